# The gradient of select, narrow or a slice in a dimension named from the end is silently wrong for shards, or raises
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_select_from_the_end.py
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
whole, arriving = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
expected, observed = list[object](), list[object]()
for layout, back, cut, taken in (
    (Shard(0), Shard(0), lambda x: x.select(-1, 0), arriving[0]),
    (Replicate(), Shard(1), lambda x: x.narrow(-1, 1, 2), arriving),
):
    wide = torch.cat([whole, whole], 1)
    plain, given = wide.clone().requires_grad_(), distribute_tensor(wide, mesh, [layout]).requires_grad_()
    cut(plain).backward(taken)
    cut(given).backward(distribute_tensor(taken, mesh, [back]))
    expected.append(plain.grad.tolist())
    observed.append(given.grad.full_tensor().tolist())
report(expected, observed)
