# Compiled by aot_eager_decomp_partition, a buffer has its change of the backward after the forward
# https://github.com/pytorch/pytorch/issues/127561
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_buffer_of_both_passes.py
# It exits with 1 where the defect is there. It needs a change in both passes.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Counted(torch.autograd.Function):
    """Double the input, and count forwards as 1 and backwards as 10."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
        ctx.calls = calls
        calls.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.calls.add_(10)
        return gradient * 2, None


@torch.compile(backend="aot_eager_decomp_partition")
def counted(x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    """Call the function."""
    return Counted.apply(x * 1, calls)


observed = []
calls, x = torch.zeros(1), torch.ones(1, requires_grad=True)
for _ in range(2):
    y = counted(x, calls)
    observed.append(calls.item())
    y.sum().backward()
    observed.append(calls.item())
report([1.0, 11.0, 12.0, 22.0], observed)
