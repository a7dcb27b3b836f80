# A compiled all_reduce of a parameter raises an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_parameter.py
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


def outcome(function: object, into: torch.Tensor, given: None) -> object:
    """Return what the output holds after the call, or the word for an error."""
    try:
        function(into, given)  # type: ignore[operator]
    except (RuntimeError, ValueError):
        return "an error"
    return into.tolist()


def reduce(into: torch.Tensor, given: None) -> None:
    dist.all_reduce(into)


compiled = torch.compile(reduce, backend="aot_eager")
report(*(outcome(function, torch.nn.Parameter(torch.full((2,), rank + 1.0)), None) for function in (reduce, compiled)))
