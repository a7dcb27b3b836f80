"""Optimizers of parameters that are DTensors, on one mesh or on several."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import optim
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fixtures.placements import MORE_OPERATORS, laid_out
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.5, "dampening": 0.25}, {"momentum": 0.5, "nesterov": True, "maximize": True}],
    "Adam": [{}, {"amsgrad": True, "maximize": True}],
    "AdamW": [{}, {"amsgrad": True, "betas": (0.5, 0.75)}],
    "Adagrad": [{}, {"lr_decay": 0.25, "initial_accumulator_value": 0.5, "maximize": True}],
    "RMSprop": [{}, {"momentum": 0.5, "centered": True, "alpha": 0.75, "maximize": True}],
    "Adadelta": [{"rho": 0.75, "maximize": True}],
    "NAdam": [{"decoupled_weight_decay": True}],
    "RAdam": [{}],
    "Adamax": [{"maximize": True}],
    "ASGD": [{"lambd": 0.25, "alpha": 0.5, "t0": 1, "maximize": True}],
    "Adafactor": [{}],
}
FORMS: dict[str, dict[str, Any]] = {
    "each": {"foreach": False},
    "lists": {"foreach": True},
    "fused": {"fused": True},
    "fused, rate as a tensor": {"fused": True, "lr": torch.tensor(0.125)},
}
FUSED = ("Adam", "AdamW")
"""Optimizers that are fused for DTensors, too."""


def cases() -> Iterator[tuple[str, str, Callable[[Any], optim.Optimizer]]]:
    """Yield each optimizer with its options, and decay, in each form that it has."""
    for name, form in itertools.product(OPTIONS, FORMS):
        if form in ("each", "lists") or name in (*FUSED, "SGD", "Adagrad"):
            for options in OPTIONS[name]:
                words = {"lr": 0.125, "weight_decay": 0.25, **options, **FORMS[form]}
                yield name, form, lambda params, name=name, words=words: getattr(optim, name)(params, **words)


def value(at: int) -> torch.Tensor:
    return numbers(5, 3).double() + at


def gradient(at: int, step: int) -> torch.Tensor:
    """Return small whole numbers of both signs."""
    return (numbers(5, 3).double() * 7 + at + step) % 11 - 5


@requirement(
    "TP-OPTIM-01",
    "An optimizer of DTensors gives one device's parameters after each step, in every form, or an error on every rank.",
    source="torch.optim: foreach, fused; torch.distributed.tensor.DTensor",
)
@requirement(
    "TP-OPTIM-02",
    "An optimizer's state is placed as its parameter, and an element-wise step does not communicate.",
    source="torch.optim; torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2)
def test_steps(world: World) -> None:
    """Take two steps with parameters on two meshes, in rows and columns, one of which leaves shards that differ."""

    def body(rank: Rank) -> list[str]:
        flat, deep = rank.mesh(), rank.mesh(1, 2, names=("dp", "tp"))
        layouts: list[tuple[Any, tuple[Placement, ...]]] = [(flat, (Shard(0),)), (flat, (Shard(1),))]
        refused = []
        for name, form, make in cases():
            what = f"{name}, {form}"
            # PyTorch 2.13 refuses one operation of ASGD on a list of several meshes
            placed = layouts if (name, form) == ("ASGD", "lists") else [*layouts, (deep, (Replicate(), Shard(0)))]
            plain = [value(i).to(rank.device).requires_grad_() for i in range(len(placed))]
            given: list[Any] = [
                DTensor.from_local(laid_out(p.detach(), *at).clone(), *at, **SIZE).requires_grad_()
                for p, at in zip(plain, placed, strict=True)
            ]
            alone, sharded = make(plain), make(given)
            at = messages.mark()
            try:
                for step in range(2):
                    for i, (p, d) in enumerate(zip(plain, given, strict=True)):
                        p.grad = gradient(i, step).to(rank.device)
                        d.grad = DTensor.from_local(laid_out(p.grad, *placed[i]).contiguous(), *placed[i], **SIZE)
                    alone.step()
                    sharded.step()
            except (RuntimeError, NotImplementedError):
                refused.append(what)
                continue
            assert not messages.since(at), what
            for i, (p, d) in enumerate(zip(plain, given, strict=True)):
                close(p.detach(), d.detach(), placed[i], f"{what}: {i}")
                assert alone.state[p].keys() == sharded.state[d].keys(), what
                for key, right in alone.state[p].items():
                    found = sharded.state[d][key]
                    if isinstance(right, torch.Tensor) and right.dim():
                        close(right, found, placed[i], f"{what}: {key} of {i}")
                    else:
                        assert float(found) == float(right), f"{what}: {key}"
        return refused

    results = world.run(body)
    assert_on_ranks([results[0]] * world.size, results)
    works = {f"{name}, {form}" for name, form, _ in cases() if form in ("each", "lists") or name in FUSED}
    assert set(results[0]) <= {"Adafactor, each", "Adafactor, lists"} | {f"{n}, {f}" for n, f, _ in cases()} - works


SIZE: Any = {"run_check": False, "shape": torch.Size((5, 3)), "stride": (3, 1)}


def close(right: torch.Tensor, found: Any, placed: Any, what: str) -> None:
    """Assert that a DTensor is placed so, and has this rank's part of a tensor."""
    assert isinstance(found, DTensor), what
    assert (found.device_mesh, found.placements) == placed, what
    torch.testing.assert_close(found.to_local(), laid_out(right, *placed), rtol=1e-12, atol=1e-12, msg=what)
