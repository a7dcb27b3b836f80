# the backward of fully_shard fails if a module inside returns its output in a deque
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_deque_output.py
# It exits with 1 where the defect is there.

import sys
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Inner(nn.Module):
    """Two layers whose output is in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> deque[torch.Tensor]:
        """Return a deque of one tensor."""
        return deque([self.last(self.first(x))])


class Model(nn.Module):
    """A layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer = Inner(), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use what is in the deque."""
        return self.layer(self.inner(x)[0])


model = Model()
fully_shard(model.inner)
fully_shard(model)
try:
    model(torch.ones(1, 2)).sum().backward()
    observed = "gradients"
except RuntimeError as e:
    observed = str(e).split(",")[0]
report("gradients", observed)
