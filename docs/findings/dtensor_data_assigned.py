# Assigning to a DTensor's data silently keeps its elements: vector_to_parameters and prune.remove change no parameter
# https://github.com/pytorch/pytorch/issues/157391
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_data_assigned.py
# It exits with 1 where the defect is there.
#
# After the assignment of a tensor of another size or dtype, a DTensor's shape and dtype are the new ones, and those of
# its local tensor and its results the old ones. The report asks to document that parameters of FSDP2 can't be set so.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.utils import prune

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
observed = {}

x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
x.data = x * 2
observed["data"] = x.full_tensor().sum().item()

layer = nn.Linear(2, 4)
nn.init.zeros_(layer.weight)
nn.init.zeros_(layer.bias)
layer = distribute_module(layer, mesh)
new = distribute_tensor(torch.full((12,), 2.0), mesh, [Replicate()])
nn.utils.vector_to_parameters(new, layer.parameters())
observed["vector_to_parameters"] = sum(
    p.full_tensor().sum().item() for p in layer.parameters() if isinstance(p, DTensor)
)

layer = nn.Linear(2, 4)
nn.init.ones_(layer.weight)
nn.init.zeros_(layer.bias)
layer = distribute_module(layer, mesh)
prune.custom_from_mask(layer, "weight", distribute_tensor(torch.zeros(4, 2), mesh, [Replicate()]))
prune.remove(layer, "weight")
observed["prune.remove"] = layer(distribute_tensor(torch.ones(2), mesh, [Replicate()])).sum().item()

x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
x.data = x.double()
observed["dtype"] = x.dtype == x.to_local().dtype

expected = {"data": 16.0, "vector_to_parameters": 24.0, "prune.remove": 0.0, "dtype": True}
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
