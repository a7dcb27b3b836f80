"""Nested compile regions of layers, one of which shares what it has with the code around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.collectives import functional

Uses = Callable[[torch.Tensor, Any], torch.Tensor]


class Layer(nn.Module):
    """Use what the layer has, in a region of its own."""

    def __init__(self, uses: Uses, has: Any) -> None:
        super().__init__()
        self.uses, self.has = uses, has

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[1] to float[1]."""
        return self.uses(x, self.has) + 1


def _reduced(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.all_reduce(x, "sum", group)


def kinds(rank: Rank) -> dict[str, tuple[Uses, Any, Any]]:
    """Return functions with what the first and the second of two layers have."""
    alone = [dist.new_group([member]) for member in range(rank.size)][rank.index]
    two, three = (nn.Parameter(torch.tensor([n], device=rank.device)) for n in (2.0, 3.0))
    return {
        "groups": (_reduced, dist.group.WORLD, alone),
        "parameters": (torch.mul, two, three),
        "numbers": (torch.mul, 2.0, 3.0),
        "lists": (lambda x, has: x * has[0], [2.0], [3.0]),
    }


USED: dict[str, Callable[[Any, Any], Any]] = {
    "the first layer's": lambda layers, first: layers[0].has,
    "a list of the first layer's": lambda layers, first: layers[0].has,
    "the second layer's": lambda layers, first: layers[1].has,
    "the first one's by another name": lambda layers, first: first,
}
"""What the code reads before it calls its layers. By the layer's name, lists are a test of their own."""


@requirement(
    "DYN-REGION-5410",
    "Layers in nested compile regions use their own parameters, groups or lists, although the code around them has "
    "used one of these before.",
    source="torch.compiler.nested_compile_region",
)
@pytest.mark.needs(torch="torch.compiler.nested_compile_region")
@pytest.mark.parametrize("used", USED)
@pytest.mark.world(2)
def test_used_before(world: World, used: str) -> None:
    """Read what one of two layers has as the layer's attribute or from a variable, and then call both layers."""

    def body(rank: Rank) -> list[str]:
        has = kinds(rank)
        if used == "a list of the first layer's":
            has = {"lists": has["lists"]}
        elif used == "the first layer's":
            del has["lists"]
        layers = {kind: [Layer(uses, thing) for thing in things] for kind, (uses, *things) in has.items()}

        def step(x: torch.Tensor) -> list[torch.Tensor]:
            results = []
            for kind, (uses, first, _) in has.items():
                y = uses(x, USED[used](layers[kind], first))
                for layer in layers[kind]:
                    y = layer(y)
                results.append(y + 0)
            return results

        torch.compiler.reset()
        x = torch.ones(1, device=rank.device)
        found = zip(has, step(x), torch.compile(step, backend="eager")(x), strict=True)
        return [f"{kind}: {a.item()} uncompiled, {b.item()} compiled" for kind, a, b in found if a != b]

    assert_on_ranks([[]] * world.size, world.run(body))
