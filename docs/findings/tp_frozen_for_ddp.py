# Tensor-parallel layers that are frozen become trainable, and are silently trained, once they are prepared for DDP
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_frozen_for_ddp.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
for layer in model:
    nn.init.ones_(layer.weight)
model[0].requires_grad_(False)
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
_pre_dp_module_transform(model)
trained = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
weights = list(trained.parameters())
trained(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(weights, lr=1.0).step()
expected, observed = [1.0] * 4, weights[0].flatten().tolist()
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
