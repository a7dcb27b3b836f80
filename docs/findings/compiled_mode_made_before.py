# In compiled code, a gradient mode that is made before another one is entered silently ends that one at its end
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_mode_made_before.py
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


def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    on = torch.enable_grad()
    with torch.no_grad():
        with on:
            y = x * 2
        z = x * 3
    return y, z


outcomes = []
for call in step, torch.compile(step, backend="eager"):
    w = torch.ones(1, requires_grad=True)
    y, z = call(w)
    (y + z).sum().backward()
    assert w.grad is not None
    dist.all_reduce(w.grad)
    outcomes.append((y.requires_grad, z.requires_grad, (w.grad / size).item()))
report(*outcomes)
