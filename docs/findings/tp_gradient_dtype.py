# with_grads: a rank whose shard has no gradients gathers float32, whatever the others gather
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_gradient_dtype.py
# It exits with another code than 0 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()  # a layer for each rank
model[0].requires_grad_(False)
model = FullyShardedDataParallel(model, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True)
model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):  # aborts a process
    observed = [str(p.grad.dtype) for p in model.parameters() if p.grad is not None]
report(["torch.float64", "torch.float64"], observed)
