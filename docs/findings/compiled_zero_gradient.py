# A parameter that compiled code changes through detach() or data silently gets a gradient of zeros, not None
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_zero_gradient.py
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


def step(weight: torch.Tensor, averaged: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(averaged.data)
    return (weight * averaged.detach() / size).sum()


# With a gradient of zeros, AdamW shrinks the parameter by its weight decay; it skips one without a gradient.
outcomes = []
for call in step, torch.compile(step, backend="aot_eager"):
    weight, averaged = torch.ones(1, requires_grad=True), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([averaged], lr=0.1, weight_decay=0.5)
    call(weight, averaged).backward()
    optimizer.step()
    outcomes.append((averaged.grad, averaged.item() / size))
report(*outcomes)
