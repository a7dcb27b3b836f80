# Under fully_shard, a backward through torch.func.grad silently leaves parameters without gradients, if all is kept
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_function_gradient.py
# It exits with 1 where the defect is there. Without set_reshard_after_backward(False) it is a segmentation fault, as
# fsdp_second_derivatives.py is. If x requires a gradient, gradients are right.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight) ** 2


model = fully_shard(Square())
model.set_reshard_after_backward(False)
gradient = torch.func.grad(lambda x: model(x).sum())(torch.ones(2))  # 2 w**2 x
gradient.sum().backward()  # 4 w x
model.reshard()
found = model.weight.grad
report([8.0, 8.0], None if found is None else found.full_tensor().tolist())
