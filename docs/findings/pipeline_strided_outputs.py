# On gloo, a pipeline stage whose output is not contiguous, as that of batch-first attention, raises in every step
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_strided_outputs.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


class Attention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is attended to."""
        return self.attention(x, x, x)[0]


observed = expected = "a step"
stage = PipelineStage(Attention(), rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: (output * target).sum())
try:
    if rank == 0:
        schedule.step(torch.ones(4, 3, 4))
    else:
        schedule.step(target=torch.ones(4, 3, 4))
except RuntimeError as error:
    observed = f"RuntimeError: {error}"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
