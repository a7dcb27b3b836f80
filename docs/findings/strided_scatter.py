# scatter from columns, or into one, moves other elements
# https://github.com/pytorch/pytorch/issues/192920
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 strided_scatter.py
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


columns = [torch.arange(6.0).reshape(3, 2)[:, 0] for _ in range(size)]
into = torch.full((3, 2), -1.0)
dist.scatter(into[:, 0], columns if rank == 0 else None, src=0)
report([[0.0, -1.0], [2.0, -1.0], [4.0, -1.0]], into.tolist())
