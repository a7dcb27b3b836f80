# torch.mm with out= silently puts a DTensor into the placements of an earlier call's: multi_dot is wrong
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_product_elsewhere.py
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
plain = torch.arange(16.0).reshape(4, 4).remainder(5)
x = distribute_tensor(plain, mesh, [Replicate()])
columns, first, second = (distribute_tensor(torch.zeros(4, 4), mesh, [p]) for p in (Shard(1), Replicate(), Replicate()))
expected = ("(Replicate(),)", torch.linalg.multi_dot([plain] * 3).tolist())
try:
    torch.mm(x, x, out=columns)
    torch.mm(x, x, out=first)
    torch.linalg.multi_dot([x, x, x], out=second)
    observed = (str(first.placements), second.to_local().tolist())
except NotImplementedError as error:  # before torch 2.13, which says so
    print(error)
    observed = expected
report(expected, observed)
