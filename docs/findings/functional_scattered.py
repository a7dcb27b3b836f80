# scatter of tensors that are pending results of functional collectives is a segmentation fault on the source
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_scattered.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


pending = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
out = torch.zeros(2)
dist.reduce_scatter(out, [pending] * size)  # as other collectives, it waits for its inputs
print(f"rank {rank}: reduce_scatter gives {out.tolist()}", flush=True)
pending = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
try:
    dist.scatter(out, [pending] * size if rank == 0 else None)  # the fault: rank 0 dies by signal 11
except RuntimeError as error:  # of the others, whose source has died
    print(f"rank {rank}: expected {[size, size]}, observed {error}", flush=True)
    sys.exit(1)
report([size, size], out.tolist())
