# a nested compile region silently ignores attributes, lists, dicts and globals that change between two calls
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_region_changed.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Layer(torch.nn.Module):
    """Scale a sum over the ranks, in a region of its own."""

    scale = 1.0

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * self.scale, "sum", dist.group.WORLD)


def run(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    layer.scale = 2.0
    x = layer(x)
    layer.scale = 10.0
    return layer(x) + 0


report(20.0 * size**2, torch.compile(run, backend="eager")(Layer(), torch.ones(1)).item())
