# The backward raises AssertionError if Shard(-1) is in grad_placements of to_local or from_local
# https://github.com/pytorch/pytorch/pull/111750
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_grad_placements_negative.py
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
columns = distribute_tensor(torch.ones(2, 4), mesh, [Shard(-1)]).requires_grad_()
try:
    (columns.to_local(grad_placements=[Shard(-1)]) * 3).sum().backward()
    observed: object = columns.grad.full_tensor().tolist()
except AssertionError as error:
    observed = repr(error)
report([[3.0] * 4] * 2, observed)
