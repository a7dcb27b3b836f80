# The backward of a column-wise layer fails if its output is sharded by positions that ranks do not divide evenly
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_columns_to_sequences.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
sequences = torch.arange(24.0).view(2, 3, 4)  # three positions for two ranks
layer = nn.Linear(4, 6)
layer(sequences).sum().backward()
expected: object = layer.weight.grad.tolist()
layer.zero_grad()
parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Shard(1)))
try:
    layer(sequences).sum().backward()
    observed: object = layer.weight.grad.full_tensor().tolist()
except RuntimeError as error:
    observed = str(error).splitlines()[0]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
