# torch.compile refuses DDP with buckets below 1 MiB (AssertionError in DDPOptimizer)
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_small_buckets.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 1


# The same without torch.compile is right.
model = torch.compile(DistributedDataParallel(Model(), bucket_cap_mb=0.5), backend="eager")
try:
    model(torch.ones(1, 4)).sum().backward()
    observed = "a step"
except AssertionError as e:
    observed = f"AssertionError: {e}"
print(f"rank {rank}: expected a step, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == "a step" else 1)
