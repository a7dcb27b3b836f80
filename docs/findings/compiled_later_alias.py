# Compiled code that changes an argument silently does not change another argument that shares its memory later
# https://github.com/pytorch/pytorch/issues/139789
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_later_alias.py
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


def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return a + b


outcomes = []
for call in step, torch.compile(step, backend="aot_eager"):
    call(torch.zeros(2), torch.zeros(2))
    bucket = torch.zeros(2)
    result = call(bucket, bucket.view(2))
    dist.all_reduce(result)
    outcomes.append((result / size).tolist())
report(*outcomes)
