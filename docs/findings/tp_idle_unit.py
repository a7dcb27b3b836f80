# NO_SHARD with original parameters: what a backward leaves out is missing from state_dict()
# https://github.com/pytorch/pytorch/issues/83956
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_idle_unit.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

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
options = {
    "device_mesh": mesh["dp"],
    "device_id": torch.device("cpu"),
    "use_orig_params": True,
    "sharding_strategy": ShardingStrategy.NO_SHARD,
}


class Model(nn.Module):
    """Its own layer is used on request; the inner one always."""

    def __init__(self) -> None:
        super().__init__()
        self.always = FullyShardedDataParallel(nn.Linear(2, 2, bias=False), **options)
        self.asked = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, asked: bool) -> torch.Tensor:
        return self.always(self.asked(x) if asked else x)


model = FullyShardedDataParallel(Model(), **options)
model(torch.ones(1, 2), False).sum().backward()
report(["always.weight", "asked.weight"], list(model.state_dict()))  # raises, and torchrun ends with 1
