"""When gradients are averaged: switches, outputs that a loss is computed from, and hooks."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from fixtures.layers import Hidden
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.training import launched, since

SOURCE = "torch.distributed.fsdp.FSDPModule"


class Layers(nn.Module):
    """A module that adds the outputs of two layers, whose weights are ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for layer in (self.inner, self.outer):
            nn.init.ones_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.outer(x) + self.inner(x)
        return result


def backward(rank: Rank, model: Any) -> int:
    """Run one backward, in which every gradient of rank r is r + 1, and return the number of its collectives."""
    output = model(torch.full((1, 1), 1.0 + rank.index, device=rank.device))
    before = launched()
    output.sum().backward()
    return sum(since(before).values())


def read(model: nn.Module) -> dict[str, float]:
    return {name: float(gradient) for name, gradient in replicate_fsdp.gradients(model).items()}


@requirement(
    "RFSDP-SYNC-01",
    "set_requires_gradient_sync applies to inner modules if recurse=True, and otherwise to its own module only.",
    source="torch.distributed.fsdp.FSDPModule: set_requires_gradient_sync, recurse",
)
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.world(2)
def test_recursion(world: World, recurse: bool) -> None:
    """A root with its own weight contains a layer; switch it off, then on again."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            self.own = nn.Parameter(torch.ones(1))
            nn.init.ones_(self.layer.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x) * self.own
            return result

    def body(rank: Rank) -> tuple[int, dict[str, float], int, dict[str, float]]:
        model: Any = replicate_fsdp.apply(Model(), rank)
        model.set_requires_gradient_sync(False, recurse=recurse)
        first = backward(rank, model), read(model)
        model.set_requires_gradient_sync(True, recurse=recurse)
        return *first, backward(rank, model), read(model)

    off: dict[str, float] = {} if recurse else {"layer.weight": 1.5}
    assert_on_ranks([(len(off), off, 2, {"own": 3.0, "layer.weight": 3.0})] * 2, world.run(body))


@requirement(
    "RFSDP-SYNC-02",
    "Without all-reduce, gradients are kept and added to those of the next backward that has it.",
    source="torch.distributed.fsdp.FSDPModule: set_requires_all_reduce",
)
@pytest.mark.world(2)
def test_requires_all_reduce(world: World) -> None:
    """Run two backwards without all-reduce and one with it; repeat."""

    def body(rank: Rank) -> list[tuple[int, dict[str, float]]]:
        model: Any = replicate_fsdp.apply(Layers(), rank)
        steps = []
        for on in (False, False, True) * 2:
            model.set_requires_all_reduce(on)
            steps.append((backward(rank, model), read(model)))
            if on:
                model.zero_grad()
        return steps

    without: tuple[int, dict[str, float]] = (0, {})
    with_it = (2, {"inner.weight": 4.5, "outer.weight": 4.5})
    assert_on_ranks([[without, without, with_it] * 2] * 2, world.run(body))


@dataclass
class Outputs:
    first: torch.Tensor
    others: Any


@requirement(
    "RFSDP-OUT-01",
    "Gradients are averaged whichever of several outputs the loss is computed from, in whatever container.",
    source="torch/distributed/fsdp/_fully_shard: FSDPState._register_pre_backward_hook",
)
@pytest.mark.parametrize("output", range(5))
@pytest.mark.world(2)
def test_any_output(world: World, output: int) -> None:
    """Compute the loss from one of five independent outputs, in two steps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
            y = [i * self.layer(x) for i in range(1, 6)]
            return y[0], y[1], [y[2]], {"a": y[3], "none": None}, Outputs(x, {"text": "text", "b": y[4]})

    def body(rank: Rank) -> list[float]:
        model = replicate_fsdp.apply(Model(), rank, groups=False)
        gradients = []
        for _ in range(2):
            first, second, listed, named, data = model(torch.full((1, 1), 1.0 + rank.index, device=rank.device))
            assert isinstance(data, Outputs)
            assert (named["none"], data.others["text"]) == (None, "text")
            (first, second, listed[0], named["a"], data.others["b"])[output].sum().backward()
            gradients.append(read(model)["layer.weight"])
            model.zero_grad()
        return gradients

    assert_on_ranks([[1.5 * (output + 1)] * 2] * 2, world.run(body))


@requirement(
    "RFSDP-OUT-02",
    "Gradients are averaged whatever container holds a module's only output.",
    source="torch/distributed/fsdp/_fully_shard: FSDPState._register_pre_backward_hook",
)
@pytest.mark.parametrize("container", ["list", "dict", "dataclass"])
@pytest.mark.world(2)
def test_containers(world: World, container: str) -> None:
    """Run two steps of a module with one output."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.layer(x)
            return {"list": [y], "dict": {"y": y}, "dataclass": Outputs(y, None)}[container]

    def body(rank: Rank) -> list[float]:
        model = replicate_fsdp.apply(Model(), rank, groups=False)
        gradients = []
        for _ in range(2):
            output = model(torch.full((1, 1), 1.0 + rank.index, device=rank.device))
            y = output.first if isinstance(output, Outputs) else output["y" if container == "dict" else 0]
            y.sum().backward()
            gradients.append(read(model)["layer.weight"])
            model.zero_grad()
        return gradients

    assert_on_ranks([[1.5, 1.5]] * 2, world.run(body))


@requirement(
    "RFSDP-OUT-03",
    "Gradients are averaged, or the model raises an error, if the loss comes from an output that cannot be found.",
    source="torch/distributed/fsdp/_fully_shard: FSDPState._register_pre_backward_hook",
)
@pytest.mark.parametrize("where", ["object", "kept"])
@pytest.mark.world(2)
def test_hidden_output(world: World, where: str) -> None:
    """The output is in an object that is not a container, or kept by a module that returns nothing; run two steps."""

    def body(rank: Rank) -> list[float] | str:
        model: Any = replicate_fsdp.apply(Hidden(nn.Linear(1, 1, bias=False), where == "object"), rank, groups=False)
        gradients = []
        for _ in range(2):
            try:
                output = model(torch.full((1, 1), 1.0 + rank.index, device=rank.device))
            except RuntimeError:
                return "an error"
            (output.y if where == "object" else model.kept).sum().backward()
            gradients.append(read(model)["layer.weight"])
            model.zero_grad()
        return gradients

    assert_on_ranks([[1.5, 1.5]] * 2, world.run(body), or_all=["an error"] * 2)


@requirement(
    "RFSDP-OUT-154",
    "Gradients of a module that returns a view are averaged, even if the view is changed in place before the backward.",
    source="torch.distributed.fsdp.fully_shard; pytorch/pytorch#181832",
)
@pytest.mark.parametrize("in_place", [False, True], ids=["added", "added-in-place"])
@pytest.mark.world(2)
def test_changed_view(world: World, in_place: bool) -> None:
    """Add a number to a view that the model returned; run two steps."""

    class Squeezed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).squeeze(0)

    def body(rank: Rank) -> list[float]:
        warnings.simplefilter("ignore")  # of a view that an operation may change in place
        model = replicate_fsdp.apply(Squeezed(1, 1, bias=False), rank, groups=False)
        gradients = []
        for _ in range(2):
            output = model(torch.full((1, 1), 1.0 + rank.index, device=rank.device))
            output = output.add_(1) if in_place else output + 1
            output.sum().backward()
            gradients.append(read(model)["weight"])
            model.zero_grad()
        return gradients

    assert_on_ranks([[1.5, 1.5]] * 2, world.run(body))


POLICIES: dict[str, dict[str, torch.dtype]] = {
    "plain": {},
    "narrow-compute": {"param_dtype": torch.bfloat16},
    "wide-reduce": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}
"""Options under which all numbers of the next test are the same."""


@requirement(
    "RFSDP-UNUSED-01",
    "With set_reduce_scatter_unused_params, a parameter that only some ranks use has the average over all ranks.",
    source="torch.distributed.fsdp.FSDPModule: set_reduce_scatter_unused_params",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params")
@pytest.mark.parametrize("precision", POLICIES)
@pytest.mark.world(2, 4)
def test_used_by_some_ranks(world: World, precision: str) -> None:
    """Ranks take different branches in three steps that rotate over the ranks."""

    class Model(nn.Module):
        def __init__(self, branches: int) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(1, i + 1, bias=False) for i in range(branches))

        def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
            result: torch.Tensor = self.branches[branch](x)
            return result

    def body(rank: Rank) -> list[list[list[float]]]:
        policy = MixedPrecisionPolicy(**POLICIES[precision])
        model: Any = replicate_fsdp.apply(Model(rank.size), rank, groups=False, mp_policy=policy)
        model.set_reduce_scatter_unused_params(True)
        steps = []
        for step in range(3):
            x = torch.full((1, 1), 1.0 + rank.index, device=rank.device)
            model(x, (rank.index + step) % rank.size).sum().backward()
            steps.append([g.flatten().tolist() for g in replicate_fsdp.gradients(model).values()])
            model.zero_grad()
        return steps

    for steps in world.run(body):
        for step, gradients in enumerate(steps):
            users = {(r + step) % world.size: 1.0 + r for r in range(world.size)}
            assert gradients == [[users[i] / world.size] * (i + 1) for i in range(world.size)]


@requirement(
    "RFSDP-HOOK-01",
    "A post-accumulate gradient hook runs once per backward and sees the averaged gradient.",
    source="torch.Tensor.register_post_accumulate_grad_hook",
)
@pytest.mark.world(2)
def test_post_accumulate_hooks(world: World) -> None:
    """Run three steps of SGD in hooks."""

    def body(rank: Rank) -> tuple[list[float], list[float]]:
        model = replicate_fsdp.apply(Layers(), rank)
        averages: list[float] = []

        def step(p: torch.Tensor) -> None:
            gradient = replicate_fsdp.whole(p.grad)  # type: ignore[arg-type]
            averages.append(float(gradient))
            with torch.no_grad():
                p.sub_(p.grad / 2)  # type: ignore[operator]
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            backward(rank, model)
        return averages, [float(p) for p in replicate_fsdp.parameters(model).values()]

    assert_on_ranks([([1.5] * 6, [-1.25, -1.25])] * 2, world.run(body))


@requirement(
    "RFSDP-HOOK-02",
    "An all-reduce hook is called once per parameter group with the reduced gradients.",
    source="torch.distributed.fsdp.FSDPModule: set_all_reduce_hook",
)
@requirement(
    "RFSDP-HOOK-04",
    "Changes that an all-reduce hook makes to the reduced gradients are kept.",
    source="torch.distributed.fsdp.FSDPModule: set_all_reduce_hook",
)
@pytest.mark.world(2)
def test_all_reduce_hook(world: World) -> None:
    """The hook doubles what it gets, in two steps."""

    def body(rank: Rank) -> tuple[list[float], dict[str, float]]:
        model: Any = replicate_fsdp.apply(Layers(), rank, groups=False)
        seen: list[float] = []

        def hook(reduced: torch.Tensor) -> None:
            seen.extend(reduced.tolist())
            reduced.mul_(2)

        model.set_all_reduce_hook(hook)
        for _ in range(2):
            backward(rank, model)
        return seen, read(model)

    assert_on_ranks([([1.5] * 4, {"inner.weight": 6.0, "outer.weight": 6.0})] * 2, world.run(body))


@requirement(
    "RFSDP-BACK-01",
    "Every backward averages gradients, even after several forwards or with a retained graph.",
    source=SOURCE,
)
@pytest.mark.parametrize("backwards", ["one", "in-order", "reversed", "retained"])
@pytest.mark.world(2)
def test_several_forwards(world: World, backwards: str) -> None:
    """Run two forwards, or one that is used twice; each rank r has gradient 3 (r + 1) in total."""

    def body(rank: Rank) -> dict[str, float]:
        model = replicate_fsdp.apply(Layers(), rank)
        own = 1.0 + rank.index
        losses = [model(torch.full((1, 1), own * part, device=rank.device)).sum() for part in (1, 2)]
        if backwards == "retained":
            losses = [model(torch.full((1, 1), own * 1.5, device=rank.device)).sum()] * 2
        elif backwards == "one":
            losses = [losses[0] + losses[1]]
        elif backwards == "reversed":
            losses.reverse()
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i < len(losses) - 1)
        return read(model)

    assert_on_ranks([{"inner.weight": 4.5, "outer.weight": 4.5}] * 2, world.run(body))


@requirement(
    "RFSDP-INF-01",
    "A forward in inference mode has no effect on training.",
    source="torch.inference_mode; pytorch/pytorch#197327",
)
@pytest.mark.parametrize("when", ["first", "between"])
@pytest.mark.world(1, 2)
def test_inference_mode(world: World, when: str) -> None:
    """Call it before the first step or between two steps."""

    def body(rank: Rank) -> list[dict[str, float]]:
        model = replicate_fsdp.apply(Layers(), rank)
        x = torch.full((1, 1), 2.0 * (1 + rank.index), device=rank.device)
        gradients = []
        for step in range(2):
            if (step == 0) == (when == "first"):
                with torch.inference_mode():
                    model(x)
            model(x).sum().backward()
            gradients.append(read(model))
            model.zero_grad()
        return gradients

    right = {"inner.weight": world.size + 1.0, "outer.weight": world.size + 1.0}
    assert_on_ranks([[right] * 2] * world.size, world.run(body))


EVALUATED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "root": (("",), {}),
    "groups": (("0", "1", ""), {}),
    "kept": (("0", "1", ""), {"reshard_after_forward": False}),
    "in-low-precision": (("0", ""), {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    "cast-output": (("1", ""), {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)}),
    "offloaded": (("0", "1", ""), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
}
"""Modules that are sharded, and how."""


@requirement(
    "RFSDP-INF-7152",
    "A sharded module whose forwards all run in inference mode has one device's outputs, which are inference tensors.",
    source="torch.distributed.fsdp.fully_shard; torch.inference_mode; pytorch/pytorch#197327",
)
@pytest.mark.parametrize("how", EVALUATED)
@pytest.mark.world(2)
def test_only_in_inference_mode(world: World, how: str) -> None:
    """Shard layers of seven and of four rows, evaluate three inputs, and read the parameters, which are the same."""
    names, options = EVALUATED[how]

    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 4, bias=False))
        for parameter in model.parameters():
            values = torch.arange(parameter.numel()).remainder(3).sub(1.0)
            parameter.data.copy_(values.reshape(parameter.shape))
        return model

    def body(rank: Rank) -> None:
        model: Any = made().to(rank.device)
        for name in names:
            fully_shard(model.get_submodule(name), mesh=rank.mesh(), **options)
        before = dict(model.named_parameters())
        for turn in range(3):
            given = torch.arange(6.0).reshape(2, 3) + rank.index - turn
            with torch.inference_mode():
                found = model(given.to(rank.device))
            assert found.is_inference(), turn
            assert torch.equal(made()(given), found.float().cpu()), turn
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for (name, own), plain in zip(model.named_parameters(), made().parameters(), strict=True):
            assert own is before[name], name
            assert own.requires_grad, name
            assert own.grad is None, name
            assert torch.equal(plain.detach(), own.detach().full_tensor().cpu()), name

    world.run(body)


@requirement(
    "RFSDP-SUM-01",
    "With set_force_sum_reduction_for_comms, gradients are still averaged, in every dtype.",
    source=SOURCE,
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.world(2, 3, 4)
def test_forced_sums(world: World, dtype: str) -> None:
    """On n ranks, rank r has a gradient of n (r + 1), so that the average is an integer."""

    def body(rank: Rank) -> dict[str, float]:
        model: Any = replicate_fsdp.apply(nn.Linear(1, 1, bias=False, dtype=getattr(torch, dtype)), rank)
        model.set_force_sum_reduction_for_comms(True)
        x = torch.full((1, 1), float(rank.size * (1 + rank.index)), device=rank.device, dtype=getattr(torch, dtype))
        model(x).sum().backward()
        return read(model)

    assert_on_ranks([{"weight": float(sum(range(world.size + 1)))}] * world.size, world.run(body))


@requirement(
    "RFSDP-RESET-01",
    "After a failed forward or backward, reset_iter_state makes the next step average without leftovers of the "
    "failed one.",
    source="torch.distributed.fsdp.FSDPModule: reset_iter_state",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.reset_iter_state")
@pytest.mark.parametrize("failing", ["forward", "backward"])
@pytest.mark.world(2)
def test_after_a_failure(world: World, failing: str) -> None:
    """The second of three steps raises an error after one of two layers, each its own group."""

    class Model(Layers):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            if self.fails and failing == "forward":
                raise ZeroDivisionError
            if self.fails:
                x.register_hook(lambda gradient: 1 / 0)
            result: torch.Tensor = self.outer(x)
            return result

    def body(rank: Rank) -> list[dict[str, float]]:
        model: Any = replicate_fsdp.apply(Model(), rank)
        gradients = []
        for step in range(3):
            model.fails = step == 1
            with pytest.raises(ZeroDivisionError) if step == 1 else contextlib.nullcontext():
                backward(rank, model)
            if step == 1:
                model.reset_iter_state()
            else:
                gradients.append(read(model))
            model.zero_grad()
        return gradients

    assert_on_ranks([[{"inner.weight": 1.5, "outer.weight": 1.5}] * 2] * 2, world.run(body))
