# A batch that the number of microbatches doesn't divide silently gets more outputs than rows from a pipeline
# https://github.com/pytorch/pytorch/issues/126600 says that it is not supported; before torch 2.12, it raises an error
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_uneven_batch.py
# It exits with 1 where the defect is there.

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
stage = PipelineStage(nn.Identity(), rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 3)
data = torch.arange(1.0, 8.0).view(7, 1)
expected = data.flatten().tolist()
try:
    with torch.no_grad():
        output = schedule.eval(data) if rank == 0 else schedule.eval()
    observed = output.flatten().tolist() if rank == size - 1 else expected
except Exception as error:
    observed = expected
    print(f"{type(error).__name__}: {error}", flush=True)
print(f"rank {rank}: expected {expected} or an error, observed {observed}", flush=True)
os._exit(observed != expected)
