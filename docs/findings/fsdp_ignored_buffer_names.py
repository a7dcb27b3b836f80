# FSDP1 silently does not cast a buffer to buffer_dtype if a module that it ignores elsewhere has the same name
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_ignored_buffer_names.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Block(nn.Module):
    """A layer, a norm, and an inner module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm, self.inner = nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the layers alone."""
        return self.inner(self.layer(x))


options = {"device_id": torch.device("cpu"), "mixed_precision": MixedPrecision(buffer_dtype=torch.float64)}
inner = Block(nn.Identity())
outer = Block(FullyShardedDataParallel(inner, ignored_modules=[inner.norm], **options))
model = FullyShardedDataParallel(outer, **options)
model(torch.ones(2, 3)).sum().backward()
report(torch.float64, outer.norm.running_mean.dtype)
