# One can't iterate over the norms of the columns of a DTensor in shards, nor over a pending product
# https://github.com/pytorch/pytorch/pull/162560
# Seen with torch 2.15.0+cu132, gloo, Python 3.11, Linux x86-64; not there in 2.14.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_iterated_norms.py
# It exits with 1 where the defect is there: "no valid sharding strategy".

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

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
columns = distribute_tensor(torch.tensor([[3.0, 6.0], [4.0, 8.0]]), mesh, [Shard(0)])
try:
    observed: object = [norm.full_tensor().item() for norm in torch.linalg.vector_norm(columns, dim=0)]
except RuntimeError as e:
    observed = str(e).splitlines()[0]
report([5.0, 10.0], observed)
