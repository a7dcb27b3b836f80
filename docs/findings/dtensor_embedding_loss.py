# cosine_embedding_loss of embeddings whose features are sharded is silently too large
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_embedding_loss.py
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


mesh = init_device_mesh("cpu", (size,))
a, b = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[4.0, 3.0, 2.0, 1.0]])
own = [distribute_tensor(x, mesh, [Shard(1)]) for x in (a, b)]
found = functional.cosine_embedding_loss(*own, distribute_tensor(torch.ones(1), mesh, [Replicate()]))
report(round(functional.cosine_embedding_loss(a, b, torch.ones(1)).item(), 4), round(found.full_tensor().item(), 4))
