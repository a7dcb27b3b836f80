# SGD with fused=True and momentum fails if a parameter gets its first gradient later than another
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fused_sgd_later.py
# It exits with 1 where the defect is there.

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
    """Use one of two layers or both."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in self.layers:
            nn.init.ones_(layer.weight)

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        """Return the sum of the results of the first layers."""
        return torch.stack([layer(x) for layer in self.layers[:used]]).sum()


def trained(fused: bool) -> object:
    """Return the weights after a step of one layer and a step of both."""
    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, fused=fused)
    try:
        for used in (1, 2):
            optimizer.zero_grad()
            model(torch.ones(1, 1), used).backward()
            optimizer.step()
    except TypeError as error:
        return f"TypeError: {error}"
    return [parameter.item() for parameter in model.parameters()]


report(trained(False), trained(True))
