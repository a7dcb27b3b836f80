# With dedup_reduce_scatters, compiled code that adds a row to a column, each from a reduce-scatter, has another shape
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_crossed_sums.py
# It exits with 1 where the defect is there. The pass adds the inputs, which broadcast to another first dimension.

import sys
from datetime import timedelta

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

if not hasattr(torch._inductor.config, "dedup_reduce_scatters"):
    print("this version of PyTorch has no dedup_reduce_scatters")
    sys.exit(0)
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def crossed(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Add what two reduce-scatters give."""
    one, two = (functional.reduce_scatter_tensor(each, "sum", 0, dist.group.WORLD) for each in (row, column))
    return one + two


row, column = torch.arange(4.0), torch.tensor([[10.0], [20.0]])
with torch._inductor.config.patch(dedup_reduce_scatters=True):
    observed = torch.compile(crossed)(row, column)
report(crossed(row, column).tolist(), observed.tolist())
