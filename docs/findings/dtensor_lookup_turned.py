# A transposed or unbound result of a lookup in a sharded table is wrong, and a reshaped one raises an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_lookup_turned.py
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
table = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
tokens = distribute_tensor(torch.tensor([[0, 3], [1, 2]]), mesh, [Replicate()])
found = functional.embedding(tokens, table)
report([[[0.0, 1.0], [2.0, 3.0]], [[6.0, 7.0], [4.0, 5.0]]], found.transpose(0, 1).full_tensor().tolist())
