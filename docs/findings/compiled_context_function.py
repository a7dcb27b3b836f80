# torch.compile of checkpoint(context_fn=noop_context_fn), its default, or a method there, is an internal error
# https://github.com/NVIDIA/TransformerEngine/issues/890
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_context_function.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, noop_context_fn

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def region(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.sin, x, use_reentrant=False, context_fn=noop_context_fn)


try:
    torch.compile(region, backend="eager")(torch.ones(1, requires_grad=True)).sum().backward()
    observed = "a gradient"
except Exception as error:
    observed = type(error).__name__ + ": " + str(error).splitlines()[0]
report("a gradient", observed)
