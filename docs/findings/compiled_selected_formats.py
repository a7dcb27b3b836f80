# Compiled, index_select of a channels-last tensor has other strides than the code sees, and can't be viewed flat
# https://github.com/pytorch/pytorch/issues/168381
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_selected_formats.py
# It exits with 1 where the defect is there. Inductor, whose decompositions these are, does the same.

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


def selected(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Take some images, and ask for their strides."""
    y = x.index_select(0, index)
    return y, y.stride()


x, index = torch.ones(3, 3, 4, 4).to(memory_format=torch.channels_last), torch.tensor([1, 0])
y, expected = selected(x, index)
z, observed = torch.compile(selected, backend="aot_eager_decomp_partition")(x, index)
report((y.stride(), expected), (z.stride(), observed))
