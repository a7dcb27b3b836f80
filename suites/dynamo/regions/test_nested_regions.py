"""Modules whose forward is a nested compile region, which compiled code traces once for all equal calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, assert_on_ranks, assert_same, requirement, spmd
from harness.stacks import dynamo
from harness.stacks.collectives import functional

SHIFTS = {"by": 1.0}


class Layer(nn.Module):
    """Scale the sum over the ranks, in a region of its own."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.scales = [scale]
        self.named = {"scale": scale}
        self.register_buffer("buffer", torch.tensor(scale))

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[n] to float[n]."""
        scale = self.scale * self.scales[0] * self.named["scale"] * self.buffer
        return functional.all_reduce(x * scale, "sum", dist.group.WORLD) + SHIFTS["by"]


def attribute(layer: Layer, to: float) -> None:
    """Set an attribute."""
    layer.scale = to


def item(layer: Layer, to: float) -> None:
    """Set an item of a list."""
    layer.scales[0] = to


def value(layer: Layer, to: float) -> None:
    """Set a value of a dict."""
    layer.named["scale"] = to


def shift(layer: Layer, to: float) -> None:
    """Set a value of a global dict."""
    SHIFTS["by"] = to


def buffer(layer: Layer, to: float) -> None:
    """Write into a buffer."""
    layer.buffer.fill_(to)  # type: ignore[operator]


def replaced(layer: Layer, to: float) -> None:
    """Set another buffer."""
    layer.buffer = torch.full_like(layer.buffer, to)  # type: ignore[arg-type]


Change = Callable[[Layer, float], None]
CHANGES: list[Change] = [attribute, item, value, shift, buffer, replaced]


@requirement(
    "DYN-REGION-5047",
    "A nested compile region that is called again runs with what its module and globals are then, as uncompiled code "
    "does.",
    source="torch.compiler.nested_compile_region",
)
@pytest.mark.needs(torch="torch.compiler.nested_compile_region")
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.world(2)
def test_changed_between_calls(world: World, change: Change) -> None:
    """Change what a layer reads between its calls, or also before the first one."""

    def body(rank: Rank) -> list[list[float]]:
        def called_first(layer: Any, x: torch.Tensor) -> torch.Tensor:
            x = layer(x)
            change(layer, 3.0)
            x = layer(layer(x))
            change(layer, 1.0)
            return layer(x) + 0

        def changed_first(layer: Any, x: torch.Tensor) -> torch.Tensor:
            change(layer, 2.0)
            x = layer(x)
            change(layer, 1.0)
            return layer(x) + 0

        x = torch.arange(2.0, device=rank.device) + rank.index
        runs: list[Any] = []
        for plain in called_first, changed_first:
            runs += [plain, torch.compile(plain, backend="eager")]
        return [run(Layer().to(rank.device), x).tolist() for run in runs]

    results = world.run(body)
    called, _, changed, _ = results[0]
    assert_on_ranks([[called, called, changed, changed]] * world.size, results)


@requirement(
    "DYN-REGION-5048",
    "Calls of a nested compile region on different modules run with the attributes of each.",
    source="torch.compiler.nested_compile_region",
)
@pytest.mark.needs(torch="torch.compiler.nested_compile_region")
@pytest.mark.world(2)
def test_different_modules(world: World) -> None:
    """Call three layers, of which the first and the last are alike; differentiate."""

    def body(rank: Rank) -> None:
        layers = [Layer(scale).to(rank.device) for scale in (2.0, 0.5, 2.0)]

        def run(x: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                x = layer(x)
            return x

        found = []
        for each in run, dynamo.compiled(run, backend="aot_eager")[0]:
            x = (torch.arange(2.0, device=rank.device) + rank.index).requires_grad_()
            y = each(x)
            y.sum().backward()
            found.append((y.detach() + 0, x.grad))
        for number, (one, other) in enumerate(zip(*found, strict=True)):
            assert_same(one, other, f"result {number}")

    world.run(body)


@requirement(
    "DYN-REGION-5440",
    "A nested compile region is traced for as many kinds of calls as max_reuse_entries, and for one more raises an "
    "error.",
    source="torch.compiler.nested_compile_region: max_reuse_entries",
)
@requirement(
    "DYN-REGION-5441",
    "Calls of a nested compile region for which reuse_hash_fn returns one number run the same code.",
    source="torch.compiler.nested_compile_region: reuse_hash_fn: 'Two calls that produce the same hash key reuse the "
    "same cached subgraph'",
)
@pytest.mark.needs(torch="torch.compiler.nested_compile_region(max_reuse_entries)")
@spmd(2)
def test_options(rank: Rank) -> None:
    """Call a region with two numbers, of which the second is a kind of its own unless its number says otherwise."""

    def ran(numbers: list[int], **options: Any) -> list[float]:
        @torch.compiler.nested_compile_region(**options)
        def region(x: torch.Tensor, number: int) -> torch.Tensor:
            return functional.all_reduce(x * number, "sum", dist.group.WORLD)

        def run(x: torch.Tensor) -> torch.Tensor:
            for number in numbers:
                x = region(x, number)
            return x + 0

        torch.compiler.reset()
        found: list[float] = torch.compile(run, backend="eager")(torch.ones(1, device=rank.device)).tolist()
        return found

    assert ran([2, 5, 2]) == [160]
    assert ran([2, 5, 2, 5], max_reuse_entries=2) == [1600]
    assert ran([2, 2], max_reuse_entries=1) == [16]
    with pytest.raises(Exception, match="exceeded maximum reuse entries"):
        ran([2, 5, 2], max_reuse_entries=1)
    assert ran([2, 5, 2], reuse_hash_fn=lambda x, number: number) == [160]
    assert ran([2, 5, 2], reuse_hash_fn=lambda x, number: 7) == [64]
