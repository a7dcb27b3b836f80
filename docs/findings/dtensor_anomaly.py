# The backward of DTensors raises NotImplementedError under torch.autograd.detect_anomaly, as in tensor parallelism
# https://github.com/pytorch/pytorch/issues/170936
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_anomaly.py
# It exits with 1 where the defect is there.
#
# With check_nan=True, the default, autograd looks for nan in each gradient by an operator that DTensor has no rule for.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
expected = "a gradient for each parameter"
try:
    with torch.autograd.detect_anomaly():
        model(torch.ones(3, 2)).sum().backward()
    observed = expected if all(p.grad is not None for p in model.parameters()) else "no gradient"
except NotImplementedError as error:
    observed = f"NotImplementedError: {error}".splitlines()[0]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
