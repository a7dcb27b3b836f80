# A module in ColwiseParallel, RowwiseParallel or SequenceParallel raises IndexError if its input is given by name
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_input_by_name.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo")
layer = parallelize_module(nn.Linear(2, 4), init_device_mesh("cpu", (dist.get_world_size(),)), ColwiseParallel())
x = torch.ones(1, 2)
expected = layer(x).shape
try:
    observed = layer(input=x).shape
except IndexError as e:
    observed = f"IndexError: {e}"
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
