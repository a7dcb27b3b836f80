# results of a compiled all_gather or all_to_all_single silently have a gradient, unlike those of uncompiled ones
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_gathered_gradient.py
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


def gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, x * 2)
    parts[rank] = x * 2
    return torch.cat(parts)


def exchanged(x: torch.Tensor) -> torch.Tensor:
    into = torch.empty(2)
    dist.all_to_all_single(into, x * 2)
    return x + into


def gradients(compiled: bool) -> list[object]:
    """Return the gradients of weighted sums."""
    found: list[object] = []
    for function in gathered, exchanged:
        x = torch.ones(2, requires_grad=True)
        y = (torch.compile(function, backend="aot_eager") if compiled else function)(x)
        (y * (1 + rank)).sum().backward()
        found.append(None if x.grad is None else x.grad.tolist())
    return found


# Uncompiled, the outputs do not require gradients, without a warning: collectives with gradients are in
# torch.distributed.nn.
# a common form: the parts of other ranks are constants, and the own part is put back with its gradient
report(gradients(False), gradients(True))
