# A second backward through a module under composable checkpoint raises AttributeError, with retain_graph as well
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_backward_twice.py
# It exits with 1 where the defect is there. torch.utils.checkpoint.checkpoint(use_reentrant=False) takes it.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).square()


layer = Layer()
checkpoint(layer)
loss = layer(torch.ones(2)).sum()
try:
    loss.backward(retain_graph=True)
    loss.backward()
    observed: object = layer.weight.grad.tolist()
except AttributeError as error:
    observed = str(error)
report([4.0, 4.0], observed)
