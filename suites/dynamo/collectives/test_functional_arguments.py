"""What functional collectives are given, compiled and uncompiled: names of operations, splits, and other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

SOURCE = "torch/distributed/_functional_collectives.py"
BACKENDS = ("", "aot_eager")
"""How a function is run: uncompiled, or compiled by a backend."""


def run_by(backend: str, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function uncompiled, or compiled as if for the first time."""
    return dynamo.compiled(function, backend=backend, **options)[0] if backend else function


def _reduced(x: torch.Tensor, op: str) -> list[torch.Tensor]:
    """Reduce in four forms, of which the last two scatter."""
    group = dist.group.WORLD
    return [
        functional.all_reduce(x, op, group) + 0,
        functional.all_reduce_coalesced([x * 1, x], op, group)[1] + 0,
        functional.reduce_scatter_tensor(x, op, 0, group) + 0,
        functional.reduce_scatter_tensor_coalesced([x * 1, x], op, [0, 0], group)[1] + 0,
    ]


@requirement(
    "DYN-ARG-52",
    "The result of a functional sum and its gradient are the same whether sum is written in small letters or in "
    "capitals.",
    source=f"{SOURCE}: all_reduce_backward, reduce_scatter_tensor_backward",
)
@pytest.mark.needs(collective="reduce_scatter_tensor")
@pytest.mark.world(2)
def test_spelling(world: World) -> None:
    """Write sum in two ways in four forms, run them uncompiled and compiled, and take gradients."""

    def body(rank: Rank) -> None:
        me, spelled = rank.index, ("SUM", "sum")
        for backend in BACKENDS:

            def call(*given: torch.Tensor) -> list[list[torch.Tensor]]:
                return [_reduced(x, op) for x, op in zip(given, spelled, strict=True)]

            function = run_by(backend, call)
            given = [torch.tensor([1.0 + me, 5.0 - me], device=rank.device, requires_grad=True) for _ in spelled]
            results = function(*given)
            for op, x, found in zip(spelled, given, results, strict=True):
                what = f"{op}, {backend or 'uncompiled'}"
                whole = [3.0, 9.0]
                assert [y.tolist() for y in found] == [whole, whole, whole[me : me + 1], whole[me : me + 1]], what
                gradients = []
                for y in found:
                    (gradient,) = torch.autograd.grad((y * (me + 2)).sum(), x, retain_graph=True)
                    gradients.append(gradient.tolist())
                assert gradients == [[5.0, 5.0], [5.0, 5.0], [2.0, 3.0], [2.0, 3.0]], what

    world.run(body)


@requirement(
    "DYN-ARG-53",
    "A functional all_to_all_single is given the splits of both sides or of neither, and otherwise raises an error.",
    source=f"{SOURCE}: all_to_all_single",
)
@pytest.mark.needs(collective="all_to_all_single")
@pytest.mark.world(2, 3)
def test_splits(world: World) -> None:
    """Leave out the splits of one side, equal or not, of one dimension or two; then exchange with both or none."""

    def body(rank: Rank) -> None:
        size, me = rank.size, rank.index
        equal, ragged = [2] * size, [1] * (size - 1) + [size + 1]
        forms = {"plain": functional.all_to_all_single, "autograd": functional.all_to_all_single_autograd}
        whole = torch.arange(2.0 * size, device=rank.device) + 10 * me
        for form, exchange in forms.items():
            for backend in BACKENDS:
                for x in (whole, torch.stack([whole, whole + 100], 1)):

                    def call(x: torch.Tensor, out: Any, given: Any, exchange: Any = exchange) -> torch.Tensor:
                        result: torch.Tensor = exchange(x, out, given, dist.group.WORLD)
                        return result + 0

                    function = run_by(backend, call, fullgraph=False)
                    what = f"{form}, {backend or 'uncompiled'}, {x.ndim} dimensions"
                    for one in (equal, ragged):
                        for out, given in ((one, None), (None, one)):
                            try:
                                function(x, out, given)
                            except dynamo.INTERNAL:
                                raise
                            except (AssertionError, RuntimeError, ValueError, TypeError):
                                continue
                            raise AssertionError(f"{what}, {out} and {given}: there is no error")
                    mine = x[2 * me : 2 * me + 2] - 10 * me
                    right = torch.cat([mine + 10 * i for i in range(size)])
                    for splits in (None, equal) if form == "plain" else (equal,):
                        assert torch.equal(function(x, splits, splits), right), what

    world.run(body)


Call = Callable[[torch.Tensor, Any], torch.Tensor]
"""A collective of a tensor, given a group of the rank alone."""


def _splits(x: torch.Tensor, mine: int, other: int) -> torch.Tensor:
    """Exchange four rows: each rank keeps ``mine`` and sends ``other``."""
    splits = [mine, other] if dist.get_rank() == 0 else [other, mine]
    return functional.all_to_all_single_autograd(x, splits, splits, dist.group.WORLD)


CALLS: dict[str, tuple[bool, list[Call]]] = {
    "operations": (
        False,
        [lambda x, g, op=op: functional.all_reduce(x, op, dist.group.WORLD) for op in ("sum", "max", "min")],
    ),
    "operations of scatters": (
        False,
        [lambda x, g, op=op: functional.reduce_scatter_tensor(x, op, 0, dist.group.WORLD) for op in ("max", "sum")],
    ),
    "operations of lists": (
        False,
        [
            lambda x, g, op=op: functional.all_reduce_coalesced([x * 2, x], op, dist.group.WORLD)[1]
            for op in ("min", "sum")
        ],
    ),
    "operations of scattered lists": (
        False,
        [
            lambda x, g, op=op: functional.reduce_scatter_tensor_coalesced([x * 2, x], op, [0, 0], dist.group.WORLD)[1]
            for op in ("max", "sum")
        ],
    ),
    "sources": (False, [lambda x, g, k=k: functional.broadcast(x, k, dist.group.WORLD) for k in range(2)]),
    "permutations": (
        False,
        [lambda x, g, to=to: functional.permute_tensor(x[0], to, dist.group.WORLD) for to in ([0, 1], [1, 0])],
    ),
    "groups": (
        True,
        [
            lambda x, g: functional.all_reduce(x, "sum", dist.group.WORLD),
            lambda x, g: functional.all_reduce(x, "sum", g),
        ],
    ),
    "groups of gathers": (
        True,
        [
            lambda x, g: functional.all_gather_tensor_autograd(x, 0, g),
            lambda x, g: functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD),
        ],
    ),
    "dimensions of scatters": (
        True,
        [
            lambda x, g, dim=dim: functional.reduce_scatter_tensor_autograd(x, "sum", dim, dist.group.WORLD)
            for dim in range(2)
        ],
    ),
    "splits": (True, [lambda x, g, pair=pair: _splits(x, *pair) for pair in ((2, 2), (3, 1), (1, 3))]),
    "collectives": (
        True,
        [
            lambda x, g: functional.all_reduce(x, "sum", dist.group.WORLD),
            lambda x, g: functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)[:4],
            lambda x, g: _splits(x, 2, 2),
        ],
    ),
}
"""Collectives of one tensor that differ in one respect, and whether they give it gradients."""
if not runs_with(">=2.12,<2.13"):  # which breaks the graph at a gather along a later dimension
    CALLS["dimensions"] = (
        True,
        [lambda x, g, dim=dim: functional.all_gather_tensor_autograd(x, dim, dist.group.WORLD) for dim in range(2)],
    )


@requirement(
    "DYN-ARG-7200",
    "In a compiled training step, collectives of one tensor that differ in an argument have each its own result.",
    source=f"torch.compile; {SOURCE}; torch/_functorch/partitioners.py",
)
@requirement(
    "DYN-ARG-7201",
    "The gradients of collectives of one tensor that differ in an argument are those of uncompiled code.",
    source=f"torch.compile; {SOURCE}; torch/_functorch/partitioners.py",
)
@pytest.mark.needs(collective="reduce_scatter_tensor")
@pytest.mark.world(2)
def test_differing(world: World) -> None:
    """Multiply each result by a weight that is trained; compare results, gradients and what was given, in two calls."""
    named = [(f"{what}, number {k}", trained, f) for what, (trained, fs) in CALLS.items() for k, f in enumerate(fs)]

    def body(rank: Rank) -> None:
        alone = rank.mesh(2, 1).get_group(1)

        def step(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
            y = x.detach()
            return [call(x if trained else y, alone) * w for _, trained, call in named]

        compiled, counter = dynamo.compiled(step)
        for number in range(2):
            found = []
            for function in step, compiled:
                x = dyadic(4, 4, key=(rank.index, number), dtype=torch.float32).to(rank.device)
                given, w = x.clone().requires_grad_(), torch.tensor(0.5, device=rank.device, requires_grad=True)
                results = function(given, w)
                torch.autograd.backward(results, [torch.full_like(y, k + 1) for k, y in enumerate(results)])
                found.append([*(y.detach() for y in results), w.grad, given.grad, given.detach()])
            names = [*(name for name, *_ in named), "gradient of the weight", "gradient", "what was given"]
            for name, right, one in zip(names, *found, strict=True):
                assert right is not None
                assert one is not None
                assert_same(right, one, f"{name}, call {number}")
            assert_same(x.cpu(), found[0][-1], "what was given")
        assert counter.graphs == 1

    world.run(body)
