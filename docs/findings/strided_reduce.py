# reduce of a column adds other elements
# https://github.com/pytorch/pytorch/issues/192920
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 strided_reduce.py
# It exits with 1 where the defect is there.

import sys

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


table = torch.full((3, 2), -1.0)
table[:, 0] = torch.tensor([1.0, 2.0, 3.0]) + 10 * rank
dist.reduce(table[:, 0], 0)
right = [sum(i + 1.0 + 10 * r for r in range(size)) for i in range(3)]
expected = [[value, -1.0] for value in right]
report(expected if rank == 0 else None, table.tolist() if rank == 0 else None)
