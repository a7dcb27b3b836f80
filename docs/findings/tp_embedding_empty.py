# an embedding divided by rows fails on a rank that has no rows
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 tp_embedding_empty.py
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


mesh = init_device_mesh("cpu", (size,))
weight = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
indices = distribute_tensor(torch.tensor([0, 3]), mesh, [Replicate()])
found = torch.nn.functional.embedding(indices, weight)  # raises on rank 2, and torchrun ends with 1
report([[0.0, 1.0], [6.0, 7.0]], found.full_tensor().tolist())
