# with static_graph, communication hooks are told in the first backward that every bucket is number 0
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 replicate_static_buckets.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

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
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2).double()  # two dtypes: two buckets

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).double())


buckets: list[tuple[int, bool]] = []


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Note which bucket it is, and whether it is the last."""
    buckets.append((bucket.index(), bucket.is_last()))
    return allreduce_hook(None, bucket)


model = replicate(Model(), static_graph=True)
model.register_comm_hook(None, hook)
model(torch.ones(1, 2)).sum().backward()
report([(0, False), (1, True)], buckets)
