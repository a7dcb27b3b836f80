# A flattened optimizer state dict of an optimizer with an empty group can be read, but not set: IndexError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 flattened_empty_group.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
fully_shard(model)
options = StateDictOptions(flatten_optimizer_state_dict=True)
first, second = (torch.optim.AdamW([{"params": model.parameters()}, {"params": []}]) for _ in range(2))
try:
    set_optimizer_state_dict(model, second, get_optimizer_state_dict(model, first, options=options), options=options)
    observed = "set"
except IndexError as e:
    observed = f"IndexError: {e}"
print(f"rank {dist.get_rank()}: expected set, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "set")
