"""A module under DDP that is used in other ways than a forward and a backward of all ranks in turn."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from fixtures.beginnings import started
from fixtures.layers import Undefined, layer
from fixtures.scaling import check_scaling
from harness import Rank, World, assert_on_ranks, requirement, spmd
from harness.stacks import replicate

SOURCE = "torch.nn.parallel.DistributedDataParallel"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1e-6},
    {"static_graph": True},
    {"find_unused_parameters": True},
]

LAYERS = ("first", "second", "third")
"""The layers of the model that check_scaling trains."""


class Both(nn.Module):
    """Two layers, whose outputs are returned apart, or of which the second is returned without being called."""

    def __init__(self, called: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.called = layer(), layer(), called
        self.register_buffer("level", torch.ones(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self.first(x) * self.level, self.second(x) if self.called else self.second  # type: ignore[operator]


def numbers(gradients: dict[str, torch.Tensor]) -> list[float]:
    """Return the number that all elements of each gradient are."""
    assert all(bool((g == g.flatten()[0]).all()) for g in gradients.values())
    return [g.flatten()[0].item() for g in gradients.values()]


def given(rank: Rank) -> torch.Tensor:
    return torch.full((1, 2), 1.0 + rank.index, device=rank.device)


@requirement(
    "REPL-CALL-08",
    "functional_call of a module under DDP uses what it is given, with own gradients, and leaves the module as it was.",
    source="torch.func.functional_call; torch.nn.parallel.DistributedDataParallel",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_functional_call(world: World, how: str) -> None:
    """Call with all parameters and a buffer, or with some, after a step, or before the first one of DDP.

    If the first forward after replicate() is such a call, PyTorch 2.13 never averages the module's own gradients.
    """

    def body(rank: Rank) -> None:
        own = 1.0 + rank.index
        for options in OPTIONS:
            if "static_graph" in options:
                continue
            for late in (False, True) if how == "DDP" else (True,):
                module = Both().to(rank.device)
                model: Any = replicate.replicate(module, **options) if how == "replicate" else None
                model = model or DistributedDataParallel(module, **options)
                prefix = "module." if how == "DDP" else ""
                if late:
                    torch.cat(model(given(rank))).sum().backward()
                    model.zero_grad()
                for names in (["first.weight", "second.weight", "level"], ["second.weight"]):
                    others = {n: torch.full((2, 2) if "w" in n else (2,), 5.0, device=rank.device) for n in names}
                    for name in names:
                        others[name].requires_grad_("weight" in name)
                    named = {prefix + name: value for name, value in others.items()}
                    output = torch.func.functional_call(model, named, (given(rank),))
                    scale = 25.0 if "level" in names else 1.0
                    assert [part[0, 0].item() for part in output] == [2 * own * scale, 10 * own], (options, names)
                    loss = output[0] + output[1] if "level" in names else output[1]
                    loss.sum().backward()
                    gradients = {name: value.grad for name, value in others.items() if value.grad is not None}
                    right = {"first.weight": 5.0 * own, "second.weight": own}
                    assert numbers(gradients) == [right[name] for name in gradients], (options, names)
                    assert list(gradients) == [name for name in names if "weight" in name]
                    assert all(p.grad is None for p in module.parameters()), (options, names)
                    assert all(bool((t == 1).all()) for t in module.state_dict().values()), (options, names)
                for step in range(2):
                    torch.cat(model(given(rank))).sum().backward()
                    assert numbers(replicate.gradients(module)) == [1.5, 1.5], (options, late, step)
                    model.zero_grad()

    world.run(body)


class Named(nn.Module):
    """A weight times the sum of what it is given, in any way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args: float, **options: float) -> torch.Tensor:
        """Return the weight times the sum."""
        return self.weight * sum([*args, *options.values()])


@requirement(
    "REPL-CALL-1601",
    "functional_call of a module under DDP passes on what its forward is given by position or by keyword, or nothing.",
    source="torch.func.functional_call: args, kwargs",
)
@pytest.mark.world(2)
def test_functional_arguments(world: World) -> None:
    """Give one number or a tuple of them, none, keywords, or both."""
    ways: list[tuple[Any, dict[str, float] | None, float]] = [
        ((2.0,), None, 2.0),
        (2.0, None, 2.0),
        ((2.0, 3.0), {"x": 4.0}, 9.0),
        (None, {"x": 4.0, "y": 1.0}, 5.0),
        ((), {"x": 4.0}, 4.0),
        ((), None, 0.0),
        (None, None, 0.0),
    ]

    def body(rank: Rank) -> None:
        model = DistributedDataParallel(Named().to(rank.device))
        for args, options, total in ways:
            weight = torch.full((2,), 5.0, device=rank.device)
            found = torch.func.functional_call(model, {"module.weight": weight}, args, options)
            assert found.tolist() == [5.0 * total] * 2, f"{args}, {options}: {found}"

    world.run(body)


@requirement(
    "REPL-CALL-08",
    "functional_call of a module under DDP uses what it is given, with own gradients, and leaves the module as it was.",
    source="torch.func.functional_call; torch.nn.parallel.DistributedDataParallel",
)
@pytest.mark.world(2)
def test_functional_call_at_first(world: World) -> None:
    """The first forward after replicate() is a functional_call; two steps follow."""

    def body(rank: Rank) -> list[list[float]]:
        model: Any = replicate.apply(layer(), rank)
        weight = torch.full((2, 2), 5.0, device=rank.device, requires_grad=True)
        torch.func.functional_call(model, {"weight": weight}, (given(rank),))
        steps = []
        for _ in range(2):
            model(given(rank)).sum().backward()
            steps.append(numbers(replicate.gradients(model)))
            model.zero_grad()
        return steps

    assert_on_ranks([[[1.5]] * 2] * 2, world.run(body))


class Scaled(nn.Module):
    """A layer whose output a buffer may scale."""

    level: torch.Tensor | None

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.layer = layer()
        self.register_buffer("level", torch.ones(2) if buffer else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if self.level is None else y * self.level


VIEWS, SMALL, LOCAL = {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}, {"broadcast_buffers": False}
FORWARD_MODE: dict[str, tuple[int, list[tuple[bool, dict[str, Any]]]]] = {
    "one step": (1, [(False, {}), (False, VIEWS), (False, SMALL), (True, LOCAL)]),
    "steps": (3, [(False, {})]),
    "buffers": (1, [(True, {})]),
    "options": (1, [(False, {"find_unused_parameters": True}), (False, {"static_graph": True})]),
}
"""How many steps are run, and whether each module has a buffer, with the options of DDP."""


@requirement(
    "REPL-FUNC-120",
    "torch.func.jvp of a module under DDP has one device's outputs and derivatives, whose backward averages gradients.",
    source=f"{SOURCE}; torch.func.jvp; pytorch/pytorch#102197, #130932, #182661",
)
@pytest.mark.parametrize("case", list(FORWARD_MODE))
@pytest.mark.world(2)
def test_jvp(world: World, case: str) -> None:
    """Differentiate with respect to the input, and train on outputs and derivatives."""
    steps, every = FORWARD_MODE[case]

    def body(rank: Rank) -> list[Any]:
        found: list[Any] = []
        for buffer, options in every:
            module = Scaled(buffer).to(rank.device)
            model = DistributedDataParallel(module, **options)
            for _ in range(steps):
                x = given(rank)
                try:
                    output, derivative = torch.func.jvp(model, (x,), (torch.ones_like(x),))
                    (output + 3 * derivative).sum().backward()
                except RuntimeError as e:
                    found.append(str(e).partition(".")[0])
                else:
                    ends = [output[0, 0].item(), derivative[0, 0].item()]
                    found.append(ends + numbers(replicate.gradients(module)))
                model.zero_grad()
        return found

    right = [[[2.0 * (1 + rank), 2.0, 4.5]] * steps * len(every) for rank in range(2)]
    assert_on_ranks(right, world.run(body))


@requirement(
    "REPL-CALL-09",
    "Without find_unused_parameters alone, layers may be called after the forward, and outputs have a backward each.",
    source=f"{SOURCE}: find_unused_parameters; static_graph, 'model parameters outside of forward function'",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_outside_of_the_forward(world: World, how: str) -> None:
    """Run two backwards in either order, then call a layer that a forward returned, for three steps."""

    def body(rank: Rank) -> None:
        for options in OPTIONS:
            if "find_unused_parameters" in options:
                continue
            for called in (True, False):
                if called and "static_graph" in options:
                    continue  # the outputs have one graph
                module = Both(called).to(rank.device)
                model: Any = replicate.replicate(module, **options) if how == "replicate" else None
                model = model or DistributedDataParallel(module, **options)
                for step in range(3):
                    output, other = model(given(rank))
                    losses = [output.sum(), other.sum()] if called else [other(output).sum()]
                    for loss in losses[:: 1 if step % 2 else -1]:
                        loss.backward()
                    right = [1.5, 1.5] if called else [3.0, 3.0]
                    assert numbers(replicate.gradients(module)) == right, (options, called, step)
                    model.zero_grad()

    world.run(body)


@requirement(
    "REPL-CALL-09",
    "Without find_unused_parameters alone, layers may be called after the forward, and outputs have a backward each.",
    source=f"{SOURCE}: find_unused_parameters; static_graph, 'model parameters outside of forward function'",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.world(2, keeps="graphs of backwards that failed")
def test_called_after_it_was_unused(world: World, how: str) -> None:
    """With find_unused_parameters, call a layer that a forward returned: the error blames no layer that was used."""

    def body(rank: Rank) -> None:
        module = Both(False).to(rank.device)
        options = {"find_unused_parameters": True}
        model: Any = replicate.replicate(module, **options) if how == "replicate" else None
        model = model or DistributedDataParallel(module, **options)
        output, second = model(given(rank))
        with pytest.raises(RuntimeError, match=r"twice.*") as e:
            second(output).sum().backward()
        assert "first.weight" not in str(e.value)

    world.run(body)


@requirement(
    "REPL-ACC-02",
    "Steps of the module inside DDP accumulate the rank's own gradients, which the next step of DDP averages.",
    source=f"{SOURCE}: module; gradients are reduced by hooks on parameters",
)
@requirement(
    "DDP-MODE-02",
    "A forward that synchronizes no buffers sends nothing in evaluation, so that one rank may evaluate alone.",
    source=f"{SOURCE}: eval; forward_sync_buffers",
)
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.world(2)
def test_alone(world: World) -> None:
    """Ranks run different numbers of steps of the inner module, thrice; then one rank evaluates, and all train on.

    With a static graph, PyTorch 2.13 averages nothing in the step after one of the inner module.
    """

    def body(rank: Rank) -> None:
        for number, options in enumerate(OPTIONS):
            module = nn.Sequential(layer(), layer()).to(rank.device)
            model = DistributedDataParallel(module, **options)
            for step in range(3) if "static_graph" not in options else ():
                inner = [step, 2][rank.index]
                for _ in range(inner):
                    module(given(rank)).sum().backward()
                own = 2.0 * (1.0 + rank.index)
                assert numbers(replicate.gradients(module)) == [own * inner] * 2 * (inner > 0), (options, step)
                model(given(rank)).sum().backward()
                mean = 2.0 * (1.0 * (step + 1) + 2.0 * 3) / 2
                assert numbers(replicate.gradients(module)) == [mean] * 2, (options, step)
                model.zero_grad()
            if rank.index == number % 2:
                model.eval()
                for gradients in (True, False):
                    with torch.set_grad_enabled(gradients):
                        assert model(given(rank))[0, 0].item() == 4.0 * (1.0 + rank.index), options
                model.train()
            model(given(rank)).sum().backward()
            assert numbers(replicate.gradients(module)) == [3.0, 3.0], options

    world.run(body)


@requirement(
    "REPL-ACC-02",
    "Steps of the module inside DDP accumulate the rank's own gradients, which the next step of DDP averages.",
    source=f"{SOURCE}: module; gradients are reduced by hooks on parameters",
)
@pytest.mark.world(2)
def test_alone_in_a_static_graph(world: World) -> None:
    """With static_graph, run a step of the inner module and one of DDP, thrice."""

    def body(rank: Rank) -> list[list[float]]:
        module = layer().to(rank.device)
        model = DistributedDataParallel(module, static_graph=True)
        steps = []
        for _ in range(3):
            module(given(rank)).sum().backward()
            model(given(rank)).sum().backward()
            steps.append(numbers(replicate.gradients(module)))
            model.zero_grad()
        return steps

    assert_on_ranks([[[3.0]] * 3] * 2, world.run(body))


class Passing(nn.Module):
    """Two layers, of which the second gets no gradient in some forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x: torch.Tensor, undefined: bool) -> torch.Tensor:
        y: torch.Tensor = self.second(x)
        result: torch.Tensor = self.first(x) + (Undefined.apply(y) if undefined else y)  # type: ignore[no-untyped-call]
        return result


@requirement(
    "REPL-UNUSED-06",
    "With find_unused_parameters, parameters whose gradients a backward leaves undefined have none, or the average.",
    source=f"{SOURCE}: find_unused_parameters; torch.autograd.Function: 'return None'",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_undefined_gradients(world: World, how: str) -> None:
    """A function within the module or after it gives no gradient, on both ranks or on one, in some of five steps."""

    def body(rank: Rank) -> None:
        for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}):
            for inside in (False, True):
                module = Passing().to(rank.device)
                options = {"find_unused_parameters": True, **options}
                model: Any = replicate.replicate(module, **options) if how == "replicate" else None
                model = model or DistributedDataParallel(module, **options)
                for step, which in enumerate(([0, 1], [], [0], [0, 1], [1])):
                    undefined = rank.index in which
                    output = model(given(rank), undefined and inside)
                    if undefined and not inside:
                        output = Undefined.apply(output)  # type: ignore[no-untyped-call]
                    output.sum().backward()
                    sums = sum(r + 1.0 for r in range(2) if r not in which)
                    second = sums / 2 if sums else None
                    right = [1.5 if inside else second, second]
                    found = [None if p.grad is None else p.grad[0, 0].item() for p in module.parameters()]
                    assert found == right, (options, inside, step)
                    model.zero_grad()

    world.run(body)


@requirement(
    "REPL-NEST-361",
    "A module under DDP within another one has averaged gradients, also if these are views of buckets, or the backward "
    "raises an error.",
    source=f"{SOURCE}: gradient_as_bucket_view; torch/nn/parallel/distributed.py: _inside_ddp_forward",
)
@pytest.mark.parametrize("views", ["none", "outer", "inner"])
@pytest.mark.world(2)
def test_nested_with_views(world: World, views: str) -> None:
    """Wrap a whole module, both layers or the second one alone before the model, with large and small buckets."""

    def body(rank: Rank) -> None:
        wrong: set[float] = set()
        inner, outer = ({"gradient_as_bucket_view": views == which} for which in ("inner", "outer"))
        for small in ({}, {"bucket_cap_mb": 1e-6}):
            for which in ("whole", "both", "second"):
                layers = nn.Sequential(layer(), layer()).to(rank.device)
                module: nn.Module = layers
                if which == "whole":
                    module = DistributedDataParallel(layers, **inner)
                else:
                    for number in (0, 1) if which == "both" else (1,):
                        layers[number] = DistributedDataParallel(layers[number], **inner)
                model = DistributedDataParallel(module, **outer, **small)
                for _ in range(3):
                    try:
                        model(given(rank)).sum().backward()
                    except RuntimeError:
                        break
                    for parameter in layers.parameters():
                        assert parameter.grad is not None
                        wrong |= set(parameter.grad.flatten().tolist()) - {3.0}
                    model.zero_grad()
        assert not wrong, f"elements of gradients that are not 3: {sorted(wrong)}"

    world.run(body)


@requirement(
    "DDP-AGAIN-01",
    "A module whose DDP is gone, even after a backward that failed, can be wrapped again, and averages once.",
    source=f"{SOURCE}: module",
)
@pytest.mark.world(2)
def test_wrapped_again(world: World) -> None:
    """Wrap a module time and again, with other options, after no step, whole steps, or one that failed midway."""

    def failing(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    def body(rank: Rank) -> None:
        module = nn.Sequential(layer(), layer()).to(rank.device)
        for number, options in enumerate(OPTIONS + OPTIONS[::-1]):
            model = DistributedDataParallel(module, **options)
            if number % 3 == 0:
                x = module[0](given(rank)).requires_grad_()
                output = model(x)
                x.register_hook(failing)
                with pytest.raises(ZeroDivisionError):
                    output.sum().backward()
                module.zero_grad()
                del output, x
                continue
            for step in range(3 * (number % 3 - 1)):
                model(given(rank)).sum().backward()
                assert numbers(replicate.gradients(module)) == [3.0, 3.0], (number, step)
                model.zero_grad()

    world.run(body)


@requirement(
    "DDP-AGAIN-3658",
    "A module that is wrapped again, in a default group that was made anew, averages over its ranks.",
    source=f"{SOURCE}: process_group, 'If None, the default process group'; torch.distributed.destroy_process_group",
)
@spmd(3, timeout=120)
def test_wrapped_in_a_new_world(rank: Rank) -> None:
    """Wrap a module in four worlds of three ranks or two, after whole steps or after a backward that failed midway."""

    def failing(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    module = nn.Sequential(layer(), layer()).to(rank.device)
    for number, options in enumerate(OPTIONS[:4]):
        dist.barrier()
        dist.destroy_process_group()
        size, me = 3 - number % 2, (rank.index + number) % 3
        if me < size:
            started(rank, f"wrapped-{number}", me, size)
            model = DistributedDataParallel(module, **options)
            for step in range(2):
                model(torch.full((1, 2), 1.0 + me, device=rank.device)).sum().backward()
                assert numbers(replicate.gradients(module)) == [size + 1.0] * 2, (number, step)
                model.zero_grad()
            if number != 1:
                x = module[0](given(rank)).requires_grad_()
                output = model(x)
                x.register_hook(failing)
                with pytest.raises(ZeroDivisionError):
                    output.sum().backward()
                module.zero_grad()
                del output, x
            del model
            dist.destroy_process_group()
        started(rank, f"between-{number}", rank.index, 3)


@requirement(
    "REPL-SCALE-01",
    "A GradScaler unscales averaged gradients as on one device, and skips a step with one that is not finite.",
    source="torch.amp.GradScaler: scale, unscale_, step, update",
)
@pytest.mark.world(2)
def test_scaling(world: World) -> None:
    """Step with finite gradients, with one that has an infinity or a NaN, and again, by every option."""

    def body(rank: Rank) -> None:
        for options in OPTIONS:
            wrap = functools.partial(replicate.apply, rank=rank, **options)
            check_scaling(rank, lambda rank, model, wrap=wrap: (wrap(model), rank.index, 2), *LAYERS)  # type: ignore[misc]

    world.run(body)


@requirement(
    "REPL-SCALE-3200",
    "A GradScaler returns scaled tensors of the same shape and dtype, in the same containers.",
    source="torch.amp.GradScaler.scale: outputs (Tensor or iterable of Tensors)",
)
@pytest.mark.world(2)
def test_scaled_shapes(world: World) -> None:
    """Scale outputs of three shapes and two dtypes, alone, in a list and in a tuple, with a first scale and another."""

    def body(rank: Rank) -> None:
        model = DistributedDataParallel(layer().to(rank.device))
        scaler = torch.amp.GradScaler(rank.device.type, init_scale=4.0)
        for scale, shape, dtype in itertools.product((4.0, 8.0), ((), (1,), (2, 1)), (torch.float32, torch.float64)):
            what = f"{scale}, {shape}, {dtype}"
            loss = model(given(rank)).sum().expand(shape).to(dtype)
            (one, (other,)), alone = scaler.scale([loss, (loss,)]), scaler.scale(loss)  # type: ignore[list-item,misc]
            for scaled in (one, other, alone):
                assert (scaled.shape, scaled.dtype) == (loss.shape, loss.dtype), what  # type: ignore[attr-defined]
                assert torch.equal(scaled, loss * scale), what  # type: ignore[call-overload]
            alone.sum().backward()
            assert numbers(replicate.gradients(model.module)) == [1.5 * scale * loss.numel()], what
            model.zero_grad()
            if shape == (2, 1) and dtype == torch.float64:
                scaler.update(8.0)

    world.run(body)


@requirement(
    "REPL-GRAPH-01",
    "backward(create_graph=True) averages several gradients that depend on parameters.",
    source="torch.Tensor.backward: create_graph; torch.nn.parallel.DistributedDataParallel; pytorch/pytorch#63929",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2, keeps="parameters whose gradients have graphs, which refer to them")
def test_create_graph(world: World, how: str) -> None:
    """Two layers, one after the other; the gradients of their gradients are not looked at."""

    def body(rank: Rank) -> list[float]:
        module = nn.Sequential(layer(), layer()).to(rank.device)
        model: Any = replicate.replicate(module) if how == "replicate" else DistributedDataParallel(module)
        model(given(rank)).sum().backward(create_graph=True)
        return numbers(replicate.gradients(module))

    assert_on_ranks([[3.0, 3.0]] * 2, world.run(body))


@requirement(
    "REPL-GRAPH-61",
    "backward(create_graph=True) averages the gradient of a module with one parameter in every step.",
    source="torch.Tensor.backward: create_graph; distributed_test.py: test_ddp_create_graph",
)
@pytest.mark.world(2, keeps="parameters whose gradients have graphs, which refer to them")
def test_create_graph_of_one_parameter(world: World) -> None:
    """Square the parameter in six steps, under every option, with gradients that are cleared or that accumulate."""

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.full((2,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.p.square() * x

    def body(rank: Rank) -> None:
        for options in OPTIONS:
            for clears in (True, False):
                module = Squared().to(rank.device)
                model = DistributedDataParallel(module, **options)
                for step in range(6):
                    if clears:
                        model.zero_grad()
                    model(given(rank)).sum().backward(create_graph=True)
                    assert module.p.requires_grad
                    assert module.p.grad is not None
                    total = 9.0 if clears else 9.0 * (step + 1)
                    assert module.p.grad.tolist() == [total] * 2, (options, clears, step)

    world.run(body)


@requirement(
    "REPL-SCALE-61",
    "Under autocast, gradients are averaged in the dtype of parameters, whether they are views of buckets or not.",
    source="torch.autocast; torch.amp.GradScaler; torch.nn.parallel.DistributedDataParallel: gradient_as_bucket_view",
)
@pytest.mark.world(2)
def test_autocast(world: World) -> None:
    """Cast the layers of three scaled steps to a narrower dtype, under every option; the optimizer subtracts."""

    def body(rank: Rank) -> None:
        for options in OPTIONS:
            module = nn.Sequential(layer(), layer()).to(rank.device)
            model = DistributedDataParallel(module, **options)
            sgd = torch.optim.SGD(model.parameters(), lr=2.0**-12)
            scaler = torch.amp.GradScaler(rank.device.type, init_scale=16.0)
            plain = nn.Sequential(layer(), layer())
            right = torch.optim.SGD(plain.parameters(), lr=2.0**-12)
            for step in range(3):
                with torch.autocast(rank.device.type, torch.bfloat16):
                    y = model(given(rank))
                assert y.dtype == torch.bfloat16
                scaler.scale(y.float().sum()).backward()
                scaler.step(sgd)
                scaler.update()
                for each in range(2):
                    with torch.autocast("cpu", torch.bfloat16):
                        y = plain(torch.full((1, 2), 1.0 + each))
                    (y.float().sum() / 2).backward()
                right.step()
                for p, one in zip(module.parameters(), plain.parameters(), strict=True):
                    assert p.grad is not None
                    assert p.grad.dtype == p.dtype
                    assert torch.equal(one.grad, p.grad.cpu()), (options, step)  # type: ignore[arg-type]
                    assert torch.equal(one.detach(), p.detach().cpu()), (options, step)
                model.zero_grad()
                plain.zero_grad()

    world.run(body)


@requirement(
    "REPL-NEST-61",
    "A DDP module within another one has the averages of one alone, also with static graphs or a search for unused "
    "parameters.",
    source="torch.nn.parallel.DistributedDataParallel: module; distributed_test.py: test_ddp_static_graph_nested_types",
)
@pytest.mark.world(2)
def test_nested(world: World) -> None:
    """Wrap a whole module, or its second layer alone before the rest of it, with every pair of options."""
    kinds: list[dict[str, Any]] = [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 1e-6},
    ]

    def body(rank: Rank) -> None:
        for inner in kinds:
            for outer in kinds:
                for whole in (True, False):
                    layers = nn.Sequential(layer(), layer()).to(rank.device)
                    if whole:
                        model = DistributedDataParallel(DistributedDataParallel(layers, **inner), **outer)
                    else:
                        layers[1] = DistributedDataParallel(layers[1], **inner)
                        model = DistributedDataParallel(layers, **outer)
                    for step in range(3):
                        model(given(rank)).sum().backward()
                        found = numbers(dict(enumerate(p.grad for p in layers.parameters())))  # type: ignore[misc,arg-type]
                        assert found == [3.0, 3.0], (inner, outer, whole, step)
                        model.zero_grad()

    world.run(body)


class Sloped(nn.Module):
    """The sum of a weight, each element of which has a gradient of its own, for an input of 1 that of `SLOPES`."""

    SLOPES = torch.arange(24.0).view(2, 3, 2, 2)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times the weighted sum."""
        return (self.weight * self.SLOPES.to(x.device)).sum() * x


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "to channels last": lambda module: module.to(memory_format=torch.channels_last),
    "to contiguous": lambda module: module.to(memory_format=torch.contiguous_format),
    "ZeroRedundancyOptimizer": lambda module: ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, lr=0.5, parameters_as_bucket_view=True
    ),
}
"""What changes how a module's parameters lie in memory: the optimizer makes them parts of a contiguous tensor."""


@requirement(
    "DDP-FORMAT-1308",
    "Gradients under DDP are averages by element, also after the strides of parameters changed.",
    source="torch/csrc/distributed/c10d/reducer.cpp: 'param's strides changed since DDP was constructed', no error; "
    "torch.distributed.optim.ZeroRedundancyOptimizer: parameters_as_bucket_view",
)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda given: next(iter(given), "default"))
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.world(2)
def test_strides_changed(world: World, change: str, when: str, options: dict[str, Any]) -> None:
    """Change them before or after DDP is made, and look at gradients of three steps."""

    def body(rank: Rank) -> list[int]:
        module = Sloped().to(rank.device)
        if change != "to channels last":
            module.to(memory_format=torch.channels_last)
        strides = module.weight.stride()
        if when == "before":
            CHANGES[change](module)
        model = DistributedDataParallel(module, **options)
        if when == "after":
            CHANGES[change](module)
        assert module.weight.stride() != strides
        wrong = []
        for step in range(3):
            model.zero_grad()
            model(torch.full((1,), 1.0 + rank.index, device=rank.device)).sum().backward()
            assert module.weight.grad is not None
            if not torch.equal(module.weight.grad.cpu(), 1.5 * Sloped.SLOPES):
                wrong.append(step)
        return wrong

    assert_on_ranks([[]] * 2, world.run(body))


@requirement(
    "DDP-LIFE-8806",
    "A backward averages gradients also if the DDP module of its forward is not referred to any more.",
    source=f"{SOURCE}: forward",
)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda given: next(iter(given), "default"))
@pytest.mark.parametrize("dropped", ["output", "module"])
@pytest.mark.world(2)
def test_dropped_before_backward(world: World, dropped: str, options: dict[str, Any]) -> None:
    """Drop the DDP module, or only the output after the loss was made of it, and let the garbage be collected."""

    def body(rank: Rank) -> list[list[float]] | str:
        module = nn.Linear(2, 1, bias=False).to(rank.device)
        model: Any = DistributedDataParallel(module, **options)
        loss = model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum()
        if dropped == "module":
            del model
        gc.collect()
        try:
            loss.backward()
        except AttributeError as error:
            return f"AttributeError: {error}"
        assert module.weight.grad is not None
        return module.weight.grad.tolist()

    assert_on_ranks([[[1.5, 1.5]]] * 2, world.run(body))
