# distribute_module silently unties a weight that two layers share: each has one of its own, with a part of the gradient
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_untied_module.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
nn.init.ones_(model[0].weight)
model[1].weight = model[0].weight
distribute_module(model, mesh)
model(distribute_tensor(torch.ones(1, 2), mesh)).sum().backward()
expected = [8.0] * 4  # of which the first layer has 4, as the second one has
observed = model[0].weight.grad.to_local().flatten().tolist()
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
