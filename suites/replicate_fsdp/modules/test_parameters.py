"""Replicated parameters before, in and after a forward, and in state dicts."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from fixtures.managed import ways
from fixtures.memory import held, held_less_than
from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import messages, replicate_fsdp

SOURCE = "torch/distributed/_composable/replicate_with_fsdp.py: replicate"


def layer(value: float = 1.0) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, value)
    return linear


def called(rank: Rank, model: Any) -> float:
    """Return a model's output for the input 1."""
    return float(model(torch.ones(1, 1, device=rank.device)).detach())


@requirement(
    "RFSDP-PAR-01",
    "Outside of a forward, parameters are replicated DTensors with their whole size and values.",
    source=SOURCE,
)
@pytest.mark.world(2, 3)
def test_placements(world: World) -> None:
    """Check parameters of several shapes, one of them frozen, before and after a step."""
    shapes: dict[str, tuple[int, ...]] = {"one": (1,), "vector": (5,), "block": (2, 1, 3, 2), "frozen": (4,)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in shapes.items():
                value = dyadic(*shape, key=name)
                self.register_parameter(name, nn.Parameter(value, requires_grad=name != "frozen"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name, p in self.named_parameters():
                assert type(p) is nn.Parameter
                assert p.requires_grad == (name != "frozen")
                x = x * p.sum()
            return x

    def body(rank: Rank) -> None:
        model = replicate_fsdp.apply(Model(), rank)
        for step in range(2):
            for name, p in model.named_parameters():
                assert isinstance(p, DTensor)
                assert isinstance(p, nn.Parameter)
                assert p.placements == (Replicate(),)
                assert p.shape == p.to_local().shape == shapes[name]
                assert p.requires_grad == (name != "frozen")
                assert_same(dyadic(*shapes[name], key=name), p.full_tensor().detach().cpu(), f"step {step}: {name}")
            model(torch.ones(1, device=rank.device)).sum().backward()
            assert (model.get_parameter("frozen").grad is None) is True

    world.run(body)


@requirement(
    "RFSDP-PAR-02",
    "Gradients of parameters of every shape are averaged element by element.",
    source=SOURCE,
)
@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.world(2, 3)
def test_shapes(world: World, offload: bool) -> None:
    """Use parameters of one element, many dimensions and equal shapes in two groups; two of three steps accumulate."""
    shapes: dict[str, tuple[int, ...]] = {"one": (1, 1), "block": (2, 1, 3, 2), "vector": (5,), "last": (5,)}
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()

    def factors(name: str, rank: int, step: int) -> torch.Tensor:
        return dyadic(*shapes[name.split(".")[-1]], key=(name, rank, step), denominator=2).float()

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.ones(shape)))

        def forward(self, name: str, rank: int, step: int) -> torch.Tensor:
            found = [(p * factors(f"{name}.{n}", rank, step).to(p.device)).sum() for n, p in self.named_parameters()]
            return torch.stack(found).sum()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Part(), Part()

        def forward(self, rank: int, step: int) -> torch.Tensor:
            result: torch.Tensor = self.first("first", rank, step) + self.second("second", rank, step)
            return result

    def body(rank: Rank) -> list[dict[str, torch.Tensor]]:
        model = replicate_fsdp.apply(Model(), rank, offload_policy=policy)
        found = []
        for step in range(3):
            (rank.size * model(rank.index, step)).backward()
            found.append({n: g.cpu() for n, g in replicate_fsdp.gradients(model).items()})
            if step == 0:
                model.zero_grad()
        return found

    for number, *ranks in zip(range(3), *world.run(body), strict=True):
        steps = [number] if number < 2 else [1, 2]
        for rank, found in enumerate(ranks):
            for name, gradient in found.items():
                right = sum(factors(name, r, s) for r in range(world.size) for s in steps)
                assert isinstance(right, torch.Tensor)
                what = f"step {number}, rank {rank}: gradient of {name}"
                if world.size == 2:
                    assert_same(right, gradient, what)
                else:  # a backend may average by multiplying with a rounded third; numbers here are halves
                    torch.testing.assert_close(gradient, right, rtol=0, atol=2.0**-18, msg=what)


@requirement(
    "RFSDP-OFFLOAD-01",
    "Parameters offloaded to pinned memory stay there and train, or replicate raises an error without an accelerator.",
    source="torch.distributed.fsdp.CPUOffloadPolicy: pin_memory",
)
@pytest.mark.world(1, 2)
def test_pinned(world: World) -> None:
    """Offload with the default policy, and run three steps of SGD."""

    def body(rank: Rank) -> list[tuple[float, bool]]:
        if not torch.accelerator.is_available():
            with pytest.raises(RuntimeError):  # the words are those of the build's accelerator
                replicate_fsdp.apply(layer(2.0), rank, offload_policy=CPUOffloadPolicy())
            return []
        model = replicate_fsdp.apply(layer(2.0), rank, offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        steps = []
        for _ in range(3):
            output = model(torch.ones(1, 1, device=rank.device))
            output.sum().backward()
            pinned = [p.to_local().is_pinned() for p in model.parameters() if isinstance(p, DTensor)]
            steps.append((float(output.detach()), pinned == [True]))
            optimizer.step()
            optimizer.zero_grad()
        return steps

    trained = [(2.0, True), (1.75, True), (1.5, True)]
    assert_on_ranks([trained] * world.size, world.run(body), or_all=[[]] * world.size)


@requirement(
    "RFSDP-STATE-02",
    "After a forward without a backward, a state dict holds the trained parameters as DTensors.",
    source="torch/distributed/fsdp/_fully_shard: FSDPParamGroup._register_state_dict_hooks",
)
@requirement(
    "RFSDP-STATE-03",
    "A state dict loaded after a forward is used by the next forward.",
    source="torch/distributed/fsdp/_fully_shard: FSDPParamGroup._register_state_dict_hooks",
)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.world(2)
def test_state_dict_after_forward(world: World, assign: bool) -> None:
    """Run a forward, save, load other values, run a forward, load again, run a forward."""

    def body(rank: Rank) -> list[float]:
        model = replicate_fsdp.apply(nn.Sequential(layer(), layer()), rank)
        outputs = []
        for value in (2.0, 4.0):
            with torch.no_grad():
                outputs.append(called(rank, model))
            state = model.state_dict()
            assert {type(p) for p in state.values()} == {DTensor}
            model.load_state_dict({n: torch.full_like(p, value) for n, p in state.items()}, assign=assign)
        return [*outputs, called(rank, model)]

    assert_on_ranks([[1.0, 4.0, 16.0]] * 2, world.run(body))


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}
"""Options under which all numbers of the next test are the same."""


@requirement(
    "RFSDP-STEP-01",
    "A forward uses the parameters as the last optimizer step left them.",
    source=SOURCE,
)
@pytest.mark.parametrize("evaluated", [False, True], ids=["trained", "evaluated"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.world(2)
def test_after_a_step(world: World, policy: str, evaluated: bool) -> None:
    """Run steps of SGD, with or without an evaluation between backward and step."""

    def body(rank: Rank) -> list[float]:
        model = replicate_fsdp.apply(nn.Sequential(layer(2.0)), rank, **POLICIES[policy])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        outputs = []
        for _ in range(3):
            output = model(torch.ones(1, 1, device=rank.device))
            outputs.append(float(output.detach()))
            output.sum().backward()
            if evaluated:
                with torch.no_grad():
                    called(rank, model)
            optimizer.step()
            optimizer.zero_grad()
        return outputs

    assert_on_ranks([[2.0, 1.75, 1.5]] * 2, world.run(body))


@requirement(
    "RFSDP-PAR-03",
    "The gradient of a parameter larger than 1 MiB is averaged in every element.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_large(world: World) -> None:
    """Run one backward, in which neighboring elements differ."""

    def numbers(rank: int) -> torch.Tensor:
        return torch.arange(300_001.0) * (rank + 1)

    def body(rank: Rank) -> torch.Tensor:
        module = nn.Embedding(1, 300_001)
        model = replicate_fsdp.apply(module, rank)
        row = model(torch.zeros(1, dtype=torch.int64, device=rank.device))
        (row * numbers(rank.index).to(rank.device)).sum().backward()
        return replicate_fsdp.gradients(model)["weight"][0].cpu()

    for rank, gradient in enumerate(world.run(body)):
        assert_same(numbers(0) * 1.5, gradient, f"rank {rank}")


@requirement(
    "RFSDP-CAST-01",
    "A replicated model that is cast before its first forward trains in its new dtype.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_cast_model(world: World) -> None:
    """Cast to float64, then set the parameters to 3."""

    def body(rank: Rank) -> tuple[float, str]:
        model = replicate_fsdp.apply(nn.Sequential(layer()), rank)
        model.double()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(3.0)
        output = model(torch.ones(1, 1, device=rank.device, dtype=torch.float64))
        output.sum().backward()
        return float(output.detach()), str(replicate_fsdp.gradients(model)["0.weight"].dtype)

    assert_on_ranks([(3.0, "torch.float64")] * 2, world.run(body))


@requirement(
    "RFSDP-UNSHARD-01",
    "unshard() makes parameters plain tensors, and reshard() makes them DTensors again.",
    source="torch.distributed.fsdp.FSDPModule: unshard, reshard",
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.world(2)
def test_unshard(world: World, asynchronous: bool) -> None:
    """Repeat it with other values."""

    def body(rank: Rank) -> list[float]:
        model: Any = replicate_fsdp.apply(layer(), rank)
        called(rank, model)
        model.reshard()
        values = []
        for _ in range(2):
            handle = model.unshard(async_op=asynchronous)
            if asynchronous:
                handle.wait()
            assert not isinstance(model.weight, DTensor)
            values.append(float(model.weight.detach()))
            model.reshard()
            assert isinstance(model.weight, DTensor)
            with torch.no_grad():
                model.weight.mul_(2)
        return values

    assert_on_ranks([[1.0, 2.0]] * 2, world.run(body))


@requirement(
    "RFSDP-UNSHARD-04",
    "unshard() and reshard() of a managed module without parameters of its own neither fail nor change any parameter.",
    source="torch.distributed.fsdp.FSDPModule: unshard, reshard; UnshardHandle.wait: 'This method is not recursive'",
)
@pytest.mark.world(2)
def test_unshard_without_parameters(world: World) -> None:
    """All parameters belong to managed submodules or are ignored, or there are none; before and after a step."""

    def body(rank: Rank) -> None:
        for way, managed in ways(rank).items():
            for whose in "submodules", "ignored", "nobody":
                model: Any = nn.Sequential(layer(2.0), layer(3.0)) if whose != "nobody" else nn.Sequential(nn.ReLU())
                model.to(rank.device)
                if whose == "submodules":
                    for part in model:
                        managed(part)
                managed(model, ignored_params=set(model.parameters()) if whose == "ignored" else None)
                for step in range(2):
                    for asynchronous in False, True:
                        what, at = f"{way}, {whose}, {asynchronous=}, step {step}", messages.mark()
                        before = list(model.parameters())
                        handle = model.unshard(async_op=asynchronous)
                        assert (handle is not None) == asynchronous, what
                        if asynchronous:
                            handle.wait()
                            handle.wait()
                        for _ in range(2):
                            assert all(map(operator.is_, before, model.parameters())), what
                            model.reshard()
                        assert messages.since(at) == [], what
                    x = torch.full((1, 1), 1.0 + rank.index, device=rank.device, requires_grad=True)
                    output = model(x)
                    output.sum().backward()
                    assert output.item() == (1 + rank.index) * (1 if whose == "nobody" else 6), what
                    mean = 1.0 + rank.index if whose == "ignored" else 1.5
                    gradients = [g.item() for g in replicate_fsdp.gradients(model).values()]
                    assert gradients == ([] if whose == "nobody" else [3 * mean, 2 * mean]), what
                    model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-UNSHARD-02",
    "A state dict saved after unshard() holds DTensors.",
    source="torch/distributed/fsdp/_fully_shard: FSDPParamGroup._register_state_dict_hooks",
)
@requirement(
    "RFSDP-UNSHARD-03",
    "A state dict can be loaded after unshard().",
    source="torch/distributed/fsdp/_fully_shard: FSDPParamGroup._register_state_dict_hooks",
)
@pytest.mark.world(2)
def test_state_dict_after_unshard(world: World) -> None:
    """Save after unshard(), load doubled values after unshard(), then run a forward."""

    def body(rank: Rank) -> tuple[bool, float, float]:
        model: Any = replicate_fsdp.apply(layer(), rank)
        before = called(rank, model)
        model.unshard()
        state = model.state_dict()
        model.unshard()
        model.load_state_dict({name: value * 2 for name, value in state.items()})
        return all(isinstance(value, DTensor) for value in state.values()), before, called(rank, model)

    assert_on_ranks([(True, 1.0, 2.0)] * 2, world.run(body))


@requirement(
    "RFSDP-METHOD-01",
    "A method registered with register_fsdp_forward_method trains like the forward.",
    source="torch.distributed.fsdp.register_fsdp_forward_method",
)
@pytest.mark.world(2)
def test_other_methods(world: World) -> None:
    """Run two steps of a method with its own inputs."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

        def other(self, x: torch.Tensor, *, times: float) -> torch.Tensor:
            return x * self.weight * times

    def body(rank: Rank) -> list[float]:
        model: Any = replicate_fsdp.apply(Model(), rank)
        register_fsdp_forward_method(model, "other")
        gradients = []
        for _ in range(2):
            model.other(torch.full((1,), 1.0 + rank.index, device=rank.device), times=2.0).sum().backward()
            gradients.append(float(replicate_fsdp.gradients(model)["weight"]))
            model.zero_grad()
        return gradients

    assert_on_ranks([[3.0, 3.0]] * 2, world.run(body))


@requirement(
    "RFSDP-HOOK-03",
    "Forward hooks, registered before or after replication, see the parameters that the module computes with.",
    source="torch/distributed/fsdp/_fully_shard: FSDPState.init, prepend=True",
)
@pytest.mark.world(2)
def test_users_hooks(world: World) -> None:
    """Register hooks before and after the forward; run two steps and an evaluation."""

    def body(rank: Rank) -> list[str]:
        model, seen = layer(), []

        def look(when: str) -> None:
            seen.append(f"{when}: {type(model.weight).__name__}")

        model.register_forward_pre_hook(lambda module, args: look("early, before"))
        model.register_forward_hook(lambda module, args, output: look("early, after"))
        replicate_fsdp.apply(model, rank)
        model.register_forward_pre_hook(lambda module, args: look("late, before"))
        for grad in (True, False, True):
            with torch.set_grad_enabled(grad):
                output = model(torch.ones(1, 1, device=rank.device))
            if grad:
                output.sum().backward()
        return seen

    right = ["early, before: Parameter", "late, before: Parameter", "early, after: Parameter"]
    assert_on_ranks([right * 3] * 2, world.run(body))


class Hooked(nn.Sequential):
    """Two linear layers and a parameter, all with hooks of every kind, which use the parameters of their module."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        self.weight = nn.Parameter(torch.ones(2))
        with torch.no_grad():
            for i, layer in enumerate(self, 1):
                layer.weight.copy_(torch.tensor([[i, 0], [-1, 1]]))
        self.seen: list[Any] = []
        for module in self.modules():
            for prepend, kwargs in itertools.product((True, False), repeat=2):
                module.register_forward_pre_hook(self.before(kwargs), prepend=prepend, with_kwargs=kwargs)
                for always in True, False:
                    after = self.after(kwargs)
                    module.register_forward_hook(after, prepend=prepend, with_kwargs=kwargs, always_call=always)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply the layers' output by the parameter."""
        return super().forward(x) * self.weight

    def look(self, module: nn.Module, values: torch.Tensor) -> torch.Tensor:
        """Note what a hook sees, and return something to add in which the parameter has a part."""
        weight: Any = module.weight
        self.seen.append((module is self, type(weight), weight.dtype, weight.tolist(), values.tolist()))
        total: torch.Tensor = weight.sum()
        return total

    def before(self, with_kwargs: bool) -> Any:
        """Return a hook that changes the input."""

        def plain(module: nn.Module, args: Any) -> Any:
            return (args[0] + self.look(module, args[0]),)

        return (lambda module, args, kwargs: (plain(module, args), kwargs)) if with_kwargs else plain

    def after(self, with_kwargs: bool) -> Any:
        """Return a hook that changes the output."""

        def plain(module: nn.Module, args: Any, output: Any) -> Any:
            return output + self.look(module, output)

        return (lambda module, args, kwargs, output: plain(module, args, output)) if with_kwargs else plain


PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "root": lambda manage, model: manage(model),
    "layers": lambda manage, model: [manage(layer) for layer in model],
    "root and layers": lambda manage, model: [manage(module) for module in (*model, model)],
    "root and group": lambda manage, model: (manage(list(model)), manage(model)),
}


@requirement(
    "RFSDP-HOOK-9012",
    "Forward hooks from before sharding see whole parameters in the dtype in which the module computes.",
    source="torch.distributed.fsdp.fully_shard; MixedPrecisionPolicy: param_dtype; "
    "torch/distributed/fsdp/_fully_shard: FSDPState.init, prepend=False",
)
@requirement(
    "RFSDP-HOOK-9013",
    "Results of forward hooks from before sharding are cast to the output dtype, with gradients as without sharding.",
    source="torch.distributed.fsdp.fully_shard; MixedPrecisionPolicy: output_dtype; "
    "torch.nn.Module.register_forward_hook: 'The hook can modify the output'",
)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.world(2)
def test_hooks_from_before(world: World, place: str) -> None:
    """Train and evaluate models whose hooks change every input and output, and compare what they see."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    settings = [(MixedPrecisionPolicy(), True), (half, False), (half, True)]

    def body(rank: Rank) -> None:
        for (way, manage), (mp, again) in itertools.product(ways(rank).items(), settings):
            what = f"{way}, {mp.param_dtype}, {again=}"
            alone, model = Hooked().to(rank.device), Hooked().to(rank.device)
            options = {"mp_policy": mp} | ({} if way == "replicated" else {"reshard_after_forward": again})
            PLACES[place](functools.partial(manage, **options), model)
            for grad in (False, True):
                outputs = []
                for module in alone, model:
                    module.seen.clear()
                    module.zero_grad()
                    with torch.set_grad_enabled(grad):
                        outputs.append(module(torch.ones(1, 2, device=rank.device)))
                assert_same(*[output.detach() for output in outputs], what)
                dtypes = {False: mp.param_dtype, True: mp.param_dtype if "root" in place else None}
                right = [(root, kind, dtypes[root] or dtype, *rest) for root, kind, dtype, *rest in alone.seen]
                assert model.seen == right, what
                if grad:
                    for output in outputs:
                        output.sum().backward()
                    for name, gradient in replicate_fsdp.gradients(alone).items():
                        assert_same(gradient, replicate_fsdp.gradients(model)[name], f"{what}: {name}")

    world.run(body)


@requirement(
    "RFSDP-LAYERWISE-01",
    "Layers can be created and replicated one by one, even if their plain parameters are already freed.",
    source="torch/distributed/fsdp/_fully_shard: FSDPState._validate_no_duplicate_params; pytorch/pytorch#176225",
)
@pytest.mark.world(1, 2)
def test_layer_by_layer(world: World) -> None:
    """Create sixty layers; each one's plain parameters are freed before the next layer is created."""

    def body(rank: Rank) -> float:
        model = nn.Sequential()
        for i in range(60):
            model.append(replicate_fsdp.apply(layer(2.0), rank, groups=False))
            if i % 4 == 0:
                gc.collect()
        return called(rank, replicate_fsdp.apply(model, rank, groups=False))

    assert_on_ranks([2.0**60] * world.size, world.run(body))


@requirement(
    "RFSDP-MEMORY-01",
    "Between steps, a rank holds its parameters once and its memory does not grow.",
    source="torch/distributed/fsdp/_fully_shard: FSDPParam.free_unsharded_param; ROCm/pytorch#3501",
)
@pytest.mark.world(2)
def test_memory(world: World) -> None:
    """Train two groups of 64 KiB for six steps, and count the bytes of all live tensors.

    A backend's thread may hold a gradient a moment longer: it gets five seconds, once.
    """

    def body(rank: Rank) -> int:
        before = held()
        model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
        replicate_fsdp.apply(model, rank)
        for _ in range(6):
            model(torch.ones(1, 128, device=rank.device)).sum().backward()
            model.zero_grad()
        return (held_less_than(before + (2 * 64 + 1) * 1024, within=5) - before) // 1024

    assert_on_ranks([2 * 64] * 2, world.run(body))


@requirement(
    "RFSDP-PAR-04",
    "An optimizer trains a replicated model whether it is created before or after the first forward.",
    source=SOURCE,
)
@pytest.mark.parametrize("made", ["first", "after-evaluation", "after-forward"])
@pytest.mark.world(2)
def test_optimizer(world: World, made: str) -> None:
    """Run two steps of SGD; before the optimizer is created, run an evaluation or a forward without a backward."""

    def body(rank: Rank) -> float:
        model = replicate_fsdp.apply(layer(2.0), rank)
        if made != "first":
            with torch.set_grad_enabled(made == "after-forward"):
                called(rank, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        for _ in range(2):
            model(torch.ones(1, 1, device=rank.device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(replicate_fsdp.parameters(model)["weight"])

    assert_on_ranks([1.5] * 2, world.run(body))


@requirement(
    "RFSDP-PAR-05",
    "Values written to parameters after a forward are trained and saved.",
    source=SOURCE,
)
@pytest.mark.parametrize("after", ["forward", "evaluation", "backward"])
@pytest.mark.world(2)
def test_written(world: World, after: str) -> None:
    """After a forward, a backward or an evaluation, set the parameters to 5; then run two steps of SGD."""

    def body(rank: Rank) -> list[float]:
        model = replicate_fsdp.apply(layer(2.0), rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        with torch.set_grad_enabled(after != "evaluation"):
            output = model(torch.ones(1, 1, device=rank.device))
        if after == "backward":
            output.sum().backward()
            optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(5.0)
        outputs = []
        for _ in range(2):
            outputs.append(called(rank, model))
            model(torch.ones(1, 1, device=rank.device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*outputs, float(replicate_fsdp.parameters(model)["weight"])]

    assert_on_ranks([[5.0, 4.75, 4.5]] * 2, world.run(body))


@requirement(
    "RFSDP-PAR-06",
    "A module may use the parameters of an inner group after calling it, and all uses contribute to their "
    "averaged gradients.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: nothing is resharded after a forward",
)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.world(2)
def test_used_by_parent(world: World, checkpointed: bool) -> None:
    """A weight is used in its layer, then transposed by the parent, in two steps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)
            nn.init.ones_(self.layer.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.layer, x, use_reentrant=False) if checkpointed else self.layer(x)
            return y + x @ self.layer.weight

    def body(rank: Rank) -> list[list[float]]:
        model = replicate_fsdp.apply(Model(), rank)
        gradients = []
        for _ in range(2):
            model(torch.tensor([[1.0 + rank.index, 4.0 * rank.index]], device=rank.device)).sum().backward()
            gradients.append(replicate_fsdp.gradients(model)["layer.weight"].flatten().tolist())
            model.zero_grad()
        return gradients

    # The gradient of a layer has the inputs in its columns, and that of its transpose in its rows: means 1.5 and 2.
    assert_on_ranks([[[3.0, 3.5, 3.5, 4.0]] * 2] * 2, world.run(body))
