# With find_unused_parameters, the backward of DDP fails if an output is in a deque, a set or another object
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_unused_containers.py
# It exits with 1 where the defect is there. DDP takes all parameters for unused ones, and without the option it works.

import sys
from collections import deque
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
    """Return a layer's output in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> deque[torch.Tensor]:
        """Return it."""
        return deque([self.layer(x)])


def gradient(finds: bool) -> object:
    """Return the gradient of a step."""
    model = DistributedDataParallel(Model(), find_unused_parameters=finds)
    try:
        model(torch.full((1, 1), 1.0 + rank))[0].sum().backward()
    except RuntimeError as error:
        return f"RuntimeError: {str(error)[:60]}"
    return model.module.layer.weight.grad.item()


report(gradient(False), gradient(True))
