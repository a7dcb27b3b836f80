# A model replicated over one dimension of a mesh, tensor-parallel over the other, does not train, without an error
# https://github.com/pytorch/pytorch/issues/152712
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 replicate_tensor_parallel.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
replicate(model, device_mesh=mesh["data"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
outputs = []
for _ in range(2):
    output = model(torch.ones(1, 4)).sum()
    output.backward()
    optimizer.step()
    outputs.append(output.item())
names = [name for name, _ in model.named_parameters()]
print(f"rank {rank}: expected outputs that change and two parameters, observed {outputs} and {names}", flush=True)
dist.destroy_process_group()
sys.exit(0 if outputs[0] != outputs[1] and len(names) == 2 else 1)
