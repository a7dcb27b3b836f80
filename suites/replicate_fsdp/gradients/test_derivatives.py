"""Functions of torch.autograd over managed modules: inputs of a backward, and changes of what is saved for one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp
from suites.replicate_fsdp.gradients.test_transforms import Square

GIVEN: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": lambda every: (each for each in every),
    "iterator": iter,
    "values": lambda every: dict(enumerate(every)).values(),
    "parameters": lambda every: nn.ParameterList(every).parameters(),
    "set": set,
}
"""Iterables of tensors, some of which have no length or run out."""


class Sum(nn.Module):
    """Multiply the sum of the inputs by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, every: Iterable[torch.Tensor]) -> torch.Tensor:
        return self.weight * functools.reduce(torch.add, every)


@requirement(
    "RFSDP-INPUTS-3500",
    "backward takes its inputs in any iterable, or as a tensor of any shape, and adds to the gradients of no other.",
    source="torch.autograd.backward: inputs (sequence[Tensor] or Tensor); torch.Tensor.backward",
)
@pytest.mark.parametrize("given", [*GIVEN, "one", "scalar"])
@pytest.mark.world(2)
def test_inputs(world: World, given: str) -> None:
    """Name two of three inputs of a managed module, or one of them, for two backwards."""

    def body(rank: Rank) -> None:
        for (way, manage), by_function in itertools.product(ways(rank).items(), (False, True)):
            model: Any = manage(Sum().to(rank.device))
            scalar = torch.tensor(1.0, device=rank.device, requires_grad=True)
            every = [nn.Parameter(torch.full((2,), 1.0 + i, device=rank.device)) for i in range(3)]
            named: list[torch.Tensor] = [scalar] if given == "scalar" else every[: 1 if given == "one" else 2]
            for number in (1, 2):
                loss = (model(every) * scalar).sum()
                inputs = GIVEN[given](named) if given in GIVEN else named[0]
                if by_function:
                    torch.autograd.backward(loss, inputs=inputs)
                else:
                    loss.backward(inputs=inputs)
                for tensor in (scalar, *every):
                    right = 36.0 if tensor is scalar else [3.0, 3.0]
                    found = None if tensor.grad is None else (tensor.grad / number).tolist()
                    what = f"{way}, {by_function=}, backward {number}"
                    assert found == (right if any(tensor is each for each in named) else None), what
                assert all(p.grad is None for p in model.parameters()), way

    world.run(body)


@requirement(
    "RFSDP-INPUTS-3501",
    "Within allow_mutation_on_saved_tensors a step between a forward and its backward changes no gradient, in any form "
    "of the optimizer.",
    source="torch.autograd.graph.allow_mutation_on_saved_tensors; torch.optim: foreach, fused",
)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.world(2)
def test_steps_before_backward(world: World, name: str) -> None:
    """Add up squares of managed parameters, take a step, and go backward; the gradients are those of the old values."""

    def body(rank: Rank) -> None:
        forms: list[dict[str, bool]] = [{"foreach": True}, {"foreach": False}, {"foreach": True}]
        for (way, manage), form in zip(ways(rank).items(), forms, strict=True):
            model: Any = manage(nn.Linear(4, 2, device=rank.device))
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.5, **form)
            before = [replicate_fsdp.whole(p).detach().clone() for p in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with allow_mutation_on_saved_tensors():
                squares = [(parameter * parameter).sum() for parameter in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
                for each in squares:
                    each.backward()
            for parameter, old in zip(model.parameters(), before, strict=True):
                what = f"{way}, {form}"
                assert not torch.equal(replicate_fsdp.whole(parameter), old), what
                torch.testing.assert_close(replicate_fsdp.whole(parameter.grad), 2 * old, msg=what)

    world.run(body)


class Counted(nn.Module):
    """A layer and buffers without dimensions, of one element and of several."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, shape in (("scalar", ()), ("one", (1,)), ("vector", (3,)), ("matrix", (3, 1))):
            self.register_buffer(name, torch.zeros(shape))


@requirement(
    "RFSDP-SHAPES-3500",
    "load_state_dict of a managed module refuses a tensor of another shape, and leaves what it would replace.",
    source="torch.nn.Module.load_state_dict: size mismatch",
)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.world(2)
def test_shapes(world: World, strict: bool) -> None:
    """Load every other shape into buffers and plain parameters of several; a scalar takes a vector of one element."""

    def body(rank: Rank) -> None:
        shapes: list[tuple[int, ...]] = [(), (1,), (2,), (3,), (3, 1), (1, 3), (0,)]
        for way, manage in ways(rank).items():
            module = Counted().to(rank.device)
            manage(module.layer)
            for (name, buffer), shape in itertools.product(dict(module.named_buffers()).items(), shapes):
                state = module.state_dict() | {name: torch.ones(shape, device=rank.device)}
                what = f"{way}, {shape} for {name}"
                if shape == buffer.shape or (name, shape) == ("scalar", (1,)):
                    module.load_state_dict(state, strict=strict)
                    assert buffer.tolist() == torch.ones(buffer.shape).tolist(), what
                    buffer.zero_()
                    continue
                with pytest.raises(RuntimeError, match="size mismatch"):
                    module.load_state_dict(state, strict=strict)
                assert not buffer.any(), what

    world.run(body)


PENALTIES: dict[str, tuple[float, float]] = {"penalty": (0.0, 1.0), "both": (1.0, 1.0), "loss": (1.0, 0.0)}
"""The factors of the loss and of the sum of its gradient of the input."""


@requirement(
    "RFSDP-SECOND-4109",
    "With set_reshard_after_backward(False), a backward through gradients gives parameters the average of one device's "
    "second derivatives.",
    source="torch.autograd.grad: create_graph; torch.distributed.fsdp.FSDPModule.set_reshard_after_backward; "
    "pytorch/pytorch#172543",
)
@pytest.mark.world(2)
def test_second_derivatives(world: World) -> None:
    """Go backward through the gradient of the input, or that and the loss, then through the loss; layers are nested."""

    def body(rank: Rank) -> None:
        for (way, manage), nested in itertools.product(ways(rank).items(), (False, True)):
            model: Any = nn.Sequential(Square(2.0), Square(1.0)).to(rank.device)
            for layer in model if nested else ():
                manage(layer)
            manage(model)
            model.set_reshard_after_backward(False)
            for name, (of_loss, of_gradient) in PENALTIES.items():
                what = f"{way}, {nested=}, {name}"
                own = 1.0 + rank.index
                x = torch.full((2,), own, device=rank.device, requires_grad=True)
                loss = model(x).sum()  # (a x)^4 b^2, with a = 2 and b = 1
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                assert gradient.tolist() == [64 * own**3] * 2, what
                (loss * of_loss + gradient.sum() * of_gradient).backward()
                assert x.grad is not None, what
                assert x.grad.tolist() == [64 * own**3 * of_loss + 192 * own**2 * of_gradient] * 2, what
                model.reshard()
                for layer in model:
                    layer.reshard() if nested else None
                right = sum(32 * (1.0 + r) ** 4 * of_loss + 128 * (1.0 + r) ** 3 * of_gradient for r in range(2)) / 2
                found = [g.tolist() for g in replicate_fsdp.gradients(model).values()]
                assert found == [[right] * 2] * 2, f"{what}: {found}"
                model.zero_grad()

    world.run(body)
