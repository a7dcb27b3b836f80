"""Compiled modules as objects: attributes and mode of what was compiled, options, copies, and what they leave."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fixtures.copying import reloaded
from fixtures.layers import layer, layers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import dynamo, replicate
from harness.stacks.training import whole

WRAPPER = "torch/_dynamo/eval_frame.py: OptimizedModule"


class Normalized(nn.Module):
    """A layer and a batch norm, of which training and evaluation differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = layer(), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        result: torch.Tensor = self.norm(self.layer(x))
        return result


@requirement(
    "DYN-WRAP-51",
    "An attribute that is set or deleted on a compiled module is set or deleted on the module that was compiled.",
    source=WRAPPER,
)
@requirement(
    "DYN-WRAP-52",
    "An attribute of the module that was compiled has at any time the same value on the compiled module.",
    source=WRAPPER,
)
@pytest.mark.world(2)
def test_attributes(world: World) -> None:
    """Turn DDP's averaging off and on, and set, change and delete attributes of each kind from both sides."""

    def body(rank: Rank) -> Any:
        torch.compiler.reset()
        inner: Any = DistributedDataParallel(layer().to(rank.device))
        outer: Any = torch.compile(inner, backend="eager")
        found = []
        for synced in (True, False, True):
            outer.require_backward_grad_sync = synced
            assert inner.require_backward_grad_sync is outer.require_backward_grad_sync is synced
            outer(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
            found.append(inner.module.weight.grad.flatten().tolist())
            inner.zero_grad()
        other: Any = DistributedDataParallel(layer().to(rank.device))
        values = (3, "text", torch.ones(2, device=rank.device), nn.Parameter(torch.ones(1, device=rank.device)))
        for value in (*values, nn.ReLU(), other.module):
            for one, another in ((outer, inner), (inner, outer)):
                one.told = value
                assert one.told is value
                assert another.told is value
                assert "told" in dir(outer)
                assert ("told" in inner.state_dict()) == isinstance(value, nn.Parameter)
                del another.told
                assert not hasattr(one, "told")
                assert not hasattr(another, "told")
        outer.module = other.module
        assert inner.module is other.module
        assert outer.module is other.module
        return found

    own = [[1.0] * 4, [2.0] * 4]
    assert_on_ranks([[[1.5] * 4, own[me], [1.5] * 4] for me in range(2)], world.run(body))


@requirement(
    "DYN-WRAP-53",
    "A compiled module is in training or evaluation exactly if the module that was compiled is.",
    source=f"{WRAPPER}; torch.nn.Module: train, eval, training",
)
@requirement(
    "DYN-WRAP-54",
    "Compiled code computes in the mode that its module has at each call, training or evaluation.",
    source="torch.nn.Module: train, eval, training",
)
@pytest.mark.world(2)
def test_training(world: World) -> None:
    """Change the mode of each from outside and from inside, before the first read and after it."""

    def body(rank: Rank) -> None:
        x = torch.tensor([[1.0, 2.0], [3.0, 6.0 + rank.index]], device=rank.device)
        for stack in (DistributedDataParallel, lambda m: replicate.apply(m, rank), lambda m: fully_shard(m)):
            torch.compiler.reset()
            inner, plain = (stack(Normalized().to(rank.device)) for _ in range(2))
            inner.eval()
            outer = torch.compile(inner, backend="eager")

            def as_uncompiled(inner: Any = inner, plain: Any = plain, outer: Any = outer) -> None:
                plain.train(inner.training)
                norms = [m for m in inner.modules() if isinstance(m, nn.BatchNorm1d)]
                assert [m.training for m in (outer, *norms)] == [inner.training] * (1 + len(norms))
                assert_same(plain(x).detach(), outer(x).detach(), f"output, training={inner.training}")

            as_uncompiled()
            for change in (inner.train, outer.eval, outer.train, inner.eval, partial(outer.train, False), inner.train):
                assert change() is not None
                as_uncompiled()
            outer.training = False
            assert not inner.training
            inner.training = True
            assert outer.training

    world.run(body)


class Broken(nn.Module):
    """A layer, and a graph break after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        x = self.layer(x)
        dynamo.graph_break()
        return x.relu()


class Whole(Broken):
    """The same without a break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        return self.layer(x).relu()


def by_function(module: nn.Module, **options: Any) -> nn.Module:
    """Compile by torch.compile."""
    return torch.compile(module, **options)


def by_itself(module: nn.Module, **options: Any) -> nn.Module:
    """Compile in place."""
    module.compile(**options)
    return module


@requirement(
    "DYN-INPLACE-51",
    "fullgraph, dynamic, disable and backend of module.compile() have the effect that they have for torch.compile.",
    source="torch.nn.Module.compile: arguments",
)
@pytest.mark.world(2)
def test_options(world: World) -> None:
    """Compile blocks of a model by both, with each option, and wrap the model; call with three numbers of rows."""

    def body(rank: Rank) -> None:
        cases: list[tuple[type[Broken], dict[str, Any], int | None]] = [
            (Broken, {"fullgraph": True}, None),
            (Broken, {}, 4),
            (Whole, {"fullgraph": True, "dynamic": True}, 1),
            (Whole, {"dynamic": False}, 3),
            (Broken, {"fullgraph": True, "disable": True}, 0),
        ]
        stacks: list[Callable[[nn.Module], nn.Module]] = [DistributedDataParallel, fully_shard, nn.Module.train]
        for number, (kind, options, graphs) in enumerate(cases):
            for way in (by_function, by_itself):
                torch.compiler.reset()
                counter = dynamo.GraphCounter("eager")
                block = way(kind().to(rank.device), backend=counter, **options)
                model = stacks[number % 3](nn.Sequential(block))
                what = (kind.__name__, options, way.__name__)
                if graphs is None:
                    with pytest.raises(dynamo.REFUSED):
                        model(torch.ones(3, 2, device=rank.device))
                    continue
                for rows in (3, 4, 5):
                    assert model(torch.ones(rows, 2, device=rank.device)).tolist() == [[2.0, 2.0]] * rows, what
                assert counter.graphs == graphs, what

    world.run(body)


class Averaging(nn.Linear):
    """A layer with a buffer and an attribute, in a forward that is not torch's own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("offset", torch.ones(2))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        result: torch.Tensor = super().forward(x) * self.factor + self.get_buffer("offset")
        return result


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "saved": reloaded}


@requirement(
    "DYN-COPY-51",
    "A copy of a compiled module computes with parameters, buffers and attributes of its own.",
    source="torch.compile; torch.nn.Module: compile, __getstate__; copy.deepcopy",
)
@requirement(
    "DYN-COPY-52",
    "A compiled module computes as before after a copy of it was changed, and still in its compiled code.",
    source="torch.compile; torch.nn.Module: compile, __getstate__; copy.deepcopy",
)
@pytest.mark.world(2)
def test_copies(world: World) -> None:
    """Average a copy's weights over ranks, as for an average of weights, before or after the first call."""

    def body(rank: Rank) -> None:
        x = torch.ones(1, 2, device=rank.device)

        def filled(model: nn.Module, value: float) -> None:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.fill_(value)

        for kind, way, copied, called, inside in (
            (Averaging, by_itself, "deepcopy", True, False),
            (Averaging, by_itself, "deepcopy", False, True),
            (nn.Linear, by_itself, "saved", True, True),
            (Averaging, by_function, "deepcopy", True, False),
            (nn.Linear, by_function, "deepcopy", False, False),
        ):
            torch.compiler.reset()
            counter = dynamo.GraphCounter("eager")
            inner = way((nn.Linear(2, 2) if kind is nn.Linear else Averaging()).to(rank.device), backend=counter)
            model: Any = nn.Sequential(inner) if inside else inner
            times = 3 if kind is nn.Linear else 4  # two inputs, a bias, and perhaps a buffer
            filled(model, 1.0 + rank.index)
            what = (kind.__name__, way.__name__, copied, called, inside)
            if called:
                assert model(x).tolist() == [[times * (1.0 + rank.index)] * 2], what
            average: Any = COPIES[copied](model)
            with torch.no_grad():
                for tensor in (*average.parameters(), *average.buffers()):
                    dist.all_reduce(tensor)
            if kind is Averaging:
                (average[0] if inside else average).factor = 10.0
            right = [[9.0 if kind is nn.Linear else 93.0] * 2]
            assert average(x).tolist() == right, what
            before = counter.graphs
            for value in (1.0 + rank.index, 5.0):
                filled(model, value)
                assert model(x).tolist() == [[times * value] * 2], what
                assert average(x).tolist() == right, what
            assert counter.graphs > 0 or kind is nn.Linear, what
            assert counter.graphs <= before + 1, what

    world.run(body)


@requirement(
    "DYN-COPY-9414",
    "A copy of a compiled parallel or replicated module has gradients of its own, and keeps no original alive.",
    source="torch.compile; torch.nn.Module: compile, __getstate__; copy.deepcopy; "
    "torch.distributed.tensor.parallel.parallelize_module; torch.nn.parallel.DistributedDataParallel: __getstate__",
)
@pytest.mark.parametrize(
    ("stack", "way", "called"),
    [
        ("parallel", by_itself, True),
        ("parallel", by_function, False),
        ("replicated", by_function, True),
        ("replicated", by_itself, True),
        ("replicated", by_itself, False),
    ],
)
@pytest.mark.world(2)
def test_copies_of_managed(world: World, stack: str, way: Callable[..., Any], called: bool) -> None:
    """Copy it before or after its first step, change the parameters of all, and call them in turn."""

    def body(rank: Rank) -> None:
        x = torch.ones(1, 2, device=rank.device) * (1 if stack == "parallel" else 1 + rank.index)
        scale = 1.0 if stack == "parallel" else 1.5

        def check(model: Any, weight: float, what: Any) -> None:
            model.zero_grad()
            output = model(x)
            assert output.tolist() == (x * weight * 4 * weight).tolist(), what
            output.sum().backward()
            for parameter in model.parameters():
                assert whole(parameter.grad).tolist() == [[2 * weight * scale] * 2] * 2, what

        torch.compiler.reset()
        counter = dynamo.GraphCounter("eager")
        model: Any = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2))).to(rank.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        if stack == "parallel":
            parallelize_module(model, rank.mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
        else:
            model = DistributedDataParallel(model)
        model = way(model, backend=counter)
        if called:
            check(model, 1.0, called)
        models = [model, copy.deepcopy(model)]
        models.append(copy.deepcopy(models[1]))
        with torch.no_grad():
            for number, each in enumerate(models, 1):
                for parameter in each.parameters():
                    parameter.fill_(number)
        for number in (3, 1, 2):
            check(models[number - 1], number, (called, number))
        first = [weakref.ref(each) for each in (model, next(model.parameters()))]
        del models[0], model, each, parameter
        torch.compiler.reset()
        gc.collect()
        assert [each() for each in first] == [None, None], called
        check(models[0], 2, (called, "alone"))

    world.run(body)


def _of_modules(model: nn.Module, x: torch.Tensor) -> dict[str, dict[str, int]]:
    """Return how many collectives of each kind each module's forward launches."""
    with CommDebugMode() as counts:
        model(x)
    return {
        name: {str(op): times for op, times in passes["forward"].items()}
        for name, passes in counts.comm_module_counts.items()
        if passes.get("forward")
    }


@requirement(
    "DYN-AFTER-51",
    "After a compiled module has run, or raised an error, CommDebugMode ascribes collectives of others as before.",
    source="torch.distributed.tensor.debug.CommDebugMode: comm_module_counts; torch.compile",
)
@pytest.mark.world(2)
def test_counts_of_modules(world: World) -> None:
    """Count the collectives of an uncompiled module before and after others are compiled in each way."""

    def body(rank: Rank) -> None:
        def made() -> nn.Module:
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
            return parallelize_module(layers().to(rank.device), rank.mesh(), plan)

        x = torch.ones(2, 4, device=rank.device)
        right = _of_modules(made(), x)
        assert sum(times for times in right["Global"].values()) == 1
        assert len(right) > 1
        torch.compiler.reset()
        by_function(made(), backend="eager")(x)
        assert _of_modules(made(), x) == right
        by_itself(made(), backend="eager")(x).sum().backward()
        assert _of_modules(made(), x) == right
        with pytest.raises(dynamo.REFUSED):
            by_function(Broken().to(rank.device), backend="eager", fullgraph=True)(x[:, :2])
        assert _of_modules(made(), x) == right

    world.run(body)


@requirement(
    "DYN-AFTER-52",
    "Warnings of the program are shown as before once code with collectives, a module or a DTensor was compiled.",
    source="torch.compile; warnings: showwarning",
)
@pytest.mark.world(2)
def test_warnings(world: World) -> None:
    """Warn in three categories after compiling a function, a module under DDP, and code that is given a DTensor."""

    def body(rank: Rank) -> None:
        def summed(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x)
            return x * 2

        x = torch.ones(1, 2, device=rank.device)
        ddp = DistributedDataParallel(layer().to(rank.device))
        shards = DTensor.from_local(x, rank.mesh(), [Replicate()])
        cases: list[tuple[str, Any, Any]] = [
            ("a function", summed, x),
            ("a module", ddp, x),
            ("a leaf", lambda x: x * 2, x.clone().requires_grad_()),
            ("no leaf", lambda x: x * 2, x.clone().requires_grad_() * 1),
            ("a DTensor", lambda x: x * 2, shards),
        ]
        for name, function, given in cases:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                dynamo.compiled(function, fullgraph=False)[0](given)
                del caught[:]
                for category in (UserWarning, RuntimeWarning, FutureWarning):
                    warnings.warn(f"unequal batches: {name}", category, stacklevel=1)
            said = [(str(each.message), each.category) for each in caught]
            text = f"unequal batches: {name}"
            assert said == [(text, category) for category in (UserWarning, RuntimeWarning, FutureWarning)], name

    world.run(body)
