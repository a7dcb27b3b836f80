# ShardedTensor.gather silently rounds integers and float64 to float32, unless it is given a dtype
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 sharded_tensor_gather_dtype.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


part = torch.tensor([2**24 + 1 + rank])
sharded = init_from_local_shards([Shard.from_tensor_and_offsets(part, [rank], rank)], size)
whole = torch.zeros(size, dtype=torch.int64) if rank == 0 else None
sharded.gather(0, whole)
report([2**24 + 1 + r for r in range(size)] if rank == 0 else None, None if whole is None else whole.tolist())
