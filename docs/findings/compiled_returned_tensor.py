# Compiled dist.all_reduce, all_gather_into_tensor and others return a tensor instead of None
# https://github.com/pytorch/pytorch/issues/174280
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_returned_tensor.py
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


def answers(x: torch.Tensor, whole: torch.Tensor) -> list[object]:
    return [dist.all_reduce(x), dist.all_gather_into_tensor(whole, x)]


# Without async_op, a collective returns None, and code may ask for that: work = dist.all_reduce(x, async_op=later)
found = torch.compile(answers, backend="eager")(torch.ones(2), torch.empty(2 * size))
report([None, None], [None if each is None else type(each).__name__ for each in found])
