# Compiled all_gather_into_tensor and reduce_scatter_tensor of stacked tensors raise an error
# https://github.com/pytorch/pytorch/issues/155632
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_stacked.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def gather(x):
    whole = x.new_zeros(size, 3)
    dist.all_gather_into_tensor(whole, x[0])
    return whole


def scatter(x):
    part = x.new_zeros(3)
    dist.reduce_scatter_tensor(part, x)
    return part


found: list[object] = []
for function in gather, scatter:
    try:
        found.append(torch.compile(function, backend="aot_eager")(torch.ones(size, 3)).tolist())
    except RuntimeError as error:
        found.append(repr(error))
report([[[1.0] * 3] * size, [float(size)] * 3], found)
