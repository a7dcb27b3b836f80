# under DDP, the broadcast of buffers before a forward makes backwards of earlier forwards fail (only before torch 2.12)
# unreported
# Seen with torch 2.11.0, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_buffers_change_graphs.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Scaled(torch.nn.Module):
    """A parameter times a buffer, which the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.full((2,), 4.0))

    def forward(self) -> torch.Tensor:
        return (self.weight * self.scale).sum()


model = torch.nn.parallel.DistributedDataParallel(Scaled())
try:
    (model() + model()).backward()
    report("a gradient", "a gradient")
except RuntimeError as error:
    report("a gradient", str(error).partition(":")[0])
