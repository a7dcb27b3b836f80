# FSDP1 runs __post_init__ of a dataclass that a forward returns twice more, which may change numbers
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_post_init.py
# It exits with 1 where the defect is there.

import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


@dataclass
class Scores:
    """Numbers that are doubled."""

    values: torch.Tensor

    def __post_init__(self) -> None:
        """Double them."""
        self.values = 2 * self.values


class Model(nn.Module):
    """Return scores."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> Scores:
        """Return the weight's scores."""
        return Scores(self.weight * x)


model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))
report([2.0, 2.0], model(torch.ones(2)).values.tolist())
