"""DTensors that compiled code changes in place, and gradients for DTensors that it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo

ROWS, COLUMNS, WHOLE, SUM = Shard(0), Shard(1), Replicate(), Partial()


class Counts(nn.Module):
    """A module with a buffer, a parameter and a list, which its forward changes."""

    def __init__(self, buffer: DTensor, parameter: DTensor, listed: DTensor) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)
        self.parameter, self.listed = nn.Parameter(parameter), [listed]

    def forward(self, x: Any) -> Any:
        self.buffer += x
        self.listed[0].mul_(2)
        with torch.no_grad():
            self.parameter.sub_(x * 2)
        return x + 1


def changed(x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Change all arguments but the first one, each by another operation."""
    a.mul_(2)
    b.add_(x)
    c.copy_(a)
    d.zero_()
    a.add_(b, alpha=2)
    return x + a


def read_and_changed(w: Any, v: Any, a: Any) -> Any:
    """Change the last argument between uses of the others, one of which is multiplied by it."""
    y = w.sin() * v
    a.add_(2)
    return y + w * a, v * 2


@requirement(
    "DYN-DT-71",
    "Compiled code that changes a DTensor in place has the gradients of uncompiled code for the other DTensors.",
    source="torch.compile; torch/_functorch/_aot_autograd: mutations of inputs; torch.distributed.tensor.DTensor",
)
@requirement(
    "DYN-DT-11",
    "Operations in place on DTensors that compiled code is given or reads change these as uncompiled code does.",
    source="torch.compile; torch/_functorch/_aot_autograd: mutations of inputs; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("placement", [ROWS, COLUMNS, WHOLE], ids=str)
@pytest.mark.world(2)
def test_changed_in_place(world: World, placement: Placement) -> None:
    """Change arguments, and a module's buffer, parameter and list; what refers to their local tensors sees it."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)

        def made(*key: Any) -> DTensor:
            local = dyadic(2, 2, key=(rank.index, *key), dtype=torch.float32).to(rank.device)
            return DTensor.from_local(local, mesh, [placement], run_check=False)

        def run(compiles: bool) -> list[torch.Tensor]:
            tensors = [made(number) for number in range(8)]
            module = Counts(tensors[5], tensors[6], tensors[7])
            function, forward = changed, module
            if compiles:
                function, first = dynamo.compiled(changed)
                forward, second = dynamo.compiled(module)
            references = [tensor.to_local() for tensor in tensors]
            results = []
            for _ in range(2):
                results += [function(*tensors[:5]), forward(tensors[0])]
            assert not compiles or (first.graphs, second.graphs) == (1, 1)
            assert all(result.placements == (placement,) for result in results)
            held = [*tensors[:5], module.buffer, module.parameter, module.listed[0], *results]
            return [*(each.detach().to_local() for each in held), *references]  # type: ignore[union-attr]

        for number, (right, found) in enumerate(zip(run(compiles=False), run(compiles=True), strict=True)):
            assert_same(right, found, f"tensor {number}")

        def gradients(compiles: bool) -> list[torch.Tensor]:
            w, v, a = made("w").requires_grad_(), made("v").requires_grad_(), made("a")
            function = dynamo.compiled(read_and_changed)[0] if compiles else read_and_changed
            for _ in range(2):
                y, z = function(w, v, a)
                (y.to_local() * 2 + z.to_local()).sum().backward()
            assert not a.requires_grad
            return [each.to_local().detach() for each in (w.grad, v.grad, a)]  # type: ignore[union-attr]

        for number, (right, found) in enumerate(zip(gradients(compiles=False), gradients(compiles=True), strict=True)):
            assert_same(right, found, f"gradient {number}")

    world.run(body)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda d: d * 3,
    "summed": lambda d: d.sum(0),
    "both": lambda d: (d * 2, d.sum(1)),
}


@requirement(
    "DYN-DT-12",
    "Compiled code takes each gradient that uncompiled code takes for a DTensor that it returns, of whatever "
    "placements the two are.",
    source="torch.compile; torch/distributed/tensor/_api.py: __coerce_tangent_metadata__",
)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.world(2)
def test_gradients_of_results(world: World, name: str) -> None:
    """Give gradients of each placement, and those of to_local and full_tensor, to results of each placement."""
    function = FUNCTIONS[name]

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)

        def placed(given: Any, target: Placement, *key: Any) -> DTensor:
            shape = list(given.shape)
            if isinstance(target, Shard):
                shape[target.dim] //= 2
            local = dyadic(*shape, key=(key, rank.index), dtype=torch.float32).to(rank.device)
            return DTensor.from_local(local, mesh, [target], run_check=False)

        def gradient(call: Callable[[Any], Any], source: Placement, how: Any) -> torch.Tensor:
            local = dyadic(2, 4, key=rank.index, dtype=torch.float32).to(rank.device).requires_grad_()
            results = call(DTensor.from_local(local, mesh, [source], run_check=False))
            ends, gradients = [], []
            for number, result in enumerate(results if isinstance(results, tuple) else [results]):
                if isinstance(how, Placement):
                    ends.append(result)
                    gradients.append(placed(result, how, number))
                else:
                    ends.append(result.full_tensor() if how == "full_tensor" else result.to_local())
                    key = how, number
                    gradients.append(dyadic(*ends[-1].shape, key=key, dtype=torch.float32).to(rank.device))
            torch.autograd.backward(ends, gradients)
            assert local.grad is not None
            return local.grad

        for source in (ROWS, COLUMNS, WHOLE, SUM):
            compiled, counter = dynamo.compiled(function)
            for how in ("to_local", "full_tensor", ROWS, WHOLE, SUM):
                what = f"gradient of {source}, from {how}"
                assert_same(gradient(function, source, how) + 0, gradient(compiled, source, how) + 0, what)
            assert counter.graphs == 1, source

    world.run(body)
