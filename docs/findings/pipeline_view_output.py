# With zero-bubble pipeline schedules, a stage whose output is a view, as of view() or an index, raises in every step
# https://github.com/pytorch/pytorch/issues/142229 (mended for other schedules)
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_view_output.py
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


class Flattened(nn.Linear):
    """A layer whose result is a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's result in the same shape."""
        return super().forward(x).view(-1, 2)


data = torch.ones(8, 2)
for schedule in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble):
    observed = expected = "a step"
    stages = [PipelineStage(Flattened(2, 2), i, 4, torch.device("cpu")) for i in (rank, rank + 2)]
    try:
        run = schedule(stages, 4, loss_fn=nn.functional.mse_loss)
        run.step(*((data,) if rank == 0 else ()), target=data if rank == 1 else None)
    except Exception as error:
        observed = f"{type(error).__name__}: {str(error.__cause__ or error)[:100]}"
    print(f"rank {rank}, {schedule.__name__}: expected {expected}, observed {observed}", flush=True)
sys.stdout.flush()
os._exit(observed != expected)
