# A linear layer of sequences that two mesh dimensions shard by position raises an error
# https://github.com/pytorch/pytorch/pull/186282
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 dtensor_twice_sharded_sequence.py
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
sequences = distribute_tensor(torch.ones(2, 8, 3), mesh, [Shard(1), Shard(1)])
matrix = distribute_tensor(torch.ones(3, 3), mesh, [Replicate(), Replicate()])
try:
    found: object = functional.linear(sequences, matrix).full_tensor().unique().tolist()
except RuntimeError as error:
    found = repr(error)
report([3.0], found)
