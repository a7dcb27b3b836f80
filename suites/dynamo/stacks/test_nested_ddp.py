"""Modules under DDP inside of other modules under DDP, compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import WIDE
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with
from harness.stacks.tracing import Tracer


class Layers(nn.Module):
    """Linear layers without biases."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + 1


class Around(nn.Module):
    """Layers before another module, and layers after it."""

    def __init__(self, before: int, inner: nn.Module, after: int) -> None:
        super().__init__()
        self.before, self.inner, self.after = Layers(before), inner, Layers(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(self.inner(self.before(x)))
        return result


class Failing(Layers):
    """Layers that raise an error."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError


class Passed(nn.Module):
    """A module whose errors are passed over."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            result: torch.Tensor = self.inner(x)
        except ValueError:
            return x
        return result


@requirement(
    "DYN-DDP-15",
    "The graphs of a compiled module under DDP end where its own buckets end, also after the forward of a module "
    "under DDP inside of it.",
    source="torch/nn/parallel/distributed.py: DistributedDataParallel.forward; DDPOptimizer",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, nothing is cut after a module under DDP that comes first")
@pytest.mark.world(1)
def test_cuts_of_nested_modules(world: World) -> None:
    """The inner module comes first, in the middle or twice, has other buckets, or raises an error."""

    def body(rank: Rank) -> None:
        def ddp(module: nn.Module, megabytes: int = 1) -> nn.Module:
            return DistributedDataParallel(module.to(rank.device), bucket_cap_mb=megabytes)

        cases: dict[str, tuple[nn.Module, list[int]]] = {
            "first": (Around(0, ddp(Layers(2)), 3), [1] * 5),
            "in the middle": (Around(1, ddp(Layers(2)), 2), [1] * 5),
            "twice": (Around(1, nn.Sequential(ddp(Layers(2)), ddp(Layers(1))), 2), [1] * 6),
            "with other buckets": (Around(1, ddp(Layers(2), 25), 2), [1, 1, 1, 1, 1]),
            "that fails": (Around(1, Passed(ddp(Failing(1))), 2), [1] * 3),
        }
        for name, (model, layers) in cases.items():
            torch.compiler.reset()
            tracer = Tracer("eager")
            torch.compile(ddp(model), backend=tracer)(torch.ones(1, WIDE, device=rank.device)).sum().backward()
            found = [n for graph in tracer.graphs if (n := sum(o.name == "linear" for o in graph.operators))]
            assert found == layers, f"a module {name}: {found}"

    world.run(body)
