# With static_graph, DDP silently never averages gradients of outputs in a dataclass, or in a class derived from dict
# https://github.com/pytorch/pytorch/issues/124666
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_static_containers.py
# It exits with 1 where the defect is there.

import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass
class Output:
    y: torch.Tensor


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.layer(x))


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = DistributedDataParallel(Model(), static_graph=True)
observed = []
for _ in range(3):
    model.zero_grad()
    model(torch.full((1, 1), 1.0 + rank)).y.sum().backward()
    observed.append(model.module.layer.weight.grad.item())
print(f"rank {rank}: expected {[1.5] * 3}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == [1.5] * 3 else 1)
