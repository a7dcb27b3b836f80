# A flattened optimizer state silently gives a group the settings of its first parameter, where those of others differ
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 flattened_joined_groups.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
options = StateDictOptions(flatten_optimizer_state_dict=True)
model = fully_shard(nn.Linear(2, 2))
groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
saved = torch.optim.SGD(groups, momentum=0.5)
joined = torch.optim.SGD(model.parameters(), lr=8.0, momentum=0.5)
try:
    set_optimizer_state_dict(model, joined, get_optimizer_state_dict(model, saved, options=options), options=options)
    observed = f"the rate of the only group is {joined.param_groups[0]['lr']}"
except (RuntimeError, ValueError):  # PyTorch has a message for this
    observed = "an error"
print(f"rank {rank}: rates 0.5 and 0.25 for one group: expected an error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "an error")
