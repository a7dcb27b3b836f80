# local shards of FSDP1's sharded tensors say the rank in the group where the metadata says that in the world
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 fsdp_shard_ranks.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
group = mesh["tp"].get_group()
saved = _create_chunk_sharded_tensor(torch.ones(4), dist.get_rank(group), group.size(), 1, group)
report(rank, saved.local_shards()[0].metadata.placement.rank())
