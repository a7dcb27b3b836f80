# input_reshard over columns raises IndexError if its module saves a vector, such as a LayerNorm's weight
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 input_reshard_vector.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel.input_reshard import input_reshard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))


class Scale(nn.Module):
    """A vector by which the columns of a matrix are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply the columns."""
        return x * self.weight


x = torch.zeros(2, 4, requires_grad=True)
try:
    input_reshard(Scale(), mesh, 1)(x).sum().backward()
    observed: object = x.grad.tolist()
except IndexError as error:
    observed = str(error)
report([[1.0] * 4] * 2, observed)
