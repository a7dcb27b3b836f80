# clip_grad_norm_ fails for a model whose modules fully_shard shards over different meshes
# https://github.com/pytorch/pytorch/issues/180346
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 clip_several_meshes.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
for module, shape in ((model[0], (2, size // 2)), (model[1], (size,))):
    fully_shard(module, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # raises, and torchrun ends with 1
report(round(32**0.5, 3), round(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm), 3))
