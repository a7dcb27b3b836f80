# waiting again for work of isend or irecv hangs until the timeout
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 second_wait.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


group = dist.new_group(timeout=timedelta(seconds=2))
tensor = torch.ones(3)
work = dist.isend(tensor, 1, group=group) if rank == 0 else dist.irecv(tensor, 0, group=group)
work.wait()
observed = "returned"
try:
    work.wait()
except RuntimeError as e:
    observed = str(e)
report("returned", observed)
