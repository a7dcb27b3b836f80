# Zero-bubble pipeline schedules raise for a stage that uses a weight before and after another layer, as a tied one
# https://github.com/pytorch/pytorch/issues/180952 is about two uses without a layer in between
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_shared_weight.py
# It exits with 1 where the defect is there.

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


class Shared(nn.Module):
    """Two layers, the first of which is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the first one before and after the second one."""
        return self.first(self.second(self.first(x)))


data = torch.ones(8, 2)
for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
    observed = expected = "a step"
    stages = [PipelineStage(Shared(), i, 4, torch.device("cpu")) for i in (rank, rank + 2)]
    try:
        run = schedule(stages, 4, loss_fn=nn.functional.mse_loss)
        run.step(*((data,) if rank == 0 else ()), target=data if rank == 1 else None)
    except Exception as error:
        observed = f"{type(error).__name__}: {str(error)[:100]}"
    print(f"rank {rank}, {schedule.__name__}: expected {expected}, observed {observed}", flush=True)
sys.stdout.flush()
os._exit(observed != expected)
