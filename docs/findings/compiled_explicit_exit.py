# In compiled code, no_grad stays on after its __exit__ was called, and that of autocast is an AttributeError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_explicit_exit.py
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


def step(w: torch.Tensor) -> torch.Tensor:
    quiet = torch.no_grad()
    quiet.__enter__()
    scale = w.sum() + rank
    quiet.__exit__(None, None, None)
    return (w * scale).sum()


outcomes = []
for call in step, torch.compile(step, backend="eager"):
    w = torch.ones(2, requires_grad=True)
    loss = call(w)
    outcomes.append((torch.is_grad_enabled(), loss.requires_grad))
    with torch.enable_grad():
        gradient = torch.autograd.grad(loss, w)[0] if loss.requires_grad else torch.zeros(2)
    dist.all_reduce(gradient)
    outcomes[-1] += (gradient.tolist(),)
report(*outcomes)
