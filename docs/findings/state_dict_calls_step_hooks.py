# get_optimizer_state_dict before the first step calls the hooks of the optimizer's steps
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 state_dict_calls_step_hooks.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
steps = []
optimizer.register_step_post_hook(lambda *_: steps.append("step"))
get_optimizer_state_dict(model, optimizer)
print(f"rank {rank}: hooks of steps: expected [], observed {steps}", flush=True)
dist.destroy_process_group()
sys.exit(bool(steps))
