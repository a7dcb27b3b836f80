# Compiled code sees other strides of a padded volume whose channels are last than it has
# https://github.com/pytorch/pytorch/issues/179442
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_padded_volume.py
# It exits with 1 where the defect is there. The same holds for mode="replicate".

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn import functional

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def padded(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...], bool]:
    """Reflect a volume, and ask the result."""
    y = functional.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect")
    return y, y.stride(), y.is_contiguous()


x = torch.ones(1, 2, 4, 3, 4).to(memory_format=torch.channels_last_3d)
y, *expected = padded(x)
z, *observed = torch.compile(padded, backend="aot_eager")(x)
report((y.stride(), expected), (z.stride(), observed))
