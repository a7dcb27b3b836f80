# torch.compile silently takes guard_filter_fn out of the options that it is given, so that the next call lacks it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_options_taken.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def step(x: torch.Tensor, number: int) -> torch.Tensor:
    dist.all_reduce(x)
    return x + number


options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
counts = []
for _ in range(2):
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(step, backend=counter, options=options)  # type: ignore[arg-type]
    for number in 1, 2:
        compiled(torch.ones(2), number)
    counts.append(counter.frame_count)
report([1, 1], counts)
