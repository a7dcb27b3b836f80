# SequenceParallel, ColwiseParallel and RowwiseParallel silently drop all positional arguments of a module but the first
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_arguments_dropped.py
# It exits with 1 where the defect is there. Keyword arguments are passed on.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x, factor=1.0):
        return x * self.weight * factor


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
module = parallelize_module(Scale(), mesh, SequenceParallel(use_local_output=True))
expected = [3.0, 3.0]
observed = module(torch.ones(1, 1, 2), 3.0).flatten().tolist()
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
