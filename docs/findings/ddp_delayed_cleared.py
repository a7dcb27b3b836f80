# DDP silently does not average delayed gradients that were set to None between the forward and the backward
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_delayed_cleared.py
# It exits with 1 where the defect is there.

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()


class Times(torch.nn.Module):
    """A parameter of one that multiplies its input."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


module = torch.nn.Sequential(*(Times() for _ in range(3)))
model = DistributedDataParallel(
    module,
    delay_all_reduce_named_params=[(f"{i}.weight", module[i].weight) for i in (1, 2)],
    param_to_hook_all_reduce=module[0].weight,
)
loss = model(torch.full((1,), 1.0 + rank)).sum()
model.zero_grad()
loss.backward()
time.sleep(1)  # the finding ddp_delayed_unfinished
dist.barrier()
observed, expected = [p.grad.item() for p in module.parameters()], [1.5] * 3
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
