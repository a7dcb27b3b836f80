# Zero-bubble pipeline schedules silently give keyword arguments no gradient, but of the first stage
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_kwarg_gradient.py
# It exits with 1 where the defect is there.

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


class Scaled(nn.Module):
    """A layer that multiplies its result by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [-1.0, 1.0]]))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x @ self.weight * scale


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of products."""
    return (output * target).sum()


data = torch.arange(16.0).view(8, 2)
scale = torch.full((8, 1), 2.0, requires_grad=True)  # what was learned besides
mine = (rank, rank + 2)
stages = [PipelineStage(Scaled(), i, 4, torch.device("cpu")) for i in mine]
schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=loss, scale_grads=False)
schedule.step(*((data,) if rank == 0 else ()), target=data if rank == 1 else None, scale=scale)

scales = [torch.full((8, 1), 2.0, requires_grad=True) for _ in range(4)]
result = data
for each in scales:
    result = Scaled()(result, each)
loss(result, data).backward()
expected = sum(scales[i].grad.flatten() for i in mine).tolist()
observed = None if scale.grad is None else scale.grad.flatten().tolist()
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
os._exit(observed != expected)
