# With an integer reshard_after_forward, unevenly divided parameters silently have wrong values after a forward
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 fsdp_uneven_after_forward.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()

mesh = init_device_mesh("cpu", (4,))
model = torch.nn.Sequential(torch.nn.Linear(1, 5, bias=False))
with torch.no_grad():
    model[0].weight.copy_(torch.arange(1.0, 6.0).view(5, 1))
fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
fully_shard(model, mesh=mesh)
model(torch.ones(1, 1))
observed, expected = model[0].weight.full_tensor().flatten().tolist(), [1.0, 2.0, 3.0, 4.0, 5.0]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
