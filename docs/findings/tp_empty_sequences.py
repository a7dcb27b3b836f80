# a tensor-parallel layer on no sequences hangs if a sequence is as long as it has features
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 tp_empty_sequences.py
# It exits with 1 where the defect is there.

import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
model = parallelize_module(nn.Linear(2, 2), mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
signal.alarm(10)  # torchrun ends with 1 when it rings
report([0, 2, 2], list(model(torch.ones(0, 2, 2)).shape))
