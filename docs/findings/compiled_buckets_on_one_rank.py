# With compile_on_one_rank, Inductor raises KeyError if it puts collectives of a group, not of a mesh, into a bucket
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_buckets_on_one_rank.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._inductor import config

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()
on_one_rank = torch.compiler.config if hasattr(torch.compiler.config, "compile_on_one_rank") else dist.config


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def sums(x: torch.Tensor) -> list[torch.Tensor]:
    """Sum two tensors over the ranks."""
    return [functional.all_reduce(x + i, "sum", dist.group.WORLD) for i in range(2)]


with on_one_rank.patch(compile_on_one_rank=True), config.patch(bucket_all_reduces_fx="all"):
    try:
        observed = [y.tolist() for y in torch.compile(sums, fullgraph=True)(torch.ones(2))]
    except Exception as error:
        observed = str(error).splitlines()[0]
report([[float(size)] * 2, [2.0 * size] * 2], observed)
