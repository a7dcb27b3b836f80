# torch.distributed.nn.functional.gather silently takes an expanded gradient from beyond its memory
# https://github.com/pytorch/pytorch/issues/192920
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 differentiable_gather_expanded.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


x = torch.ones(3, requires_grad=True)
gathered = differentiable.gather(x, 0)
sum((i + 1) * part.sum() for i, part in enumerate(gathered)).backward()  # the gradient of a sum is expanded
assert x.grad is not None
report([rank + 1.0] * 3, x.grad.tolist())
