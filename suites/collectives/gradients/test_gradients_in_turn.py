"""Gradients of collectives that one program calls in several groups, and under other defaults for new tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from suites.collectives.gradients.test_derivatives import alone, derivatives, loss
from suites.collectives.gradients.test_gradient_modes import BOTH, WAYS, data, each, listed
from suites.collectives.gradients.test_gradients import expected_gradient

GROUPS = ((1, 2), (0, 1), (0, 1, 2))
FAILING = ("gather", "scatter", "all_gather", "all_to_all")
"""What raises in a group without rank 0: the findings differentiable_roots and differentiable_exchange."""


@requirement(
    "COLL-GRAD-4000",
    "A differentiable collective follows its own group and root, whatever others were called before.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives: group, src, dst",
)
@BOTH
@pytest.mark.world(3)
def test_groups_in_turn(world: World, way: str) -> None:
    """Call each collective in three groups of other members, with each root, and then its backwards in reverse."""
    through, names = WAYS[way]

    def body(rank: Rank) -> None:
        made: dict[tuple[int, ...], Any] = {ranks: dist.new_group(list(ranks)) for ranks in GROUPS[:-1]}
        made[GROUPS[-1]] = dist.group.WORLD
        for name in names:
            called: list[tuple[str, torch.Tensor, Any, torch.Tensor]] = []
            for ranks, group in made.items():
                starts, size = ranks[0] == 0, len(ranks)
                if rank.index not in ranks or (way == "module" and name in FAILING and not starts):
                    continue
                for root in range(size if size == rank.size else 1):
                    me, what = ranks.index(rank.index), f"{name} in {ranks}, root {ranks[root]}"
                    given, (gradients, _) = derivatives(name, size, root, [None] * size)
                    x = given[me].to(rank.device).requires_grad_()
                    results = listed(through(name, x, group, ranks[root], size))
                    if name != "reduce" or me == root:
                        for right, found in zip(alone(name, given, root)[me], results, strict=True):
                            assert_same(right, found.detach() + 0, what)
                    if starts or name != "broadcast":  # the finding broadcast_gradient
                        called.append((what, x, loss(name, results, me, root, None), gradients[me]))
            for what, x, own, right in reversed(called):
                own.backward()
                assert x.grad is not None, what
                assert_same(right, x.grad, f"{what}: gradient")

    world.run(body)


@contextlib.contextmanager
def default(setter: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    """Set a default of the process."""
    setter(value)
    try:
        yield
    finally:
        setter(back)


DEFAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "device as a context": lambda: torch.device("meta"),
    "default device": lambda: default(torch.set_default_device, "meta", None),
    "default dtype": lambda: default(torch.set_default_dtype, torch.float64, torch.float32),
}


@requirement(
    "COLL-GRAD-4001",
    "Results and gradients of a differentiable collective do not depend on the default device or dtype.",
    source="torch.distributed.nn.functional; torch.distributed._functional_collectives; torch.device, "
    "torch.set_default_device, torch.set_default_dtype",
)
@BOTH
@pytest.mark.world(2)
def test_other_defaults(world: World, way: str) -> None:
    """Call forward and backward while new tensors have no memory, or double precision."""

    def body(name: str, rank: Rank, call: Callable[..., list[torch.Tensor]]) -> None:
        right = torch.tensor(expected_gradient(name, rank.index, rank.size), dtype=torch.float32)
        for what, set_default in DEFAULTS.items():
            x = data(name, rank).requires_grad_()
            plain = [result.detach() + 0 for result in call(x)]
            with set_default():
                results = call(x)
                total: Any = sum((out * (i + 1) * 10**rank.index).sum() for i, out in enumerate(results))
                torch.autograd.backward(total)  # Tensor.backward itself leaves the context
            for one, other in zip(plain, results, strict=True):
                assert_same(one.cpu(), other.detach() + 0, f"{name}, {what}")
            assert x.grad is not None
            assert_same(right, x.grad, f"{name}, {what}: gradient")

    each(world, way, body)
