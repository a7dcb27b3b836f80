# ranks disagree about where the shards of a sharded tensor over tensor parallelism are
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 tp_shard_ranks.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
parameter = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh["tp"], [Shard(0)])
saved = DTensorExtensions(torch.cpu).chunk_tensor(parameter, 0, 1, 1, mesh["dp"].get_group())
report(list(range(size)), [shard.placement.rank() for shard in saved.metadata().shards_metadata])
