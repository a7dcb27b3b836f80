# a print that compiled code defers (reorderable_logging_functions) silently loses its keyword arguments
# https://github.com/pytorch/pytorch/pull/190840
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_print_keywords.py
# It exits with 1 where the defect is there.

import contextlib
import io
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


def step(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    print("loss", "sum", sep="=", end=";")
    return x * 2


printed = []
for call in step, torch.compile(step, backend="eager"):
    deferred = torch._dynamo.config.patch(reorderable_logging_functions={print})
    with deferred, contextlib.redirect_stdout(io.StringIO()) as out:
        call(torch.ones(2))
    printed.append(out.getvalue())
report(*printed)
