# compiled, a buffer that the forward changes in place and that the gradient needs: silently wrong gradients under DDP
# https://github.com/pytorch/pytorch/pull/197039
# The backward computes the new value again, from the buffer, which has the new value by then.
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_buffer_recomputed.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


class Scale(nn.Module):
    """Multiply by a weight and by the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.weight * self.calls


outcomes = []
for compiles in (False, True):
    model = DistributedDataParallel(Scale())
    function = torch.compile(model, backend="aot_eager") if compiles else model
    gradients = []
    for _ in range(2):
        function(torch.ones(1)).sum().backward()
        gradients.append(model.module.weight.grad.item())
        model.zero_grad()
    outcomes.append(gradients)
expected, observed = outcomes
bad = torch.tensor([float(expected != observed)])
print(f"rank {rank}: expected gradients {expected}, observed {observed}", flush=True)
dist.all_reduce(bad)
dist.destroy_process_group()
sys.exit(1 if bad.item() else 0)
