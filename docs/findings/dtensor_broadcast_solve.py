# linalg.solve and its like silently pair wrong matrices and right sides if one of them is a larger batch
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_broadcast_solve.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

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
matrices = torch.diag_embed(torch.arange(1.0, 9.0).reshape(2, 2, 2))
sides = torch.tensor([[[1.0], [1.0]], [[100.0], [100.0]]])
expected = torch.linalg.solve(matrices, sides)
given = (distribute_tensor(x, mesh, [Shard(0)]) for x in (matrices, sides))
report(expected.tolist(), torch.linalg.solve(*given).full_tensor().tolist())
