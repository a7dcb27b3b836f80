"""Modules with parallel styles that are called with any arguments, have hooks of their own, or run in autocast."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fixtures.placements import part
from fixtures.tensors import numbers
from harness import Rank, World, assert_same, requirement
from harness.stacks import training

SOURCE = "torch.distributed.tensor.parallel"


class Linear(nn.Linear):
    """A linear layer with a factor, as an adapter may have, which is one unless it is named."""

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return super().forward(x) * factor


class Table(nn.Embedding):
    """An embedding with such a factor."""

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return super().forward(x) * factor


class Norm(nn.Module):
    """A weight for each feature, with such a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return x * self.weight * factor


def distributed(module: nn.Module, mesh: Any) -> nn.Module:
    """Distribute a module with functions that leave inputs and outputs as they are, or return nothing."""
    return distribute_module(module, mesh, input_fn=lambda m, x, on: None, output_fn=lambda m, y, on: y)


Apply = Callable[[nn.Module, Any], nn.Module]


def styled(style: Callable[[], ParallelStyle]) -> Apply:
    return lambda module, mesh: parallelize_module(module, mesh, style())


WHOLE, ROWS = Replicate(), Shard(0)
CASES: dict[str, tuple[Callable[[], nn.Module], Apply, Placement, Placement]] = {
    "columns": (lambda: Linear(6, 4), styled(ColwiseParallel), WHOLE, Shard(1)),
    "columns of rows": (lambda: Linear(6, 4), styled(lambda: ColwiseParallel(input_layouts=ROWS)), ROWS, Shard(1)),
    "rows": (lambda: Linear(6, 4), styled(RowwiseParallel), Shard(1), WHOLE),
    "rows to rows": (lambda: Linear(6, 4), styled(lambda: RowwiseParallel(output_layouts=ROWS)), Shard(1), ROWS),
    "columns of a table": (lambda: Table(4, 6), styled(ColwiseParallel), WHOLE, Shard(1)),
    "rows of a table": (lambda: Table(4, 6), styled(lambda: RowwiseParallel(input_layouts=WHOLE)), WHOLE, WHOLE),
    "sequence": (Norm, styled(lambda: SequenceParallel(sequence_dim=0)), ROWS, ROWS),
    "input": (
        Norm,
        styled(
            lambda: PrepareModuleInput(input_layouts=ROWS, desired_input_layouts=WHOLE, use_local_output=True),
        ),
        ROWS,
        WHOLE,
    ),
    "output": (
        Norm,
        styled(lambda: PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=ROWS)),
        WHOLE,
        ROWS,
    ),
}
"""Modules, what makes them parallel, and the layouts of their local inputs and outputs."""


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@requirement(
    "TP-PLAN-5530",
    "Keywords for which a style has no layout reach the module's forward as they are.",
    source=f"{SOURCE}: ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, PrepareModuleOutput; "
    "torch.distributed.tensor.distribute_module",
)
@requirement(
    "TP-PLAN-5531",
    "Forward hooks that a module had before see its inputs before styles change them, and its outputs as they are.",
    source="torch.distributed.tensor.distribute_module: input_fn, output_fn: 'installed as a module forward_pre_hook', "
    "'forward_hook'; torch.nn.Module.register_forward_pre_hook: called in the order of registration",
)
@pytest.mark.world(2)
def test_keywords_and_hooks(world: World) -> None:
    """Register hooks before and after, and call twice without the keyword and with two values of it."""

    def body(rank: Rank) -> None:
        mesh, x = rank.mesh(), (numbers(4, 6) % 5).to(rank.device)
        for name, (make, apply, given, wanted) in CASES.items():
            plain = make().to(rank.device)
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.copy_(numbers(*parameter.shape) % 3)
            module = copy.deepcopy(plain)
            seen: dict[str, Any] = {}

            def note(key: str, seen: Any = seen) -> Any:
                return lambda module, *values: seen.update({key: values[-1][0] if key[0] == "i" else values[-1]})

            module.register_forward_pre_hook(note("input before"))
            module.register_forward_hook(note("output before"))
            assert apply(module, mesh) is module
            module.register_forward_pre_hook(note("input after"))
            module.register_forward_hook(note("output after"))
            whole = torch.arange(4, device=rank.device) if isinstance(plain, nn.Embedding) else x
            own = part(whole, rank, given).clone()
            for options in {}, {"factor": 2.0}, {"factor": 3.0}, {}:
                what = f"{name}, {options}"
                seen.clear()
                output = module(own, **options)
                assert seen["input before"] is own, what
                assert seen["output after"] is output, what
                assert_same(part(plain(whole, **options).detach(), rank, wanted), local(output).detach() + 0, what)
                if name not in ("input", "output"):
                    assert isinstance(seen["input after"], DTensor), what
                    assert isinstance(seen["output before"], DTensor), what
        layer = distributed(Linear(6, 4).to(rank.device), mesh)
        replicas = distribute_tensor(x, mesh, [WHOLE], src_data_rank=None)
        once: Any = layer(replicas)
        assert_same(once.to_local().detach() * 3, layer(replicas, factor=3.0).to_local().detach(), "distribute_module")

    world.run(body)


@requirement(
    "TP-PLAN-9010",
    "A copy of a parallel module computes with its own parameters, and does not keep the first module alive.",
    source=f"{SOURCE}.parallelize_module; torch.distributed.tensor.distribute_module; torch.nn.Module",
)
@pytest.mark.world(2)
def test_copies(world: World) -> None:
    """Copy each before its first call, after a backward and once it is a copy, and change the parameters of each."""

    def body(rank: Rank) -> None:
        mesh, x = rank.mesh(), (numbers(4, 6) % 5).to(rank.device)
        first: list[tuple[str, Any]] = []
        kept = []
        for name, (make, apply, given, wanted) in CASES.items():
            plain = make().to(rank.device)
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.copy_(numbers(*parameter.shape) % 3)
            whole = torch.arange(4, device=rank.device) if isinstance(plain, nn.Embedding) else x

            def check(
                module: Any, times: int, what: str, plain: Any = plain, case: Any = (whole, given, wanted)
            ) -> None:
                whole, given, wanted = case
                right = copy.deepcopy(plain)
                with torch.no_grad():
                    for parameter in right.parameters():
                        parameter.mul_(times)
                module.zero_grad()
                expected, found = right(whole, factor=2.0), local(module(part(whole, rank, given).clone(), factor=2.0))
                assert_same(part(expected.detach(), rank, wanted), found.detach() + 0, what)
                expected.sum().backward()
                found.sum().backward()
                for (key, one), other in zip(right.named_parameters(), module.parameters(), strict=True):
                    assert_same(one.grad, training.whole(other.grad), f"{what}: {key}")

            modules = [apply(copy.deepcopy(plain), mesh)]
            modules += [copy.deepcopy(modules[0])]
            check(modules[0], 1, f"{name}: first")
            modules += [copy.deepcopy(modules[0]), copy.deepcopy(modules[1])]
            with torch.no_grad():
                for times, module in enumerate(modules, 1):
                    for parameter in module.parameters():
                        parameter.mul_(times)
            for times, module in [*enumerate(modules, 1), (1, modules[0])]:
                check(module, times, f"{name}: {times}")
            first.append((name, weakref.ref(modules.pop(0))))
            kept += modules
        del modules, module, parameter
        gc.collect()
        assert [name for name, module in first if module() is not None] == []

    world.run(body)


@requirement(
    "TP-CAST-5532",
    "In autocast, parallel layers have one device's output in its dtype, while gradients have the parameters' dtype.",
    source=f"{SOURCE}: ColwiseParallel, RowwiseParallel, SequenceParallel; torch.autocast",
)
@pytest.mark.world(2)
def test_autocast(world: World) -> None:
    """Layers by columns and by rows, over whole or divided sequences, in autocast or in float32, backward outside."""
    plans: dict[str, dict[str, ParallelStyle]] = {
        "whole": {"0": ColwiseParallel(), "2": RowwiseParallel()},
        "rows": {"0": ColwiseParallel(input_layouts=ROWS), "2": RowwiseParallel(output_layouts=ROWS)},
        "DTensors": {
            "0": ColwiseParallel(use_local_output=False),
            "2": RowwiseParallel(use_local_output=False, output_layouts=ROWS),
        },
    }

    def body(rank: Rank) -> None:
        x = (numbers(4, 6) % 3).to(rank.device)
        for (name, plan), cast in itertools.product(plans.items(), (True, False)):
            plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(rank.device)
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.copy_(numbers(*parameter.shape) % 2)
            module = parallelize_module(copy.deepcopy(plain), rank.mesh(), plan)
            given, wanted = (ROWS if name == "rows" else WHOLE), (WHOLE if name == "whole" else ROWS)
            what = f"{name}, {cast=}"
            with torch.autocast(rank.device.type, torch.bfloat16) if cast else nullcontext():
                expected, found = plain(x), local(module(part(x, rank, given)))
            assert found.dtype == expected.dtype == (torch.bfloat16 if cast else torch.float32), what
            assert_same(part(expected.detach(), rank, wanted), found.detach() + 0, what)
            expected.sum().backward()
            found.sum().backward()
            for (key, right), parameter in zip(plain.named_parameters(), module.parameters(), strict=True):
                gradient: Any = parameter.grad
                assert gradient.dtype == torch.float32, f"{what}: {key}"
                assert_same(right.grad, gradient.full_tensor(), f"{what}: {key}")

    world.run(body)


class Scaled(nn.Linear):
    """A linear layer that multiplies its result by an argument."""

    def forward(self, x: Any, factor: float = 1.0, shift: float = 0.0) -> Any:  # type: ignore[override]
        return super().forward(x) * factor + shift


SCALED: dict[str, Any] = {
    "columns": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rows": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequences": lambda: SequenceParallel(use_local_output=True),
}
FORMS: dict[str, Callable[..., Any]] = {
    "numbers by name": lambda module, x: module(x, factor=3.0, shift=0.5),
    "by position": lambda module, x: module(x, 3.0, 0.5),
    "input by name": lambda module, x: module(x=x, factor=3.0, shift=0.5),
}
"""Forms of a call."""


@requirement(
    "TP-STYLE-5385",
    "A parallelized module gets every argument of a call.",
    source="torch.distributed.tensor.parallel: ColwiseParallel, RowwiseParallel, SequenceParallel; torch.nn.Module",
)
@pytest.mark.parametrize("how", FORMS)
@pytest.mark.world(2)
def test_arguments(world: World, how: str) -> None:
    """Call a module with its input and two numbers, in each style and form."""

    def body(rank: Rank) -> None:
        for name, style in SCALED.items():
            module: Any = Scaled(2, 2).to(rank.device)
            for parameter in module.parameters():
                nn.init.ones_(parameter)
            x = torch.ones(1, 1, 2, device=rank.device)
            expected = module(x, 3.0, shift=0.5)
            parallelize_module(module, rank.mesh(), style())
            found = FORMS[how](module, x)
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(found, expected), f"{name}: {found.tolist()}, expected {expected.tolist()}"

    world.run(body)
