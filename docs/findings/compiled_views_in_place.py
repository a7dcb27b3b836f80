# in compiled code, a collective's result that transpose_ or unsqueeze_ turned silently keeps its old shape
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_views_in_place.py
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


def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
    y = functional.wait_tensor(functional.all_gather_tensor(x, 0, dist.group.WORLD))
    y.transpose_(0, 1)
    return y * y.size(0), y.shape


outcomes = []
for call in function, torch.compile(function, backend="eager"):
    result, shape = call(torch.ones(1, 3))
    outcomes.append((result.tolist(), tuple(shape)))
report(*outcomes)
