# Code compiled for a pending result of a collective is compiled again once results are waited for
# https://github.com/pytorch/pytorch/issues/187073
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_waited_for_later.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._dynamo.testing import CompileCounterWithBackend

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


counter = CompileCounterWithBackend("aot_eager")
compiled = torch.compile(lambda x: x * 3, backend=counter)
compiled(functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD))
compiled(functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).wait())
report(1, counter.frame_count)
