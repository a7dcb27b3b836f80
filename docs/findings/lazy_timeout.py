# with TORCH_GLOO_LAZY_INIT, a rank whose peer has left waits five times as long as the timeout of the group
# https://github.com/pytorch/gloo/issues/520
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 lazy_timeout.py
# It exits with 1 where the defect is there.

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
groups = [dist.new_group(timeout=timedelta(seconds=2)) for _ in range(12)]  # which rank connects is left to chance
if rank == size - 1:
    for group in groups:
        dist.destroy_process_group(group)
dist.barrier()
before = time.monotonic()
if rank < size - 1:
    for work in [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups]:
        try:
            work.wait()
        except RuntimeError as e:
            error = str(e).splitlines()[0]
seconds = time.monotonic() - before
report("an error in less than 7 s", "an error in less than 7 s" if seconds < 7 else f"{seconds:.1f} s: {error}")
