# the gradient of the functional broadcast stays on each rank, without an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_broadcast_gradient.py
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


x = torch.ones(2, requires_grad=True)
(functional.broadcast(x, 0, dist.group.WORLD) * (rank + 1)).sum().backward()
assert x.grad is not None
report([3, 3] if rank == 0 else [0, 0], x.grad.tolist())
