# parallelize_module ignores src_data_rank for the key "" of a plan
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_plan_root.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))

expected, observed = list[float](), list[float]()
for found, plan in ((expected, ColwiseParallel()), (observed, {"": ColwiseParallel()})):
    layer = nn.Linear(2, 2 * size, bias=False)
    nn.init.constant_(layer.weight, float(rank))  # each rank's own data, which None asks for
    parallelize_module(layer, mesh, plan, src_data_rank=None)
    found += layer.weight.to_local().flatten().tolist()
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
bad = torch.tensor([float(expected != observed)])
dist.all_reduce(bad)
dist.destroy_process_group()
sys.exit(1 if bad.item() else 0)
