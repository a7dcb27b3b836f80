# CyclicLR.load_state_dict takes a key out of the dict that it loads: a second load of it raises KeyError
# https://github.com/pytorch/pytorch/issues/32756
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 loaded_schedule_changes.py
# It exits with 1 where the defect is there. The report is of LambdaLR, which puts the key back since then.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CyclicLR

dist.init_process_group("gloo")
optimizer = torch.optim.SGD(fully_shard(nn.Linear(2, 2)).parameters(), lr=1.0, momentum=0.5)
schedule = CyclicLR(optimizer, 0.25, 1.0)
state = schedule.state_dict()
expected, observed = ["loaded", "loaded"], []
for _ in range(2):
    try:
        schedule.load_state_dict(state)
        observed.append("loaded")
    except KeyError as e:
        observed.append(f"KeyError: {e}")
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
