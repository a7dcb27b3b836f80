# A lookup in a sharded table fails while another one, in a table of that shape, is pending
# https://github.com/pytorch/pytorch/pull/131264
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_two_lookups.py
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
first, second = (distribute_tensor(torch.arange(8.0)[:, None] + 10 * i, mesh, [Shard(0)]) for i in range(2))
tokens, others = (distribute_tensor(torch.tensor(x), mesh, [Replicate()]) for x in ([1, 5, 7], [3, 6, 0]))
try:
    results = functional.embedding(tokens, first), functional.embedding(others, second)
    found: object = [x.full_tensor().flatten().tolist() for x in results]
except RuntimeError as error:
    found = repr(error)
report([[1.0, 5.0, 7.0], [13.0, 16.0, 10.0]], found)
