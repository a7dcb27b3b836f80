"""Operators that the compiler rewrites as others, in compiled code with a collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf
from torch.nn.utils.rnn import pad_sequence

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from suites.dynamo.backends import INDUCTOR
from suites.dynamo.objects import summed

Operator = Callable[..., Any]
Case = tuple[Operator, tuple[torch.Tensor, ...]]

REWRITING = "aot_eager_decomp_partition"
"""The backend that rewrites operators as Inductor does, and executes them without generating code."""
NAN, INF = float("nan"), float("inf")


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return quarters from -1.25 to 1.25, of which neighbors differ."""
    values = (torch.arange(torch.Size(shape).numel()) * 7 + 1).remainder(11).sub(5).div(4).reshape(shape)
    return torch.complex(values, values.flip(-1)).to(dtype) if dtype.is_complex else values.to(dtype)


IMAGE = numbers(2, 3, 4, 4).to(memory_format=torch.channels_last)
VOLUME = numbers(1, 2, 4, 2, 4).to(memory_format=torch.channels_last_3d)


def resized(mode: str, times: float = 2) -> Operator:
    """Return an interpolation."""
    return lambda x: nnf.interpolate(x, scale_factor=times, mode=mode)


def padded(mode: str, *padding: int) -> Operator:
    """Return a padding of all dimensions but the first two."""
    return lambda x: nnf.pad(x, padding, mode=mode)


FORMATS: dict[str, Case] = {
    "nearest image": (resized("nearest"), (IMAGE,)),
    "nearest volume": (resized("nearest"), (VOLUME,)),
    "nearest-exact": (resized("nearest-exact"), (IMAGE,)),
    "nearest-exact volume": (resized("nearest-exact"), (VOLUME,)),
    "bilinear": (resized("bilinear"), (IMAGE,)),
    "trilinear": (resized("trilinear"), (VOLUME,)),
    "bicubic": (resized("bicubic"), (IMAGE,)),
    **{f"{mode} image": (padded(mode, 1, 1, 1, 1), (IMAGE,)) for mode in ("reflect", "replicate", "constant")},
    "max_pool2d": (lambda x: nnf.max_pool2d(x, 2, 2), (IMAGE,)),
    "avg_pool2d": (lambda x: nnf.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), (IMAGE,)),
    "adaptive_avg_pool2d": (lambda x: nnf.adaptive_avg_pool2d(x, (2, 3)), (IMAGE,)),
    "batch_norm": (lambda x: nnf.batch_norm(x, None, None, training=True), (IMAGE,)),
    "group_norm": (lambda x: nnf.group_norm(x, 3), (IMAGE,)),
    "pixel_shuffle": (lambda x: nnf.pixel_shuffle(x[:, :1].expand(-1, 4, -1, -1), 2), (IMAGE,)),
    "full_like": (lambda x: torch.full_like(x, 2.0), (IMAGE,)),
}
"""Operators of images and volumes whose channels are last in memory."""

FLAT = numbers(4, 3).t()
DEEP = numbers(3, 4, 2).permute(2, 0, 1)

STRIDES: dict[str, Case] = {
    # Of random numbers, only those that are no matter of chance are compared.
    "rand_like": (lambda x: torch.rand_like(x) * 0, (DEEP,)),
    "randn_like": (lambda x: torch.randn_like(x) * 0, (DEEP,)),
    "randint_like": (lambda x: torch.randint_like(x, 1), (DEEP,)),
    "bernoulli": (lambda x: torch.bernoulli(torch.ones_like(x)), (DEEP,)),
    "dropout of all": (lambda x: nnf.dropout(x, 1.0), (DEEP,)),
    "dropout of none": (lambda x: nnf.dropout(x, 0.0), (DEEP,)),
    "zeros_like": (torch.zeros_like, (DEEP,)),
    "softmax": (lambda x: x.softmax(0), (FLAT,)),
    "log_softmax": (lambda x: x.log_softmax(0), (FLAT,)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), (FLAT, torch.tensor([1]))),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:1]), (FLAT, torch.tensor([1]))),
    "index_add": (lambda x, i: x.index_add(0, i, x[:1], alpha=2), (FLAT, torch.tensor([1]))),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.5), (FLAT,)),
    "addcmul": (lambda x: torch.addcmul(x, x, x, value=0.5), (FLAT,)),
    "roll": (lambda x: x.roll((1, -2), (0, 1)), (FLAT,)),
    "tril": (torch.tril, (FLAT,)),
    "select_scatter": (lambda x: torch.select_scatter(x, x[:, 0], 1, 1), (FLAT,)),
    "slice_scatter": (lambda x: torch.slice_scatter(x, x[:2], 0, 1), (FLAT,)),
    "var_mean": (lambda x: torch.var_mean(x, 0, correction=0)[0], (DEEP,)),
    "stack": (lambda x: torch.stack([x, x], 1), (FLAT,)),
    **{
        f"{name} of {dims}": (partial(function, dim=dims), (x,))
        for name, function, x in (
            ("fftn", torch.fft.fftn, numbers(3, 4, 5, dtype=torch.complex64)),
            ("ifftn", torch.fft.ifftn, numbers(3, 4, 6, dtype=torch.complex64).permute(2, 0, 1)),
            ("rfftn", torch.fft.rfftn, numbers(3, 4, 5)),
            ("irfftn", torch.fft.irfftn, numbers(3, 4, 5, dtype=torch.complex64)),
        )
        for dims in ((0, 1), (2, 0), (1,))
    },
}
"""Operators of transposed tensors, or of dimensions that are not the last."""

WHOLE = torch.arange(4)
HALF = numbers(4, dtype=torch.bfloat16)


def of_both(function: Operator) -> dict[str, Case]:
    """Return a function of two tensors for operands of two dtypes, both ways."""
    targets = torch.tensor([0.0, 1.0, 1.0, 0.0])
    return {
        f"{function.__name__} of bfloat16": (function, (HALF, targets)),
        f"{function.__name__} with bfloat16": (function, (numbers(4), targets.bfloat16())),
    }


DTYPES: dict[str, Case] = {
    **of_both(nnf.binary_cross_entropy_with_logits),
    **of_both(nnf.mse_loss),
    **of_both(nnf.smooth_l1_loss),
    "clamp of integers": (lambda x: x.clamp(0.5, 1.5), (WHOLE,)),
    "clamp of integers from below": (lambda x: x.clamp(min=1.5), (WHOLE,)),
    "clamp by a tensor": (torch.clamp, (WHOLE, torch.tensor(1.5))),
    **{f"angle of {dtype}": (torch.angle, (numbers(4, dtype=dtype),)) for dtype in (torch.bfloat16, torch.float64)},
    "angle of integers": (torch.angle, (WHOLE - 2,)),
    "angle of complex": (torch.angle, (numbers(4, dtype=torch.complex64),)),
    "cat of an empty double": (lambda e, x: torch.cat([e, x]), (torch.zeros(0, dtype=torch.float64), numbers(4))),
    "cat of both": (lambda x, y: torch.cat([x, y]), (WHOLE, HALF)),
    "pad_sequence": (lambda x, y: pad_sequence([x, y], batch_first=True), (WHOLE, numbers(3))),
    "where": (lambda x: torch.where(x > 1, x, 0.5), (WHOLE,)),
    "copysign": (lambda x: torch.copysign(x, -1), (WHOLE,)),
    "randint_like of a bound": (
        lambda x, h: torch.randint_like(x, h, dtype=torch.int16),
        (numbers(4), torch.tensor(1)),
    ),
    "linspace": (lambda x, y: torch.linspace(x, y, 5), (torch.tensor(1.0), torch.tensor(2))),
    "cumsum": (lambda x: x.cumsum(0), (WHOLE.int(),)),
    "softmax": (lambda x: x.softmax(0, dtype=torch.float64), (HALF,)),
    "full": (lambda x: torch.full((4,), True) & (x > 1), (WHOLE,)),
    "floor of a quotient": (lambda x: torch.div(x, 2, rounding_mode="floor"), (WHOLE - 2,)),
}
"""Operators whose results have another dtype than an operand."""

FRAMES = torch.stft(numbers(24), 8, window=torch.hann_window(8), return_complex=True)

VALUES: dict[str, Case] = {
    "cat of an empty first": (lambda e, x: torch.cat([e, x]), (torch.zeros(0, 3), numbers(2, 3))),
    "cat of an empty last": (lambda e, x: torch.cat([x, e], -1), (torch.zeros(2, 0), numbers(2, 3))),
    "cat of an empty vector": (lambda e, x: torch.cat([x, e, x]), (torch.zeros(0), numbers(2, 3))),
    "cat of itself": (lambda x: torch.cat([x, x], -1), (numbers(2, 3),)),
    "addmv of beta 0": (
        lambda x, a, b: torch.addmv(x, a, b, beta=0),
        (torch.full((3,), NAN), numbers(3, 2), numbers(2)),
    ),
    "addmm of beta 0": (
        lambda x, a: torch.addmm(x, a, a, beta=0, alpha=2),
        (torch.full((3, 3), NAN), numbers(3, 3)),
    ),
    "baddbmm of beta 0": (lambda x, a: torch.baddbmm(x, a, a, beta=0), (torch.full((2, 3, 3), NAN), numbers(2, 3, 3))),
    "addr of beta 0": (lambda x, a: torch.addr(x, a, a, beta=0), (torch.full((3, 3), NAN), numbers(3))),
    **{
        f"complex sum of {tuple(shapes)}": (
            torch.add,
            tuple(numbers(*shape, dtype=torch.complex64) for shape in shapes),
        )
        for shapes in (((3, 4), (3, 4)), ((3, 1), (4,)), ((3, 4), (1,)), ((3, 4), ()))
    },
    "istft beyond the frames": (lambda x: torch.istft(x, 8, window=torch.hann_window(8), length=40), (FRAMES,)),
    "softmax": (lambda x: x.softmax(0), (torch.tensor([-INF, 0.0]),)),
    "logsumexp": (lambda x: x.logsumexp(0), (torch.tensor([-INF, -INF]),)),
    "logaddexp": (torch.logaddexp, (torch.tensor([INF, -INF]), torch.tensor([INF, -INF]))),
    "clamp": (lambda x: x.clamp(0.0, 1.0), (torch.tensor([NAN, 2.0, -1.0]),)),
    "fmax": (torch.fmax, (torch.tensor([NAN, 1.0, 2.0]), torch.tensor([1.0, NAN, 3.0]))),
    "xlogy": (torch.xlogy, (torch.zeros(2), torch.tensor([NAN, 0.0]))),
    "nan_to_num": (torch.nan_to_num, (torch.tensor([NAN, INF, -INF]),)),
    "amax of nothing": (lambda x: x.amax((0, 1)), (numbers(3, 4, 0),)),
    "cumprod": (lambda x: x.cumprod(0), (torch.tensor([2.0, 0.0, 3.0]),)),
    "round": (lambda x: x.round(decimals=-1), (torch.tensor([15.0, 25.0, -35.0]),)),
    "remainder": (torch.remainder, (torch.tensor([-7, 7]), torch.tensor([2, -2]))),
    "floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (numbers(4), torch.tensor([0.0, -2.0, 2.0, 0.5]))),
    "split of nothing": (lambda x: torch.split(x, 2)[0], (torch.zeros(0, 3),)),
}
"""Operators of empty, complex, infinite and undefined values, and of factors that are 0."""

JOINED: dict[str, Case] = {
    f"cat of an empty {e.dtype} and two": (lambda e, x, y: torch.cat([e, x, y]), (e, numbers(2, 3), numbers(2, 3)))
    for e in (torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, 3, dtype=torch.int64))
}
"""Two tensors joined with an empty one, which counts for the dtype."""

LABELED: dict[str, Case] = {
    "multilabel_margin_loss": (nnf.multilabel_margin_loss, (numbers(4), torch.tensor([3, 0, -1, 1]))),
}
"""Losses of labels that end before the others."""

VOLUMES: dict[str, Case] = {f"{mode} volume": (padded(mode, *[1] * 6), (VOLUME,)) for mode in ("reflect", "replicate")}
"""Paddings of a volume whose channels are last in memory."""

SELECTED: dict[str, Case] = {
    f"index_select of {what}": (lambda x, i: x.index_select(0, i), (x, torch.tensor([0, 0])))
    for what, x in (("an image", IMAGE), ("a volume", VOLUME))
}
"""Selections of what has its channels last in memory, which are contiguous."""

UNADDED: dict[str, Case] = {
    f"addmm of {rows} rows": (
        lambda x, a, b: torch.addmm(x, a, b, beta=0),
        (torch.full((4,), NAN), numbers(rows, 3), numbers(3, 4)),
    )
    for rows in (1, 2)
}
"""Products that ignore what they could be added to."""

SUBJECTS = {
    "formats": FORMATS,
    "strides": STRIDES,
    "dtypes": DTYPES,
    "values": VALUES,
    "joined": JOINED,
    "labeled": LABELED,
    "volumes": VOLUMES,
    "selected": SELECTED,
    "unadded": UNADDED,
}

BINS = torch.tensor([1, 2, 1])

OF_DATA: dict[str, Case] = {
    "unique": (lambda x: torch.unique(x, return_inverse=True, return_counts=True), (torch.tensor([1.0, 2.0, 1.0]),)),
    "unique rows": (lambda x: torch.unique(x, return_inverse=True, dim=0), (torch.tensor([[2.0], [1.0], [2.0]]),)),
    "unique_consecutive": (
        lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True),
        (torch.tensor([1.0, 1.0, 2.0, 1.0]),),
    ),
    "bincount": (torch.bincount, (BINS.int(),)),
    **{f"bincount of {d}": (torch.bincount, (BINS, torch.ones(3, dtype=d))) for d in (torch.float32, torch.float64)},
    "bincount of integers": (torch.bincount, (BINS.int(), BINS)),
    "nonzero": (torch.nonzero, (torch.tensor([0.0, 2.0, 1.0]),)),
    "where": (torch.where, (torch.tensor([0.0, 2.0, 1.0]),)),
    "masked_select": (lambda x: torch.masked_select(x, x > 1), (torch.tensor([0.0, 2.0, 1.0]).bfloat16(),)),
    "repeat_interleave": (torch.repeat_interleave, (torch.tensor([1.0, 2.0]), torch.tensor([2, 1]))),
}
"""Operators whose results have sizes that depend on data."""

ACTIVATIONS: dict[str, Operator] = {
    "hardtanh": lambda x: nnf.hardtanh(x, -0.7, 0.7),
    "relu6": nnf.relu6,
    "hardsigmoid": nnf.hardsigmoid,
    "hardswish": nnf.hardswish,
    "hardshrink": lambda x: nnf.hardshrink(x, 0.7),
    "softshrink": lambda x: nnf.softshrink(x, 0.7),
    "threshold": lambda x: nnf.threshold(x, 0.7, 0.0),
    "clamp": lambda x: x.clamp(-0.7, 0.7),
    "leaky_relu": lambda x: nnf.leaky_relu(x, 0.5),
}
"""Functions that have another slope on each side of a bound."""

BOUNDS = torch.tensor([0.7, -0.7, 0.5, 0.0, 1.0, 3.0, -3.0, 6.0, 7.0])

WRONG_IN: dict[str, tuple[str, ...]] = {
    "<2.12": ("fftn", "ifftn", "rfftn", "irfftn", "unique", "binary_cross_entropy_with_logits", "index_fill"),
    "<2.13": (
        *("nearest volume", "nearest-exact volume", "reflect image", "replicate image", "hardtanh"),
        *("randint_like of a bound", "bincount", "istft", "split of nothing"),
    ),
    ">=2.14,<2.15": ("group_norm",),
}
"""How the names of cases begin that versions of PyTorch compile in another way."""


def right_here(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cases that the running version of PyTorch compiles as it executes them."""
    wrong = tuple(name for versions, names in WRONG_IN.items() if runs_with(versions) for name in names)
    return {name: case for name, case in cases.items() if not name.startswith(wrong)}


def answered(results: Any) -> list[tuple[Any, ...]]:
    """Return what code can ask each result."""
    return [(tuple(y.shape), y.stride(), y.dtype) for y in results]


def of(given: Any, rank: Rank) -> Any:
    """Move operands of cases to the rank's device."""
    return [tuple(x.to(rank.device) for x in operands) for operands in given]


def listed(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    return [y for part in result for y in listed(part)] if isinstance(result, list | tuple) else [result]


def computing(functions: list[Operator], *, answers: bool = True) -> Callable[[Any], Any]:
    """Return code that calls each function with its operands, asks the results, and counts ranks by a collective."""

    def code(given: Any) -> Any:
        results = [y for function, operands in zip(functions, given, strict=True) for y in listed(function(*operands))]
        ranks = summed(torch.ones(1, device=results[0].device))
        return results, answered(results) if answers else [y.dtype for y in results], ranks

    return code


@requirement(
    "DYN-OPERATOR-3400",
    "Operators in compiled code have the results of uncompiled code: their values, dtypes, shapes, strides.",
    source="torch.compile; torch._decomp: decompositions are equivalent to their operators",
)
@requirement(
    "DYN-OPERATOR-3401",
    "Compiled code sees the dtype, shape and strides of an operator's result as uncompiled code does.",
    source="torch.compile; torch.Tensor: dtype, shape, stride",
)
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.world(2)
def test_results(world: World, subject: str) -> None:
    """Compute all results of one subject in one graph, with a collective, and ask them there."""

    def body(rank: Rank) -> list[str]:
        cases = right_here(SUBJECTS[subject])
        code = computing([function for function, _ in cases.values()])
        given = of([operands for _, operands in cases.values()], rank)
        names = [name for name, (f, x) in cases.items() for _ in listed(f(*x))]
        function, counter = dynamo.compiled(code, backend=REWRITING)
        results, asked, ranks = function(given)
        expected, answers, _ = code(given)
        assert counter.graphs == 1
        assert ranks.item() == rank.size
        wrong = []
        for name, y, right, seen, answer in zip(names, results, expected, asked, answers, strict=True):
            try:
                torch.testing.assert_close(y, right, equal_nan=True, check_stride=True)
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
            if seen != answer:
                wrong.append(f"{name}: compiled code sees {seen} for {answer}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "DYN-OPERATOR-3402",
    "In compiled code, results whose sizes depend on data have the values and dtypes of uncompiled code.",
    source="torch.compile; torch.unique; torch.bincount; torch._dynamo.config.capture_dynamic_output_shape_ops",
)
@pytest.mark.world(2)
def test_results_of_data(world: World) -> None:
    """Compute unique elements, counts of elements and others in one graph, with a collective."""

    def body(rank: Rank) -> list[str]:
        cases = right_here(OF_DATA)
        code = computing([function for function, _ in cases.values()], answers=False)
        given = of([operands for _, operands in cases.values()], rank)
        names = [name for name, (f, x) in cases.items() for _ in listed(f(*x))]
        with dynamo.data_in_graphs():
            function, counter = dynamo.compiled(code, backend=REWRITING)
            results, seen, ranks = function(given)
        expected, dtypes, _ = code(given)
        assert counter.graphs == 1
        assert ranks.item() == rank.size
        rows = zip(names, results, expected, seen, dtypes, strict=True)
        return [name for name, y, right, one, other in rows if not (torch.equal(y, right) and one == other == y.dtype)]

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "DYN-OPERATOR-3403",
    "Gradients of compiled activations are those of uncompiled code in each dtype, also at their bounds.",
    source="torch.compile; torch.nn.functional.hardtanh",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.world(2)
def test_gradients_at_bounds(world: World, dtype: torch.dtype) -> None:
    """Compute activations at, below and above their bounds, which bfloat16 rounds, and sum them over ranks."""

    def body(rank: Rank) -> list[str]:
        activations = right_here(ACTIVATIONS)
        inputs = [BOUNDS.to(rank.device, dtype).requires_grad_() for _ in activations]

        def code(xs: list[torch.Tensor]) -> Any:
            results = [function(x) for function, x in zip(activations.values(), xs, strict=True)]
            return results, summed(torch.ones(1, device=rank.device))

        function, counter = dynamo.compiled(code, backend=REWRITING)
        (results, ranks), (expected, _) = function(inputs), code(inputs)
        assert counter.graphs == 1
        assert ranks.item() == rank.size
        ones = [torch.ones_like(y) for y in expected]
        found, right = (torch.autograd.grad(ys, inputs, ones) for ys in (results, expected))
        rows = zip(activations, results, expected, found, right, strict=True)
        return [name for name, y, e, g, r in rows if not (torch.allclose(y, e, rtol=1e-2) and torch.equal(g, r))]

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "DYN-OPERATOR-3404",
    "Compiled recurrent modules return the outputs and hidden states that uncompiled ones return.",
    source="torch.compile; torch._dynamo.config.allow_rnn; torch.nn.LSTM, GRU, RNN",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a state of compiled LSTM has one dimension more")
@pytest.mark.world(2)
def test_recurrent_modules(world: World) -> None:
    """Compute states of two steps of batches of two in one graph, with a collective."""

    def body(rank: Rank) -> None:
        torch.manual_seed(5)
        modules = nn.ModuleList([nn.LSTM(3, 2), nn.LSTM(3, 3, proj_size=2), nn.GRU(3, 2), nn.RNN(3, 2)]).to(rank.device)
        x = numbers(2, 2, 3).to(rank.device).requires_grad_()

        def code(x: torch.Tensor) -> Any:
            return [module(x) for module in modules], summed(torch.ones(1, device=rank.device))

        with dynamo.recurrent_in_graphs(), torch.no_grad():
            function, counter = dynamo.compiled(code, backend=REWRITING)
            found, ranks = function(x)
            expected, _ = code(x)
        assert counter.graphs == 1
        assert ranks.item() == rank.size
        torch.testing.assert_close(found, expected)

    world.run(body)


@requirement(
    "DYN-OPERATOR-3901",
    "Padded images whose channels are last, compiled by Inductor, have the values and gradients of uncompiled code.",
    source="torch.compile; torch.nn.functional.pad: mode; torch.channels_last",
)
@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("backend", [INDUCTOR])
@pytest.mark.world(2, timeout=180)
def test_gradients_of_paddings(world: World, backend: str, mode: str) -> None:
    """Pad images of the rank in a graph of their own, and give the result a gradient."""

    def body(rank: Rank) -> None:
        pad = padded(mode, 1, 1, 1, 1)
        found = []
        for function in dynamo.compiled(pad, backend=backend)[0], pad:
            x = IMAGE.detach().clone().to(rank.device).requires_grad_()
            y = function(x)
            (gradient,) = torch.autograd.grad(y, x, numbers(*y.shape).to(rank.device) + rank.index)
            found.append((y.detach(), gradient))
        torch.testing.assert_close(*found)

    world.run(body)
