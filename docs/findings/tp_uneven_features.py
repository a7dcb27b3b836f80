# A row-wise layer after a column-wise one fails if the ranks do not divide the features between them
# https://github.com/pytorch/pytorch/issues/150336
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_uneven_features.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
parallelize_module(model, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
try:
    found: object = tuple(model(torch.ones(2, 4)).shape)
except RuntimeError as error:
    found = repr(error)
report((2, 4), found)
