# PowerSGD with warm start silently has no gradients any more for a matrix whose gradients were zero
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 power_sgd_after_zeros.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
observed = {}
for warm in (False, True):
    model = DistributedDataParallel(nn.Linear(16, 16, bias=False))
    state = PowerSGDState(None, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8, warm_start=warm)
    model.register_comm_hook(state, powerSGD_hook)
    steps = []
    for factor in (0, 0, 0, 1, 1, 1):
        model.zero_grad()
        (model(torch.ones(1, 16)).sum() * factor).backward()
        steps.append(round(model.module.weight.grad.mean().item(), 2))
    observed["warm" if warm else "cold"] = steps
expected = {"cold": [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], "warm": [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
