# FSDP1 gives a parameter that is a slice of a tensor other elements, and those of its neighbour
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_sliced_parameter.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
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


model = nn.Module()
model.weight = nn.Parameter(torch.arange(8.0).view(2, 4)[:, :2])
model.other = nn.Parameter(torch.full((8,), 100.0))
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
with FullyShardedDataParallel.summon_full_params(model):
    found = model.module.weight.tolist()
report([[0.0, 1.0], [4.0, 5.0]], found)
