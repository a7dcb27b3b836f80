# Compiled code that changes one of two views of a buffer silently keeps the offsets of the first ones, if they overlap
# https://github.com/pytorch/pytorch/pull/184481
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_view_offsets.py
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


def step(gradient: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    gradient.add_(1)
    return other * 2


compiled = torch.compile(step, backend="aot_eager")
for first, second in ((1, 0), (0, 4)):
    buffer = torch.zeros(6)
    try:
        compiled(buffer[first : first + 2], buffer[second : second + 2])
    except AssertionError:
        report("other versions", "other versions")  # before 2.13 every such call is an internal error
report([1.0, 1.0, 0.0, 0.0, 0.0, 0.0], buffer.tolist())
