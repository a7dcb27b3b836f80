# Compiled by Inductor, the backward of replicate padding of a channels-last image is an AssertionError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_padding_gradient.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn import functional

dist.init_process_group("gloo", timeout=timedelta(seconds=300))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


@torch.compile
def padded(x: torch.Tensor) -> torch.Tensor:
    """Repeat the edges of images."""
    return functional.pad(x, (1, 1, 1, 1), mode="replicate")


x = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
try:
    padded(x).sum().backward()
    observed = f"a gradient of {x.grad.sum().item()}"
except (AssertionError, RuntimeError) as error:
    observed = repr(error).splitlines()[0]
report("a gradient of 216.0", observed)
