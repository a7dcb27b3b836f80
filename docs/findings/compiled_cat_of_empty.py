# Gradients of two tensors that compiled code joins with an empty one of a wider dtype are silently garbage
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_cat_of_empty.py
# It exits with 1 where the defect is there. The decomposition of cat drops empty tensors before it promotes dtypes.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def joined(empty: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Join three tensors; the empty one counts for the dtype."""
    return torch.cat([empty, x, y])


def outcome(function) -> tuple[str, list[float]]:
    """Return the dtype of the result, and a gradient."""
    x, y = (torch.full((4,), float(rank + k), requires_grad=True) for k in range(2))
    result = function(torch.zeros(0, dtype=torch.float64), x, y)
    (result.double() * 1.5).sum().backward()
    return str(result.dtype), x.grad.tolist()


report(outcome(joined), outcome(torch.compile(joined)))
