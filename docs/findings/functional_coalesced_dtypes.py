# a functional all-gather of a list of several dtypes is silently wrong unless the first can hold the others' numbers
# https://github.com/pytorch/pytorch/issues/35671
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_coalesced_dtypes.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


given = [torch.full((2,), 1.5, dtype=dtype) for dtype in (torch.float32, torch.float64)]
try:
    results = functional.all_gather_into_tensor_coalesced(given, dist.group.WORLD)
    report([[1.5] * 2 * size] * 2, [functional.wait_tensor(result).tolist() for result in results])
except (RuntimeError, ValueError, TypeError) as error:  # refusing them is right, too
    report("an error", "an error" if error else "")
