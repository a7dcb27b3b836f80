# embedding(scale_grad_by_freq=True) of a sharded batch silently counts the tokens of each shard alone
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_counted_embedding.py
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


mesh = init_device_mesh("cpu", (2,))
tokens = distribute_tensor(torch.tensor([1, 2, 3, 1]), mesh, [Shard(0)])
weight = distribute_tensor(torch.ones(4, 1), mesh, [Replicate()]).requires_grad_()
functional.embedding(tokens, weight, scale_grad_by_freq=True).sum().full_tensor().backward()
report([0.0, 1.0, 1.0, 1.0], weight.grad.full_tensor().flatten().tolist())
