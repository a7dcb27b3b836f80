# a module under composable checkpoint can't be called with a keyword that has the name of an option, such as debug
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_keyword.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed._composable import checkpoint

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, debug: bool = False) -> torch.Tensor:
        return self.weight * x * (2 if debug else 1)


layer = Layer()
checkpoint(layer)
try:
    layer(torch.ones(3), debug=True).sum().backward()
    observed: object = layer.weight.grad.tolist()
except TypeError as e:
    observed = str(e)
report([2.0, 2.0, 2.0], observed)
