# A tensor-parallel layer over one rank fails for a batch of sequences without a sequence
# unreported
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_no_rows_of_sequences.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
model = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
expected = observed = [0, 2, 4]
try:
    observed = list(model(torch.ones(0, 2, 4)).shape)
except RuntimeError as e:
    observed = str(e).splitlines()[0]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
