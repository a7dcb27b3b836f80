# cat of an empty vector, which it skips, and a DTensor whose columns are sharded raises an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64; not there in 2.14.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_joined_to_nothing.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (2,))
columns = distribute_tensor(torch.tensor([[1.0, 2.0]]), mesh, [Shard(1)])
try:
    nothing = distribute_tensor(torch.empty(0), mesh, [Replicate()])
    observed: object = torch.cat([nothing, columns]).full_tensor().tolist()  # type: ignore[attr-defined]
except IndexError as e:
    observed = str(e).splitlines()[0]
report([[1.0, 2.0]], observed)
