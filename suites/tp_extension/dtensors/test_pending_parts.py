"""Views, parts and copies of DTensors whose reduction is pending, and rows that not every rank has."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import Operator, close, distributed, floats, right
from fixtures.placements import MORE_OPERATORS, REDUCED
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from harness.stacks.tp_extension import foreach

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"
PARTS = torch.stack([floats(2, 3) + 6, floats(2, 3, start=4) + 7])
"""The parts of two ranks, all positive, so that they are right for each reduction."""

CUTS: dict[str, Operator] = {
    "detach": lambda x: x.detach(),
    "alias": lambda x: x[:],
    "row": lambda x: x[0],
    "slice": lambda x: x[:1],
    "split": lambda x: x.split(1)[0],
}
VIEWS: dict[str, Operator] = {
    "view": lambda x: x.view(-1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "permute": lambda x: x.permute(*range(x.dim())[::-1]),
    "expand": lambda x: x.expand(x.shape),
}
"""Views of a vector or a matrix."""


def pending(rank: Rank, kind: str) -> DTensor:
    """Return a matrix with a pending reduction, or the norms of the columns of a matrix in shards."""
    if kind == "norm":
        return torch.linalg.vector_norm(distributed(PARTS[0].to(rank.device), Shard(0), rank, rank.mesh()), dim=0)  # type: ignore[return-value]
    return DTensor.from_local(PARTS[rank.index].clone().to(rank.device), rank.mesh(), [Partial(kind)])


def reduced(rank: Rank, kind: str) -> torch.Tensor:
    """Return the plain tensor."""
    if kind == "norm":
        return torch.linalg.vector_norm(PARTS[0].to(rank.device), dim=0)
    return REDUCED[kind](PARTS.to(rank.device), 0)


SHARED: dict[str, tuple[tuple[str, ...], dict[str, Operator]]] = {
    "products and norms": (("product", "norm"), CUTS),
    "views of products and norms": (("product", "norm"), VIEWS),
    "others": (("sum", "avg", "max", "min"), CUTS | VIEWS),
}
"""Kinds of pending reductions, and views."""


@requirement(
    "TP-VIEW-515",
    "detach(), an index or a slice of a DTensor with a pending reduction share its memory, whatever the reduction.",
    source="torch.Tensor.detach: shares the same storage with the original one; torch.distributed.tensor.Partial",
)
@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.world(2)
def test_shared_memory(world: World, kind: str) -> None:
    """Compare addresses, and values after the view has been put together."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        reductions, views = SHARED[kind]
        for of, (name, view) in itertools.product(reductions, views.items()):
            x = pending(rank, of)
            found = view(x)
            if found.to_local().untyped_storage().data_ptr() != x.to_local().untyped_storage().data_ptr():
                wrong.append(f"{name} of a {of}: copied")
            if not right(view(reduced(rank, of)), found):
                wrong.append(f"{name} of a {of}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-VIEW-516",
    "A DTensor with a pending reduction can be iterated over, and unbound, whatever the reduction.",
    source="torch.unbind; torch.distributed.tensor.Partial; pytorch/pytorch#162560",
)
@pytest.mark.parametrize("kind", ["products and norms", "others"])
@pytest.mark.world(2)
def test_iterated(world: World, kind: str) -> None:
    """Iterate over rows of matrices, or over norms of columns."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for of in SHARED[kind][0]:
            try:
                for cut in (list, torch.unbind):
                    for expected, found in zip(cut(reduced(rank, of)), cut(pending(rank, of)), strict=True):  # type: ignore[operator]
                        if not close(expected, found.full_tensor()):
                            wrong.append(f"{of}")
            except RuntimeError as e:
                wrong.append(f"{of}: {str(e).splitlines()[0]}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-WRITE-699",
    "zero_() of a DTensor with a pending reduction sets all of its elements to zero, whatever the reduction.",
    source="torch.Tensor.zero_; torch.distributed.tensor.Partial",
)
@pytest.mark.parametrize("kind", ["products and norms", "others"])
@pytest.mark.world(2)
def test_zeroed(world: World, kind: str) -> None:
    """Keep the placements, and send nothing."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for of in SHARED[kind][0]:
            x = pending(rank, of)
            placements, at = x.placements, messages.launched()
            try:
                x.zero_()
            except RuntimeError as e:
                wrong.append(f"{of}: {str(e).splitlines()[0]}")
                continue
            if (x.placements, messages.launched()) != (placements, at) or x.full_tensor().any():
                wrong.append(f"{of}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


TOKENS, TABLE = torch.tensor([[0, 3], [1, 2]]), floats(4, 2)
LOOKED_AT: dict[str, dict[str, Callable[[Any], Any]]] = {
    "cut-or-like-it": {
        "detach": lambda x: x.detach(),
        "data": lambda x: x.data,
        "alias": lambda x: x[:],
        "row": lambda x: x[0],
        "slice": lambda x: x[:, :1],
        "sum": lambda x: x.sum(),
        "empty_like": torch.empty_like,
        "zeros_like": torch.zeros_like,
        "new_zeros": lambda x: x.new_zeros(2),
    },
    "others": {
        "shape": lambda x: x.shape,
        "view": lambda x: x.view(4, 2),
        "transpose": lambda x: x.transpose(0, 1),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "contiguous": lambda x: x.contiguous(),
        "conversion to its own type": lambda x: x.to(x.dtype),
        "is_same_size": lambda x: x.is_same_size(x),
        "text": repr,
    },
}
"""What one does with the result of a lookup, and leaves."""


def looked_up(rank: Rank, *, gathered: bool = False) -> DTensor:
    """Return the rows that tokens have in a table whose rows are sharded, or an element of each row in columns."""
    tokens, table = TOKENS.to(rank.device), TABLE.to(rank.device)
    if gathered:
        columns = distributed(table, Shard(1), rank, rank.mesh())
        return columns.gather(1, distributed(tokens.view(4, 1) % 2, Replicate(), rank, rank.mesh()))  # type: ignore[return-value]
    layouts = (Replicate(), Shard(0))
    own = (distributed(x, p, rank, rank.mesh()) for x, p in zip((tokens, table), layouts, strict=True))
    return functional.embedding(*own)  # type: ignore[return-value]


@requirement(
    "TP-READ-422",
    "A lookup in a sharded table can still be read after it was detached or cut, or a tensor like it was made.",
    source="torch.distributed.tensor.DTensor; torch.nn.functional.embedding; torch.Tensor.detach",
)
@pytest.mark.parametrize("kind", LOOKED_AT)
@pytest.mark.world(2)
def test_looked_at(world: World, kind: str) -> None:
    """Read the lookup itself, once."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, use in LOOKED_AT[kind].items():
            found = looked_up(rank)
            use(found)
            try:
                if not close(functional.embedding(TOKENS, TABLE), found.full_tensor().cpu()):
                    wrong.append(name)
            except AssertionError:
                wrong.append(f"{name}: can't be read")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


OF_LOOKUPS: dict[str, dict[str, Operator]] = {
    "cut": {
        "row": lambda x: x[0],
        "second tokens": lambda x: x[:, 1],
        "slice": lambda x: x[:, :1],
        "split": lambda x: x.split(1, 0)[1],
        "sum": lambda x: x.sum(),
        "sum of a row": lambda x: x.sum(0),
    },
    "turned": {
        "transpose": lambda x: x.transpose(0, 1),
        "last transpose": lambda x: x.transpose(1, 2),
        "view": lambda x: x.view(4, 2),
        "flatten": lambda x: x.flatten(1),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "unbind": lambda x: x.unbind()[1],
    },
    "gathered": {
        "squeeze": lambda x: x.squeeze(1),
        "transpose": lambda x: x.t(),
        "flatten": lambda x: x.flatten(),
    },
    "others": {
        "first elements": lambda x: x[..., 0],
        "slice of elements": lambda x: x[..., :1],
        "split of elements": lambda x: x.split(1, 2)[0],
        "sum of elements": lambda x: x.sum(2),
        "mean": lambda x: x.mean(),
        "flip": lambda x: x.flip(0),
        "roll": lambda x: x.roll(1, 0),
        "relu": lambda x: x.relu(),
        "sum with a number": lambda x: x + 1,
        "clone": lambda x: x.clone().transpose(0, 1),
    },
}
"""Operators on the result of a lookup, or of a gather."""


@requirement(
    "TP-OP-06",
    "An operator on a DTensor with a pending reduction gives what it gives on the reduced tensor, for any reduction.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@pytest.mark.parametrize("kind", OF_LOOKUPS)
@pytest.mark.world(2)
def test_lookups(world: World, kind: str) -> None:
    """Look up as many tokens in each row as there are rows, so that a transposed mask has the right shape."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, operator in OF_LOOKUPS[kind].items():
            whole = TABLE.gather(1, TOKENS.view(4, 1) % 2) if kind == "gathered" else TABLE[TOKENS]
            expected = operator(whole.to(rank.device))
            try:
                if not close(expected, operator(looked_up(rank, gathered=kind == "gathered")).full_tensor()):
                    wrong.append(name)
            except (IndexError, RuntimeError) as e:
                wrong.append(f"{name}: {type(e).__name__}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=["replicas", "rows", "columns"])
@pytest.mark.world(2)
def test_identity_matrices(world: World, placement: Placement) -> None:
    """Write an identity matrix with out=, and as an initialization."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for fill in "out", "init":
            x = distributed(torch.ones(4, 6, device=rank.device), placement, rank, rank.mesh())
            try:
                torch.eye(4, 6, out=x) if fill == "out" else nn.init.eye_(x)
            except RuntimeError:
                if placement.is_replicate() and fill == "out":
                    wrong.append(f"{fill} of {placement}: refused")
                continue
            if not right(torch.eye(4, 6, device=rank.device), x):
                wrong.append(f"{fill} of {placement}: a rank has {tuple(x.to_local().shape)}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-PEND-01",
    "An operator on two DTensors with pending reductions, equal or different ones, gives what it gives on the results.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@pytest.mark.parametrize("kind", ["different", "equal"])
@pytest.mark.world(2)
def test_joined(world: World, kind: str) -> None:
    """Concatenate or stack matrices that are pending with each two reductions."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for one, other in itertools.product(REDUCED, REDUCED):
            if (one == other) != (kind == "equal"):
                continue
            for join in torch.cat, torch.stack:
                case = f"{join.__name__} of {one} and {other}"
                try:
                    found = join([pending(rank, one), pending(rank, other)])
                except AssertionError:
                    wrong.append(f"{case}: refused")
                    continue
                if not close(join([reduced(rank, one), reduced(rank, other)]), found.full_tensor()):  # type: ignore[attr-defined]
                    wrong.append(case)
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


OF_TWO: dict[str, Operator] = {
    "sum": torch.add,
    "multiple added": lambda a, b: torch.add(a, b, alpha=3),
    "foreach sum": lambda a, b: foreach("add")([a], [b])[0],
    "sum of all": lambda a, b: sum([b, a], a),
    "difference": torch.sub,
    "product": torch.mul,
    "product in place": lambda a, b: a.clone().mul_(b),
    "quotient": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "hypotenuse": torch.hypot,
    "middle": lambda a, b: torch.lerp(a, b, 0.5),
    "comparison": torch.lt,
    "choice": lambda a, b: torch.where(a > b, a, b),
    "norm of both": lambda a, b: torch.linalg.vector_norm(torch.stack([a, b])),
    "distance": torch.dist,
}
"""Operators on the norms of two matrices."""


@requirement(
    "TP-PEND-01",
    "An operator on two DTensors with pending reductions, equal or different ones, gives what it gives on the results.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@pytest.mark.world(2)
def test_norms(world: World) -> None:
    """Combine norms of matrices or of their columns with norms of another matrix that has rows on each rank, or all."""

    def body(rank: Rank) -> list[str]:
        wrong, orders = [], ((0, 2), (1, 2), (2, 2), (3, 3), (2, 3))
        one, two = floats(4, 6, start=1).to(rank.device), floats(4, 6, start=3).square().to(rank.device)
        for (name, operator), (order, of) in itertools.product(OF_TWO.items(), orders):
            for layout, dim in itertools.product((Shard(0), Replicate()), (None, 0)):
                case = f"{name} of norms of orders {order} and {of} over {dim}, {layout}"
                expected = operator(torch.linalg.vector_norm(one, order, dim), torch.linalg.vector_norm(two, of, dim))
                a, b = (distributed(x, p, rank, rank.mesh()) for x, p in ((one, Shard(0)), (two, layout)))
                try:
                    found = operator(torch.linalg.vector_norm(a, order, dim), torch.linalg.vector_norm(b, of, dim))
                except (AssertionError, RuntimeError) as e:
                    wrong.append(f"{case}: {str(e).splitlines()[0]}")
                    continue
                if not close(expected, found.full_tensor()):
                    wrong.append(case)
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-PEND-01",
    "An operator on two DTensors with pending reductions, equal or different ones, gives what it gives on the results.",
    source="torch.distributed.tensor.Partial: pending reduction; DTensor",
)
@pytest.mark.parametrize("to", ["count", "norm"])
@pytest.mark.world(2)
def test_norms_in_place(world: World, to: str) -> None:
    """Add or subtract norms in place, to other norms or to how many elements are not zero, which is a pending sum."""

    def body(rank: Rank) -> list[str]:
        wrong, one, two = [], floats(4, 6, start=1).to(rank.device), floats(4, 6, start=3).to(rank.device)
        a, b = (distributed(x, Shard(0), rank, rank.mesh()) for x in (one, two))
        for order, of, dim in itertools.product((0,) if to == "count" else (1, 2, 3), (1, 2, 3), (None, 0)):
            for sign in 1, -1:
                case = f"{sign} times norm {of} added to norm {order} over {dim}"
                expected = torch.linalg.vector_norm(one, order, dim).add(
                    torch.linalg.vector_norm(two, of, dim), alpha=sign
                )
                found = torch.linalg.vector_norm(a, order, dim).clone()
                try:
                    found.add_(torch.linalg.vector_norm(b, of, dim), alpha=sign)
                except (AssertionError, RuntimeError) as e:
                    wrong.append(f"{case}: {str(e).splitlines()[0]}")
                    continue
                if not close(expected, found.full_tensor()):  # type: ignore[attr-defined]
                    wrong.append(case)
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.world(2)
def test_joined_to_nothing(world: World, dim: int) -> None:
    """Concatenate an empty vector, which torch.cat skips, and a matrix in shards, before or after it."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        nothing, whole = torch.empty(0, dtype=torch.float64, device=rank.device), floats(4, 2).to(rank.device)
        for first in True, False:
            own = [
                distributed(nothing, Replicate(), rank, rank.mesh()),
                distributed(whole, Shard(dim), rank, rank.mesh()),
            ]
            try:
                if not close(whole, torch.cat(own if first else own[::-1]).full_tensor()):  # type: ignore[attr-defined]
                    wrong.append(f"{first=}")
            except IndexError as e:
                wrong.append(f"{first=}: {e}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


BY_ROWS: dict[str, dict[str, Operator]] = {
    "averages": {
        "mean": lambda x: x.mean(1),
        "nll_loss": lambda x: functional.nll_loss(
            x.log_softmax(1),
            distribute_tensor(torch.tensor([1], device=x.device), x.device_mesh, x.placements, src_data_rank=None),
            reduction="none",
        ),
        "rms_norm": lambda x: functional.rms_norm(x, (4,)),
        "split": lambda x: x.split(2, 1)[0],
    },
    "orders": {
        "max": lambda x: x.max(1).values,
        "min": lambda x: x.min(1).indices,
        "topk": lambda x: x.topk(2, 1).values,
        "sort": lambda x: x.sort(1).values,
        "median": lambda x: x.median(1).values,
        "kthvalue": lambda x: x.kthvalue(2, 1).values,
        "mode": lambda x: x.mode(1).values,
        "cummax": lambda x: x.cummax(1).values,
        "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    },
    "others": {
        "sum": lambda x: x.sum(1),
        "amax": lambda x: x.amax(1),
        "prod": lambda x: x.prod(1),
        "std": lambda x: x.std(1),
        "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=1),
        "softmax": lambda x: x.softmax(1),
        "argmax": lambda x: x.argmax(1),
        "cumsum": lambda x: x.cumsum(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "gelu": functional.gelu,
        "slice": lambda x: x[:, :2],
        "unbind": lambda x: x.unbind(1)[0],
    },
}
"""Operators on each row."""


@requirement(
    "TP-FREE-01",
    "An operator that treats each shard on its own, or is linear in pending sums, does not communicate.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@pytest.mark.parametrize("kind", BY_ROWS)
@pytest.mark.world(2)
def test_fewer_rows(world: World, kind: str) -> None:
    """Shard a batch of one row, of which the second rank has none."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, operator in BY_ROWS[kind].items():
            x = distributed(floats(1, 4).to(rank.device), Shard(0), rank, rank.mesh())
            at = messages.launched()
            found = operator(x)
            if found.placements != (Shard(0),) or messages.launched() != at:
                wrong.append(f"{name}: {found.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
