"""What a compiled backward passes: writes into parts of tensors, packed tensors, retained gradients, and NaNs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import dynamo
from suites.dynamo.objects import summed

SOURCE = "torch/_dynamo/compiled_autograd.py"

Code = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scaled_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Scale a row in place, by a number and by weights."""
    y = x * w
    y[0].mul_(3)
    y[1].mul_(w[0])
    return y


def copied(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Write other values over a row, a column and the diagonal."""
    y = x * w
    y[1].copy_(w[0] * 5)
    y[:, 0] = x[:, 1]
    y.diagonal().zero_()
    return y


def through_views(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Scale a part of a view of a view; then sum the whole with a view that was made before."""
    y = x * w
    row = y[2]
    y.view(-1)[2:9].view(7, 1)[1:4].mul_(2)
    return y + row


def packed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Change what is saved as it is packed and as it is unpacked."""
    with saved_tensors_hooks(lambda t: t + 1, lambda t: t * 2):
        y = (x * w).square()
    return y * w


CODE: list[Code] = [
    scaled_row,
    copied,
    through_views,
    packed,
]


@requirement(
    "DYN-CAUTO-5049",
    "Compiled autograd gives the gradients of an uncompiled backward through writes into parts of tensors, and calls "
    "the hooks that unpack saved tensors.",
    source=f"{SOURCE}; torch.autograd.graph: saved_tensors_hooks",
)
@requirement(
    "DYN-CAUTO-5050",
    "Compiled autograd retains the gradients of results for which retain_grad was called, as an uncompiled backward "
    "does.",
    source=f"{SOURCE}; torch.Tensor.retain_grad",
)
@pytest.mark.world(2)
def test_kinds(world: World) -> None:
    """Compare the gradients of inputs and of the result; sum one over the ranks in a hook."""

    def body(rank: Rank) -> None:
        def trained(code: Code, compiles: bool) -> list[torch.Tensor | None]:
            x, w = (
                dyadic(3, 4, key=(name, rank.index), dtype=torch.float32, span=2).to(rank.device).requires_grad_()
                for name in "xw"
            )
            y = code(x, w)
            y.retain_grad()
            if code is scaled_row:
                y.register_hook(summed)
            with dynamo.compiled_backward("aot_eager") if compiles else nullcontext():
                y.sin().sum().backward()
            return [x.grad, w.grad, y.grad]

        for code in CODE:
            torch.compiler.reset()
            results = zip(trained(code, compiles=False), trained(code, compiles=True), strict=True)
            for number, (right, found) in enumerate(results):
                assert right is not None
                assert found is not None
                assert_same(right + 0, found + 0, f"{code.__name__}, gradient {number}")

    world.run(body)


@requirement(
    "DYN-CAUTO-5051",
    "Compiled autograd raises an error on exactly the ranks with a NaN in a gradient if detect_anomaly checks it.",
    source=f"{SOURCE}; torch.autograd.detect_anomaly: check_nan",
)
@pytest.mark.parametrize("checks", [True, False], ids=["checked", "not checked"])
@pytest.mark.world(2)
def test_not_a_number(world: World, checks: bool) -> None:
    """The gradient of a leaf, of a result, or of none is NaN on the second rank."""

    def body(rank: Rank) -> list[str]:
        found = []
        for where in ("none", "leaf", "accumulated", "result"):
            torch.compiler.reset()
            bad = rank.index == 1
            x = torch.ones(2, device=rank.device).requires_grad_()
            if where == "accumulated":
                x.grad = torch.ones_like(x)
            zero = torch.zeros(2, device=rank.device) if bad and where != "none" else torch.ones(2, device=rank.device)
            y = (x * zero).sqrt() * zero if where != "result" else (x * zero).sqrt().mul(zero).exp()
            with torch.autograd.detect_anomaly(check_nan=checks), dynamo.compiled_backward("aot_eager"):
                try:
                    y.sum().backward()
                    found.append("none")
                except RuntimeError as error:
                    found.append("NaN" if "nan" in str(error).lower() else str(error))
        return found

    bad = ["none", *(["NaN"] * 3 if checks else ["none"] * 3)]
    assert_on_ranks([["none"] * 4, bad], world.run(body))


@requirement(
    "DYN-CAUTO-8701",
    "A compiled hook that packs saved tensors is compiled at the first call of the compiled code that saves them.",
    source="torch.autograd.graph: saved_tensors_hooks; torch.compile",
)
@pytest.mark.world(1)
def test_compiled_hooks(world: World) -> None:
    """Pack the factors of a product by a compiled function, in two calls."""

    def body(rank: Rank) -> None:
        compiled, _ = dynamo.compiled(lambda x, w: x * w)
        counter = dynamo.GraphCounter("eager")
        pack = torch.compile(lambda t: t * 2, backend=counter, fullgraph=True)
        x, w = (dyadic(3, key=name, dtype=torch.float32).to(rank.device).requires_grad_() for name in "xw")
        for _ in range(2):
            with saved_tensors_hooks(lambda t: pack(t), lambda t: t / 4):
                y = compiled(x, w)
            assert counter.graphs == 1
            gradients = torch.autograd.grad(y.sum(), (x, w))
            for other, gradient in zip((w, x), gradients, strict=True):
                assert_same(other.detach() / 2, gradient, "gradient")

    world.run(body)
