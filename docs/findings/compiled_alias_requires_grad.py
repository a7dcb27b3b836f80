# In compiled code, requires_grad of other names and views of a tensor that is changed in place is silently stale
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_alias_requires_grad.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def step(w: torch.Tensor) -> tuple[bool, ...]:
    a = torch.zeros(2)
    same = a
    a += w
    listed = torch.zeros(2)
    torch._foreach_add_([listed], [w])
    base = torch.zeros(2, 2)
    base[0].add_(w)
    other = torch.zeros(2, 2)
    view = other.view(-1)
    other[0] = w
    return same.requires_grad, listed.requires_grad, base.requires_grad, view.requires_grad


w = torch.ones(2, requires_grad=True)
report(step(w), torch.compile(step, backend="eager")(w))
