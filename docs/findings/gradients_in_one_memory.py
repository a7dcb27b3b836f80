# DDP silently accumulates wrong gradients of parameters that are stacked and summed: their gradients are in one memory
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 gradients_in_one_memory.py
# It exits with 1 where the defect is there. On a single device, two backwards and clip_grad_norm_ are wrong, too.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Model(nn.Module):
    """The sum of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(2)) for _ in "ab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return it times ``x``."""
        return (torch.stack([self.a, self.b]).sum(0) * x).sum()


model = DistributedDataParallel(Model())
x = torch.tensor(3.0)
with model.no_sync():
    model(x).backward()
    model(x).backward()
model(x).backward()
report([[9.0, 9.0]] * 2, [parameter.grad.tolist() for parameter in model.parameters()])
