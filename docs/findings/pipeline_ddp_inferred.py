# The second step of a pipeline whose stages are in DDP fails if their shapes are inferred
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 pipeline_ddp_inferred.py
# It exits with 1 where the defect is there.

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))
index = mesh["stages"].get_local_rank()
ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh["replicas"].get_group())
stage = PipelineStage(ddp, index, 2, torch.device("cpu"), group=mesh["stages"].get_group())
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output * target).sum())
data = torch.ones(8, 2)
observed = 0
try:
    for _ in range(2):
        schedule.step(*((data,) if index == 0 else ()), target=data if index == 1 else None, losses=[])
        observed += 1
except RuntimeError as error:
    print(str(error)[:300], flush=True)
print(f"rank {dist.get_rank()}: expected 2 steps, observed {observed}", flush=True)
sys.stdout.flush()
os._exit(observed != 2)
