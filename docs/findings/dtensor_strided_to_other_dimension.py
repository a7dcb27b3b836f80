# redistribute from a strided shard to a shard of the same dimension over another mesh dimension is silently wrong
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 dtensor_strided_to_other_dimension.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

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
whole = torch.arange(8.0)
x = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2), Replicate()], src_data_rank=None)
try:
    observed = x.redistribute(placements=[Replicate(), Shard(0)]).to_local().tolist()
except (RuntimeError, ValueError) as error:
    observed = str(error).splitlines()[0]
report(whole.chunk(2)[rank % 2].tolist(), observed)
