"""Static graphs: ranks that use different parameters, several forwards in a step, and graphs that change after all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import Undefined, layer
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate

SOURCE = "torch.nn.parallel.DistributedDataParallel: static_graph"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 1e-6},
]


class Parts(nn.Module):
    """Three layers, the sum of some of whose outputs it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        return torch.stack([self.layers[i](x) for i in used]).sum()


def made(how: str, rank: Rank, **options: Any) -> Any:
    module = Parts().to(rank.device)
    if how == "replicate":
        return replicate.replicate(module, static_graph=True, **options)
    return DistributedDataParallel(module, static_graph=True, **options)


def gradients(model: nn.Module) -> list[float | None]:
    """Return the number that all elements of each gradient are."""
    found = [p.grad for p in model.parameters()]
    assert all(g is None or bool((g == g[0, 0]).all()) for g in found)
    return [None if g is None else g[0, 0].item() for g in found]


@requirement(
    "REPL-STATIC-04",
    "With static_graph=True, the gradients of all forwards of a step are averaged, whichever parameters a rank uses.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_uses(world: World) -> None:
    """Ranks use the same layers, others, or one more, in one forward or in two, for four steps."""
    each: list[tuple[list[int], list[int]]] = [([0, 1], [0, 1]), ([0], [1]), ([0, 2], [2]), ([1], [2, 0])]

    def body(rank: Rank) -> None:
        for number, (used, options, forwards) in enumerate(itertools.product(each, OPTIONS, (1, 2))):
            model = made("replicate" if number // 2 % 2 else "DDP", rank, **options)
            for step in range(4):
                x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
                losses = [model(x * (i + 1), used[rank.index]) for i in range(forwards)]
                torch.stack(losses).sum().backward()
                times = forwards * (forwards + 1) / 2
                sums = [sum(r + 1.0 for r in range(2) if i in used[r]) for i in range(3)]
                right = [times * total / 2 if total else None for total in sums]
                assert gradients(model) == right, (options, used, forwards, step)
                model.zero_grad()

    world.run(body)


@requirement(
    "REPL-STATIC-3200",
    "With static_graph=True, gradients are averaged in all steps, whatever forwards without a backward come before.",
    source=SOURCE,
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_forwards_alone(world: World, how: str) -> None:
    """One forward or two with gradients, without them or in evaluation, before the first step and before the second."""

    def body(rank: Rank) -> None:
        x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
        ways = ("training", "evaluation", "no_grad")
        cases = zip(itertools.product((0, 1), ways, (1, 2)), itertools.cycle(OPTIONS), strict=False)
        for (before, way, count), options in cases:
            model = made(how, rank, **options)
            for step in range(3):
                for _ in range(count if step == before else 0):
                    model.train(way != "evaluation")
                    with torch.no_grad() if way == "no_grad" else nullcontext():
                        model(x, [0, 1, 2])
                    model.train()
                model(x, [0, 1, 2]).backward()
                assert gradients(model) == [1.5] * 3, (options, before, way, count, step)
                model.zero_grad()

    world.run(body)


@requirement(
    "REPL-STATIC-05",
    "A static graph that changes after the first step, or that is only called static then, is an error.",
    source=f"{SOURCE}, 'the set of used and unused parameters will not change during the whole training loop'",
)
@pytest.mark.world(2, keeps="graphs of backwards that failed")
def test_changes(world: World) -> None:
    """Use one layer more or one less in the second or third step; the error comes at the next one at the latest."""
    every: list[list[list[int]]] = [[[0], [0, 1]], [[0, 1], [0]], [[0, 1, 2], [0, 1, 2], [1, 2]], [[1], [1], [1, 2]]]

    def run(model: Any, x: torch.Tensor, steps: list[list[int]]) -> None:
        for used in steps:
            model(x, used).backward()

    def body(rank: Rank) -> None:
        for how, steps in itertools.product(("DDP", "replicate"), every):
            model = made(how, rank)
            x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
            run(model, x, steps[:-1])
            with pytest.raises(RuntimeError, match="graph has changed"):
                run(model, x, [steps[-1], steps[0]])

    world.run(body)


@requirement(
    "REPL-STATIC-05",
    "A static graph that changes after the first step, or that is only called static then, is an error.",
    source=f"{SOURCE}, 'the set of used and unused parameters will not change during the whole training loop'",
)
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.world(2)
def test_called_static(world: World) -> None:
    """Call it static before the first step, twice, beside the option, or after a step; one layer is never used."""

    def body(rank: Rank) -> None:
        says: list[tuple[dict[str, bool], int]] = [({}, 1), ({}, 2), ({"static_graph": True}, 1)]
        x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
        for options, times in says:
            model = DistributedDataParallel(Parts().to(rank.device), **options)  # type: ignore[arg-type]
            for number in range(times):
                again = pytest.warns(UserWarning, match="no need to set it again")
                with again if number or options else nullcontext():
                    replicate.make_static(model)
            for step in range(3):
                model(x, [0, 2]).backward()
                assert gradients(model) == [1.5, None, 1.5], (options, times, step)
                model.zero_grad()
        model = DistributedDataParallel(Parts().to(rank.device))
        model(x, [0, 1, 2]).backward()
        with pytest.raises(RuntimeError, match="before training loop starts"):
            replicate.make_static(model)

    world.run(body)


@requirement(
    "REPL-STATIC-06",
    "With static_graph=True, steps after one whose gradients are undefined average gradients, or raise an error.",
    source=f"{SOURCE}; torch.autograd.Function: 'return None'",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_undefined_at_first(world: World, how: str) -> None:
    """A function after the module gives no gradient in the first of three steps."""

    def body(rank: Rank) -> str | list[list[float | None]]:
        model = made(how, rank)
        x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
        Undefined.apply(model(x, [0, 1, 2])).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        steps = []
        try:
            for _ in range(2):
                model(x, [0, 1, 2]).backward()
                steps.append(gradients(model))
                model.zero_grad()
        except RuntimeError:
            return "an error"
        return steps

    assert_on_ranks([[[1.5] * 3] * 2] * 2, world.run(body), or_all=["an error"] * 2)
