"""Sequences of checkpointed segments, contexts that say how checkpoints run, and several backwards of one region."""

from __future__ import annotations

import itertools
import warnings
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    GraphExecGroup,
    checkpoint,
    checkpoint_sequential,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp

SOURCE = "torch.utils.checkpoint"
LAYERS = 5


class Layer(nn.Module):
    """Multiply by a weight; note each call with a random number in a list that several layers share."""

    def __init__(self, index: int, calls: list[tuple[int, float]]) -> None:
        super().__init__()
        self.index, self.calls = index, calls
        self.weight = nn.Parameter(torch.full((4,), 1.0 + index % 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[4] to float[4]."""
        self.calls.append((self.index, torch.rand(1, device=x.device).item()))
        return x * self.weight


class Sequence(nn.Module):
    """Layers in segments, as a module or as a list with a function at its end; or without checkpoints."""

    def __init__(self, kind: str, segments: int, **options: Any) -> None:
        super().__init__()
        self.calls: list[tuple[int, float]] = []
        self.layers = nn.Sequential(*(Layer(index, self.calls) for index in range(LAYERS)))
        self.kind, self.segments, self.options = kind, segments, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[4] to float[4]."""
        if self.kind == "plain":
            result: torch.Tensor = self.layers(x)
            return result * result
        functions: Any = self.layers if self.kind == "module" else [*self.layers, torch.square]
        result = checkpoint_sequential(functions, self.segments, x, **self.options)
        return result * result if self.kind == "module" else result


def stepped(rank: Rank, model: Any) -> tuple[list[float], list[Any]]:
    """Return the output of a step and its gradients, those of the input at last."""
    x = torch.full((4,), 1.0 + rank.index, device=rank.device, requires_grad=True)
    y = model(x * 1.0)
    torch.rand(3, device=rank.device)
    y.sum().backward()
    assert x.grad is not None
    return y.tolist(), [*(g.tolist() for g in replicate_fsdp.gradients(model).values()), x.grad.tolist()]


@requirement(
    "RFSDP-CKPT-5480",
    "A sequence in checkpointed segments has the output with the gradients that it has without, however many segments.",
    source=f"{SOURCE}.checkpoint_sequential: functions, segments, use_reentrant",
)
@requirement(
    "RFSDP-CKPT-5481",
    "The backward computes each segment of a checkpointed sequence but the last again, with its random numbers.",
    source=f"{SOURCE}.checkpoint_sequential: 'All segments except the last', preserve_rng_state",
)
@pytest.mark.world(2)
def test_segments(world: World) -> None:
    """Five managed layers, as a module or as a list with a function, in one to five segments; two steps of each."""

    def body(rank: Rank) -> None:
        every = itertools.cycle(ways(rank).items())
        for number, (kind, reentrant, segments) in enumerate(
            itertools.product(("module", "list"), (False, True), (1, 2, 3, LAYERS))
        ):
            way, manage = next(every)
            restores = number % 5 != 0
            options: dict[str, Any] = {"use_reentrant": reentrant} | ({} if restores else {"preserve_rng_state": False})
            what = f"{way}, {kind}, {reentrant=}, {segments=}, {restores=}"
            models: list[Any] = [
                Sequence("plain", 1),
                Sequence(kind, segments, **options),
            ]
            for model in models:
                model.to(rank.device)
                for layer in model.layers:
                    manage(layer)
                manage(model)
            right, own = models
            for step in range(1 + (segments == 2)):
                own.zero_grad()
                right.zero_grad()
                own.calls.clear()
                due = stepped(rank, right)
                assert stepped(rank, own) == due, f"{what}, step {step}"
                first = [index for index, _ in own.calls[:LAYERS]]
                again = [index for index, _ in own.calls[LAYERS:]]
                assert first == list(range(LAYERS)), f"{what}: {first}"
                assert sorted(again) == list(range(len(again))), f"{what}: computed again: {again}"
                assert len(again) < LAYERS + (kind == "list"), f"{what}: computed again: {again}"
                runs = [i for n, i in enumerate(again) if n == 0 or i != again[n - 1] + 1]
                assert runs == sorted(runs, reverse=True), f"{what}: computed again: {again}"
                assert len(runs) == segments - 1, f"{what}: computed again: {again}"
                drawn_first = dict(own.calls[:LAYERS])
                assert all((drawn_first[i] == drawn) == restores for i, drawn in own.calls[LAYERS:]), what

    world.run(body)


class Region(nn.Module):
    """A checkpointed product that is squared twice; count the calls that come to their end, of which later ones may
    have another shape."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.begun, self.ended, self.changes = 0, 0, changes

    def region(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.begun += 1
        shape = (2, 2) if self.changes and self.begun > 1 else (4,)
        y = (x * self.weight).view(shape).square()
        result = y.flatten().square(), y.flatten().square().square()
        self.ended += 1
        return result

    def forward(self, x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Map float[4] to two of float[4]."""
        result: tuple[torch.Tensor, torch.Tensor] = checkpoint(self.region, x, use_reentrant=False, **options)
        return result[0] * 1, result[1] * 1


STOPS: list[tuple[tuple[bool, ...], bool, bool]] = [
    ((), True, True),
    ((), False, False),
    ((False,), True, False),
    ((True,), False, True),
    ((True, False), True, False),
    ((False, True), False, True),
]
"""Values of set_checkpoint_early_stop from the outside inwards, the argument's, and whether the recomputation stops."""
DEBUGS: list[tuple[tuple[bool | None, ...], bool, bool]] = [
    ((), True, True),
    ((True,), False, True),
    ((False,), True, False),
    ((True, None), False, False),
]
"""Values of set_checkpoint_debug_enabled, that of the argument, and whether the error has the operators' names."""


@requirement(
    "RFSDP-CKPT-5482",
    "The innermost set_checkpoint_early_stop around a forward decides whether the recomputation stops early, wherever "
    "the backward is.",
    source=f"{SOURCE}.set_checkpoint_early_stop: 'only needs to be active when forward is run'",
)
@requirement(
    "RFSDP-CKPT-5483",
    "The error of a region that is computed again in another way lists operators if debug says so, or the innermost "
    "set_checkpoint_debug_enabled.",
    source=f"{SOURCE}: checkpoint: debug; set_checkpoint_debug_enabled: 'To defer to the local setting, pass None'",
)
@pytest.mark.world(2)
def test_contexts(world: World) -> None:
    """Nest contexts around the forward of a managed module, leave them by an error once, and go backward in others."""

    def body(rank: Rank) -> None:
        x = torch.full((4,), 2.0, device=rank.device)
        every = itertools.cycle(ways(rank).values())
        for values, argument, stops in STOPS:
            module = next(every)(Region().to(rank.device))
            with ExitStack() as stack:
                for value in values:
                    stack.enter_context(set_checkpoint_early_stop(value))
                loss = module(x, early_stop=argument)[0].sum()
            with set_checkpoint_early_stop(not stops):
                loss.backward()
            assert (module.begun, module.ended) == (2, 1 if stops else 2), (values, argument)
        for values, argument, named in DEBUGS:
            module = next(every)(Region(True).to(rank.device))
            with ExitStack() as stack:
                for wanted in values:
                    stack.enter_context(set_checkpoint_debug_enabled(wanted))
                loss = module(x, debug=argument)[0].sum()
            with pytest.raises(CheckpointError) as refused:
                loss.backward()
            assert ("aten.pow" in str(refused.value)) == named, (values, argument, str(refused.value)[:200])
        module = next(every)(Region().to(rank.device))
        with set_checkpoint_early_stop(False):
            with set_checkpoint_early_stop(True):
                module(x)
            loss = module(x)[0].sum()
        loss.backward()
        assert (module.begun, module.ended) == (3, 3)
        with pytest.raises(ZeroDivisionError), set_checkpoint_early_stop(False), set_checkpoint_debug_enabled(True):
            raise ZeroDivisionError
        module = next(every)(Region().to(rank.device))
        module(x)[0].sum().backward()
        assert module.ended == 1

    world.run(body)


class Branches(nn.Module):
    """Two products of the input in one checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))
        self.calls = 0

    def region(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return (x * self.one).square(), (x * self.other).square()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map float[4] to two of float[4]."""
        one, other = checkpoint(self.region, x, use_reentrant=False)
        return one * 1, other * 1


@requirement(
    "RFSDP-CKPT-5484",
    "Several backwards within one GraphExecGroup compute a checkpointed region again once.",
    source=f"{SOURCE}.GraphExecGroup: 'will trigger recompute at most once, even if there are multiple calls'",
)
@pytest.mark.world(2)
def test_several_backwards(world: World) -> None:
    """Two outputs of a managed region, each with a backward of its own, in one group, in two, or without; two steps."""

    def body(rank: Rank) -> None:
        x = torch.full((4,), 1.0 + rank.index, device=rank.device)
        for (way, manage), grouped in itertools.product(ways(rank).items(), ("one", "each", "none")):
            module: Any = manage(Branches().to(rank.device))
            for step in range(2):
                what = f"{way}, {grouped}, step {step}"
                module.zero_grad()
                module.calls = 0
                outputs = module(x)
                with GraphExecGroup() if grouped == "one" else nullcontext():
                    for output in outputs:
                        with GraphExecGroup() if grouped == "each" else nullcontext():
                            output.sum().backward()
                found = {name: g.tolist() for name, g in replicate_fsdp.gradients(module).items()}
                assert found == {"one": [5.0] * 4, "other": [10.0] * 4}, f"{what}: {found}"  # of 1 and of 2
                assert grouped != "one" or module.calls == 2, f"{what}: {module.calls} calls"

    world.run(body)


class Nested(nn.Module):
    """Multiply tensors of a dict and of a list in a checkpointed region, which may be told to add a number."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weight, self.options = nn.Parameter(torch.full((4,), 3.0)), options

    def region(self, x: torch.Tensor, given: dict[str, Any], **more: float) -> torch.Tensor:
        return x * given["x"] * given["list"][0] * self.weight.square() + more.get("number", 0.0)

    def forward(self, x: torch.Tensor, given: dict[str, Any], **more: float) -> torch.Tensor:
        """Map float[4] to float[4]."""
        result: torch.Tensor = checkpoint(self.region, x, given, **more, **self.options)
        return result * 1


@requirement(
    "RFSDP-CKPT-5487",
    "A non-reentrant checkpoint has gradients for tensors in containers by every way of a backward, with any inputs.",
    source=f"{SOURCE}.checkpoint: 'the non-reentrant version supports all ways of performing the backward pass'",
)
@requirement(
    "RFSDP-CKPT-5488",
    "A reentrant checkpoint refuses a backward with inputs, with no gradients if none of its inputs requires one.",
    source=f"{SOURCE}.checkpoint: 'only supports the torch.autograd.backward API for the backward pass without its "
    "inputs argument'; 'the checkpointed part of the model will not have gradients'",
)
@pytest.mark.world(2)
def test_ways_of_backward(world: World) -> None:
    """Ask for gradients of all leaves, of one or two, or by autograd.grad, and pass inputs that require none."""

    def body(rank: Rank) -> None:
        for way, manage in ways(rank).items():
            for how in ("all", "inputs", "grad", "no input"):
                module: Any = manage(Nested(use_reentrant=False).to(rank.device))
                leaves = [
                    torch.full((4,), value, device=rank.device, requires_grad=how != "no input")
                    for value in (2.0, 5.0, 7.0)
                ]
                loss = module(leaves[0], {"x": leaves[1], "list": [leaves[2]]}, number=1.0).sum()
                assert loss.item() == 4 * (70.0 * 9 + 1), f"{way}, {how}"
                due = [35.0 * 9, 14.0 * 9, 10.0 * 9]
                if how == "grad":
                    found = [g.tolist() for g in torch.autograd.grad(loss, leaves[1:])]
                    assert found == [[value] * 4 for value in due[1:]], f"{way}: {found}"
                    continue
                loss.backward(**({"inputs": leaves[1:2]} if how == "inputs" else {}))
                expected = {"all": due, "inputs": [None, due[1], None], "no input": [None] * 3}[how]
                got = [None if leaf.grad is None else leaf.grad.tolist() for leaf in leaves]
                assert got == [None if value is None else [value] * 4 for value in expected], f"{way}, {how}: {got}"
                if how != "inputs":
                    assert replicate_fsdp.gradients(module)["weight"].tolist() == [420.0] * 4, f"{way}, {how}"
            module = manage(Nested(use_reentrant=True).to(rank.device))
            x, one = torch.ones(4, device=rank.device, requires_grad=True), torch.ones(4, device=rank.device)
            given = {"x": one, "list": [one]}
            for ask in (
                lambda loss, x=x: loss.backward(inputs=[x]),
                lambda loss, x=x: torch.autograd.grad(loss, x),
            ):
                with pytest.raises(RuntimeError, match="use_reentrant"):
                    ask(module(x, given).sum())
                assert x.grad is None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert not module(one, given).requires_grad, way

    world.run(body)
