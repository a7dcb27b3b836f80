# a synchronized backward that comes to no parameter averages nothing, without an error, and the next one is an error
# https://github.com/pytorch/pytorch/issues/40566
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_no_parameter.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor, with_layer: bool) -> torch.Tensor:
        return self.layer(x) if with_layer else x * 2


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

model = DistributedDataParallel(Model(), find_unused_parameters=True)
x = torch.full((1, 1), 1.0 + rank, requires_grad=True)
observed: list[object] = []
try:
    for _ in range(2):
        with model.no_sync():
            model(x, True).sum().backward()
        model(x, False).sum().backward()
        observed.append(model.module.layer.weight.grad.item())  # ranks have 1 and 2
        model.zero_grad()
except RuntimeError as e:
    observed.append(f"RuntimeError: {str(e)[:47]}")
print(f"rank {rank}: expected [1.5, 1.5], observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == [1.5, 1.5] else 1)
