# If a weight is used inside and outside of a reentrant checkpoint, DDP averages only a part of its gradient
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_reentrant_shared.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.first.weight)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=True)


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = DistributedDataParallel(Model())
try:
    model(torch.full((1, 1), 1.0 + rank)).sum().backward()  # ranks have 2 and 4
    observed = model.module.first.weight.grad.item()
except RuntimeError as e:  # an error is right, too
    print(f"rank {rank}: {e}", flush=True)
    observed = 3.0
print(f"rank {rank}: expected 3.0 or an error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 3.0 else 1)
