"""Inputs and outputs of a replicated module, and when its gradients are averaged."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import Hidden, layer
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate

SOURCE = "torch/distributed/_composable/replicate.py: replicate"
STATIC = pytest.mark.needs(features=["static_graph"])


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Record:
    first: torch.Tensor
    name: str


class Structured(nn.Module):
    """A module whose inputs and outputs are in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, x: torch.Tensor, factor: float = 1.0, *, others: Any = None) -> Any:
        """Return the layer's output times 1 to 5, in containers of several kinds, and the other inputs."""
        first, second, third, fourth, fifth = (i * factor * self.layer(x) for i in range(1, 6))
        named = {"third": third, "none": None}
        return first, [second, named], Pair(fourth, ("text", 5)), fifth, others, x.detach().long()


class Bare(nn.Module):
    """A module that needs no input, and returns what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return 2 * self.weight, inputs, named


@requirement(
    "REPL-CALL-01",
    "A replicated module passes on inputs of every kind, and its outputs keep their containers.",
    source=SOURCE,
)
@pytest.mark.parametrize("find", [False, True], ids=["plain", "find-unused"])
@pytest.mark.world(1, 2)
def test_structure(world: World, find: bool) -> None:
    """Use positional, keyword, default or no arguments; tuples, lists, dicts, dataclasses, packed sequences, text."""

    def body(rank: Rank) -> None:
        model = replicate.apply(Structured(), rank, find_unused_parameters=find)
        x = torch.full((1, 1), 2.0, device=rank.device)
        output = model(x, factor=0.5, others={"a": (1, x)})
        assert type(output) is tuple
        first, (second, named), pair, fifth, others, whole = output
        assert (float(first), float(second), float(named["third"]), float(fifth)) == (1.0, 2.0, 3.0, 5.0)
        assert named["none"] is None
        assert isinstance(pair, Pair)
        assert (float(pair.first), pair.second) == (4.0, ("text", 5))
        assert isinstance(others["a"], tuple)
        assert others["a"][0] == 1
        assert whole.dtype == torch.int64
        packed, record = nn.utils.rnn.pack_sequence([x, x]), Record(x, "text")
        given = {"pair": Pair(x, (packed, [record]))}
        pair = model(x, others=given)[4]["pair"]
        assert isinstance(pair, Pair)
        first, (found, [one]) = pair
        assert torch.equal(first, x)
        assert isinstance(found, nn.utils.rnn.PackedSequence)
        assert (found.batch_sizes.tolist(), found.data.tolist()) == ([2], [[2.0], [2.0]])
        assert isinstance(one, Record)
        assert (one.first.tolist(), one.name) == ([[2.0]], "text")
        assert isinstance(model(x)[1], list)
        assert model(x)[4] is None
        bare: Any = replicate.apply(Bare(), rank, find_unused_parameters=find)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((), {}), ((2,), {}), ((), {"b": "c"}), ((None,), {})]
        for inputs, named_inputs in calls * 2:
            result, *passed = bare(*inputs, **named_inputs)
            assert passed == [inputs, named_inputs]
            (result * (rank.index + 1)).sum().backward()
            assert bare.weight.grad.item() == rank.size + 1, (inputs, named_inputs)  # twice the mean
            bare.zero_grad()

    world.run(body)


@requirement(
    "REPL-CALL-02",
    "Gradients are averaged whichever of several outputs the loss is computed from.",
    source=SOURCE,
)
@pytest.mark.parametrize("find", [False, True], ids=["plain", "find-unused"])
@pytest.mark.parametrize("output", range(5))
@pytest.mark.world(2)
def test_any_output(world: World, output: int, find: bool) -> None:
    """Compute the loss from one of five independent outputs, in two steps."""

    def body(rank: Rank) -> list[float]:
        model = replicate.apply(Structured(), rank, find_unused_parameters=find)
        gradients = []
        for _ in range(2):
            first, (second, named), pair, fifth, *_ = model(torch.full((1, 1), 1.0 + rank.index, device=rank.device))
            (first, second, named["third"], pair.first, fifth)[output].sum().backward()
            gradients.append(float(replicate.gradients(model)["layer.weight"]))
            model.zero_grad()
        return gradients

    assert_on_ranks([[1.5 * (output + 1)] * 2] * 2, world.run(body))


@requirement(
    "REPL-CALL-04",
    "Gradients are averaged even if the loss comes from an output inside an object or kept by the module.",
    source="torch.nn.parallel.DistributedDataParallel: gradients are reduced by hooks on parameters",
)
@pytest.mark.parametrize("where", ["object", "kept"])
@pytest.mark.world(2)
def test_hidden_output(world: World, where: str) -> None:
    """The forward returns a namespace, or nothing; run two steps."""

    def body(rank: Rank) -> list[list[float]]:
        model: Any = replicate.apply(Hidden(layer(), where == "object"), rank)
        gradients = []
        for _ in range(2):
            output = model(torch.full((1, 2), 1.0 + rank.index, device=rank.device))
            (output.y if where == "object" else model.kept).sum().backward()
            gradients.append(replicate.gradients(model)["layer.weight"].flatten().tolist())
            model.zero_grad()
        return gradients

    assert_on_ranks([[[1.5] * 4] * 2] * 2, world.run(body))


@requirement(
    "REPL-SYNC-01",
    "set_requires_gradient_sync takes effect from the next forward on, for the module it is called on and no other.",
    source="torch/distributed/_composable/replicate.py: DDP.set_requires_gradient_sync",
)
@pytest.mark.world(2)
def test_sync_of_one_module(world: World) -> None:
    """Replicate two modules separately; disable sync on one before the first forward, then on the other, then none."""

    def body(rank: Rank) -> list[list[float]]:
        modules = [replicate.apply(nn.Linear(1, 1, bias=False), rank) for _ in range(2)]
        gradients = []
        for synced in ((False, True), (True, False), (True, True)):
            for module, on in zip(modules, synced, strict=True):
                module.set_requires_gradient_sync(on)
            for module in modules:
                module(torch.full((1, 1), 1.0 + rank.index, device=rank.device)).sum().backward()
            gradients.append([float(replicate.gradients(module)["weight"]) for module in modules])
            for module in modules:
                module.zero_grad()
        return gradients

    for rank, gradients in enumerate(world.run(body)):
        own = 1.0 + rank
        assert gradients == [[own, 1.5], [1.5, own], [1.5, 1.5]]


@requirement(
    "DDP-SYNC-02",
    "no_sync ends with its own block, even if the block is nested or left by an error.",
    source="torch.nn.parallel.DistributedDataParallel: no_sync",
)
@requirement(
    "DDP-SYNC-03",
    "no_sync has no effect before its block is entered, however long before it was called.",
    source="torch.nn.parallel.DistributedDataParallel: no_sync, 'within this context'",
)
@pytest.mark.world(2)
def test_no_sync(world: World) -> None:
    """Raise an error in a nested block, then run backwards inside and outside, and use contexts made long before."""

    def body(rank: Rank) -> list[float]:
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(rank.device))
        gradients = []
        contexts = [model.no_sync() for _ in range(4)]  # the last is never entered

        def backward() -> None:
            model(torch.full((1, 1), 1.0 + rank.index, device=rank.device)).sum().backward()
            gradients.append(float(model.module.weight.grad))
            model.zero_grad()

        with model.no_sync():
            with pytest.raises(ZeroDivisionError), model.no_sync():
                raise ZeroDivisionError
            backward()
        backward()
        with pytest.raises(ZeroDivisionError), model.no_sync():
            raise ZeroDivisionError
        backward()
        with contexts[0]:
            backward()
            with contexts[1]:
                backward()
            backward()
        backward()
        contexts[2](backward)()
        backward()
        return gradients

    own = [1.0 + rank for rank in range(2)]
    assert_on_ranks([[x, 1.5, 1.5, x, x, x, 1.5, x, 1.5] for x in own], world.run(body))


@requirement(
    "DDP-SYNC-7001",
    "no_sync holds for its own model alone, whether others run beside it, around it or on its output.",
    source="torch.nn.parallel.DistributedDataParallel: no_sync",
)
@pytest.mark.parametrize("how", ["beside", "chained", "around"])
@pytest.mark.world(2)
def test_no_sync_of_one_model(world: World, how: str) -> None:
    """None, one, both in either order, none: of models beside each other, one after the other, or one in the other."""

    class Around(nn.Module):
        """A layer that adds the output of other modules, which are no part of it."""

        def __init__(self, *others: nn.Module) -> None:
            super().__init__()
            self.layer, self.others = layer(), others

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Map float[1, 2] to float[1, 2]."""
            y: torch.Tensor = torch.stack([self.layer(x), *(other(x) for other in self.others)]).sum(0)
            return y

    def body(rank: Rank) -> list[list[float]]:
        first = DistributedDataParallel(Around().to(rank.device))
        second = DistributedDataParallel(Around(*[first] * (how == "around")).to(rank.device))
        models = (first, second)
        x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
        found = []
        for without in ((), (0,), (1,), (0, 1), (1, 0), ()):
            with contextlib.ExitStack() as stack:
                for number in without:
                    stack.enter_context(models[number].no_sync())
                if how == "beside":
                    for model in models:
                        model(x).sum().backward()
                else:
                    (second(first(x)) if how == "chained" else second(x)).sum().backward()
            found.append([float(model.module.layer.weight.grad[0, 0]) for model in models])
            for model in models:
                model.zero_grad()
        return found

    outer = 2 if how == "chained" else 1  # what the second layer makes of a gradient, and the first one of an input
    for rank, found in enumerate(world.run(body)):
        own = [outer * (1.0 + rank)] * 2
        mean = [outer * 1.5] * 2
        mixed = [[own[0], mean[1]], [mean[0], own[1]]]
        assert found == [mean, *mixed, own, own, mean], f"rank {rank}"


@requirement(
    "DDP-SYNC-9407",
    "A model is without synchronization exactly as long as a no_sync block of it, in whatever order blocks nest.",
    source="torch.nn.parallel.DistributedDataParallel: no_sync, 'within this context'",
)
@pytest.mark.parametrize("error", [False, True], ids=["ended", "by an error"])
@pytest.mark.world(2)
def test_no_sync_of_two_models(world: World, error: bool) -> None:
    """Nest blocks of two models in every order, up to three, and go backward before and after each begin and end."""

    def body(rank: Rank) -> None:
        models = [DistributedDataParallel(layer().to(rank.device)) for _ in range(2)]
        x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)

        def check(*entered: int) -> None:
            for number, model in enumerate(models):
                model(x).sum().backward()
                right = 1.0 + rank.index if number in entered else 1.5
                assert float(model.module.weight.grad[0, 0]) == right, (number, entered)
                model.zero_grad()

        def enter(*entered: int) -> None:
            check(*entered)
            for number in range(2) if len(entered) < 3 else ():
                with pytest.raises(KeyError) if error else contextlib.nullcontext(), models[number].no_sync():
                    enter(*entered, number)
                    if error:
                        raise KeyError
                check(*entered)

        enter()

    world.run(body)


@requirement(
    "REPL-CALL-03",
    "A forward without gradients, between a forward and its backward, has no effect.",
    source=SOURCE,
)
@pytest.mark.parametrize("find", [False, True], ids=["plain", "find-unused"])
@pytest.mark.world(2)
def test_forward_without_gradients_in_between(world: World, find: bool) -> None:
    """Run three steps, each with one more such forward."""

    def body(rank: Rank) -> list[float]:
        model = replicate.apply(nn.Linear(1, 1, bias=False), rank, find_unused_parameters=find)
        x = torch.full((1, 1), 1.0 + rank.index, device=rank.device)
        gradients = []
        for step in range(3):
            loss = model(x).sum()
            with torch.no_grad():
                for _ in range(step):
                    model(x)
            loss.backward()
            gradients.append(float(replicate.gradients(model)["weight"]))
            model.zero_grad()
        return gradients

    assert_on_ranks([[1.5] * 3] * 2, world.run(body))


@requirement(
    "REPL-BACK-01",
    "Every backward averages gradients or raises an error, even after several forwards or with a retained graph.",
    source="torch.nn.parallel.DistributedDataParallel; pytorch/pytorch#47260",
)
@pytest.mark.parametrize(
    "backwards",
    [
        "one",
        "in-order",
        "reversed",
        "retained",
        *(pytest.param(s, marks=STATIC) for s in ("static", "static-retained")),
    ],
)
@pytest.mark.world(2)
def test_several_forwards(world: World, backwards: str) -> None:
    """Run two forwards, or one that is used twice; each rank r has gradient 3 (r + 1) in total."""

    def body(rank: Rank) -> str | float:
        model = replicate.apply(nn.Linear(1, 1, bias=False), rank, static_graph="static" in backwards)
        own = 1.0 + rank.index
        losses = [model(torch.full((1, 1), own * part, device=rank.device)).sum() for part in (1, 2)]
        if "retained" in backwards:
            losses = [model(torch.full((1, 1), own * 1.5, device=rank.device)).sum()] * 2
        elif backwards in ("one", "static"):
            losses = [losses[0] + losses[1]]
        elif backwards == "reversed":
            losses.reverse()
        try:
            for i, loss in enumerate(losses):
                loss.backward(retain_graph=i < len(losses) - 1)
        except RuntimeError:
            return "an error"
        return float(replicate.gradients(model)["weight"])

    assert_on_ranks([4.5] * 2, world.run(body), or_all=["an error"] * 2)


@requirement(
    "REPL-INF-01",
    "A forward in inference mode has no effect on training.",
    source="torch.inference_mode",
)
@pytest.mark.parametrize("when", ["first", "between"])
@pytest.mark.world(1, 2)
def test_inference_mode(world: World, when: str) -> None:
    """Call it before the first step or between two steps."""

    def body(rank: Rank) -> list[float]:
        model = replicate.apply(nn.Linear(1, 1, bias=False), rank)
        x = torch.full((1, 1), 2.0 * (1 + rank.index), device=rank.device)
        gradients = []
        for step in range(2):
            if (step == 0) == (when == "first"):
                with torch.inference_mode():
                    model(x)
            model(x).sum().backward()
            gradients.append(float(replicate.gradients(model)["weight"]))
            model.zero_grad()
        return gradients

    assert_on_ranks([[world.size + 1.0] * 2] * world.size, world.run(body))


@requirement(
    "REPL-STATE-02",
    "A replicated model's state dict has the names, values and memory of the plain model's.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_state_dict(world: World) -> None:
    """Compare before the first forward and after a step, of a model that is replicated as a whole or layer by layer."""

    def body(rank: Rank) -> None:
        for each in (False, True):
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            names = list(model.state_dict())
            for part in model if each else [model]:
                replicate.apply(part, rank)
            for _ in range(2):
                state = model.state_dict()
                assert list(state) == names
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                    assert state[name].data_ptr() == tensor.data_ptr(), name
                model(torch.ones(2, 2, device=rank.device)).sum().backward()

    world.run(body)


@requirement(
    "REPL-MP-01",
    "A module replicated with mixed precision computes in the requested dtype, or replicate() raises "
    "NotImplementedError.",
    source="torch/nn/parallel/distributed.py: _MixedPrecision",
)
@pytest.mark.world(1, 2)
def test_mixed_precision(world: World) -> None:
    """A product that bfloat16 rounds is averaged in bfloat16, while the parameters stay float32."""

    def body(rank: Rank) -> Any:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, 1.0)
        low = replicate.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        try:
            model = replicate.apply(layer, rank, mixed_precision=low)
        except NotImplementedError:
            return None
        output = model(torch.full((1, 1), 1.0 + 2**-10 + rank.index, device=rank.device))
        output.sum().backward()
        weight = model.weight
        assert isinstance(weight, torch.Tensor)
        assert weight.grad is not None
        return [output.dtype, float(output), weight.dtype, float(weight.grad)]

    size = world.size
    expected = [[torch.bfloat16, 1.0 + rank, torch.float32, 1 + (size - 1) / 2] for rank in range(size)]
    assert_on_ranks(expected, world.run(body), or_all=[None] * size)


@requirement(
    "REPL-BACK-02",
    "After a forward or backward that failed on every rank, the next step averages gradients or raises an error.",
    source=SOURCE,
)
@pytest.mark.parametrize("failing", ["forward", "backward"])
@pytest.mark.world(2, keeps="the module whose forward failed: the finding replicate_active_after_failure")
def test_after_a_failure(world: World, failing: str) -> None:
    """The second of three steps raises an error after the first of two layers."""

    class Model(nn.Sequential):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self[0](x)
            if self.fails and failing == "forward":
                raise ZeroDivisionError
            if self.fails:
                x.register_hook(lambda gradient: 1 / 0)
            result: torch.Tensor = self[1](x)
            return result

    def body(rank: Rank) -> list[list[float]] | str:
        layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        for linear in layers:
            nn.init.ones_(linear.weight)
        model = replicate.apply(Model(*layers), rank)
        gradients = []
        for step in range(3):
            model.fails = step == 1
            try:
                model(torch.full((1, 1), 1.0 + rank.index, device=rank.device)).sum().backward()
            except ZeroDivisionError:
                assert step == 1
            except RuntimeError:
                return "an error"
            else:
                gradients.append([float(g) for g in replicate.gradients(model).values()])
            model.zero_grad()
        return gradients

    assert_on_ranks([[[1.5, 1.5]] * 2] * 2, world.run(body), or_all=["an error"] * 2)


@requirement(
    "REPL-BACK-03",
    "torch.autograd.grad returns each rank's own gradients.",
    source="torch.autograd.grad",
)
@requirement(
    "REPL-BACK-04",
    "The backward after torch.autograd.grad averages gradients.",
    source="torch.autograd.grad",
)
@pytest.mark.parametrize("same", [False, True], ids=["other-forward", "same-forward"])
@pytest.mark.parametrize("of", ["inputs", "parameters"])
@pytest.mark.world(2)
def test_autograd_grad(world: World, of: str, same: bool) -> None:
    """Call it before each of two backwards, which may share its forward."""

    def body(rank: Rank) -> list[float]:
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        model = replicate.apply(layer, rank)
        gradients = []
        for _ in range(2):
            x = torch.full((1, 1), 1.0 + rank.index, device=rank.device, requires_grad=True)
            output = model(x)
            inputs = x if of == "inputs" else list(model.parameters())
            (own,) = torch.autograd.grad((output**2).sum(), inputs, retain_graph=same)
            (output if same else model(x)).sum().backward()
            gradients += [float(own), float(replicate.gradients(model)["weight"])]
            model.zero_grad()
        return gradients

    assert_on_ranks([[2.0 * (1 + r) ** (1 if of == "inputs" else 2), 1.5] * 2 for r in range(2)], world.run(body))


@requirement(
    "REPL-CALL-05",
    "With find_unused_parameters, outputs require gradients as the module makes them, and can be changed in place.",
    source=SOURCE,
)
@pytest.mark.parametrize("unused", [False, True], ids=["plain", "find-unused"])
@pytest.mark.world(2)
def test_outputs_as_they_are(world: World, unused: bool) -> None:
    """One output is detached, and the other is doubled in place before the backward."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y: torch.Tensor = self.layer(x)
            return y, y.detach() + 1

    def body(rank: Rank) -> tuple[bool, bool, list[float]]:
        model = replicate.apply(Both(), rank, find_unused_parameters=unused)
        output, detached = model(torch.full((1, 2), 1.0 + rank.index, device=rank.device))
        output.mul_(2)
        output.sum().backward()
        gradient = replicate.gradients(model)["layer.weight"]
        return output.requires_grad, detached.requires_grad, gradient.flatten().tolist()

    assert_on_ranks([(True, False, [3.0] * 4)] * 2, world.run(body))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.mT,
    "permuted": lambda x: x.permute(3, 1, 0, 2),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "channels last in 3D": lambda x: x[None].to(memory_format=torch.channels_last_3d),
    "a number": lambda x: x.sum(),
}
"""How elements of an output, none of which is apart from the others, lie in memory."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)


class Laid(nn.Module):
    """A weight times its input in every layout and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, 4, 5))

    def forward(self, x: torch.Tensor) -> dict[tuple[str, torch.dtype], torch.Tensor]:
        """Return the products by layout and dtype."""
        y = self.weight * x
        return {(name, dtype): LAYOUTS[name](y.to(dtype)) for name, dtype in itertools.product(LAYOUTS, DTYPES)}


@requirement(
    "REPL-CALL-8450",
    "Outputs of a replicated module have the dtypes and strides that the module gives them, under every option.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters, static_graph; torch.preserve_format",
)
@pytest.mark.parametrize("find", [False, True], ids=["plain", "find-unused"])
@pytest.mark.parametrize("static", [False, pytest.param(True, marks=STATIC)], ids=["dynamic", "static"])
@pytest.mark.world(2)
def test_outputs_in_memory(world: World, static: bool, find: bool) -> None:
    """Outputs of every layout and dtype, in evaluation and in training, for three steps."""

    def body(rank: Rank) -> None:
        module = Laid().to(rank.device)
        model: Any = replicate.apply(Laid(), rank, find_unused_parameters=find, static_graph=static)
        x = torch.full((), 1.0 + rank.index, device=rank.device)
        for step, training in itertools.product(range(3), (False, True)):
            model.train(training)
            with torch.set_grad_enabled(training):
                outputs, right = model(x), module(x)
            for name, output in outputs.items():
                what, made = (name, step, training), right[name]
                assert (output.dtype, output.shape, output.stride()) == (made.dtype, made.shape, made.stride()), what
                assert output.requires_grad == training, what
                assert torch.equal(output, made), what
            if training:
                torch.stack([output.real.double().sum() for output in outputs.values()]).sum().backward()
                found = replicate.gradients(model)["weight"]
                assert torch.equal(found, torch.full_like(found, 1.5 * len(outputs))), step
                model.zero_grad()

    world.run(body)


def refuse(*_: Any) -> Any:
    """Raise an error in a hook."""
    raise ZeroDivisionError


class Failing(nn.Module):
    """A layer, and an error if it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        """Map float[1, 2] to float[1, 2]."""
        result: torch.Tensor = self.layer(x)
        return refuse() if fails else result


def hooked(model: Any, x: torch.Tensor, kind: str) -> None:
    handle = getattr(model.module.layer, kind)(refuse)
    try:
        model(x)
    finally:
        handle.remove()


def failing_backward(model: Any, x: torch.Tensor) -> None:
    output = model(x)
    output.register_hook(refuse)
    output.sum().backward()


FAILS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "forward": lambda model, x: model(x, True),
    "shape": lambda model, x: model(x[:, :1]),
    "arguments": lambda model, x: model(),
    "pre-hook": lambda model, x: hooked(model, x, "register_forward_pre_hook"),
    "hook": lambda model, x: hooked(model, x, "register_forward_hook"),
    "backward": failing_backward,
}
"""What raises an error on every rank."""


@requirement(
    "DDP-LIFE-8452",
    "A DDP module is freed with what it wraps once nothing refers to it, also after a forward or backward failed.",
    source="torch.nn.parallel.DistributedDataParallel: module; torch.nn.Module",
)
@pytest.mark.parametrize("fails", FAILS)
@pytest.mark.world(2)
def test_freed_after_a_failure(world: World, fails: str) -> None:
    """Under each option, the first or second step fails, and another one follows or not."""
    options: list[dict[str, bool]] = [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]

    def used(rank: Rank, before: int, after: int, options: dict[str, bool]) -> list[weakref.ref[Any]]:
        model: Any = DistributedDataParallel(Failing().to(rank.device), **options)
        x = torch.ones(1, 2, device=rank.device)
        for number in range(before + 1 + after):
            if number != before:
                model(x).sum().backward()
                continue
            try:
                FAILS[fails](model, x)
            except (ZeroDivisionError, RuntimeError, TypeError):
                continue
            raise AssertionError(fails)
        return [weakref.ref(each) for each in (model, model.module, model.module.layer.weight)]

    def body(rank: Rank) -> list[Any]:
        alive = []
        for before, after, option in itertools.product((0, 1), (0, 1), options):
            if not (after and fails == "backward"):
                alive += [(before, after, option, ref) for ref in used(rank, before, after, option)]
        gc.collect()
        return [case for *case, ref in alive if ref() is not None]

    assert_on_ranks([[]] * 2, world.run(body))
