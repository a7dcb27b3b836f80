# A compiled reduce_scatter checks neither the number nor the dtype of its inputs
# unreported
# Seen with torch 2.15.0+cu132, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_reduce_scatter.py
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


def outcome(function: object, into: torch.Tensor, given: list[torch.Tensor]) -> object:
    """Return what the output holds after the call, or the word for an error."""
    try:
        function(into, given)  # type: ignore[operator]
    except (RuntimeError, ValueError):
        return "an error"
    return into.tolist()


def scatter(into: torch.Tensor, given: list[torch.Tensor]) -> None:
    dist.reduce_scatter(into, given)


compiled = torch.compile(scatter, backend="aot_eager")
report(*(outcome(function, torch.zeros(2), [torch.arange(2.0)]) for function in (scatter, compiled)))
