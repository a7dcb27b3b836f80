# In compiled code, requires_grad_(False) after requires_grad_() silently leaves a gradient to the result
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_requires_grad_off.py
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


def step(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    y = x.clone().requires_grad_()
    y.requires_grad_(False)
    return y, y.requires_grad


outcomes = []
for call in step, torch.compile(step, backend="eager"):
    result, said = call(torch.ones(2))
    outcomes.append((result.requires_grad, said))
report(*outcomes)
