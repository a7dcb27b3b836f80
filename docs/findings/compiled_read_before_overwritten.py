# Compiled code reads an input again in the backward, after its forward changed it in place, as a collective does
# https://github.com/pytorch/pytorch/pull/197039
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_read_before_overwritten.py
# It exits with 1 where the defect is there.

import math
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


# Any other change in place does the same: scale.mul_(2), for example.
def scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    result = weight * scale.sin()
    dist.all_reduce(scale)
    return result


weight, scale = torch.ones(1, requires_grad=True), torch.full((1,), 1.0 + rank)
torch.compile(scaled, backend="aot_eager")(weight, scale).sum().backward()
report((round(math.sin(1.0 + rank), 4), 3.0), (round(weight.grad.item(), 4), scale.item()))
