# The batched PowerSGD hook always raises an AssertionError without a message when it begins to compress
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 batched_power_sgd.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 16, bias=False))
state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
observed = "five steps"
for number in range(5):
    try:
        model(torch.ones(1, 16)).sum().backward()
    except AssertionError as e:
        observed = f"AssertionError({e}) in step {number}"
        break
print(f"rank {dist.get_rank()}: expected five steps, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "five steps")
