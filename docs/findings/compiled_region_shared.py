# nested compile regions silently use the first layer's parameter, group or list in all layers, if it was read before
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_region_shared.py
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

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * self.weight, "sum", dist.group.WORLD)


class Model(torch.nn.Module):
    """Two layers, of which the first shares its weight with the model, as embeddings do that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))
        self.layers = torch.nn.ModuleList([Layer(self.weight), Layer(torch.nn.Parameter(torch.tensor([10.0])))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for layer in self.layers:
            x = layer(x)
        return x + 0


# the second layer's weight is 2, too, where the first one's was read as the model's before
report(40.0 * size**2, torch.compile(Model(), backend="eager")(torch.ones(1)).item())
