# With an integer reshard_after_forward, the backward of a parameter that is sharded over columns raises IndexError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 fsdp_columns_after_forward.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

dist.init_process_group("gloo")
rank = dist.get_rank()

mesh = init_device_mesh("cpu", (4,))
model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))
torch.nn.init.ones_(model[0].weight)
fully_shard(model[0], mesh=mesh, reshard_after_forward=2, shard_placement_fn=lambda parameter: Shard(1))
fully_shard(model, mesh=mesh)
try:
    model(torch.ones(1, 4)).sum().backward()
    observed = model[0].weight.grad.full_tensor().flatten().tolist()
except IndexError as error:
    observed = repr(error)
expected = [1.0] * 16
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
