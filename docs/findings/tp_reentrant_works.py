# Reentrantly checkpointed tensor-parallel layers keep the result of a collective of each backward, for ever
# https://github.com/pytorch/torchtitan/issues/2763
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 tp_reentrant_works.py
# It exits with 1 where the defect is there.

import gc
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def held() -> int:
    """Return the bytes of all tensors that are alive."""
    gc.collect()
    storages = [t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
parallelize_module(model, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
growth = []
for _ in range(6):
    before = held()
    x = torch.ones(32, 64, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=True)  # with False, nothing is kept
    y.sum().backward()
    del x, y
    growth.append(held() - before)
report([0, 0, 0], growth[3:])
