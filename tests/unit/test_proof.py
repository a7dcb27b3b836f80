"""The proof of exactness: what it calls exact is, in every order tried; what is not, it does not."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.oracles.exact import dyadic
from harness.oracles.proof import Exactness

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
Tensors = Sequence[torch.Tensor]


def watch(f: Callable[[], object], dtype: torch.dtype = torch.float64, factor: int = 1) -> Exactness:
    with Exactness(dtype, factor=factor) as seen:
        f()
    return seen


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Proven is exact: each operation as the sum over pieces of what it is linear in, added in the dtype in some order.


def conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x[None], w)[0]


PIECES: dict[str, tuple[Callable[[Tensors], torch.Tensor], Callable[[Tensors, list[int]], Tensors]]] = {
    "sum": (lambda t: t[0].sum(1), lambda t, k: [t[0][:, k]]),
    "mm": (lambda t: t[0] @ t[1], lambda t, k: [t[0][:, k], t[1][k]]),
    "bmm": (lambda t: torch.bmm(t[0][None], t[1][None])[0], lambda t, k: [t[0][:, k], t[1][k]]),
    "linear, twice": (lambda t: (t[0] @ t[1]) @ t[2], lambda t, k: [t[0][:, k], t[1][k], t[2]]),
    "accumulated": (lambda t: t[0] @ t[1] + 0.5 * t[0].sum(), lambda t, k: [t[0][:, k], t[1][k]]),
    "subtracted": (lambda t: (t[0] @ t[1]).sub(t[0].sum(), alpha=2).neg(), lambda t, k: [t[0][:, k], t[1][k]]),
    "conv1d": (lambda t: conv(t[0].t(), t[1].t()[:, :, None]), lambda t, k: [t[0][:, k], t[1][k]]),
    "index_add": (lambda t: index_add(t[0].t()), lambda t, k: [t[0][:, k]]),
}  # fmt: skip
"""The operation, and its operands of only some of the places summed over."""


def index_add(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1]) % 2
    return torch.stack([torch.zeros(2, dtype=x.dtype).index_add(0, places, row) for row in x]).sum(0)


@st.composite
def operands(draw: st.DrawFn, dtype: torch.dtype) -> list[torch.Tensor]:
    """x[2, k], y[k, 3], z[3, 2], of numbers that spread over some bits."""
    size = draw(st.integers(1, 7))

    def tensor(*shape: int) -> torch.Tensor:
        span = 2 ** draw(st.integers(0, {torch.float64: 30, torch.float32: 15}.get(dtype, 6)))
        places = draw(st.integers(-4, {torch.float16: 12}.get(dtype, 8)))
        count = torch.Size(shape).numel()
        edge = st.sampled_from([0, 1, -1, span, -span])
        whole = draw(st.lists(st.integers(-span, span) | edge, min_size=count, max_size=count))
        return torch.tensor(whole, dtype=torch.float64).reshape(shape) / 2.0**places

    return [tensor(2, size), tensor(size, 3), tensor(3, 2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", PIECES)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_proven_is_exact_in_every_order(what: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """What is proven comes out as in float64 when its sum is cut into pieces that are summed in any order."""
    given_ = data.draw(operands(dtype))
    compute, some = PIECES[what]
    with Exactness(dtype) as seen:
        expected = compute(given_)
    if not seen.proven:
        return
    order = data.draw(st.permutations(range(given_[1].shape[0])))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order)))) | {0, len(order)})
    pieces = [list(order[a:b]) for a, b in itertools.pairwise(cuts)]
    low = [t.to(dtype) for t in given_]
    total = sum(compute(some(low, piece)) for piece in pieces)
    # Piece by piece and element by element there is no accumulator that is wider than the dtype.
    one_by_one = sum(compute(some(low, [k])) for k in order)
    assert torch.equal(torch.as_tensor(total).double(), expected)
    assert torch.equal(torch.as_tensor(one_by_one).double(), expected)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_granularity_of_any_number(values: list[float]) -> None:
    """Adding a number to zeros is proven for float64 just where all of them are multiples of one another's last bit."""
    ratios = [v.as_integer_ratio() for v in values if v]
    with Exactness(torch.float64) as seen:
        numbers(*values).sum()
    if seen.proven and ratios:
        below = max(b for _, b in ratios)
        whole = [a * (below // b) for a, b in ratios]
        step = min(a & -a for a in whole)
        assert sum(map(abs, whole)) // step <= 2**53


# Inexact is not proven, and said why.


def late() -> torch.Tensor:
    """Two gradients, each of terms that cancel, are accumulated: ranks add what has not cancelled yet."""
    large, small = numbers(2.0**23, -(2.0**23)), numbers(2.0**-1, -(2.0**-1))
    return large.sum() + small.sum()


INEXACT: dict[str, tuple[torch.dtype, Callable[[], object], str]] = {
    "tenths": (torch.float64, lambda: numbers(0.1, 0.2, 0.3).sum(), "aten.sum: partial sums need 5"),
    "a third": (torch.float64, lambda: numbers(1.0, 2.0) / 3, "aten.div: divides by 3, which is not a power of two"),
    "one over": (torch.float64, lambda: 1 / numbers(3.0), "aten.reciprocal: not known to be a sum of products"),
    "25 bits": (torch.float32, lambda: numbers(2.0**24, 1.0).sum(), "need 25 bits, float32 has 24"),
    "54 bits": (torch.float64, lambda: numbers(2.0**53, 1.0).sum(), "need 54 bits, float64 has 53"),
    "25 bits, cancelled": (torch.float32, lambda: numbers(2.0**24, 1, -(2.0**24)).sum(), "need 26 bits"),
    "25 bits, late": (torch.float32, late, "aten.add: partial sums need 26 bits, float32 has 24"),
    "small": (torch.float16, lambda: numbers(2.0**-25) + 0, "2.9802322387695312e-08 is not a number of float16"),
    "small product": (torch.float16, lambda: numbers(2.0**-13) * 2.0**-12, r"of 2\^-25, float16 goes down to 2\^-24"),
    "overflow": (torch.float16, lambda: numbers(40000, 40000, -40000).sum(), "need|may reach 120000, float16 65504"),
    "overflow before": (torch.float16, lambda: numbers(512, 512).dot(numbers(64, 64)), "may reach 65536"),
    "overflow of float64": (torch.float64, lambda: numbers(1e308, 1e308).sum(), "infinity"),
    "mean": (torch.float64, lambda: numbers(1, 2, 3).mean(), "aten.mean: divides by 3"),
    "overflow in a mean": (torch.float16, lambda: numbers(32768, 32768).mean(), "may reach 65536"),
    "bfloat16": (torch.bfloat16, lambda: numbers(256, 1).sum(), "need 9 bits, bfloat16 has 8"),
    "entered": (torch.bfloat16, lambda: numbers(257).view(1, 1) + 0, "that enters: 257.0 is not a number of bfloat16"),
    "NaN": (torch.float64, lambda: numbers(float("nan")).relu(), "nan is not a number of float64"),
    "-inf": (torch.float64, lambda: numbers(1).masked_fill(torch.tensor([True]), -torch.inf), "takes -inf"),
    "rate": (torch.float32, lambda: numbers(1).mul_(0.1), "aten.mul_: takes 0.1, which is not a number of float32"),
    "exp": (torch.float64, lambda: numbers(0).exp(), "aten.exp: not known to be a sum of products"),
    "float32": (torch.float32, lambda: torch.ones(2) + torch.ones(2), "aten.ones: gives float32"),
    "to float32": (torch.float32, lambda: numbers(1).float(), "aten._to_copy: gives float32, not float64"),
    "half of whole": (torch.float64, lambda: torch.tensor([1, 2]) / 3, "aten.div: makes"),
    "foreach": (torch.float32, lambda: torch._foreach_add([numbers(1), numbers(2.0**24)], 1.0), "_foreach_add: .* 25"),
    "random": (torch.float64, lambda: torch.rand(2, dtype=torch.float64), "aten.rand: not known"),
    "layer norm": (torch.float64, lambda: F.layer_norm(numbers(1, 2), (2,)), "aten.native_layer_norm"),
    "softmax": (torch.float64, lambda: numbers(1, 2).softmax(0), "aten._softmax"),
    "other bits": (torch.float64, lambda: numbers(1, 2).view(torch.int64), "aten.view"),
    "frequencies": (
        torch.float64,
        lambda: embedding(scale_grad_by_freq=True),
        "embedding_dense_backward: divides by how often",
    ),
}  # fmt: skip


def embedding(**options: bool) -> None:
    table = numbers(1, -2, 0.5, 0.25, 3, 1).view(3, 2).requires_grad_()
    F.embedding(torch.tensor([0, 0, 2]), table, **options).sum().backward()


@pytest.mark.parametrize("what", INEXACT)
def test_inexact_is_not_proven(what: str) -> None:
    """What rounds, or may round in some order, is not proven, and the reason is given."""
    dtype, compute, why = INEXACT[what]
    seen = watch(compute, dtype)
    assert not seen.proven
    assert any(re.search(why, said) for said in seen.unproven), seen.unproven


@pytest.mark.parametrize(
    ("dtype", "compute"),
    [
        (torch.float32, lambda: numbers(2.0**23, 2.0**23).sum()),
        (torch.float32, lambda: numbers(2.0**24 - 1, 1).sum()),
        (torch.float64, lambda: numbers(2.0**53 - 2, 1).sum()),
        (torch.float16, lambda: numbers(2.0**-24, 2.0**-24).sum()),
        (torch.float16, lambda: numbers(65504, 0).sum()),
        (torch.float64, lambda: numbers(5e-324 * 2**60).relu()),
        (torch.bfloat16, lambda: numbers(255, 1).sum()),
        (torch.float32, lambda: numbers(1, 2, 3, 4).mean()),
        (torch.float32, lambda: 3 - numbers(1, 2)),
        (torch.float32, lambda: (numbers(1, -2) / 4).div_(2)),
        (torch.float32, lambda: torch._foreach_add_([numbers(1), numbers(2.0**24)], [numbers(1), numbers(0)])),
        (torch.float32, lambda: numbers(1, -2).square()),
        (torch.float32, lambda: torch.tensor([1, 2]).double() * 3),
        (torch.float32, embedding),
        (torch.float32, lambda: torch.arange(0, 6, 2).sum() // 2),
    ],
)
def test_exact_is_proven(dtype: torch.dtype, compute: Callable[[], object]) -> None:
    """What just fits is proven."""
    assert watch(compute, dtype).unproven == []


def test_a_factor_takes_bits() -> None:
    """Of a factor that ranks divide out again, a power of two takes range, and any other bits, too."""
    assert watch(lambda: numbers(2.0**21, 1).sum(), torch.float32, 3).proven
    assert watch(lambda: numbers(2.0**22, 1).sum(), torch.float32, 3).unproven == [
        "aten.sum: partial sums need 25 bits, 2 of them spare, float32 has 24"
    ]
    assert watch(lambda: numbers(2.0**23, 1).sum(), torch.float32, 4).proven
    assert not watch(lambda: numbers(2.0**24, 1).sum(), torch.float32, 4).proven
    assert watch(lambda: numbers(2.0**14).sum(), torch.float16, 2).proven
    assert watch(lambda: numbers(2.0**14).sum(), torch.float16, 4).unproven == [
        "aten.sum: partial sums may reach 16384, and 2^2 times that on ranks, float16 65504"
    ]
    assert watch(lambda: numbers(2.0**-23).sum(), torch.float16, 2).proven
    assert watch(lambda: numbers(2.0**-23).sum(), torch.float16, 4).unproven == [
        "aten.sum: terms are multiples of 2^-23, float16 goes down to 2^-24"
    ]


def test_in_place_is_judged_by_what_was_there_before() -> None:
    """An operand that is written is looked at before it is."""
    x = numbers(2.0**24)
    assert not watch(lambda: x.add_(1), torch.float32).proven
    y = numbers(1, 2)
    assert not watch(lambda: torch.add(numbers(2.0**24, 0), 1, out=y), torch.float32).proven
    assert y.tolist() == [2.0**24 + 1, 1]


def test_what_is_known_follows_views() -> None:
    """Terms put together through a view are known to the tensor it shows, and the rest of it keeps its own."""

    def compute() -> torch.Tensor:
        whole = torch.zeros(2, 3, dtype=torch.float64)
        whole.t()[1].add_(torch.stack([numbers(2.0**23, -(2.0**23)).sum(), numbers(1, 2).sum()]))
        return whole[0] + 0.5

    assert watch(compute, torch.float32).unproven == ["aten.add: partial sums need 26 bits, float32 has 24"]


def test_relu_and_steps_start_anew() -> None:
    """Ranks have whole values before what is not linear, and in parameters, so terms that cancelled are forgotten."""
    cancelled = numbers(2.0**22, -(2.0**22))
    assert not watch(lambda: cancelled.sum() + 0.25, torch.float32).proven
    assert watch(lambda: cancelled.sum().relu() + 0.25, torch.float32).proven
    for weight in (numbers(1), nn.Parameter(numbers(1), requires_grad=False)):
        seen = watch(lambda to=weight: to.add_(cancelled.sum(0, keepdim=True)) + 0.25, torch.float32)  # type: ignore[misc]
        assert seen.proven == isinstance(weight, nn.Parameter)


def test_results_are_untouched() -> None:
    """Watching changes neither values nor gradients."""
    alone, start = train(program("mlp"), steps=2), program("mlp")
    with Exactness(torch.float32):
        watched = train(start, steps=2)
    assert all(map(torch.equal, alone, watched))


def test_one_sentence_for_each_kind() -> None:
    """Reasons are not repeated, and there are at most 20 of them."""
    seen = watch(lambda: [numbers(0).exp().exp(), numbers(1, 2).sin()])
    assert [s.split(":")[0] for s in seen.unproven] == ["aten.exp", "aten.sin"]
    many = (
        "sin cos tan asin atan sinh cosh tanh exp exp2 expm1 log1p sqrt sigmoid erf erfc asinh digamma lgamma sinc i0"
    )
    seen = watch(lambda: [getattr(numbers(0.5), name)() for name in [*many.split(), "log", "log2"]])
    assert len(seen.unproven) == 20


@pytest.mark.parametrize("options", [{"dtype": torch.int32}, {"dtype": torch.float32, "factor": 0}])
def test_bad_arguments(options: dict[str, object]) -> None:
    """A dtype without a mantissa, and less than no bits, are refused."""
    with pytest.raises(ValueError, match="must be"):
        Exactness(**options)  # type: ignore[arg-type]


# Programs as they are generated.


class Residual(nn.Module):
    """Residual addition, a mask, a buffer, tied weights, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.relu(self.first(x))
        self.seen += x.detach().sum(0)
        x = x.masked_fill(x > 2, 0.0)
        x[:, 0] = 0.5
        return self.second(x) * self.seen.sign() + x[:, 1:2]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)), (4, 5)),
    "deep": (lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)), (4, 5)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(15, 2)), (3, 2, 7)),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        (2, 2, 4, 4),
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 2)), (3, 2)),
    "residual": (Residual, (3, 4)),
}


Program = tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]


def program(name: str, dtype: torch.dtype = torch.float64) -> Program:
    """Module, inputs, and weights of the outputs; of three steps."""
    module = MODELS[name][0]().to(dtype)
    for key, tensor in module.named_parameters():
        tensor.data = dyadic(*tensor.shape, key=(name, key), span=2, denominator=2, dtype=dtype)
    data = [dyadic(*MODELS[name][1], key=("input", i), span=2, denominator=1, dtype=dtype) for i in range(3)]
    if name == "embedding":
        data = [x.long().abs() for x in data]
    shape = copy.deepcopy(module)(data[0]).shape
    return module, data, [dyadic(*shape, key=("weights", i), span=2, denominator=1, dtype=dtype) for i in range(3)]


def train(start: Program, steps: int, accumulate: int = 1, **options: object) -> list[torch.Tensor]:
    """Loss of every step, the last gradients, and parameters."""
    module, data, weights = start
    optimizer = torch.optim.SGD(module.parameters(), **{"lr": 1 / 4, "foreach": False, **options})  # type: ignore[arg-type]
    losses = []
    gradients: list[torch.Tensor] = []
    for step in range(steps):
        for _ in range(accumulate):
            loss = 2 * (module(data[step]) * weights[step]).sum()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [*losses, *gradients, *module.parameters()]


def watch_training(
    name: str, steps: int, dtype: torch.dtype = torch.float64, factor: int = 1, **options: object
) -> list[str]:
    start = program(name)
    return watch(lambda: train(start, steps, **options), dtype, factor).unproven  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.5},
        {"momentum": 0.5, "nesterov": True, "weight_decay": 0.25},
        {"foreach": True, "momentum": 0.5, "weight_decay": 0.5},
        {"accumulate": 3},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_usual_programs_are_proven(name: str, options: dict[str, object]) -> None:
    """Two steps of small programs on small dyadic data are proven in float64, one in float32."""
    assert watch_training(name, 2, **options) == []  # type: ignore[arg-type]
    assert watch_training(name, 1, torch.float32, **options) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [1, 3])
def test_three_steps_of_an_mlp_are_proven(factor: int) -> None:
    """Three steps of two layers are proven in float64."""
    assert watch_training("mlp", 3, factor=factor) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_proven_programs_are_exact(name: str, dtype: torch.dtype) -> None:
    """As far as a program is proven, it gives the same in the dtype, with the rows of its batch in another order."""
    for steps in (1, 2):
        start = program(name)
        with Exactness(dtype) as seen:
            expected = train(start, steps)
        if seen.proven:
            module, data, weights = program(name, dtype)
            actual = train((module, [x.flip(0) for x in data], [x.flip(0) for x in weights]), steps)
            assert all(torch.equal(a.double(), e) for a, e in zip(actual, expected, strict=True))


def test_clipping_is_not_proven() -> None:
    """A norm has a root in it."""
    module, data, _ = program("mlp")

    def compute() -> None:
        module(data[0]).sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)

    assert any("norm" in said for said in watch(compute).unproven)
