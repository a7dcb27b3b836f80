"""Buffers that compiled code changes in forwards, or an autograd.Function in its forward, its backward or in both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import dynamo, replicate, replicate_fsdp
from harness.stacks.collectives import functional
from suites.dynamo.backends import INDUCTOR

Change = Callable[[torch.Tensor, torch.Tensor], Any]

CHANGES: dict[str, Change] = {
    "number": lambda buffer, x: buffer.add_(10),
    "product": lambda buffer, x: buffer.mul_(3).add_(1),
    "other tensor": lambda buffer, x: buffer.copy_(x * 5),
    "part": lambda buffer, x: buffer[1:].sub_(2),
    "sum over ranks": lambda buffer, x: buffer.add_(functional.all_reduce(x * 3, "sum", dist.group.WORLD)),
}
"""Changes of a buffer by itself and by another tensor: in the backward, the saved input or the gradient."""


def counting(forward: Change | None, backward: Change | None, *, by_gradient: bool, factor: int = 2) -> type[Function]:
    """Return a function that multiplies its input by a factor and changes its second argument in its passes.

    If the factor is 1, it adds 1 instead, and passes on the gradient itself.
    """

    class Counting(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(buffer, x)
            if forward is not None:
                forward(buffer, x)
            return x + 1 if factor == 1 else x * factor

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            buffer, x = ctx.saved_tensors
            if backward is not None:
                backward(buffer, gradient if by_gradient else x)
            return gradient if factor == 1 else gradient * factor, None

    return Counting


PASSES = {
    "forward": [(change, None, False) for change in CHANGES.values()],
    "backward": [(None, change, by) for change in CHANGES.values() for by in (False, True)],
    "both": [(CHANGES[one], CHANGES[two], True) for one, two in (("number", "product"), ("product", "number"))],
}
"""The changes of the forward and of the backward, by the passes that have any."""

CAPTURED = "compiled autograd"
EVERY = {CAPTURED: 3, "inductor": 3}
"""Of how many changes one is tried, where compiling each takes long."""


def states(rank: Rank, functions: list[type[Function]], how: str) -> list[Any]:
    """Return each buffer after the forward and after the backward in two steps, with the input's gradient.

    ``how``: the backend, or nothing for uncompiled code.
    """

    def applied(x: torch.Tensor, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        return [each.apply(x + 1, buffer) + 0 for each, buffer in zip(functions, buffers, strict=True)]

    backend = "aot_eager" if how == CAPTURED else how
    run = dynamo.compiled(applied, backend=backend)[0] if how else applied
    buffers = [torch.tensor([1.0, 2.0 + rank.index], device=rank.device) for _ in functions]
    found = []
    for step in range(2):
        x = torch.tensor([1.0 + step, 3.0 + rank.index], device=rank.device, requires_grad=True)
        results = run(x, buffers)
        found.append([buffer.tolist() for buffer in buffers])
        with dynamo.compiled_backward("aot_eager") if how == CAPTURED else nullcontext():
            torch.stack([(y * (n + 3)).sum() for n, y in enumerate(results)]).sum().backward()
        assert x.grad is not None
        found += [[buffer.tolist() for buffer in buffers], x.grad.tolist()]
    return found


@requirement(
    "DYN-AUTOFN-1800",
    "A change in place by a compiled autograd.Function takes effect once, in the pass that makes it.",
    source="torch.autograd.Function; torch/_functorch/_aot_autograd: mutations of inputs in the forward or backward",
)
@pytest.mark.parametrize(
    ("how", "of"),
    [
        *(("aot_eager", of) for of in PASSES),
        *(("aot_eager_decomp_partition", of) for of in PASSES),
        *((CAPTURED, of) for of in PASSES if of != "forward"),
        pytest.param("inductor", "both", marks=INDUCTOR.marks),
    ],
)
@pytest.mark.world(2, timeout=180)
def test_changed_in_a_pass(world: World, how: str, of: str) -> None:
    """Change buffers in five ways in two steps, and compare them with uncompiled code after each pass."""

    def body(rank: Rank) -> list[Any]:
        changes = PASSES[of][:: EVERY.get(how, 1)]
        cases = [[counting(one, two, by_gradient=by) for one, two, by in changes]]
        if of == "backward" and not EVERY.get(how):
            cases += [[counting(one, two, by_gradient=by, factor=1)] for one, two, by in changes[:2]]
        found = [(states(rank, case, ""), states(rank, case, how)) for case in cases]
        return [each for each in found if each[0] != each[1]]

    assert_on_ranks([[]] * world.size, world.run(body))


def added(module: Any) -> None:
    module.level.add_(module.own)


def multiplied(module: Any) -> None:
    with torch.no_grad():
        module.level *= 2


def assigned(module: Any) -> None:
    module.level = module.level + module.own


def filled(module: Any) -> None:
    module.level.fill_(3.0)


class Leveled(nn.Module):
    """Multiply by a weight and by a buffer that a function changes first."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.weight, self.change = nn.Parameter(torch.ones(2)), change
        self.register_buffer("level", torch.ones(2))
        self.register_buffer("own", torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        result: torch.Tensor = x * self.weight * self.level
        return result


@requirement(
    "DYN-BUFFER-3667",
    "Gradients of a compiled replicated module use the values that its buffers had in the forward, which it changes "
    "before.",
    source="torch.nn.parallel.DistributedDataParallel; torch.compile: side effects; pytorch/pytorch#197039",
)
@pytest.mark.parametrize("change", [added, multiplied, assigned, filled])
@pytest.mark.world(2)
def test_gradient_of_a_changed_buffer(world: World, change: Callable[[Any], None]) -> None:
    """Change a buffer in place or assign a new one, in three steps on each stack that keeps buffers."""

    def body(rank: Rank) -> None:
        for stack in ("DDP", "replicate", "replicate_fsdp"):
            found = []
            for compiles in (False, True):
                module: Any = Leveled(change).to(rank.device)
                model: Any = module
                if stack == "DDP":
                    model = DistributedDataParallel(module)
                elif stack == "replicate":
                    replicate.apply(module, rank)
                else:
                    replicate_fsdp.apply(module, rank, groups=False)
                torch.compiler.reset()
                function = torch.compile(model, backend="aot_eager") if compiles else model
                steps = []
                for _ in range(3):
                    function(torch.full((2,), 1.0 + rank.index, device=rank.device)).sum().backward()
                    steps.append((replicate_fsdp.whole(module.weight.grad).tolist(), module.level.tolist()))
                    model.zero_grad()
                found.append(steps)
            assert found[0] == found[1], f"{stack}: right {found[0]}, compiled {found[1]}"

    world.run(body)
