# Zero-bubble pipeline schedules silently give two weights that a stage adds wrong gradients: both in one memory
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_added_weights.py
# It exits with 1 where the defect is there.

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


class Adapted(nn.Module):
    """A layer that multiplies by the sum of a weight and of what was learned besides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [-1.0, 1.0]]))
        self.change = nn.Parameter(torch.tensor([[0.0, -1.0], [1.0, 0.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return x @ (self.weight + self.change)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of products."""
    return (output * target).sum()


data = torch.arange(16.0).view(8, 2)
layers = [Adapted() for _ in range(4)]
mine = (rank, rank + 2)
stages = [PipelineStage(layers[i], i, 4, torch.device("cpu")) for i in mine]
schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=loss, scale_grads=False)
schedule.step(*((data,) if rank == 0 else ()), target=data if rank == 1 else None)
alone = [Adapted() for _ in range(4)]
loss(nn.Sequential(*alone)(data), data).backward()
wrong = False
for i in mine:
    expected, observed = ([p.grad.tolist() for p in layer.parameters()] for layer in (alone[i], layers[i]))
    wrong |= expected != observed
    print(f"rank {rank}: stage {i}: expected {expected}, observed {observed}", flush=True)
os._exit(wrong)
