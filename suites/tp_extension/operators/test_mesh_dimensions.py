"""Operators and moves of DTensors on meshes of several dimensions, each with a placement of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fixtures.operators import Operator, close, floats, right
from fixtures.placements import MORE_OPERATORS, REDUCED, laid_out
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages
from harness.stacks.limit import runs_with
from harness.stacks.tp_extension import StridedShard, foreach

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor"
R, ROWS, COLUMNS, SUM = Replicate(), Shard(0), Shard(1), Partial()
A, B, MATRIX = floats(5, 7), floats(5, 7, start=3), floats(7, 4, start=1)
Layout = tuple[Placement, ...]


def placed(whole: torch.Tensor, mesh: Any, placements: Sequence[Placement]) -> DTensor:
    """Return a DTensor of this rank's part; the first of the ranks that have parts of a sum has all of it."""
    pending = [i for i, placement in enumerate(placements) if placement.is_partial()]
    local = laid_out(whole, mesh, placements).clone(memory_format=torch.contiguous_format)
    if any(mesh.get_local_rank(i) for i in pending):
        local.zero_()
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())


JOINED: dict[str, Operator] = {
    "cat": lambda a, b, c: torch.cat([a, b, c], 1),
    "stack": lambda a, b, c: torch.stack([a, b, c]),
    "sum": lambda a, b, c: a + b - c,
    "product": lambda a, b, c: a * b + c,
    "choice": lambda a, b, c: torch.where(a > 0, b, c),
    "product of matrices": lambda a, b, c: a @ b.t(),
}
"""Functions of three tensors."""
APART: tuple[Layout, ...] = (
    (SUM, R),
    (R, SUM),
    (ROWS, R),
    (COLUMNS, SUM),
    (R, ROWS),
    (SUM, SUM),
    (ROWS, COLUMNS),
    (R, R),
    (COLUMNS, COLUMNS),
)
"""Placements on two mesh dimensions, of which neighbours differ in both."""


@requirement(
    "TP-MODEL-35",
    "An operator on DTensors that differ in their placements on each of two or three mesh dimensions gives the plain "
    "tensors' result.",
    source=f"{SOURCE}: a single-device abstraction over multi-device tensors",
)
@pytest.mark.world(4)
def test_different_layouts(world: World) -> None:
    """Join, add, multiply and choose; one of the dimensions has one rank, or none has."""

    def body(rank: Rank) -> list[str]:
        wrong, c = [], floats(5, 7, start=6)
        square, deep = rank.mesh(2, 2, names=("dp", "tp")), rank.mesh(2, 1, 2, names=("a", "b", "c"))
        turns = ((name, f, i) for k, (name, f) in enumerate(JOINED.items()) for i in range(k % 3, len(APART), 4))
        for name, operator, i in turns:
            layouts = [APART[(i + j) % len(APART)] for j in (0, 1, 4)]
            mesh = deep if i < 3 else square
            if mesh is deep:
                middle: Sequence[Placement] = (ROWS, SUM, R)
                layouts = [(p[0], middle[(i + j) % 3], p[1]) for j, p in enumerate(layouts)]
            whole = [x.to(rank.device) for x in (A, B, c)]
            own = [placed(x, mesh, layout) for x, layout in zip(whole, layouts, strict=True)]
            case = f"{name} of {layouts}"
            try:
                if not right(operator(*whole), operator(*own)):
                    wrong.append(case)
            except (NotImplementedError, RuntimeError, AssertionError) as error:
                wrong.append(f"{case}: {error!r:.150}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


SIZES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {"even": ((4, 8), (8, 12)), "uneven": ((7, 11), (11, 7))}
"""Sizes of a tensor, and those of the dimension along which another one is joined to it."""
JOINING: dict[str, tuple[Operator, int | None]] = {
    **{f"cat along {dim}": (lambda a, b, dim=dim: torch.cat([a, b], dim), dim) for dim in (0, 1)},
    "cat along the last": (lambda a, b: torch.cat([a, b], -1), 1),
    **{f"stack along {dim}": (lambda a, b, dim=dim: torch.stack([a, b], dim), None) for dim in (0, 1, 2)},
    "stack along the last": (lambda a, b: torch.stack([a, b], -1), None),
    "vstack": (lambda a, b: torch.vstack([a, b]), 0),
    "hstack": (lambda a, b: torch.hstack([a, b]), 1),
}
"""What joins two matrices, and the dimension in which their sizes may differ."""


@requirement(
    "TP-MODEL-7050",
    "Matrices that are joined along any dimension have the plain result and gradients, in whatever placements on one "
    "or two mesh dimensions both are.",
    source=f"{SOURCE}; torch: cat, stack, vstack, hstack",
)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.world(4)
def test_joined(world: World, sizes: str) -> None:
    """Take each second layout with either size; ranks are in a line or in a square, and the gradient arrives whole."""

    def body(rank: Rank) -> list[str]:
        wrong, layouts = [], [*itertools.product((R, ROWS, COLUMNS), repeat=2)][1:] + [(SUM, R), (ROWS, SUM)]
        line, square = rank.mesh(), rank.mesh(2, 2, names=("dp", "tp"))
        places = [(line, (p,)) for p in (ROWS, COLUMNS, SUM)] + [(square, p) for p in layouts]
        (size, others), turns = SIZES[sizes], itertools.product(JOINING.items(), places)
        for (name, (operator, along)), (mesh, layout) in [*turns][[*SIZES].index(sizes) :: 2]:
            other = tuple(others[i] if i == along else size[i] for i in range(2))
            whole = [x.to(rank.device).requires_grad_() for x in (floats(*size), floats(*other, start=3))]
            own = [placed(x.detach(), mesh, layout).requires_grad_() for x in whole]
            expected, found = operator(*whole), operator(*own)
            case = f"{name} of {layout}"
            if not right(expected.detach(), found.detach()):
                wrong.append(case)
            weights = floats(*expected.shape, start=2).to(rank.device)
            expected.backward(weights)
            found.backward(placed(weights, mesh, (R,) * mesh.ndim))
            for x, part in zip(whole, own, strict=True):
                if not right(x.grad, part.grad):  # type: ignore[arg-type]
                    wrong.append(f"gradient of {case}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-MODEL-36",
    "A product of matrices has one device's result and gradients on a mesh of which one dimension has one rank.",
    source=f"{SOURCE}: a single-device abstraction over multi-device tensors",
)
@pytest.mark.world(2)
def test_dimensions_of_one_rank(world: World) -> None:
    """The first or the second dimension of the mesh has one rank, over which a factor is sharded, pending or whole."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        layouts = list(itertools.product((R, ROWS, COLUMNS), repeat=2))
        for first in True, False:
            mesh = rank.mesh(*((1, 2) if first else (2, 1)), names=("one", "two") if first else ("two", "one"))
            alone: list[Layout] = [(SUM, COLUMNS), (SUM, R)] if first else [(COLUMNS, SUM), (R, SUM)]
            for i, x_layout in enumerate([*layouts[first::2], *alone]):
                y_layout = layouts[(i * 4 + first) % 9]
                x, y = A.to(rank.device), MATRIX.to(rank.device)
                own = [placed(x, mesh, x_layout).requires_grad_(), placed(y, mesh, y_layout).requires_grad_()]
                found, case = own[0] @ own[1], f"{x_layout} by {y_layout}"
                weights = floats(5, 4, start=2).to(rank.device)
                if not right(x @ y, found.detach()):
                    wrong.append(case)
                found.backward(placed(weights, mesh, x_layout if SUM not in x_layout else y_layout))
                for name, factor, due in (("first", own[0], weights @ y.t()), ("second", own[1], x.t() @ weights)):
                    if factor.grad is None or not right(due, factor.grad):  # type: ignore[arg-type]
                        wrong.append(f"{case}: gradient of the {name} factor")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


OF_MIXED: dict[str, tuple[Operator, int]] = {
    "double": (lambda x, y: x * 2, 0),
    "quotient": (lambda x, y: x / 2, 0),
    "negative": (lambda x, y: -x, 0),
    "sum of both": (lambda x, y: x + x, 0),
    "turned": (lambda x, y: x.t(), 0),
    "product by a whole": (lambda x, y: x @ y.t(), 0),
    "product of a whole": (lambda x, y: y.t() @ x, 0),
    "number added": (lambda x, y: x + 1, 2),
    "activation": (lambda x, y: x.relu(), 2),
    "maximum": (lambda x, y: x.amax(0), 2),
    "sum of rows": (lambda x, y: x.sum(0), 2),
    "whole added": (lambda x, y: x + y, 2),
    "multiple of a whole": (lambda x, y: x * y, 0),
    "square": (lambda x, y: x * x, 2),
    "comparison": (lambda x, y: x > y, 2),
}
"""Functions of a pending tensor and a whole one, and the most collectives that they take."""


@requirement(
    "TP-PEND-32",
    "An operator on a DTensor that is pending with a sum over one mesh dimension and an average over another gives "
    "what it gives on the reduced tensor.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@requirement(
    "TP-PEND-33",
    "An operator on a DTensor that is pending with reductions whose order matters raises an error on every rank, "
    "or gives what it gives on the reduced tensor.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor; test_single_dim_strategy.py: "
    "test_expand_filters_mixed_partial_types",
)
@pytest.mark.world(4)
def test_pending_over_both(world: World) -> None:
    """Combine each operation with each; the same one, or a sum with an average, stays pending where it may."""

    def body(rank: Rank) -> tuple[list[str], list[str]]:
        mesh, wrong, refused = rank.mesh(2, 2, names=("dp", "tp")), [], []
        y = B.to(rank.device)
        other = placed(y, mesh, (R, R))
        for pair in itertools.product(REDUCED, repeat=2):
            parts = torch.stack([A.flip(0) * (i + 1) % 5 - 1 for i in range(4)]).to(rank.device)
            orders = [REDUCED[pair[1]](REDUCED[pair[0]](parts.view(2, 2, 5, 7), 0), 0)]
            orders += [REDUCED[pair[0]](REDUCED[pair[1]](parts.view(2, 2, 5, 7), 1), 0)]
            linear = set(pair) <= {"sum", "avg"}
            for name, (operator, most) in OF_MIXED.items():
                case = f"{name} of {pair}"
                at = messages.launched()
                try:
                    x = DTensor.from_local(parts[rank.index].clone(), mesh, [Partial(op) for op in pair])
                    found = operator(x, other)
                except (RuntimeError, ValueError):
                    refused.append(case)
                    if linear or len(set(pair)) == 1 or messages.launched() != at:
                        wrong.append(f"{case}: refused")
                    continue
                if linear and messages.launched() - at > most:
                    wrong.append(f"{case}: {messages.launched() - at} collectives")
                try:
                    full = found.full_tensor()
                except (RuntimeError, ValueError):
                    refused.append(case)
                    if linear or len(set(pair)) == 1:
                        wrong.append(f"{case}: not reduced")
                    continue
                if not any(close(operator(due, y), full) for due in orders):
                    wrong.append(case)
        return wrong, refused

    results = world.run(body)
    assert_on_ranks([([], results[0][1])] * world.size, results)


@requirement(
    "TP-OP-40",
    "A matrix product with a DTensor in strided shards, as FSDP makes of tensor-parallel ones, is the plain one.",
    source="torch/distributed/tensor/placement_types.py: _StridedShard; test_matrix_ops.py: test_mm_with_strided_input",
)
@pytest.mark.world(4)
def test_strided_factors(world: World) -> None:
    """Shard rows or columns, with the other mesh dimension in the same shards, in others, or in none."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
        y, z = floats(9, 3).to(rank.device), floats(3, 8, start=2).to(rank.device)
        for dim, shape in ((0, (8, 9)), (0, (5, 9)), (1, (9, 9)), (1, (5, 9))):
            strided = StridedShard(dim, split_factor=2)
            for layout in (strided, Shard(dim)), (R, strided), (strided, R), (Shard(1 - dim), strided):
                whole = floats(*shape, start=1).to(rank.device)
                case = f"{shape} in {layout}"
                x = distribute_tensor(whole, mesh, layout, src_data_rank=None).requires_grad_()
                right_of = x @ placed(y, mesh, (R, R))
                left_of = placed(z[:, : shape[0]] if shape[0] < 9 else y.t().contiguous(), mesh, (R, R)) @ x
                if not close(whole @ y, right_of.full_tensor().detach()):
                    wrong.append(f"{case}, by a whole")
                if not close((z[:, : shape[0]] if shape[0] < 9 else y.t()) @ whole, left_of.full_tensor().detach()):
                    wrong.append(f"{case}, of a whole")
                right_of.sum().full_tensor().backward()
                gradient: Any = x.grad
                if not close(y.sum(1).expand(shape), gradient.full_tensor()):
                    wrong.append(f"{case}: gradient")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def needed(source: Layout, target: Layout) -> int:
    """Return over how many mesh dimensions a tensor has to be gathered or reduced."""

    def before(placements: Layout, i: int) -> list[int]:
        """Return the mesh dimensions before one that shard the same dimension of the tensor, or that cut it first."""
        if isinstance(placements[i], StridedShard):
            return [j for j in range(i + 1, len(placements)) if placements[j].is_shard()]
        return [j for j in range(i) if placements[j] == placements[i]]

    return sum(
        not placement.is_replicate() and (target[i] != placement or before(source, i) != before(target, i))
        for i, placement in enumerate(source)
    )


def wrong_moves(rank: Rank, moves: Iterable[tuple[Layout, Layout]]) -> list[str]:
    """Bring a tensor on two by two ranks from a layout to another; return which have wrong values or collectives."""
    mesh, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
    whole = numbers(8, 4).to(rank.device) * 4
    for source, target in moves:
        x, at = placed(whole, mesh, source), messages.launched()
        moved = x.redistribute(placements=target)
        found = messages.launched() - at
        if found != needed(source, target):
            wrong.append(f"{source} to {target}: {found} collectives")
        if not torch.equal(laid_out(whole, mesh, target), moved.to_local()):
            wrong.append(f"{source} to {target}")
    return wrong


@requirement(
    "TP-MOVE-44",
    "redistribute over several mesh dimensions takes one collective for each whose shards or sums change, and none to "
    "cut replicas.",
    source=f"{SOURCE}.redistribute; test_redistribute.py: test_redistribute_shard_dim_multi_dim_mesh",
)
@pytest.mark.world(4)
def test_collectives_of_moves(world: World) -> None:
    """Bring a tensor from each layout on two by two ranks to each other."""

    sources = itertools.product((R, ROWS, COLUMNS, SUM), repeat=2)
    moves = list(itertools.product(sources, itertools.product((R, ROWS, COLUMNS), repeat=2)))
    assert_on_ranks([[]] * world.size, world.run(lambda rank: wrong_moves(rank, moves)))


STRIDED: tuple[Layout, ...] = tuple((StridedShard(dim, split_factor=2), Shard(dim)) for dim in (0, 1))
"""Layouts of tensors whose dimension the second mesh dimension cuts first."""


@requirement(
    "TP-MOVE-44",
    "redistribute over several mesh dimensions takes one collective for each whose shards or sums change, and none to "
    "cut replicas.",
    source=f"{SOURCE}.redistribute; test_redistribute.py: test_redistribute_shard_dim_multi_dim_mesh",
)
@pytest.mark.world(4)
def test_collectives_of_strided_moves(world: World) -> None:
    """Bring a tensor to or from shards that the second mesh dimension cuts first, as FSDP makes them."""

    plain = list(itertools.product((R, ROWS, COLUMNS), repeat=2))
    to = itertools.product([*plain, (SUM, SUM), (SUM, R), (ROWS, SUM), (SUM, ROWS)], STRIDED[:1])
    moves = [*to, *itertools.product(STRIDED, plain), STRIDED, STRIDED[:1] * 2]
    assert_on_ranks([[]] * world.size, world.run(lambda rank: wrong_moves(rank, moves)))


LISTS: dict[str, Callable[[list[Any], list[Any]], Any]] = {
    "add": foreach("add"),
    "mul": foreach("mul"),
    "maximum": foreach("maximum"),
    "add_": foreach("add_"),
    "lerp": lambda a, b: foreach("lerp")(a, b, 0.5),
}
"""Functions of two lists."""


@requirement(
    "TP-FOREACH-31",
    "An operator on DTensors of two meshes, alone or at one position of two lists, raises an error on every rank, "
    "without communication.",
    source="torch: Foreach Operations; torch.distributed.tensor.DTensor; test_math_ops.py: "
    "test_foreach_add_different_mesh",
)
@pytest.mark.world(4)
def test_two_meshes(world: World) -> None:
    """The meshes are the dimensions of one mesh; the first position of the lists agrees, the second does not."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 2, names=("dp", "tp")), []
        single: dict[str, Operator] = {"add": torch.add, "mm": lambda a, b: a @ b.t(), "cat": lambda *x: torch.cat(x)}
        whole = A.to(rank.device)
        for first, second in itertools.product((R, ROWS), repeat=2):
            own = [placed(whole, mesh[name], (p,)) for name, p in (("dp", first), ("tp", second))]
            before, at = [x.to_local().clone() for x in own], messages.launched()
            calls = {name: (operator, own[0], own[1]) for name, operator in single.items()}
            calls |= {f"{name} of lists": (f, [own[0], own[0]], own) for name, f in LISTS.items()}
            for name, (function, a, b) in calls.items():
                if name == "cat" and runs_with(">=2.14"):
                    continue  # which joins replicas of two meshes, and moves other tensors first
                with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
                    function(a, b)
                changed = name == "add_ of lists"  # may have changed the first position
                if messages.launched() != at or not (changed or torch.equal(own[0].to_local(), before[0])):
                    wrong.append(f"{name} of {first} and {second}")
                assert_same(before[1], own[1].to_local(), name)
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
