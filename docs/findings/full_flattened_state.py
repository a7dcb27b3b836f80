# A full flattened optimizer state dict can't be loaded with the options with which it was saved: KeyError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 full_flattened_state.py
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
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
state = get_optimizer_state_dict(model, optimizer, options=options)
observed = "loaded"
try:
    set_optimizer_state_dict(model, optimizer, state, options=options)
except KeyError as e:
    observed = f"KeyError: {e}"
print(f"rank {dist.get_rank()}: expected loaded, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "loaded")
