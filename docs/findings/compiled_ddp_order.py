# Compiled DDP of several buckets reads a changed tensor at the wrong time, if what it computes of it uses only weights
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 compiled_ddp_order.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")


class Model(nn.Module):
    """Three layers that count their steps, with a penalty that grows with them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(512) for _ in range(3))  # 1 MiB each, a bucket for each
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Count, multiply, and return a penalty besides."""
        self.steps.add_(1)
        for weight in self.weights:
            x = x @ weight
        return x, self.weights[-1].sum() * self.steps


def penalties(compiles: bool) -> list[float]:
    """Return what two calls give."""
    model = DistributedDataParallel(Model(), bucket_cap_mb=1)
    function = torch.compile(model, backend="eager") if compiles else model
    return [function(torch.ones(1, 512))[1].item() for _ in range(2)]


expected, observed = penalties(False), penalties(True)
print(f"expected {expected}, observed {observed}", flush=True)
os._exit(observed != expected)
