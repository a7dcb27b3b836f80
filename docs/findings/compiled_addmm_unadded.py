# Compiled by aot_eager_decomp_partition, addmm of one row with beta=0 is NaN if what it must ignore is NaN
# https://github.com/pytorch/pytorch/issues/196596
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_addmm_unadded.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def product(ignored: torch.Tensor, row: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the product alone."""
    return torch.addmm(ignored, row, matrix, beta=0)


given = torch.full((4,), float("nan")), torch.ones(1, 3), torch.ones(3, 4)
observed = torch.compile(product, backend="aot_eager_decomp_partition")(*given)
report(product(*given).tolist(), [[x if x == x else "nan" for x in row] for row in observed.tolist()])
