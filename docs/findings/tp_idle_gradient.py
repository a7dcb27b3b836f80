# accumulated gradients are lost where a backward leaves out all that was flattened together
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_idle_gradient.py
# It exits with 1 where the defect is there.

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
options = {"device_mesh": mesh["dp"], "device_id": torch.device("cpu")}


class Model(nn.Module):
    """Its own layer is used on request; the inner one always."""

    def __init__(self) -> None:
        super().__init__()
        self.always = FullyShardedDataParallel(nn.Linear(2, 2, bias=False), **options)
        self.asked = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, asked: bool) -> torch.Tensor:
        return self.always(self.asked(x) if asked else x)


model = FullyShardedDataParallel(Model(), **options)
before = None
model(torch.ones(1, 2), True).sum().backward()
before = model._flat_param.grad.tolist()
model(torch.ones(1, 2), False).sum().backward()
after = model._flat_param.grad
report(before, None if after is None else after.tolist())
