# local_map refuses a DTensor whose columns are sharded if in_placements say so by Shard(-1)
# https://github.com/pytorch/pytorch/pull/188188
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_local_map_negative.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

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
columns = distribute_tensor(torch.ones(2, 4), mesh, [Shard(-1)])
try:
    doubled = local_map(lambda x: x * 2, [Shard(-1)], ([Shard(-1)],))(columns)
    observed: object = doubled.full_tensor().tolist()
except ValueError as error:
    observed = str(error).splitlines()[-1]
report([[2.0] * 4] * 2, observed)
