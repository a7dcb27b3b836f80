# torch.func.jvp and dual numbers (torch.autograd.forward_ad) silently take functional collectives for constants
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_dual_numbers.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.autograd.forward_ad as forward
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


def summed(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x, "sum", dist.group.WORLD) + 0


x, direction = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])
observed: dict[str, object] = {}
observed["jvp"] = torch.func.jvp(summed, (x,), (direction,))[1].tolist()
with forward.dual_level():
    tangent = forward.unpack_dual(summed(forward.make_dual(x, direction))).tangent
    observed["dual numbers"] = None if tangent is None else tangent.tolist()
derivative = (direction * size).tolist()  # of a sum over the ranks, which is linear
report({"jvp": derivative, "dual numbers": derivative}, observed)
