# torch.func.grad of a functional collective raises an error, where torch.autograd.grad gives the gradient
# https://github.com/pytorch/pytorch/issues/170834
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_function_gradient.py
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


def loss(x: torch.Tensor) -> torch.Tensor:
    return (functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD) * 2).sum()


x = torch.tensor([1.0, 2.0])
leaf = x.clone().requires_grad_()
(expected,) = torch.autograd.grad(loss(leaf), leaf)
try:
    observed: object = torch.func.grad(loss)(x).tolist()
except RuntimeError as error:
    observed = str(error).splitlines()[0]
report(expected.tolist(), observed)
