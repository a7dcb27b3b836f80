# Pipeline schedules silently divide gradients of earlier steps again, so that steps don't accumulate
# https://github.com/pytorch/torchtitan/issues/1733
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_accumulated.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
layer = nn.Linear(1, 1, bias=False)
nn.init.ones_(layer.weight)
stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output * target).mean())
data = torch.ones(8, 1)
for _ in range(2):  # each of them adds a gradient of 1
    schedule.step(*((data,) if rank == 0 else ()), target=data if rank == 1 else None, losses=[])
observed = layer.weight.grad.item()
print(f"rank {rank}: expected a gradient of 2.0, observed {observed}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(observed != 2.0)
