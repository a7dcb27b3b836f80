"""What operators of DTensors leave sharded or pending, and how many collectives the others take."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.nn import functional

from fixtures.operators import Operands, Operator, distributed, floats, right
from fixtures.placements import MORE_OPERATORS, REDUCED
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from harness.stacks.limit import runs_with
from harness.stacks.tp_extension import foreach

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"
R, ROWS, COLUMNS, SUM = Replicate(), Shard(0), Shard(1), Partial()
A, B, MATRIX = floats(5, 7) / 16, floats(5, 7, start=3) / 16, floats(7, 4, start=1)
EVEN = floats(4, 6) / 16
SQUARE = floats(4, 4) + 9 * torch.eye(4, dtype=torch.float64)
NAMES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")


def _loss(name: str, reduction: str) -> Operator:
    return lambda a, b: getattr(functional, name)(a, b, reduction=reduction)


KEPT: dict[str, tuple[Operator, Operands, tuple[Placement, ...], Placement]] = {
    **{f"sum of {name}": (_loss(name, "sum"), (A, B), (COLUMNS, COLUMNS), SUM) for name in NAMES},
    **{
        f"mean of {name}": (_loss(name, "mean"), (EVEN, EVEN + 1), (ROWS, ROWS), Partial("avg"))
        for name in NAMES
        if name != "kl_div"
    },
    **{f"each of {name}": (_loss(name, "none"), (A, B), (ROWS, ROWS), ROWS) for name in NAMES},
    "minimum of aminmax": (lambda a: torch.aminmax(a).min, (A,), (COLUMNS,), Partial("min")),
    "maximum of aminmax": (lambda a: torch.aminmax(a, dim=0).max, (A,), (ROWS,), Partial("max")),
    "aminmax of rows": (lambda a: torch.aminmax(a, dim=1).max, (A,), (ROWS,), ROWS),
    "addmm by rows": (lambda a, b, c: torch.addmm(c, a, b), (A, MATRIX, MATRIX[0]), (ROWS, R, R), ROWS),
    "addmm by columns": (lambda a, b, c: torch.addmm(c, a, b), (A, MATRIX, MATRIX[0]), (R, COLUMNS, ROWS), COLUMNS),
    "addmm in parts": (lambda a, b, c: torch.addmm(c, a, b), (A, MATRIX, MATRIX[0]), (COLUMNS, ROWS, R), SUM),
    "sum and a whole": (torch.add, (A, B), (SUM, R), SUM),
    "whole and a sum": (torch.add, (A, B), (R, SUM), SUM),
    "sum without a whole": (torch.sub, (A, B), (SUM, R), SUM),
    "multiples of a sum": (torch.mul, (A, B), (SUM, R), SUM),
    "quotient of a sum": (lambda a, b: a / (b + 1), (A, B), (SUM, R), SUM),
    "product of a sum": (torch.mm, (A, MATRIX), (SUM, R), SUM),
    "product by a sum": (torch.mm, (A, MATRIX), (R, SUM), SUM),
    "sum of a sum": (lambda a: a.sum(0), (A,), (SUM,), SUM),
    "batch": (lambda a: torch.vmap(lambda row: row.softmax(0))(a), (A,), (ROWS,), ROWS),
    "embedding of a batch": (
        lambda i, w: torch.vmap(lambda one: functional.embedding(one, w))(i),
        (torch.arange(6).reshape(3, 2), MATRIX),
        (ROWS, R),
        ROWS,
    ),
}
"""Operators with their operands, these operands' placements, and the placement of the result."""
AT, BOUNDARIES = torch.tensor([0, 3]), torch.tensor([-0.3, -0.1, 0.0, 0.15, 0.2], dtype=torch.float64)


def _put(x: Any, i: Any, v: Any) -> Any:
    return torch.index_put(x, (i,), v)


def _added(x: Any, i: Any, v: Any) -> Any:
    return x.index_put((i,), v, accumulate=True)


def _of_lists(name: str, **options: float) -> Operator:
    """Return a foreach function as one of tensors, for which it is called with lists of two, the second one twice."""
    function = foreach(name)
    return lambda a, b: function([a, a * 2], [b, b], **options)[1]


def _added_in_place(a: Any, b: Any) -> Any:
    changed = [a * 3, a * 2]
    foreach("add_")(changed, [b, b])
    return changed[1]


def _of_numbers(name: str, *numbers: Any) -> Operator:
    return lambda a: foreach(name)([a, a * 2], *numbers)[1]


SINCE: dict[str, tuple[Operator, Operands, tuple[Placement, ...], Placement]] = {
    "multiples of a later sum": (torch.mul, (A, B), (R, SUM), SUM),
    "multiples by a row of a later sum": (torch.mul, (A, B[0]), (R, SUM), SUM),
    "multiples of a later sum of rows": (torch.mul, (A[0], B), (R, SUM), SUM),
    "padded rows": (lambda a: functional.pad(a, (1, 1)), (A,), (ROWS,), ROWS),
    "padded columns": (lambda a: functional.pad(a, (0, 0, 2, 1), value=3.0), (A,), (COLUMNS,), COLUMNS),
    "columns cut off": (lambda a: functional.pad(a, (-1, 0)), (A,), (ROWS,), ROWS),
    "bucketize of rows": (torch.bucketize, (A, BOUNDARIES), (ROWS, R), ROWS),
    "bucketize by boundaries in shards": (torch.bucketize, (A, BOUNDARIES), (R, ROWS), SUM),
    "bucketize of a row by boundaries in shards": (torch.bucketize, (A[0], BOUNDARIES), (R, ROWS), SUM),
    "bucketize from the right": (
        lambda a, b: torch.bucketize(a, b, right=True),
        (A, BOUNDARIES),
        (R, ROWS),
        SUM,
    ),
    **{
        f"{name} {kind}": (put, (A, AT, v), placements, kept)
        for name, put in (("index_put", _put), ("accumulating index_put", _added))
        for kind, v, placements, kept in (
            ("of rows in columns", B[:2], (COLUMNS, R, COLUMNS), COLUMNS),
            ("of replicated rows in columns", B[:2], (COLUMNS, R, R), COLUMNS),
            ("of a row in columns", B[0], (COLUMNS, R, ROWS), COLUMNS),
            ("of a number for each row", B[:2, :1], (COLUMNS, R, R), COLUMNS),
            ("of one number", B[:1, :1], (COLUMNS, R, R), COLUMNS),
            ("of sums", B[:2], (SUM, R, SUM), SUM),
            ("of a sum of rows", B[0], (SUM, R, SUM), SUM),
        )
    },
    "foreach sum": (_of_lists("add"), (A, B), (SUM, SUM), SUM),
    "foreach multiple added": (_of_lists("add", alpha=3), (A, B), (SUM, SUM), SUM),
    "foreach difference": (_of_lists("sub"), (A, B), (SUM, SUM), SUM),
    "foreach product": (_of_lists("mul"), (A, B), (SUM, R), SUM),
    "foreach product of a later sum": (_of_lists("mul"), (A, B), (R, SUM), SUM),
    "foreach quotient": (lambda a, b: foreach("div")([a, a], [b + 1, b + 2])[1], (A, B), (SUM, R), SUM),
    "foreach product by a number": (_of_numbers("mul", 3.0), (A,), (SUM,), SUM),
    "foreach quotient by a number": (_of_numbers("div", 4.0), (A,), (SUM,), SUM),
    "foreach product by numbers": (_of_numbers("mul", [2.0, 3.0]), (A,), (SUM,), SUM),
    "foreach quotient by numbers": (_of_numbers("div", [2.0, 4.0]), (A,), (SUM,), SUM),
    "foreach negative": (_of_numbers("neg"), (A,), (SUM,), SUM),
    "foreach sum in place": (_added_in_place, (A, B), (SUM, SUM), SUM),
}
"""Those that PyTorch 2.13 keeps as they are, and that earlier ones gather or reduce."""
LINEAR: dict[str, Operator] = {
    "negative": torch.neg,
    "negative in place": lambda a: a.neg_(),
    "positive": torch.positive,
    "multiple": lambda a: 3 * a,
    "multiple in place": lambda a: a.mul_(3),
    "multiple by a plain number": lambda a: a * torch.tensor(3.0, dtype=torch.float64),
    "part": lambda a: a / 4,
    "part in place": lambda a: a.div_(4),
    "sum with itself": lambda a: torch.add(a, a, alpha=3),
    "sum with itself in place": lambda a: a.add_(a * 2),
    "difference": lambda a: a * 3 - a,
    "difference in place": lambda a: a.sub_(a * 3),
    "reversed difference": lambda a: torch.rsub(a, a, alpha=3),
    "conversion": lambda a: a.float(),
    "real part": torch.real,
    "reversed": lambda a: a.flip(0),
    "rolled": lambda a: a.roll(1, 0),
    "joined": lambda a: torch.cat([a, a]),
    "stacked": lambda a: torch.stack([a, -a]),
    "repeated": lambda a: a.repeat(2, 1),
    "padded": lambda a: functional.pad(a, (1, 1)),
    "column": lambda a: a[:, 2],
    "foreach negative in place": lambda a: (foreach("neg_")([a]), a)[1],
}
"""Functions whose sum or average of parts is the function of the sum or average."""
RISING = ("asinh", "atan", "ceil", "deg2rad", "erf", "exp", "exp2", "expm1", "floor", "rad2deg", "relu", "round", "sgn")
RISING = (*RISING, "sigmoid", "sign", "sinh", "tanh", "trunc")
"""Names of functions that never fall, for which a maximum or minimum of parts stays one."""


def _like(tensor: torch.Tensor, x: Any) -> Any:
    """Return a tensor as a replicated DTensor, if the other one is a DTensor."""
    tensor = tensor.to(x.device)
    return DTensor.from_local(tensor, x.device_mesh, [R]) if isinstance(x, DTensor) else tensor


@requirement(
    "TP-FREE-32",
    "An operator leaves its result sharded or pending, without communication, if its inputs allow that.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary; Partial",
)
@pytest.mark.world(2)
def test_kept(world: World) -> None:
    """Losses with each reduction, extremes, products, sums with whole tensors, and functions of batches."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for name, (operator, given, placements, kept) in (KEPT | (SINCE if runs_with(">=2.13") else {})).items():
            own = [distributed(x.to(rank.device), p, rank, mesh) for x, p in zip(given, placements, strict=True)]
            at = messages.launched()
            found = operator(*own)
            if (found.placements, messages.launched() - at) != ((kept,), 0):
                wrong.append(f"{name}: {found.placements} after {messages.launched() - at} collectives")
            if not right(operator(*(x.to(rank.device) for x in given)), found):
                wrong.append(name)
        for op, reduced in REDUCED.items():
            if op == "product" and runs_with(">=2.14"):
                continue  # which it does not keep pending
            parts = torch.stack([A, B]).to(rank.device)
            same: dict[str, Operator] = {"t": torch.t}
            if op != "product":  # which PyTorch refuses to copy to
                same["copy_"] = lambda x: torch.empty_like(x).copy_(x)
            if op in ("sum", "avg") and runs_with(">=2.13"):
                same |= LINEAR
            if op in ("max", "min"):
                same |= {f"a{op}": lambda x, op=op: getattr(x, f"a{op}")(0), op: lambda x, op=op: getattr(x, op)()}
                if runs_with(">=2.13"):
                    in_turn = [f"{name}_" if i % 2 else name for i, name in enumerate(RISING, op == "min")]
                    same |= {name: lambda x, name=name: getattr(x, name)() for name in in_turn}
                    same["hardshrink"] = functional.hardshrink
                    same["bucketize"] = lambda x: torch.bucketize(x, _like(BOUNDARIES, x))
            for name, operator in same.items():
                pending = DTensor.from_local(parts[rank.index].clone(), mesh, [Partial(op)])
                at = messages.launched()
                found = operator(pending)
                if (found.placements, messages.launched() - at) != ((Partial(op),), 0):
                    wrong.append(f"{name} of {op}: {found.placements} after {messages.launched() - at} collectives")
                if not right(operator(reduced(parts, 0)), found):
                    wrong.append(f"{name} of {op}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


LAYERS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "linear": (lambda: nn.Linear(6, 3), EVEN),
    "linear without a bias": (lambda: nn.Linear(6, 3, bias=False), EVEN),
    "linear of sequences": (lambda: nn.Linear(6, 3), floats(4, 3, 6)),
    "two linear layers": (lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 5)), EVEN),
    "layer norm": (lambda: nn.LayerNorm(6), EVEN),
    "RMS norm": (lambda: nn.RMSNorm(6), EVEN),
    "embedding": (lambda: nn.Embedding(9, 2), torch.arange(8).reshape(4, 2)),
    "flattened": (lambda: nn.Flatten(), floats(4, 3, 2)),
    "unflattened": (lambda: nn.Unflatten(1, (2, 3)), EVEN),
    "convolution": (lambda: nn.Conv1d(3, 2, 2), floats(4, 3, 6)),
    **{kind.__name__: (kind, EVEN) for kind in (nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid)},
    "softmax": (lambda: nn.Softmax(-1), EVEN),
    "dropout": (lambda: nn.Dropout(0.0), EVEN),
}
"""Layers, and batches of four rows for them."""


@requirement(
    "TP-FREE-7102",
    "A layer whose parameters are replicated leaves its batch sharded, without communication, as it does with its "
    "gradient.",
    source="torch.distributed.tensor: distribute_module; DTensor: issue communications whenever necessary",
)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.world(4)
def test_batches_of_layers(world: World, shape: tuple[int, ...]) -> None:
    """Give each layer rows over one mesh dimension or both, in turn, and compare with one device."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(*shape, names=("a", "b")[: len(shape)]), []
        layouts = [(ROWS,)] if len(shape) == 1 else [(ROWS, R), (R, ROWS), (ROWS, ROWS)]
        turns = [(name, layouts[i % len(layouts)]) for i, name in enumerate(LAYERS)]
        for name, layout in [*turns, *(("linear", layout) for layout in layouts[1:])]:
            if (name, layout) == ("convolution", (ROWS, ROWS)):
                continue  # which PyTorch refuses
            kind, batch = LAYERS[name]
            torch.manual_seed(0)
            alone = kind().to(rank.device, torch.float64)
            own, given = distribute_module(copy.deepcopy(alone), mesh), batch.to(rank.device, copy=True)
            case = f"{name} of {layout}"
            x = distribute_tensor(given, mesh, layout)
            if given.is_floating_point():
                given, x = given.requires_grad_(), x.requires_grad_()
            at = messages.launched()
            found = own(x)
            found.backward(found.detach())
            if (count := messages.launched() - at) or found.placements != layout:
                wrong.append(f"{case}: {found.placements} after {count} collectives")
            expected = alone(given)
            expected.backward(expected.detach())
            pairs = [("output", expected, found)]
            pairs += [(n, p.grad, q.grad) for (n, p), q in zip(alone.named_parameters(), own.parameters(), strict=True)]
            if given.is_floating_point():
                if x.grad.placements != layout:
                    wrong.append(f"{case}: {x.grad.placements} of the gradient")
                pairs.append(("gradient of the batch", given.grad, x.grad))
            wrong += [f"{case}: {what}" for what, one, other in pairs if not right(one.detach(), other.detach())]
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


ONCE: dict[str, tuple[Operator, Operands, tuple[Placement, ...], int]] = {
    **{name: (getattr(torch, name), (A,), (ROWS,), 1) for name in ("std", "var")},
    "std of columns": (lambda a: a.std(0), (A,), (ROWS,), 1),
    "svd": (lambda a: torch.linalg.svd(a, full_matrices=False).S, (A,), (COLUMNS,), 1),
    "eigh": (lambda a: torch.linalg.eigh(a).eigenvalues, (SQUARE @ SQUARE.T,), (ROWS,), 1),
    "qr": (lambda a: torch.linalg.qr(a).R, (SQUARE,), (ROWS,), 1),
    "square of a sum": (lambda a: a * a, (A,), (SUM,), 1),
    "product of sums": (lambda a: a @ a.t(), (A,), (SUM,), 1),
    "maximum of a sum": (lambda a: a.amax(0), (A,), (SUM,), 1),
    "copy of a sum to a whole": (lambda a, b: b.clone().copy_(a), (A, B), (SUM, R), 1),
    "softmax of rows": (lambda a: a.softmax(0), (A,), (ROWS,), 1),
}
"""Operators with their operands, these operands' placements, and the number of collectives."""


@requirement(
    "TP-OP-38",
    "An operator that needs a whole operand gathers or reduces it once, also if it has several results.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@requirement(
    "TP-OP-39",
    "A product of matrices, of which one has to be gathered, gathers the smaller one.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@pytest.mark.world(2)
def test_once(world: World) -> None:
    """Deviations, decompositions, powers of pending sums, and products of a large matrix by a small one."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for name, (operator, given, placements, count) in ONCE.items():
            own = [distributed(x.to(rank.device), p, rank, mesh) for x, p in zip(given, placements, strict=True)]
            at = messages.launched()
            found = operator(*own)
            if messages.launched() - at != count:
                wrong.append(f"{name}: {messages.launched() - at} collectives")
            if not right(operator(*(x.to(rank.device) for x in given)), found):
                wrong.append(name)
        large, small = floats(64, 8).to(rank.device), floats(8, 2).to(rank.device)
        for (x, y), (one, other) in itertools.product(
            ((large, small), (small.t(), large.t())), ((ROWS, ROWS), (COLUMNS, COLUMNS), (ROWS, COLUMNS))
        ):
            at = messages.mark()
            found = distributed(x, one, rank, mesh) @ distributed(y, other, rank, mesh)
            sent = [message.shape for message in messages.since(at)]
            free = one != other or (x is large) == (one == ROWS)  # in which case the large one may stay in shards
            if len(sent) != 1 or (free and math.prod(sent[0]) > small.numel() // 2):
                wrong.append(f"{tuple(x.shape)} by {tuple(y.shape)}, {one} and {other}: {sent}")
            if not right(x @ y, found):
                wrong.append(f"{tuple(x.shape)} by {tuple(y.shape)}, {one} and {other}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


POSITIONS: dict[str, Callable[..., Any]] = {
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "max": lambda x, *a: x.max(*a).indices,
    "min": lambda x, *a: x.min(*a).indices,
    "sort": lambda x, dim, keepdim: x.argsort(dim),
    "topk": lambda x, dim, keepdim: x.topk(2, dim).indices,
}
"""Functions of a tensor, a dimension and ``keepdim`` that return positions."""


@requirement(
    "TP-OP-401",
    "Positions that an operator finds along a sharded dimension are whole on every rank, and pending for none.",
    source=f"{SOURCE}; torch.argmax, argmin, max, min, argsort, topk",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, positions may be called pending")
@pytest.mark.world(2)
def test_positions(world: World) -> None:
    """Shards of rows or columns, even or not; reading the positions takes no collective."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for (rows, columns), (name, find), dim, keepdim in itertools.product(
            ((4, 6), (5, 3)), POSITIONS.items(), (0, 1, -1), (False, True)
        ):
            whole = (torch.arange(rows * columns) * 7).remainder(rows * columns + 2).double().view(rows, columns)
            own = distributed(whole.to(rank.device), Shard(dim % 2), rank, mesh)
            expected, found, case = find(whole.to(rank.device), dim, keepdim), find(own, dim, keepdim), f"{name}, {dim}"
            at = messages.launched()
            if found.placements != (R,) or not torch.equal(expected, found.to_local()):
                wrong.append(f"{case} of {rows} rows, {keepdim=}: {found.placements}, {found.to_local().tolist()}")
            if not torch.equal(expected, found.full_tensor()) or messages.launched() != at:
                wrong.append(f"{case} of {rows} rows, {keepdim=}: {messages.launched() - at} collectives")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


PRODUCTS: dict[str, tuple[Operator, Operands]] = {
    "mm": (torch.mm, (floats(5, 7), MATRIX)),
    "bmm": (torch.bmm, (floats(3, 5, 6), floats(3, 6, 4))),
    "addmm": (lambda a, b, c: torch.addmm(c, a, b), (floats(5, 7), MATRIX, floats(4))),
}


@requirement(
    "TP-MODEL-02",
    "An operator gives each DTensor that requires a gradient, alone or with others, the plain tensor's gradient.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_different_factors(world: World) -> None:
    """Multiply factors in different placements, whose product's gradient arrives in one after the other."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong, count = rank.mesh(), [], 0
        for name, (operator, given) in PRODUCTS.items():
            whole = [x.to(rank.device) for x in given]
            plain = [x.clone().requires_grad_() for x in whole]
            expected = operator(*plain)
            weights = floats(*expected.shape, start=2).to(rank.device)
            expected.backward(weights)
            backs: list[Placement] = [R, *map(Shard, range(expected.dim()))]
            each = [[*map(Shard, range(x.dim())), SUM] for x in given[:2]]
            for placements in itertools.product(*each):
                if len({p.dim for p in placements if isinstance(p, Shard)}) < 2 and SUM not in placements:
                    continue
                count += 1
                back, rest = backs[count % len(backs)], [(R, ROWS)[count % 2]] * (len(given) - 2)
                case = f"{name} of {placements}, {rest}, {back} on the way back"
                own = [
                    distributed(x.clone(), p, rank, mesh).requires_grad_()
                    for x, p in zip(whole, [*placements, *rest], strict=True)
                ]
                found: Any = operator(*own)
                if not right(expected.detach(), found.detach()):
                    wrong.append(case)
                found.backward(distributed(weights, back, rank, mesh))
                for i, (due, x) in enumerate(zip(plain, own, strict=True)):
                    if x.grad is None or not right(due.grad, x.grad):  # type: ignore[arg-type]
                        wrong.append(f"{case}: gradient of factor {i}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
