"""Gradients that DistributedDataParallel reduces together, once a chosen parameter has its gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.delayed import waited
from fixtures.layers import layer
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from suites.replicate.reducer.test_buckets import of, sent

SOURCE = "torch.nn.parallel.DistributedDataParallel: delay_all_reduce_named_params, param_to_hook_all_reduce"
pytestmark = pytest.mark.usefixtures("with_buckets")


class Times(nn.Module):
    """A parameter of ones that multiplies its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply float[2]."""
        return x * self.weight


@requirement(
    "DDP-DELAY-01",
    "Delayed parameters are averaged in one all-reduce of their own, and the others as usual.",
    source=SOURCE,
)
@requirement(
    "DDP-DELAY-02",
    "Every rank gets the delayed parameters of rank 0.",
    source=SOURCE,
)
@pytest.mark.parametrize("delayed", [["2.weight"], ["1.weight", "2.weight"]], ids=["one", "two"])
@pytest.mark.world(2, keeps="DDP with delayed gradients: the finding ddp_delayed_memory")
def test_delayed(world: World, delayed: list[str]) -> None:
    """Three layers, of which the first is hooked; gradients are cleared to None or to zero, or add up."""

    def body(rank: Rank) -> None:
        module = nn.Sequential(layer(), layer(), layer()).to(rank.device)
        for parameter in module.parameters():
            nn.init.constant_(parameter, 1.0 + rank.index)
        named = [(name, parameter) for name, parameter in module.named_parameters() if name in delayed]
        model: Any = DistributedDataParallel(
            module,
            device_ids=None if rank.device.type == "cpu" else [rank.device],
            delay_all_reduce_named_params=named,
            param_to_hook_all_reduce=module[0].weight,
        )
        assert [p.flatten().tolist() for p in module.parameters()] == [[1.0] * 4] * 3
        added = 0
        for number in range(4):
            before = messages.mark()
            with waited():
                model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
            added += 1
            found = [p.grad.flatten().tolist() for p in module.parameters()]
            assert found == [[6.0 * added] * 4] * 3, f"step {number}"
            reduced = sorted(of(sent(before), "all_reduce"))
            assert reduced in ([], [4, 8]), f"step {number}"
            if number != 1:
                module.zero_grad(set_to_none=number == 0)
                added = 0

    world.run(body)


CLEAR: dict[str, Callable[[nn.Parameter], Any]] = {
    "none": lambda parameter: setattr(parameter, "grad", None),
    "zero": lambda parameter: parameter.grad.zero_(),  # type: ignore[union-attr]
}
"""Ways to clear a gradient."""
SUBSETS = [subset for n in range(5) for subset in itertools.combinations(range(4), n)]
"""Which of four parameters are cleared; of two, both can follow each other."""


@requirement(
    "DDP-DELAY-9091",
    "The gradient of a delayed parameter adds up over steps until it is cleared, to None or to zero, whichever of the "
    "others are cleared with it.",
    source=SOURCE,
)
@pytest.mark.parametrize("evaluated", [False, True], ids=["training", "evaluated"])
@pytest.mark.parametrize("how", [*CLEAR, "both"])
@pytest.mark.world(2, keeps="DDP with delayed gradients: the finding ddp_delayed_memory")
def test_cleared_in_part(world: World, how: str, evaluated: bool) -> None:
    """Of a hooked parameter and three delayed ones, clear any after each step; forwards without gradients between."""

    def body(rank: Rank) -> None:
        module = nn.Sequential(*(Times() for _ in range(4))).to(rank.device)
        model: Any = DistributedDataParallel(
            module,
            delay_all_reduce_named_params=[(f"{i}.weight", module[i].weight) for i in range(1, 4)],
            param_to_hook_all_reduce=module[0].weight,
        )
        right = [0.0] * 4
        for number, subset in enumerate([*SUBSETS, *SUBSETS[::-1]]):
            x = torch.full((2,), 2.0 * (1 + rank.index), device=rank.device)
            with waited():
                model(x).sum().backward()
            right = [value + 3.0 for value in right]
            assert [p.grad.tolist() for p in module.parameters()] == [[value] * 2 for value in right], (number, subset)
            for i in subset:
                CLEAR[how if how != "both" else list(CLEAR)[(i + number) % 2]](module[i].weight)
                right[i] = 0.0
            if evaluated:
                with torch.no_grad():
                    model(x)
                found = [p.grad.tolist() if p.grad is not None else [0.0] * 2 for p in module.parameters()]
                assert found == [[value] * 2 for value in right], (number, subset)

    world.run(body)


@requirement(
    "DDP-DELAY-9340",
    "The gradients of delayed parameters are averaged, whether they are cleared before the forward or after it.",
    source=SOURCE,
)
@pytest.mark.parametrize("how", CLEAR)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("which", [range(1), range(3)], ids=["hooked", "all"])
@pytest.mark.world(2, keeps="DDP with delayed gradients: the finding ddp_delayed_memory")
def test_cleared_before_backward(world: World, which: range, when: str, how: str) -> None:
    """Clear the hooked gradient alone, or all three, in the second step and in the third one."""

    def body(rank: Rank) -> list[list[float]]:
        module = nn.Sequential(*(Times() for _ in range(3))).to(rank.device)
        model: Any = DistributedDataParallel(
            module,
            delay_all_reduce_named_params=[(f"{i}.weight", module[i].weight) for i in (1, 2)],
            param_to_hook_all_reduce=module[0].weight,
        )
        x = torch.full((2,), 2.0 * (1 + rank.index), device=rank.device)
        with waited():
            model(x).sum().backward()
        found = []
        for _ in range(2):
            output = None if when == "before" else model(x)
            for i in which:
                CLEAR[how](module[i].weight)
            with waited():
                (model(x) if output is None else output).sum().backward()
            found.append([float(p.grad[0]) for p in module.parameters()])
        return found

    right = [[3.0 if i in which else 3.0 * steps for i in range(3)] for steps in (2, 3)]
    assert_on_ranks([right] * 2, world.run(body))


@requirement(
    "DDP-DELAY-03",
    "Delayed parameters without a hooked one, or a hooked one without them, raise an error.",
    source=SOURCE,
)
@pytest.mark.world(1)
def test_half_given(world: World) -> None:
    """Give one of the two arguments."""

    def body(rank: Rank) -> None:
        module = nn.Sequential(layer(), layer()).to(rank.device)
        with pytest.raises(ValueError, match="delay_all_reduce_named_params"):
            DistributedDataParallel(module, delay_all_reduce_named_params=[("1.weight", module[1].weight)])
        with pytest.raises(ValueError, match="param_to_hook_all_reduce"):
            DistributedDataParallel(module, param_to_hook_all_reduce=module[0].weight)

    world.run(body)


@requirement(
    "DDP-DELAY-5603",
    "A model under DDP is freed once nothing refers to it, also with delayed parameters.",
    source=SOURCE,
)
@pytest.mark.parametrize("delayed", [False, True], ids=["usual", "delayed"])
@pytest.mark.world(1)
def test_freed(world: World, delayed: bool) -> None:
    """Train one step; the rank looks for what is left when the test ends."""

    def body(rank: Rank) -> None:
        module = nn.Sequential(layer(), layer()).to(rank.device)
        options: dict[str, Any] = {}
        if delayed:
            options["delay_all_reduce_named_params"] = [("1.weight", module[1].weight)]
            options["param_to_hook_all_reduce"] = module[0].weight
        model = DistributedDataParallel(module, **options)
        model(torch.ones(1, 2, device=rank.device)).sum().backward()

    world.run(body)
