# With static_graph, where the loss leaves an output out, gradients are not averaged in the second step
# https://github.com/pytorch/pytorch/issues/97030
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_static_unused.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = replicate(Model(), static_graph=True)
try:
    for _ in range(2):
        model(torch.full((1, 1), 1.0 + rank))[0].sum().backward()
    observed = model.used.weight.grad.item()
except RuntimeError as e:
    observed = f"RuntimeError: {e}"
print(f"rank {rank}: expected 3.0, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == 3.0 else 1)
