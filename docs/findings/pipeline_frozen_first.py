# Zero-bubble schedules silently leave the stage after a frozen first one without gradients
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_frozen_first.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

dist.init_process_group("gloo")
rank = dist.get_rank()
layers = [nn.Linear(2, 2, bias=False) for _ in range(4)]
for layer in layers:
    nn.init.ones_(layer.weight)
layers[0].requires_grad_(False)
mine = (rank, rank + 2)
stages = [PipelineStage(layers[i], i, 4, torch.device("cpu")) for i in mine]
schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=lambda output, target: (output * target).sum())
data = torch.ones(8, 2)
schedule.step(*((data,) if rank == 0 else ()), target=data if rank == 1 else None, losses=[])
observed = [layers[i].weight.grad is not None for i in mine]
expected = [i > 0 for i in mine]
print(f"rank {rank}: expected gradients of stages {mine}: {expected}, observed {observed}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(observed != expected)
