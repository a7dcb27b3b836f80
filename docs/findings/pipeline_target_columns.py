# A pipeline that splits its batch along another dimension than the first silently splits the target along the first
# https://github.com/pytorch/pytorch/pull/148458 says that there is no way to split it; 2.11 refuses the batch
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_target_columns.py
# It exits with 1 where the defect is there.

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import TensorChunkSpec

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


class Scaled(nn.Module):
    """A layer of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return (x * self.weight).contiguous()


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the sum of products, as a loss of flattened logits and labels does."""
    return (output.flatten() * target.flatten()).sum()


spec = TensorChunkSpec(1)
stage = PipelineStage(Scaled(), rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=loss, args_chunk_spec=(spec,), output_merge_spec=spec)
data, target = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6) ** 2  # (sequence, batch)
losses: list[torch.Tensor] = []
try:
    schedule.step(*(() if rank else (data,)), **({"target": target, "losses": losses} if rank == size - 1 else {}))
    observed = str([each.item() for each in losses])
except Exception as error:
    observed = f"{type(error).__name__}: {error}"
parts = zip(data.chunk(2, 1), target.chunk(2, 1), strict=True)
expected = str([loss(x, y).item() for x, y in parts] if rank == size - 1 else [])
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
os._exit(observed != expected)
