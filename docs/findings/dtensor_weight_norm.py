# weight_norm of a weight that ranks share unevenly along the other dimension silently has wrong values
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_weight_norm.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils.parametrizations import weight_norm

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)
layer = nn.Linear(5, 3, bias=False)
plain = layer.weight.detach().clone()
layer.weight = nn.Parameter(distribute_tensor(plain, mesh, [Shard(1)]))
weight_norm(layer)  # whose first value is the weight itself
with torch.no_grad():
    found = layer.weight.full_tensor()
report(True, torch.allclose(plain, found))
