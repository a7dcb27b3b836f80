# An embedding with rows sharded over a mesh dimension before the one that shards its tokens can't be put together
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 dtensor_lookup_in_two_dimensions.py
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
tokens, table = torch.tensor([3, 0, 2, 1]), torch.arange(8.0).reshape(4, 2)
found = functional.embedding(
    distribute_tensor(tokens, mesh, [Replicate(), Shard(0)]), distribute_tensor(table, mesh, [Shard(0), Replicate()])
)
try:
    observed: object = found.full_tensor().tolist()
except IndexError as error:
    observed = str(error)
report(table[tokens].tolist(), observed)
