"""Activation checkpoints within a replicated module, and of a whole one, by every option and in both of their forms."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate

NEWER = "torch.utils.checkpoint.checkpoint: use_reentrant=False; torch.nn.parallel.DistributedDataParallel"
OLDER = "torch.nn.parallel.DistributedDataParallel: static_graph, 'activation checkpointing multiple times'"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"static_graph": True, "find_unused_parameters": True},
]


def one() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


class Recomputed(nn.Module):
    """Two layers of one weight, or two weights, which are ones; how they are called, and what is checkpointed, differs.

    With ``left_out``, a third layer is never used.
    """

    def __init__(self, how: str, *, reentrant: bool, shared: bool, left_out: bool = False) -> None:
        super().__init__()
        self.first, self.second = one(), one()
        if shared:
            self.second.weight = self.first.weight
        if left_out:
            self.third = one()
        self.how, self.reentrant, self.calls = how, reentrant, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def recomputed(layer: nn.Module, x: torch.Tensor) -> Any:
            return checkpoint(layer, x, use_reentrant=self.reentrant)

        if self.how == "once":
            return recomputed(self.second, self.first(x))  # type: ignore[no-any-return]
        if self.how == "twice":
            return recomputed(self.second, recomputed(self.second, self.first(x)))  # type: ignore[no-any-return]
        if self.how == "both":
            return recomputed(self.second, recomputed(self.first, x))  # type: ignore[no-any-return]
        if self.how == "in turn":
            self.calls += 1
            return recomputed(self.second if self.calls % 2 else self.first, x)  # type: ignore[no-any-return]
        return self.second(self.first(x))  # type: ignore[no-any-return]


def uses(how: str, step: int) -> list[int]:
    """Return how often each layer is used in a step."""
    if how == "in turn":
        return [step % 2, 1 - step % 2]
    return [1, 2 if how == "twice" else 1]


def works(how: str, shared: bool, reentrant: bool, options: dict[str, Any]) -> bool:
    """Return whether DDP takes part: a reentrant checkpoint runs a backward of its own, in which it sees no other use.

    Without a static graph, PyTorch 2.13 averages nothing of a shared weight there, silently.
    """
    static = "static_graph" in options
    if how == "in turn":
        return "find_unused_parameters" in options and not static and not reentrant
    if not reentrant or static:
        return True
    return how != "twice" and not shared and "find_unused_parameters" not in options


@requirement(
    "DDP-CKPT-01",
    "Layers or whole modules in non-reentrant checkpoints, repeated or of one weight, have averaged gradients.",
    source=NEWER,
)
@requirement(
    "DDP-CKPT-02",
    "Whole modules in reentrant checkpoints, or layers with static_graph, also repeated, have averaged gradients.",
    source=OLDER,
)
@pytest.mark.world(2)
def test_layers(world: World) -> None:
    """Checkpoint one or both of two layers, once, twice or in turn, beside an unused one or not, for three steps."""
    cases = itertools.product(("once", "twice", "both", "in turn"), (False, True), (False, True), OPTIONS)
    works_so = [case for case in cases if works(*case)]

    def body(rank: Rank) -> None:
        for number, case in enumerate(works_so):
            check(rank, *case, by_replicate=number % 2 == 1)

    def check(
        rank: Rank, kind: str, shared: bool, reentrant: bool, options: dict[str, Any], *, by_replicate: bool
    ) -> None:
        finds = bool({"find_unused_parameters", "static_graph"} & options.keys())
        module = Recomputed(kind, reentrant=reentrant, shared=shared, left_out=finds).to(rank.device)
        model: Any = replicate.replicate(module, **options) if by_replicate else None
        model = model or DistributedDataParallel(module, **options)
        for step in range(3):
            x = torch.full((1, 1), 1.0 + rank.index, device=rank.device, requires_grad=True)
            model(x).sum().backward()
            counts = uses(kind, step)
            right = [1.5 * sum(counts)] if shared else [1.5 * count if count else None for count in counts]
            found = [None if p.grad is None else p.grad.item() for p in module.parameters()]
            assert found == right + [None] * finds, (kind, options, reentrant, shared, step)
            model.zero_grad()

    world.run(body)


@requirement(
    "DDP-CKPT-01",
    "Layers or whole modules in non-reentrant checkpoints, repeated or of one weight, have averaged gradients.",
    source=NEWER,
)
@requirement(
    "DDP-CKPT-02",
    "Whole modules in reentrant checkpoints, or layers with static_graph, also repeated, have averaged gradients.",
    source=OLDER,
)
@pytest.mark.world(2)
def test_whole_module(world: World) -> None:
    """Checkpoint a module of two layers, which may share a weight, for three steps."""

    def body(rank: Rank) -> None:
        for shared in (False, True):
            for reentrant in (False, True):
                for options in OPTIONS:
                    module = Recomputed("plain", reentrant=reentrant, shared=shared).to(rank.device)
                    model = DistributedDataParallel(module, **options)
                    for step in range(3):
                        x = torch.full((1, 1), 1.0 + rank.index, device=rank.device, requires_grad=True)
                        checkpoint(model, x, use_reentrant=reentrant).sum().backward()  # type: ignore[union-attr]
                        found = [p.grad.item() for p in module.parameters() if p.grad is not None]
                        assert found == ([3.0] if shared else [1.5, 1.5]), (options, reentrant, shared, step)
                        model.zero_grad()

    world.run(body)


@requirement(
    "DDP-CKPT-03",
    "A weight inside and outside of a reentrant checkpoint has an averaged gradient, or an error is raised.",
    source="torch.nn.parallel.DistributedDataParallel: use_reentrant=True, 'each layer is checkpointed at most once'",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_shared_with_a_checkpoint(world: World, how: str) -> None:
    """Two layers of one weight, of which the second is in a checkpoint, for two steps."""

    def body(rank: Rank) -> str | list[float]:
        module = Recomputed("once", reentrant=True, shared=True).to(rank.device)
        model: Any = replicate.replicate(module) if how == "replicate" else DistributedDataParallel(module)
        steps = []
        try:
            for _ in range(2):
                model(torch.full((1, 1), 1.0 + rank.index, device=rank.device)).sum().backward()
                steps.append(float(next(iter(replicate.gradients(module).values()))))
                model.zero_grad()
        except RuntimeError:
            return "an error"
        return steps

    assert_on_ranks([[3.0, 3.0]] * 2, world.run(body), or_all=["an error"] * 2)


@requirement(
    "DDP-CKPT-3657",
    "A reentrant checkpoint of layers that DDP does not support raises an error, or has averaged gradients.",
    source="torch.nn.parallel.DistributedDataParallel: use_reentrant=True, find_unused_parameters, static_graph",
)
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {}], ids=["finds", "plain"])
@pytest.mark.world(2)
def test_unsupported(world: World, options: dict[str, Any]) -> None:
    """Checkpoint one layer or both with find_unused_parameters, beside an unused layer or none; or one layer twice."""
    kinds = ["once", "both"] if options else ["twice"]

    def body(rank: Rank) -> list[str | list[float | None]]:
        found: list[str | list[float | None]] = []
        for kind in kinds:
            for left_out in (False, True) if options else (False,):
                module = Recomputed(kind, reentrant=True, shared=False, left_out=left_out).to(rank.device)
                model = DistributedDataParallel(module, **options)
                x = torch.full((1, 1), 1.0 + rank.index, device=rank.device, requires_grad=True)
                try:
                    model(x).sum().backward()
                except RuntimeError:
                    found.append("an error")
                else:
                    found.append([None if p.grad is None else p.grad.item() for p in module.parameters()])
        return found

    right: list[Any] = [[1.5, 3.0]] if not options else [[1.5, 1.5], [1.5, 1.5, None]] * 2
    for found in world.run(body):
        assert all(one in ("an error", expected) for one, expected in zip(found, right, strict=True)), found
