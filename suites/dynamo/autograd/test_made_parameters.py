"""requires_grad in compiled code: of parameters that it makes, and of tensors that it writes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harness import Rank, World, requirement
from harness.stacks import dynamo
from suites.dynamo.objects import known, summed


def outcome(function: Callable[[torch.Tensor], Any], rank: Rank, *, learns: bool) -> Any:
    """Return what a function gives, which of its tensors require grad, and the gradient of what it was given."""
    x = (torch.arange(3.0, device=rank.device) + rank.index).requires_grad_(learns)
    results = function(x)
    tensors = [each for each in results if isinstance(each, torch.Tensor)]
    if needing := [each for each in tensors if each.requires_grad]:
        sum(each.sum() for each in needing).backward()
    gradient = None if x.grad is None else x.grad.tolist()
    return (
        known([each.detach() if isinstance(each, torch.Tensor) else each for each in results]),
        gradient,
        [(each.requires_grad, isinstance(each, nn.Parameter)) for each in tensors],
    )


MADE: dict[str, Callable[[torch.Tensor], nn.Parameter]] = {
    "by default": lambda x: nn.Parameter(x),
    "frozen": lambda x: nn.Parameter(x, requires_grad=False),
    "frozen by position": lambda x: nn.Parameter(x, False),
    "learning": lambda x: nn.Parameter(x, requires_grad=True),
    "by name": lambda x: nn.Parameter(data=x, requires_grad=False),
}
"""Parameters of a tensor."""


@requirement(
    "DYN-MADE-1900",
    "A parameter that compiled code makes of a tensor requires grad as it does in uncompiled code.",
    source="torch.nn.Parameter: requires_grad; torch.compile",
)
@pytest.mark.world(2)
def test_parameters(world: World) -> None:
    """Make parameters of an input, look at them, and multiply by a sum over ranks."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, make in MADE.items():

            def made(x: torch.Tensor, make: Callable[[torch.Tensor], nn.Parameter] = make) -> Any:
                p = make(x)
                return p * summed(x), p.requires_grad, isinstance(p, nn.Parameter), p.is_leaf

            right = outcome(made, rank, learns=False)
            compiled, counter = dynamo.compiled(made)
            found = [outcome(compiled, rank, learns=False) for _ in range(2)]
            wrong += [f"{name}: {right} uncompiled, {each} compiled" for each in found if each != right]
            if counter.graphs != 1:
                wrong.append(f"{name}: {counter.graphs} graphs")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


def _set_all(buffer: torch.Tensor, y: torch.Tensor) -> None:
    buffer[:] = y


def _set_one(buffer: torch.Tensor, y: torch.Tensor) -> None:
    buffer[1] = y.sum()


WRITTEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "index": _set_one,
    "slice": _set_all,
    "copy_": lambda buffer, y: buffer.copy_(y),
    "mul_": lambda buffer, y: buffer.mul_(y),
    "add_": lambda buffer, y: buffer.add_(y, alpha=2),
    "addcmul_": lambda buffer, y: buffer.addcmul_(y, y),
    "index_add_": lambda buffer, y: buffer.index_add_(0, torch.tensor([2, 0, 1], device=y.device), y),
    "masked_fill_": lambda buffer, y: buffer.masked_fill_(buffer == 1, y.sum()),
    "lerp_": lambda buffer, y: buffer.lerp_(y, 0.5),
}
"""How a tensor is written into a buffer in place."""


@requirement(
    "DYN-MADE-1901",
    "In compiled code, a tensor requires grad once one that requires grad was written into it, by whatever operation.",
    source="torch.Tensor: requires_grad, __setitem__, copy_; torch.compile",
)
@pytest.mark.world(2)
def test_written(world: World) -> None:
    """Write what does and does not require grad into a sum over ranks, and look at that before and after."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for learns in (True, False):

            def everything(x: torch.Tensor) -> list[Any]:
                results: list[Any] = []
                for write in WRITTEN.values():
                    buffer = summed(torch.ones_like(x.detach())) * 0.5
                    before = buffer.requires_grad
                    write(buffer, x * 2)
                    results += [buffer * 3, before, buffer.requires_grad, buffer.is_leaf]
                return results

            compiled, counter = dynamo.compiled(everything)
            right, found = outcome(everything, rank, learns=learns), outcome(compiled, rank, learns=learns)
            if found != right:
                wrong.append(f"{learns}: {right} uncompiled, {found} compiled")
            if counter.graphs != 1:
                wrong.append(f"{learns}: {counter.graphs} graphs")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


def _into(x: torch.Tensor, call: Callable[..., Any], *outs: torch.Tensor) -> Any:
    """Let a function of a sum over ranks write its results into tensors, and use their new shapes."""
    call(summed(x), out=outs if len(outs) > 1 else outs[0])
    return [out * out.shape[0] for out in outs], [tuple(out.shape) for out in outs]


INTO: dict[str, tuple[Callable[..., Any], int]] = {
    "add": (lambda y, out: torch.add(y, 1, out=out), 1),
    "cat": (lambda y, out: torch.cat([y, y], out=out), 1),
    "sort": (lambda y, out: torch.sort(y, out=out), 2),
    "topk": (lambda y, out: torch.topk(y, 2, out=out), 2),
    "max": (lambda y, out: torch.max(y.view(1, -1).repeat(2, 1), 1, out=out), 2),
}
"""Functions with out=, and how many results they have, of which a second one has whole numbers."""


@requirement(
    "DYN-MADE-1902",
    "In compiled code, out= resizes each empty tensor to its result's shape, for functions of one result or several.",
    source="torch.sort: out; torch.compile",
)
@pytest.mark.world(2)
def test_out(world: World) -> None:
    """Give empty tensors and tensors of the right shape; graph breaks are allowed."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, (call, count) in INTO.items():
            compiled, _ = dynamo.compiled(_into, fullgraph=False)
            for fits in (False, True):
                found: list[Any] = []
                for run in (_into, compiled):
                    x = torch.tensor([3.0, 1.0, 2.0], device=rank.device) * (rank.index + 1)
                    kinds = (torch.float32, torch.int64)[:count]
                    outs = [torch.empty(0, dtype=kind, device=rank.device) for kind in kinds]
                    if fits:
                        call(x, out=tuple(outs) if count > 1 else outs[0])
                        outs = [out * 0 for out in outs]
                    try:
                        found.append(known([*run(x, call, *outs), outs]))
                    except Exception as error:  # uncompiled code raises none
                        found.append(repr(error)[:200])
                if found[0] != found[1]:
                    wrong.append(f"{name}, {fits}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(3, 2, device=x.device).t()


def _every_second(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2, 6, device=x.device)[:, ::2]


def _part(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, 5, device=x.device)[1:3, 1:4]


PLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": _transposed,
    "every second column": _every_second,
    "part": _part,
}
"""Tensors of 2 x 3 elements that do not lie side by side."""


@requirement(
    "DYN-MADE-3350",
    "In compiled code, a tensor that is given as out= keeps its strides, as do the tensors that it is a part of.",
    source="torch.add: out; torch.compile: the compiled function does what the function does",
)
@pytest.mark.world(2)
def test_out_of_strides(world: World) -> None:
    """Write functions of a sum over ranks into tensors that the code makes or is given, and return them."""
    calls: list[Callable[..., Any]] = [
        lambda y, out: torch.add(y, 1, out=out),
        lambda y, out: torch.mm(y, y.t() @ y, out=out),
        lambda y, out: torch.cat([y[:1], y[1:]], out=out),
    ]

    def step(x: torch.Tensor, given: list[torch.Tensor]) -> Any:
        y = summed(x)
        made = [make(x) for make in PLACED.values()]
        for call, one, other in zip(calls, made, given, strict=True):
            call(y, one)
            call(y, other)
        return made

    def body(rank: Rank) -> None:
        x, found = torch.arange(6.0, device=rank.device).view(2, 3) + rank.index, []
        for call in step, dynamo.compiled(step, fullgraph=False)[0]:
            given = [make(x) for make in PLACED.values()]
            made = call(x, given)
            whole = [torch.as_strided(each, (each.untyped_storage().nbytes() // 4,), (1,), 0) for each in given]
            found.append([known([*made, *given, *whole]), [each.stride() for each in (*made, *given)]])
        assert found[1] == found[0]

    world.run(body)
