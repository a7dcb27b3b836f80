# An embedding in a table whose rows two mesh dimensions shard can't be put together
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 dtensor_lookup_twice_sharded.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (2, 2))
tokens, table = torch.tensor([3, 0, 7, 5]), torch.arange(16.0).reshape(8, 2)
try:
    found = functional.embedding(
        distribute_tensor(tokens, mesh, [Replicate(), Replicate()]),
        distribute_tensor(table, mesh, [Shard(0), Shard(0)]),
    )
    observed: object = found.full_tensor().tolist()
except RuntimeError as error:
    observed = str(error)
report(table[tokens].tolist(), observed)
