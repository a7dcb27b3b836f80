# GradScaler silently skips a step on some ranks only if the first gradient is replicated and a later one is sharded
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_scaler_first_gradient.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


layer = parallelize_module(torch.nn.Linear(4, 4), init_device_mesh("cpu", (2,)), RowwiseParallel())
sgd = torch.optim.SGD([layer.bias, layer.weight], lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
scaler.scale(layer(torch.ones(2, 2)).sum()).backward()
if rank == 1:
    layer.weight.grad.to_local()[0, 0] = float("inf")
scaler.step(sgd)
scaler.update()
report(8.0, scaler.get_scale())
