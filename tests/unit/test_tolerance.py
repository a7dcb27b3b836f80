"""The bounded oracle: it allows what rounding explains and nothing more."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from harness.oracles.rounding import UNIT
from harness.oracles.tolerance import Bounded

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SCALE_CAUGHT = {torch.float64: 1e-13, torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.06}
"""Relative errors of all gradients that are caught here; docs/tolerances.md says what is caught in general."""

Tensors = dict[str, torch.Tensor]
Gradients = list[list[torch.Tensor]]


def train(
    dtype: torch.dtype,
    ranks: int = 1,
    fault: Callable[[Gradients], None] = lambda parts: None,
    optimizer: str = "adamw",
) -> Tensors:
    """Two steps on a batch of eight rows that ``ranks`` emulated ranks share; ``fault`` changes [rank][parameter]."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(torch.float64)
    module = module.to(torch.bfloat16).to(dtype)
    inputs, targets = (torch.randn(8, n, dtype=torch.float64).to(torch.bfloat16).to(dtype) for n in (4, 3))
    parameters = list(module.parameters())
    made: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, lr=0.01) if optimizer == "adamw" else torch.optim.SGD(parameters, 0.1, 0.9)
    )
    found = {}
    for step in range(2):
        parts, outputs = [], []
        for x, y in zip(inputs.tensor_split(ranks), targets.tensor_split(ranks), strict=True):
            output = module(x)
            ((output - y).square().sum() * (ranks / 24)).backward()
            outputs.append(output.detach())
            parts.append([p.grad for p in parameters if p.grad is not None])
            made.zero_grad()
        fault(parts)
        for i, p in enumerate(parameters):
            total = parts[0][i]
            for gradients in parts[1:]:
                total = total + gradients[i]
            p.grad = total / ranks
            found[f"gradient {step}.{i}"] = p.grad.clone()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        made.step()
        made.zero_grad()
        found |= {f"parameter {step}.{i}": p.detach().clone() for i, p in enumerate(parameters)}
        found[f"output {step}"] = torch.cat(outputs)
    return found


def wrong(bounded: Bounded, found: Tensors) -> list[str]:
    return [said for name in bounded.truth if (said := bounded.differs(name, found[name]))]


def bound(dtype: torch.dtype, ranks: int = 2) -> Bounded:
    return Bounded(lambda: train(torch.float64, optimizer=kind(dtype)), dtype, world=ranks)


def kind(dtype: torch.dtype) -> str:
    return "sgd" if dtype == torch.float16 else "adamw"


def broken(dtype: torch.dtype, fault: Callable[[Gradients], None], ranks: int = 2) -> list[str]:
    return wrong(bound(dtype, ranks), train(dtype, ranks, fault, kind(dtype)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_healthy_run_passes(dtype: torch.dtype, ranks: int) -> None:
    """Training on ranks in the dtype is within the bound, whatever the number of ranks."""
    assert wrong(bound(dtype, ranks), train(dtype, ranks, optimizer=kind(dtype))) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_gradients_are_caught(dtype: torch.dtype) -> None:
    """Gradients that are too large by the share that the documentation states are an error."""

    def fault(parts: Gradients) -> None:
        for gradients in parts:
            gradients[:] = [g * (1 + SCALE_CAUGHT[dtype]) for g in gradients]

    assert broken(dtype, fault) != []


@pytest.mark.parametrize("dtype", DTYPES)
def test_lost_element_is_caught(dtype: torch.dtype) -> None:
    """One element of one rank's gradient that never arrived is an error; here the largest."""

    def fault(parts: Gradients) -> None:
        lost = parts[1][0].clone()
        lost.view(-1)[lost.abs().argmax()] = 0
        parts[1][0] = lost

    assert "gradient 0.0: 1 of 32 elements" in broken(dtype, fault)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_contribution_is_caught(dtype: torch.dtype) -> None:
    """One rank's gradients counted twice, in place of another's, are an error."""

    def fault(parts: Gradients) -> None:
        parts[1] = parts[0]

    assert broken(dtype, fault) != []


def test_stale_gradients_of_the_second_step_are_caught() -> None:
    """An error that is made later than in the first step is caught as well."""
    first: Gradients = []

    def fault(parts: Gradients) -> None:
        if first:
            parts[:] = first
        first.extend([g.clone() for g in gradients] for gradients in parts)

    said = broken(torch.float32, fault)
    assert said != []
    assert not [text for text in said if text.startswith("gradient 0")]


def halves() -> Tensors:
    return {"x": torch.tensor([0.5, 1.5, -2.5], dtype=torch.float64) / 3}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_caught(value: float) -> None:
    """NaN and infinity are not explained by rounding."""
    found = (torch.tensor([0.5, 1.5, -2.5]) / 3).index_fill(0, torch.tensor(1), value)
    assert Bounded(halves, torch.float32).differs("x", found).startswith("x: 1 of 3 elements differ by more than")


def test_nan_that_is_expected_passes() -> None:
    """Where the truth itself is NaN, nothing is known."""
    bounded = Bounded(lambda: {"x": torch.zeros(1, dtype=torch.float64).log() * 0}, torch.float32)
    assert bounded.differs("x", torch.tensor([math.nan])) == ""


def test_difference_says_expected_found_and_allowed() -> None:
    """A difference names the first elements, with what was expected, found and allowed."""
    said = Bounded(halves, torch.float32).differs("x", torch.tensor([0.5, 1.5, -2.5]))
    assert said.startswith(
        "x: 3 of 3 elements differ by more than rounding explains: [0] expected 0.166666667, found 0.5, allowed ±"
    )


def test_wrong_shape_is_a_difference() -> None:
    """A tensor of another shape is not compared element by element."""
    said = Bounded(halves, torch.float32).differs("x", torch.zeros(3, 1))
    assert said == "x: expected float32[3], found float32[3, 1]"


def test_wrong_dtype_is_a_difference() -> None:
    """A result in another dtype is an error, though it be the truth itself."""
    bounded = Bounded(halves, torch.float32)
    assert bounded.differs("x", bounded.truth["x"]) == "x: expected float32[3], found float64[3]"


def test_a_part_in_another_dtype() -> None:
    """A rank's rows are held against those rows, in the dtype that is asked for."""
    bounded = Bounded(halves, torch.float32)
    last = bounded.truth["x"][2:].to(torch.bfloat16).double()
    assert bounded.differs("x", last, dtype=torch.float64, part=(1, 2)).startswith("x: 1 of 1 elements differ")
    assert bounded.differs("x", bounded.truth["x"][:2], dtype=torch.float64, part=(0, 2)) == ""
    assert (
        bounded.differs("x", bounded.truth["x"][:2].float(), part=(1, 2)) == "x: expected float32[1], found float32[2]"
    )


def test_whole_numbers_must_be_equal() -> None:
    """What the run gives in another dtype than float64 is compared exactly, in that dtype."""
    bounded = Bounded(lambda: {"count": torch.tensor([1, 2])}, torch.bfloat16)
    assert bounded.differs("count", torch.tensor([1, 2])) == ""
    assert bounded.differs("count", torch.tensor([1, 3])).startswith("count: 1 of 2 elements differ")


def test_untouched_numbers_must_be_equal() -> None:
    """A tensor that no operation rounds, such as a frozen parameter, has no tolerance."""
    bounded = Bounded(lambda: {"x": torch.tensor([[1.0, 2.0]], dtype=torch.float64).t().clone()}, torch.bfloat16)
    assert bounded.tolerance["x"].tolist() == [[0.0], [0.0]]


def test_numbers_that_the_dtype_cannot_hold() -> None:
    """A constant may be rounded to the dtype, and no further."""
    bounded = Bounded(lambda: {"x": torch.full((2,), 0.1, dtype=torch.float64)}, torch.bfloat16)
    assert bounded.differs("x", torch.full((2,), 0.1, dtype=torch.bfloat16)) == ""
    assert bounded.differs("x", torch.full((2,), 0.11, dtype=torch.bfloat16)) != ""


def test_constants_are_rounded_together() -> None:
    """What rounding does to many constants adds up to the same error in every run, far larger than by chance."""

    def run(dtype: torch.dtype) -> Tensors:
        constants = [torch.full((1,), 1 + 2.0**-10, dtype=torch.float64).to(dtype) for _ in range(64)]
        total = constants[0] - 1
        for constant in constants[1:]:
            total = total + (constant - 1)
        return {"x": total}

    bounded = Bounded(lambda: run(torch.float64), torch.bfloat16)
    assert bounded.truth["x"].tolist() == [2.0**-4]
    assert bounded.differs("x", run(torch.bfloat16)["x"]) == ""
    assert bounded.differs("x", torch.full((1,), -(2.0**-3), dtype=torch.bfloat16)) != ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_of_rows_that_are_nearly_alike(dtype: torch.dtype) -> None:
    """Batch norm subtracts a mean that it has rounded: where rows hardly differ, little is left of them."""

    def run(dtype: torch.dtype) -> Tensors:
        module = nn.BatchNorm1d(8).to(dtype)
        x = torch.tensor([[-1.0], [1.0]]) * UNIT[of] * 16 + torch.linspace(0.7, 1.3, 8)
        output = module(x.to(of).to(dtype).requires_grad_())
        return {"output": output.detach(), "mean": module.running_mean, "variance": module.running_var}  # type: ignore[dict-item]

    of = dtype
    bounded = Bounded(lambda: run(torch.float64), dtype)
    found = run(dtype)
    assert wrong(bounded, found) == []
    assert bounded.differs("mean", found["mean"] * 1.5) != ""
    assert bounded.differs("variance", found["variance"] * 1.5) != ""


def test_elements_of_unknown_sign_share_their_samples() -> None:
    """Where all that is left is rounding errors, any may be as large as the largest."""

    def run() -> Tensors:
        x = torch.arange(1, 65, dtype=torch.float64) / 64
        return {"x": x.exp().log() - x}

    tolerance = Bounded(run, torch.float32).tolerance["x"]
    assert tolerance.unique().numel() == 1
    assert 2.0**-24 < float(tolerance[0]) < 2.0**-18


def test_elements_of_unknown_size_are_reported() -> None:
    """AdamW's first step goes by the sign of the gradient alone: where that is noise, the bound says so."""

    def run() -> Tensors:
        x = torch.nn.Parameter(torch.ones(64, dtype=torch.float64))
        weight = torch.tensor([[1.0], [0.0], [0.0], [1.0]], dtype=torch.float64).repeat(1, 64)
        weight[:, 0] = torch.tensor([1.0, 0.1, -0.1, -1.0])
        before = x.detach().clone()
        (weight.exp().log() * x).sum().backward()
        torch.optim.AdamW([x], lr=0.1, weight_decay=0.0).step()
        return {"moved": x.detach() - before}

    bounded = Bounded(run, torch.float32)
    moved = bounded.tolerance["moved"] > 0.1
    assert moved.tolist() == [True] + [False] * 63
    assert bounded.loose == 1 / 64
    assert "(1 are allowed more than their own size)" in bounded.differs("moved", torch.zeros(64) + 0.5)


def test_cancellation_is_allowed_for() -> None:
    """Where large numbers cancel, the bound is relative to them and not to the small result."""

    def run() -> Tensors:
        x = torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64) / 3
        return {"x": (x * 1000 + 0.001) - x * 1000}

    bounded = Bounded(run, torch.float32)
    assert bool((bounded.tolerance["x"] > 1e-5).all())
    assert bool((bounded.tolerance["x"] < 1e-2).all())


def test_more_ranks_are_allowed_more() -> None:
    """Each rank adds a rounding to what is summed over ranks."""

    def run() -> Tensors:
        x = torch.arange(1, 65, dtype=torch.float64).sqrt()
        return {"x": x.sum()}

    two, many = (float(Bounded(run, torch.bfloat16, world=n).tolerance["x"]) for n in (2, 64))
    assert two < many < 10 * two


def test_the_run_is_called_once() -> None:
    """The run may have effects: samples execute its operations, not the function."""
    calls = []
    Bounded(lambda: calls.append(0) or halves(), torch.float32)
    assert calls == [0]


def test_tensors_from_outside_are_taken_as_they_were() -> None:
    """What the run changes in place is as it was when a sample starts, and views of it change with it."""
    outside = torch.ones(4, dtype=torch.float64)
    part = outside[1:3]

    def run() -> Tensors:
        part.mul_(3)
        outside.add_(1)
        return {"all": outside.clone(), "part": part}

    bounded = Bounded(run, torch.float32)
    assert bounded.truth["all"].tolist() == [2, 4, 4, 2]
    assert bounded.truth["part"].tolist() == [4, 4]
    assert float(bounded.tolerance["part"].max()) < 1e-5


def test_random_numbers_are_drawn_once() -> None:
    """Dropout and the like, drawn from torch's generator, are the same in every sample."""

    def run() -> Tensors:
        x = torch.empty(100, dtype=torch.float64).uniform_() + torch.rand(100, dtype=torch.float64)
        return {"x": torch.nn.functional.dropout(x, 0.5)}

    assert float(Bounded(run, torch.float32).tolerance["x"].max()) < 1e-5


def test_same_seed_same_tolerance() -> None:
    """A verdict can be reproduced."""
    one, same, other = (Bounded(halves, torch.float32, seed=seed).tolerance["x"] for seed in (1, 1, 2))
    assert one.equal(same)
    assert not one.equal(other)


def test_operations_without_a_rule_for_samples() -> None:
    """An operation that cannot be executed for all samples at once is executed for one after the other."""

    def run() -> Tensors:
        x = torch.arange(1, 7, dtype=torch.float64).sqrt()
        return {"x": x[x > 1.5] / 3}

    bounded = Bounded(run, torch.float32)
    assert bounded.truth["x"].shape == (4,)
    assert bounded.differs("x", (torch.arange(3, 7).float().sqrt() / 3)) == ""
    assert 0 < float(bounded.tolerance["x"].max()) < 1e-5


def test_underflow_of_float16_is_unknown() -> None:
    """Where float16 may divide zero by zero, anything is allowed, and counted."""

    def run() -> Tensors:
        x = torch.tensor([1e-5, 1.0], dtype=torch.float64)
        return {"x": x / (x * x).sqrt()}

    bounded = Bounded(run, torch.float16)
    assert bounded.tolerance["x"].isinf().tolist() == [True, False]
    assert bounded.loose == 0.5


def test_bad_arguments() -> None:
    """What cannot be bounded is refused, with what can be."""
    with pytest.raises(ValueError, match="dtype must be one of float64, float32, float16, bfloat16, not torch.int8"):
        Bounded(halves, torch.int8)
    with pytest.raises(ValueError, match="at least 1, not 0 and 64"):
        Bounded(halves, torch.float32, world=0)
    with pytest.raises(KeyError):
        Bounded(halves, torch.float32).differs("y", torch.zeros(3))
