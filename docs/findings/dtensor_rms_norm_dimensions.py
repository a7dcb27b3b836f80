# rms_norm of a DTensor raises an error if a dimension that it normalizes is evenly sharded, although layer_norm works
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_rms_norm_dimensions.py
# It exits with 1 where the defect is there.
#
# One normalized dimension is enough, as the last of several is. If the dimension doesn't divide evenly, rms_norm works.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))
whole = torch.ones(2, 4, 3)
try:
    found = functional.rms_norm(distribute_tensor(whole, mesh, [Shard(1)]), (4, 3))
    observed = round(found.full_tensor().sum().item(), 3)
except RuntimeError as error:
    observed = str(error).splitlines()[0]
report(24.0, observed)
