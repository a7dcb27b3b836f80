# Compiled code with contextlib.nullcontext(enter_result=value) fails with an internal error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_nullcontext.py
# It exits with 1 where the defect is there.

import sys
from contextlib import nullcontext
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


def step(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    with nullcontext(enter_result=3.0) as factor:
        return x * factor


compiled = torch.compile(step, backend="eager")
try:
    observed: object = compiled(torch.ones(1)).item()
except Exception as error:
    observed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
report(step(torch.ones(1)).item(), observed)
