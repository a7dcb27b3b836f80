# a full state can't be set on a weight that tensor parallelism and FSDP2 shard in uneven parts
# https://github.com/pytorch/pytorch/pull/150490
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 full_state_of_uneven_parts.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model = parallelize_module(nn.Linear(4, 6, bias=False), mesh["tp"], ColwiseParallel())
fully_shard(model, mesh=mesh["dp"])  # three rows of each tensor-parallel rank on two
options = StateDictOptions(full_state_dict=True)
try:
    set_model_state_dict(model, {"weight": torch.arange(24.0).view(6, 4)}, options=options)
    report(276.0, model.weight.full_tensor().sum().item())
except AssertionError as error:
    report(276.0, repr(error))
