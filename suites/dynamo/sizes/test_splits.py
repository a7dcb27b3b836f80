"""Exchanges whose sizes are numbers that compiled code is given: how often it is compiled, and what it computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

Splits = list[int]


def written(x: torch.Tensor, received: Splits, sent: Splits) -> torch.Tensor:
    """Exchange rows into a new tensor."""
    into = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(into, x.detach(), received, sent)
    return into


FORMS: dict[str, tuple[bool, Callable[[torch.Tensor, Splits, Splits], torch.Tensor]]] = {
    "in place": (False, written),
    "functional": (False, lambda x, r, s: functional.all_to_all_single(x.detach(), r, s, dist.group.WORLD)),
    "with gradients": (True, lambda x, r, s: functional.all_to_all_single_autograd(x, r, s, dist.group.WORLD)),
    "functional with gradients": (True, lambda x, r, s: functional.all_to_all_single(x, r, s, dist.group.WORLD)),
    "there and back": (
        True,
        lambda x, r, s: functional.all_to_all_single_autograd(
            functional.all_to_all_single_autograd(x, r, s, dist.group.WORLD) * 2, s, r, dist.group.WORLD
        ),
    ),
}
"""Exchanges, and whether they give gradients."""
if runs_with("<2.13"):
    del FORMS["functional with gradients"]


@requirement(
    "DYN-SIZE-8661",
    "With dynamic=True, a compiled exchange with its backward is compiled once for all sizes that it is given as "
    "numbers.",
    source="torch.compile: dynamic; torch/distributed/_functional_collectives.py: all_to_all_single, "
    "all_to_all_single_autograd",
)
@requirement(
    "DYN-SIZE-8662",
    "A compiled exchange whose sizes are numbers has rows and gradients of the sizes of each call.",
    source="torch.compile: dynamic; torch/distributed/_functional_collectives.py: all_to_all_single, "
    "all_to_all_single_autograd",
)
@pytest.mark.needs(collective="all_to_all_single")
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.world(2)
def test_given_splits(world: World, form: str, dynamic: bool | None) -> None:
    """Exchange other numbers of rows in each of five calls, all of them at least two and none equal to another."""
    trained, call = FORMS[form]

    def body(rank: Rank) -> None:
        function, counter = dynamo.compiled(lambda x, r, s: call(x, r, s) * 3, dynamic=dynamic)
        counts = []
        for number in range(5):
            rows = [[3 + number, 9 + 2 * number], [15 + 3 * number, 27 + 4 * number]]
            sent, received = rows[rank.index], [row[rank.index] for row in rows]
            found = []
            for code in (lambda x, r, s: call(x, r, s) * 3, function):
                x = torch.arange(13.0 * sum(sent), device=rank.device).view(-1, 13).requires_grad_(trained)
                y = code(x, list(received), list(sent))
                if trained:
                    (y * (rank.index + 1)).sum().backward()
                found.append((y.detach() + 0, x.grad))
            (right, gradient), (result, other) = found
            assert_same(right, result, f"rows of call {number}")
            if gradient is not None and other is not None:
                assert_same(gradient + 0, other + 0, f"gradient of call {number}")
            assert (gradient is None) == (other is None) == (not trained)
            counts.append(counter.graphs)
        assert counts == ([1] * 5 if dynamic else [1, 2, 2, 2, 2]), f"compiled {counts} times"

    world.run(body)


def routed(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Send as many rows to each rank as a tensor says."""
    received = functional.all_to_all_single(counts, None, None, dist.group.WORLD)
    there, back = received.tolist(), counts.tolist()
    return functional.all_to_all_single_autograd(x.sin(), there, back, dist.group.WORLD).cos()


def repeated(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Send rows as :func:`routed` does, and do so again in the backward."""
    return checkpoint(routed, x, counts, use_reentrant=False)  # type: ignore[no-any-return]


@requirement(
    "DYN-SIZE-9000",
    "A compiled exchange whose sizes are elements of a tensor is compiled once, also within a checkpoint, with the "
    "rows and gradients of uncompiled code.",
    source="torch/_dynamo/config.py: capture_scalar_outputs; torch.utils.checkpoint; test_inductor_collectives.py: "
    "test_all_to_all_recompute_is_always_banned",
)
@pytest.mark.needs(collective="all_to_all_single")
@pytest.mark.parametrize("code", [routed, repeated], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.world(2)
def test_splits_of_data(world: World, backend: str, code: Callable[..., torch.Tensor]) -> None:
    """Exchange other numbers of rows in each of three calls, none among them."""

    def body(rank: Rank) -> int:
        with dynamo.data_in_graphs():
            function, counter = dynamo.compiled(code, backend=backend, dynamic=True)
            for number, counts in enumerate(((3, 2), (2, 4), (5, 0))):
                sent = torch.tensor(counts[:: 1 - 2 * rank.index], device=rank.device)
                found = []
                for use in (code, function):
                    x = torch.arange(3.0 * sum(counts), device=rank.device).view(-1, 3).requires_grad_()
                    y = use(x, sent)
                    (y * (rank.index + 1)).sum().backward()
                    assert x.grad is not None
                    found.append((y.detach() + 0, x.grad + 0))
                for right, result in zip(*found, strict=True):
                    assert_same(right, result, f"call {number}")
            return counter.graphs

    assert_on_ranks([1] * world.size, world.run(body))
