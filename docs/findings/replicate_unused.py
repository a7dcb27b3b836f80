# Composable DDP leaves gradients as they are in the first step, without an error, where a module is unused
# https://github.com/pytorch/pytorch/issues/128949
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_unused.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


model = replicate(Model())
try:
    model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    observed = str(model.used.weight.grad.flatten().tolist())
except RuntimeError:
    observed = "an error"
print(f"rank {rank}: expected [1.5, 1.5] or an error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed in ("[1.5, 1.5]", "an error") else 1)
