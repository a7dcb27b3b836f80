# Pipelines silently change buffers such as BatchNorm's statistics while they infer shapes, from memory that is not set
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_inferred_buffers.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
norm = nn.BatchNorm1d(2)
stage = PipelineStage(norm, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output * target).sum())
data = torch.arange(16.0).view(8, 2)
schedule.step(*((data,) if rank == 0 else ()), target=data if rank == 1 else None, losses=[])
observed = norm.num_batches_tracked.item()
mean = norm.running_mean.tolist()
print(f"rank {rank}: expected 4 batches, observed {observed}, with a mean of {mean}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(observed != 4)
