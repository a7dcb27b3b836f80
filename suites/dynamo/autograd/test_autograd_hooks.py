"""Hooks of tensors, of parameters and of autograd's nodes under compiled autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fixtures.layers import layer
from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.tracing import Tracer
from suites.dynamo.objects import summed

SOURCE = "torch/_dynamo/compiled_autograd.py; torch.Tensor: register_hook, register_post_accumulate_grad_hook"


def _of_result(product: torch.Tensor) -> None:
    product.register_hook(lambda g: summed(g) * 2)


def _that_returns_nothing(product: torch.Tensor) -> None:
    product.register_hook(lambda g: None)


def _in_order(product: torch.Tensor) -> None:
    product.register_hook(lambda g: g + 1)
    product.register_hook(lambda g: g * 4)
    product.register_hook(lambda g: g * 8).remove()


def _before_node(product: torch.Tensor) -> None:
    assert product.grad_fn is not None
    product.grad_fn.register_prehook(lambda outputs: (summed(outputs[0]),))


def _after_node(product: torch.Tensor) -> None:
    assert product.grad_fn is not None
    product.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else g * 2 for g in inputs))


def _of_weight(weight: torch.Tensor) -> None:
    weight.register_hook(lambda g: summed(g) * 2)
    weight.register_hook(lambda g: g - 1)


def _accumulated(weight: torch.Tensor) -> None:
    def reduce(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(summed(parameter.grad))

    weight.register_post_accumulate_grad_hook(reduce)


def _accumulated_in_order(weight: torch.Tensor) -> None:
    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(1)

    def multiply(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(4)

    weight.register_post_accumulate_grad_hook(add)
    weight.register_post_accumulate_grad_hook(multiply)


def _stepped(weight: torch.Tensor) -> None:
    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad / 64)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(step)


Hooks = tuple[Callable[[torch.Tensor], None], ...]

EACH_STEP: Hooks = (_of_result, _that_returns_nothing, _in_order, _before_node, _after_node)
"""Hooks of the product of an input and a weight, which each step makes."""
PLACES: tuple[tuple[Callable[[torch.Tensor], None], tuple[int, ...]], ...] = (
    *((hook, (3,)) for hook in EACH_STEP),
    (_of_weight, ()),
    (_accumulated, (3,)),
    (_accumulated, ()),
    (_accumulated_in_order, ()),
    (_stepped, (1, 1)),
)
"""Hooks with the shapes of their weights, by which vectors of three elements are multiplied."""


def _hooked(x: Any, wrap: Callable[[Any], Any], method: str, *, removed: bool) -> Any:
    """Hook what is made of a tensor, let the hook multiply gradients unless it is removed, and return a sum."""
    product = wrap(x)
    handle = getattr(product, method)(lambda gradient: gradient * 100)
    if removed:
        handle.remove()
    return (product * 3).sum()


OF_WHAT: dict[str, Callable[[Any], Any]] = {
    "argument": lambda x: x,
    "dtensor": lambda x: x * 2,
    "result": lambda x: functional.all_gather_tensor_autograd(x.to_local(), 0, dist.group.WORLD),
}
"""What is made of a DTensor."""


def gradients_of_hooked(rank: Rank, of: str, method: str, *, removed: bool) -> list[Any]:
    """Return the gradient or the error of uncompiled code and of compiled code, of a sharded DTensor of two rows."""
    found: list[Any] = []
    for run in _hooked, dynamo.compiled(_hooked, backend="aot_eager", fullgraph=False)[0]:
        x = DTensor.from_local(torch.ones(1, 2, device=rank.device), rank.mesh(), [Shard(0)]).requires_grad_()
        try:
            run(x, OF_WHAT[of], method, removed=removed).backward()
        except (RuntimeError, AssertionError) as error:
            found.append(f"refused: {error}".partition("\n")[0])
        else:
            assert isinstance(x.grad, DTensor)
            found.append(x.grad.full_tensor().tolist())
    return found


@requirement(
    "DYN-HOOK-328",
    "A hook of a DTensor or of a collective's result that compiled code registers and removes has no effect.",
    source="torch.Tensor.register_hook: 'a handle with a method handle.remove() that removes the hook'",
)
@pytest.mark.parametrize("of", OF_WHAT)
@pytest.mark.world(2)
def test_removed_hooks(world: World, of: str) -> None:
    """Register a hook of an argument, of a product or of gathered rows, and remove it."""

    def body(rank: Rank) -> Any:
        uncompiled, found = gradients_of_hooked(rank, of, "register_hook", removed=True)
        assert isinstance(uncompiled, list)
        return found if found != uncompiled else "as uncompiled"

    assert_on_ranks(["as uncompiled"] * world.size, world.run(body))


@requirement(
    "DYN-HOOK-06",
    "Under compiled autograd, hooks of tensors and of autograd's nodes change gradients as without compiling.",
    source=f"{SOURCE}; torch.autograd.graph.Node: register_hook, register_prehook",
)
@requirement(
    "DYN-HOOK-07",
    "Under compiled autograd, a hook after accumulation is called in order with the accumulated gradient.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_hooks(world: World) -> None:
    """Hook ten products or weights of several shapes; some hooks sum over ranks. Run two steps without clearing."""

    def body(rank: Rank) -> None:
        def trained(compiles: bool) -> dict[str, torch.Tensor | None]:
            found: dict[str, torch.Tensor | None] = {}
            weights = [
                dyadic(*shape, key=number, dtype=torch.float32).to(rank.device).requires_grad_()
                for number, (_, shape) in enumerate(PLACES)
            ]
            for (hook, _), weight in zip(PLACES[len(EACH_STEP) :], weights[len(EACH_STEP) :], strict=True):
                hook(weight)
            for step in range(2):
                x = dyadic(3, key=(rank.index, step), dtype=torch.float32).to(rank.device).requires_grad_()
                products = [(x * weight).view(3) for weight in weights]
                for hook, product in zip(EACH_STEP, products, strict=False):
                    hook(product)
                loss = torch.stack(products).square().sum()
                with dynamo.compiled_backward("aot_eager") if compiles else nullcontext():
                    loss.backward()
                found[f"input of step {step}"] = x.grad
                for (hook, shape), weight in zip(PLACES, weights, strict=True):
                    name = f"{hook.__name__.strip('_')} of {shape}, step {step}"
                    found[f"gradient: {name}"] = None if weight.grad is None else weight.grad + 0
                    found[f"weight: {name}"] = weight.detach() + 0
            return found

        torch.compiler.reset()
        found = trained(compiles=True)
        for name, right in trained(compiles=False).items():
            result = found[name]
            assert (right is None) == (result is None), name
            if right is not None and result is not None:
                assert_same(right, result, name)

    world.run(body)


@requirement(
    "DYN-HOOK-329",
    "Compiled code refuses a hook after accumulation of a DTensor or of a collective's result that is no leaf.",
    source="torch.Tensor.register_post_accumulate_grad_hook: 'only applicable for leaf tensors'",
)
@pytest.mark.parametrize("of", ["dtensor", "result"])
@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.world(2)
def test_hooks_of_products(world: World, of: str, method: str) -> None:
    """Register it, or a hook of another kind, which changes gradients."""

    def body(rank: Rank) -> Any:
        uncompiled, found = gradients_of_hooked(rank, of, method, removed=False)
        if str(uncompiled).startswith("refused"):
            return "refused" if "non-leaf tensors" in str(found) else found
        return "refused" if found == uncompiled and method == "register_hook" else found

    assert_on_ranks(["refused"] * world.size, world.run(body))


@requirement(
    "DYN-HOOK-57",
    "Under compiled autograd, callbacks for the end of the backward are called then, each once and in their order.",
    source="torch/_dynamo/external_utils.py: FakeCompiledAutogradEngine; torch/autograd/variable.py: queue_callback",
)
@requirement(
    "DYN-HOOK-58",
    "Under compiled autograd, a callback for the end of the backward may queue others, which are called after it.",
    source="torch/_dynamo/external_utils.py: FakeCompiledAutogradEngine; torch/autograd/variable.py: queue_callback",
)
@pytest.mark.world(2)
def test_callbacks(world: World) -> None:
    """Queue callbacks from hooks of two weights, some of which queue others or reduce gradients; run two steps."""

    def body(rank: Rank) -> None:
        def trained(backend: str) -> list[Any]:
            torch.compiler.reset()
            found: list[Any] = []
            names: list[str] = []
            one, other = (torch.full((2,), value, device=rank.device, requires_grad=True) for value in (2.0, 3.0))

            def halve() -> None:
                names.append("halve")
                one.grad.div_(2)  # type: ignore[union-attr]

            def reduce() -> None:
                names.append("reduce")
                dist.all_reduce(one.grad)
                dynamo.at_end_of_backward(halve)

            def begin() -> None:
                names.append("begin")
                dynamo.at_end_of_backward(reduce)

            def add() -> None:
                names.append("add")
                other.grad.add_(one.grad)  # type: ignore[union-attr, arg-type]

            def of_one(parameter: torch.Tensor) -> None:
                dynamo.at_end_of_backward(begin)

            def of_other(parameter: torch.Tensor) -> None:
                dynamo.at_end_of_backward(add)

            one.register_post_accumulate_grad_hook(of_one)
            other.register_post_accumulate_grad_hook(of_other)
            for step in range(2):
                loss = (one * (rank.index + 1 + step)).sum() + (other * 5).sum()
                with dynamo.compiled_backward(backend, fullgraph=True) if backend else nullcontext():
                    loss.backward()
                found.append(
                    (sorted(names[:2]), names[2:], [p.grad.tolist() for p in (one, other) if p.grad is not None])
                )
                names.clear()
            return found

        assert trained("eager") == trained("")

    world.run(body)


@requirement(
    "DYN-HOOK-1807",
    "Under compiled autograd, hooks run in the order of an uncompiled backward, whatever they are hooks of.",
    source=f"{SOURCE}; torch.nn.Module.register_full_backward_hook",
)
@pytest.mark.world(1)
def test_order_of_hooks(world: World) -> None:
    """Hook the gradients, the accumulation and the modules of three layers, and note each call."""

    def body(rank: Rank) -> list[list[str]]:
        found = []
        for captured in (False, True):
            torch.compiler.reset()
            order: list[str] = []
            kept: list[Any] = []
            layers = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).to(rank.device)

            def noted(name: str, order: list[str] = order) -> Callable[..., None]:
                return lambda *given: order.append(name)

            for name, parameter in layers.named_parameters():
                parameter.register_post_accumulate_grad_hook(noted(f"{name} accumulated"))
                parameter.register_hook(noted(f"gradient of {name}"))
                node = _accumulator(parameter)
                node.register_hook(noted(f"after accumulation of {name}"))
                node.register_prehook(noted(f"before accumulation of {name}"))
                kept.append(node)
            for name, part in layers.named_children():
                part.register_full_backward_hook(noted(f"after {name}"))
            result = layers(torch.ones(2, 3, device=rank.device))
            result.register_hook(noted("gradient of the result"))
            with dynamo.compiled_backward("eager") if captured else nullcontext():
                result.sum().backward()
            found.append(order)
        return found

    ((right, other),) = world.run(body)
    assert other == right


def _of_gradient(parameter: torch.Tensor) -> Any:
    return parameter.register_hook(summed)


def _after_accumulation(parameter: torch.Tensor) -> Any:
    def reduce(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(summed(parameter.grad))

    return parameter.register_post_accumulate_grad_hook(reduce)


def _accumulator(parameter: torch.Tensor) -> Any:
    """Return the node that accumulates a parameter's gradient."""
    node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def _after_accumulator(parameter: torch.Tensor) -> Any:
    def reduce(*_: Any) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(summed(parameter.grad))

    node = _accumulator(parameter)
    node.register_hook(reduce)
    return node


def _before_accumulator(parameter: torch.Tensor) -> Any:
    node = _accumulator(parameter)
    node.register_prehook(lambda gradients: (summed(gradients[0]),))
    return node


HOOKS = (_of_gradient, _after_accumulation, _after_accumulator, _before_accumulator)
"""Hooks of each kind that a parameter can have, each of which sums its gradient over ranks."""


@requirement(
    "DYN-HOOK-1900",
    "Under compiled autograd, a hook of a compiled model's parameter reduces its gradient before the gradients of "
    "earlier layers are computed, as without compiling.",
    source=f"{SOURCE}: 'This differs from eager mode, which schedules them as soon as possible'",
)
@requirement(
    "DYN-HOOK-1901",
    "Under compiled autograd, hooks of a compiled model's parameters change gradients as without compiling.",
    source=SOURCE,
)
@pytest.mark.parametrize("register", HOOKS, ids=lambda f: f.__name__.strip("_"))
@pytest.mark.world(2)
def test_hooks_of_compiled_models(world: World, register: Callable[[torch.Tensor], Any]) -> None:
    """Sum gradients of three layers over ranks in hooks: the first sum comes before the last product of matrices."""

    def body(rank: Rank) -> None:
        found = []
        for compiles in (False, True):
            model = nn.Sequential(*(layer(rank.device) for _ in range(3)))
            kept = [register(parameter) for parameter in model.parameters()]
            run, tracer = dynamo.compiled(model)[0] if compiles else model, Tracer("eager")
            x = dyadic(2, 2, key=rank.index, dtype=torch.float32).to(rank.device)
            with dynamo.compiled_backward(tracer, fullgraph=True) if compiles else nullcontext():
                run(x).sum().backward()
            found.append([p.grad for p in model.parameters()])
            assert len(kept) == len(found[0])
        for number, (right, gradient) in enumerate(zip(*found, strict=True)):
            assert right is not None
            assert gradient is not None
            assert_same(right, gradient, f"gradient {number}")
        names = [operator.name for operator in tracer.graphs[-1].operators]
        sums = [place for place, name in enumerate(names) if "all_reduce" in name]
        products = [place for place, name in enumerate(names) if {"mm", "addmm", "matmul"} & set(name.split("."))]
        assert products, names
        assert len(sums) == len(found[0]), names
        assert sums[0] < products[-1], names

    world.run(body)


@requirement(
    "DYN-HOOK-2500",
    "Compiled autograd has the gradients of uncompiled backwards also for inputs on which no output of compiled code "
    "depends.",
    source=SOURCE,
)
@requirement(
    "DYN-HOOK-2501",
    "A hook may run a backward of its own within a backward that is compiled.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_compiled_backwards(world: World) -> None:
    """Compile a function with a detached input, and run a backward of another tensor in a hook of the first."""

    def body(rank: Rank) -> None:
        def detached(x: torch.Tensor, w: torch.Tensor) -> Any:
            return functional.all_reduce(x * 2, "sum", dist.group.WORLD), w.detach() + x

        def gradients(function: Any, context: Any) -> list[Any]:
            seen: list[Any] = []

            def squared(gradient: torch.Tensor) -> torch.Tensor:
                with torch.enable_grad():
                    other = torch.full((3,), 2.0, device=rank.device, requires_grad=True)
                    (other * other).sum().backward()
                assert other.grad is not None
                seen.append(other.grad.tolist())
                return gradient * 2

            x, w = (torch.ones(3, device=rank.device, requires_grad=True) for _ in range(2))
            y = x * 3
            y.register_hook(squared)
            with context:
                sum(function(y, w)).sum().backward()
            return [*seen, *(None if t.grad is None else t.grad.tolist() for t in (x, w))]

        right = gradients(detached, nullcontext())
        compiled, _ = dynamo.compiled(detached)
        assert gradients(compiled, dynamo.compiled_backward("aot_eager")) == right

    world.run(body)
