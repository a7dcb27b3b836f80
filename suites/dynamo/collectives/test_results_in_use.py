"""What compiled code does with a collective's result as with any other tensor: its methods, attributes and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from suites.dynamo.objects import summed

Function = Callable[[torch.Tensor], Any]

OF_TENSORS = pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, compiled code gets some of these wrong")

TENSOR = "torch.Tensor; torch/_dynamo/variables/tensor.py: TensorVariable"


def detached_in_place(x: torch.Tensor) -> Any:
    """Detach what was made of a sum, and look."""
    y = summed(x.detach() * 2) * x
    before = y.requires_grad
    y.detach_()
    return (x + y if y.requires_grad else x - y), before, y.requires_grad, y.grad_fn is None


def without_gradient(x: torch.Tensor) -> Any:
    """Ask sums for gradients that nobody computes."""
    y = summed(x.detach())
    z = y * x.detach()
    return y + (1 if y.grad is None else 2), z + (1 if z.grad is None else 2), y.is_leaf, z.is_leaf


def with_factors(x: torch.Tensor) -> Any:
    """Add sums times numbers, which is rounded once."""
    y, z = summed(x.detach() / 7), x.detach() / 3
    return [
        z.clone().add_(y, alpha=-0.1),
        z.clone().sub_(y, alpha=0.3),
        z.add(y, alpha=1 / 3),
    ]


def with_summed_factors(x: torch.Tensor) -> Any:
    """Use a sum without dimensions as a number."""
    y = x.detach()
    factor = summed(y.new_full((), 2.0))
    return [y.clone().sub_(y, alpha=factor), y.clone().add_(y, alpha=factor), y.clone().mul_(factor), y.div(factor)]


def attributes(x: torch.Tensor) -> Any:
    """Ask for an attribute that a tensor does not have."""
    found = [hasattr(x, "shard_count"), getattr(x, "shard_count", 7), hasattr(x, "shape")]
    try:
        found.append(x.shard_count)  # type: ignore[attr-defined]
    except AttributeError:
        found.append("none")
    return summed(x.detach()), found


def addresses(x: torch.Tensor) -> Any:
    """Compare the addresses of a tensor and its aliases."""
    y = x.detach()
    return summed(y), y.data_ptr() == x.data_ptr(), y.data_ptr() != y.detach().data_ptr()


USES: dict[str, tuple[Function, str]] = {
    "detached in place": (detached_in_place, "eager"),
    "without a gradient": (without_gradient, "eager"),
    "with factors": (with_factors, "aot_eager"),
    "with summed factors": (with_summed_factors, "eager"),
    "attributes": (attributes, "eager"),
    "addresses": (addresses, "eager"),
}
"""What code does with results, and the backend that runs it."""


def values(found: Any) -> list[Any]:
    """Return what a function returned, flat."""
    parts: list[Any] = list(found) if isinstance(found, tuple | list) else [found]
    return [value for part in parts for value in (part if isinstance(part, list) else [part])]


@requirement(
    "DYN-USED-01",
    "Methods, attributes and addresses of a collective's result are in compiled code what they are without it.",
    source=TENSOR,
)
@OF_TENSORS
@pytest.mark.world(2)
def test_uses(world: World) -> None:
    """Compare each use, in one graph, with uncompiled code to the last bit."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, (function, backend) in USES.items():
            x = (torch.arange(1.0, 301.0) * (rank.index + 1) / 11).to(rank.device).requires_grad_()
            compiled, counter = dynamo.compiled(function, backend=backend)
            expected = values(function(x))
            for one, other in zip(expected, values(compiled(x)), strict=True):
                if not isinstance(one, torch.Tensor):
                    wrong += [f"{name}: {other}, not {one}"] if one != other else []
                elif differing := int((one + 0).ne(other + 0).sum()):
                    wrong.append(f"{name}: {differing} of {one.numel()} elements differ")
            if counter.graphs != 1:
                wrong.append(f"{name}: {counter.graphs} graphs")
        return wrong

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)


class Doubling(TorchFunctionMode):
    """Doubles each result of torch.add."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.add else result


@requirement(
    "DYN-USED-02",
    "In compiled code a torch function mode is off where functions are disabled, and on again where that ends.",
    source="torch.overrides.TorchFunctionMode; torch/_dynamo/variables/ctx_manager.py: TorchFunctionDisableVariable",
)
@OF_TENSORS
@pytest.mark.world(2)
def test_disabled_modes(world: World) -> None:
    """Disable subclasses' functions, modes as well, and both in each other, in a function with a sum."""

    def adding(x: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.add(summed(x), 1)]
        with dynamo.without_subclasses():
            with dynamo.without_functions():
                found.append(torch.add(x, 1))
            found.append(torch.add(x, 1))
        with dynamo.without_functions():
            with dynamo.without_subclasses():
                found.append(torch.add(x, 1))
            found.append(torch.add(x, 1))
        return [*found, torch.add(x, 1)]

    def body(rank: Rank) -> None:
        x = dyadic(4, key=rank.index, dtype=torch.float32).to(rank.device)
        compiled, _ = dynamo.compiled(adding)
        with Doubling():
            pairs = list(zip(adding(x), compiled(x), strict=True))
        for number, (expected, found) in enumerate(pairs):
            assert_same(expected + 0, found + 0, f"sum {number}")

    world.run(body)


def hooks_in_order(x: torch.Tensor) -> torch.Tensor:
    """Register hooks whose order matters on what was made of a sum."""
    y = summed(x.detach()) * x
    y.register_hook(lambda g: g + 1)
    y.register_hook(lambda g: g * 10)
    y.register_hook(lambda g: summed(g) - 3)
    return (y * 3).sum()


def hooks_in_checkpoints(x: torch.Tensor) -> torch.Tensor:
    """In a checkpoint, register a hook on a tensor from outside of it."""
    y = summed(x.detach()) * x

    def inner(x: torch.Tensor) -> torch.Tensor:
        y.register_hook(lambda g: g.clamp(max=0.5))
        return y.square() + x

    return (checkpoint(inner, x, use_reentrant=False) + y * 3).sum()


class Scale:
    """Multiplies gradients by a number."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.factor


def hooks_with_objects(x: torch.Tensor) -> torch.Tensor:
    """Register hooks that use a list, a dictionary and an object that are made there."""
    scale, factors, shifts = Scale(3.0), [2.0], {"one": 1.0}
    y = summed(x.detach()) * x
    x.register_hook(lambda g: scale(g) * factors[0])
    y.register_hook(lambda g: summed(g) + shifts["one"])
    return (y * 3).sum()


def penalty(x: torch.Tensor) -> torch.Tensor:
    """Sum what autograd saves no input for."""
    return (x.exp() * summed(x.detach())).sum()


@requirement(
    "DYN-USED-03",
    "Hooks that compiled code registers on tensors run in their order in the backward, in checkpoints as outside.",
    source="torch.Tensor.register_hook; torch/_dynamo/variables/tensor.py: method_register_hook",
)
@requirement(
    "DYN-USED-04",
    "With create_graph=True, gradients of a compiled function require gradients, and raise where they have none.",
    source="torch.autograd.grad: create_graph; torch/_functorch/_aot_autograd/runtime_wrappers.py: compiled backward",
)
@OF_TENSORS
@pytest.mark.world(2)
def test_gradients(world: World) -> None:
    """Compare gradients with uncompiled code, and differentiate one again, which compiled code refuses."""

    def gradient(function: Function, x: torch.Tensor, *, again: bool) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, create_graph=again)[0]

    def body(rank: Rank) -> None:
        for function in (hooks_in_order, hooks_in_checkpoints, hooks_with_objects, penalty):
            x = dyadic(4, key=rank.index, dtype=torch.float32).to(rank.device).requires_grad_()
            compiled, _ = dynamo.compiled(function, fullgraph=function is hooks_with_objects)
            found = gradient(compiled, x, again=function is penalty)
            assert_same(gradient(function, x, again=False), found.detach(), function.__name__)
            if function is penalty:
                assert found.requires_grad
                with pytest.raises(RuntimeError):  # it can't differentiate again, and must not ignore that
                    found.square().sum().backward()

    world.run(body)


@requirement(
    "DYN-USED-05",
    "Compiled linear algebra of a collective's result raises where it has no result, as uncompiled code does.",
    source="torch.linalg: cholesky, inv, solve; torch/_library/effects.py",
)
@requirement(
    "DYN-USED-06",
    "The error for a compiled function's DTensor whose gradient is missing says which output it is.",
    source="torch/_functorch/_aot_autograd/runtime_wrappers.py: tangents that are subclasses",
)
@OF_TENSORS
@pytest.mark.world(2)
def test_errors(world: World) -> None:
    """Factorize a sum that has no factorization, invert one that has no inverse, and use one of two DTensors."""

    def body(rank: Rank) -> None:
        singular = torch.ones(3, 3, device=rank.device)
        negative = torch.eye(3, device=rank.device) * (1.0 if rank.index else -3.0)
        for function, matrix in (
            (lambda a: torch.linalg.cholesky(summed(a)) + 1, negative),
            (lambda a: torch.linalg.inv(summed(a)) + 1, singular),
            (lambda a: torch.linalg.solve(summed(a), torch.ones_like(a)) + 1, singular),
        ):
            compiled, _ = dynamo.compiled(function)
            with pytest.raises(torch.linalg.LinAlgError):
                compiled(matrix)

        mesh = init_device_mesh(rank.device.type, (rank.size,))
        x = distribute_tensor(torch.ones(4, device=rank.device), mesh, [Shard(0)]).requires_grad_()
        compiled, _ = dynamo.compiled(lambda x: (x * 2, x * 3))
        first, _ = compiled(x)
        said = ""
        try:
            first.sum().backward()
        except RuntimeError as error:
            said = str(error)
        if said:
            assert "output" in said, said
            assert "DTensor" in said, said
        else:
            assert x.grad is not None
            assert x.grad.full_tensor().tolist() == [2.0] * 4  # type: ignore[attr-defined]

    world.run(body)


@requirement(
    "DYN-USED-07",
    "Compiled code records regions of record_function by their names, wherever the region was made.",
    source="torch.profiler.record_function; torch/_dynamo/variables/ctx_manager.py",
)
@OF_TENSORS
@pytest.mark.world(2)
def test_recorded_regions(world: World) -> None:
    """Name a region by position and by keyword, and enter one from outside; profile a call."""

    def body(rank: Rank) -> None:
        outside = torch.profiler.record_function("from outside")

        def recording(x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("by position"):
                y = summed(x)
            with torch.profiler.record_function(name="by keyword"):
                y = y + 1
            with outside:
                return y * 2

        with dynamo.recorded_regions():
            compiled, counter = dynamo.compiled(recording)
            compiled(torch.ones(2, device=rank.device))
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                found = compiled(torch.ones(2, device=rank.device))
        assert found.tolist() == [6.0, 6.0]
        names = {event.name for event in profile.events()}
        assert {"by position", "by keyword"} <= names, sorted(names)
        assert "unknown" not in names
        assert counter.graphs == 1

    world.run(body)
