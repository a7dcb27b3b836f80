"""Training under FSDP1: repeated and frozen modules, kinds of inputs, accumulation, order, collectives, groups."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fixtures.wrapped import STRATEGIES, Outer, Two, Weight, assert_as_alone, inputs, nested, own, whole, wrapped
from harness import Rank, World, dyadic, requirement
from harness.stacks import messages

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"


class Layers(nn.Module):
    """Four linear layers without biases, of which one is used twice and one not in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last, self.seldom = (nn.Linear(2, 2, bias=False) for _ in range(4))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(dyadic(*parameter.shape, key=name, dtype=torch.float32))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Use a layer again with its own output, and without gradients as well."""
        x = self.first(x)
        y: torch.Tensor = self.again(self.again(x))
        with torch.no_grad():
            noted = self.again(x)
        y = y + noted + self.seldom(x) if step == 1 else y + noted
        result: torch.Tensor = self.last(y)
        return result


def steps(model: Any, parts: list[int], device: torch.device, prepare: Callable[[Any, int], None]) -> list[Any]:
    """Train three steps on these parts of a batch, and return the outputs of the first part."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    seen = []
    for step in range(3):
        prepare(model, step)
        for part in parts:
            x = dyadic(2, 2, key=(step, part), dtype=torch.float32).to(device)
            y = model(x, step)
            seen.append(y.detach().cpu())
            (y.sum() / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def as_alone(
    rank: Rank, made: Callable[[], nn.Module], prepare: Callable[[Any, int], None], what: str, **options: Any
) -> None:
    """Assert that a wrapped module trains as one device does on the average of all parts."""
    alone, there = made(), made().to(rank.device)
    right, right_there = (
        dict(enumerate(steps(one, [*range(rank.size)], device, prepare)[rank.index :: rank.size]))
        for one, device in ((alone, torch.device("cpu")), (there, rank.device))
    )
    model = wrapped(rank, made(), **options)
    found = steps(model, [rank.index], rank.device, prepare)
    assert_as_alone(right, right_there, dict(enumerate(found)), f"{what}: output of step")
    expected, expected_there = ({name: p.detach() for name, p in one.named_parameters()} for one in (alone, there))
    assert_as_alone(expected, expected_there, whole(model), f"{what}: parameter")


def policies() -> list[Any]:
    return [None, ModuleWrapPolicy({nn.Linear})]


@requirement(
    "TP-CALLS-91",
    "A layer under FSDP that is called twice before a backward, without gradients or never trains as on one device.",
    source=f"{SOURCE}; test_fsdp_fine_tune.py: test_hooks_multi_traversal",
)
@pytest.mark.world(2)
def test_called_again(world: World) -> None:
    """Wrap the layers together or each on its own; one is used in one of three steps only."""

    def body(rank: Rank) -> None:
        for strategy, original, policy in itertools.product(STRATEGIES, (True, False), policies()):
            what = f"{strategy}, {original=}, {policy}"
            options = {"sharding_strategy": strategy, "use_orig_params": original, "auto_wrap_policy": policy}
            as_alone(rank, Layers, lambda model, step: None, what, **options)
        for strategy, original, looks in itertools.product(STRATEGIES, (True, False), (True, False)):
            model = nested(rank, sharding_strategy=strategy, use_orig_params=original)
            for _ in range(2):
                y = model(inputs(rank))
                if looks:
                    whole(model)
                (y + model(inputs(rank) * 3)).sum().backward()
                assert own(model) == {3 * 1.5 * 4, 5 * 1.5 * 4}, f"{strategy}, {original=}, {looks=}: {own(model)}"
                model.zero_grad()
        empty = wrapped(rank, nn.Sequential(nn.ReLU(), nn.Identity()), auto_wrap_policy=ModuleWrapPolicy({nn.ReLU}))
        assert empty(torch.tensor([-1.0, 2.0], device=rank.device)).tolist() == [0.0, 2.0]

    world.run(body)


@requirement(
    "TP-CALLS-3451",
    "A layer that is called again or evaluated trains as on one device, whatever FSDP gathers ahead in forward and "
    "backward.",
    source=f"{SOURCE}: forward_prefetch, backward_prefetch, BackwardPrefetch",
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=[strategy.name for strategy in STRATEGIES])
@pytest.mark.world(2)
def test_gathered_ahead(world: World, strategy: ShardingStrategy) -> None:
    """Evaluate all layers before each step, with parameters of their own or flat ones."""

    class Static(Layers):
        """The layers that every step uses."""

        def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
            """Leave out the other layer."""
            return super().forward(x, 0)

    def body(rank: Rank) -> None:
        ways = [*itertools.product((True,), (None, *BackwardPrefetch)), (False, BackwardPrefetch.BACKWARD_POST)]
        for (forward, backward), original in zip(ways, itertools.cycle((True, False)), strict=False):
            evaluated: list[torch.Tensor] = []

            def prepare(model: Any, step: int, evaluated: list[torch.Tensor] = evaluated) -> None:
                with torch.no_grad():
                    x = torch.ones(2, 2, device=next(model.parameters()).device)
                    evaluated.append(model(x, step).cpu())

            options = {"sharding_strategy": strategy, "use_orig_params": original, "auto_wrap_policy": policies()[1]}
            ahead = {"forward_prefetch": forward, "backward_prefetch": backward}
            what = f"{original=}, {forward=}, {backward}"
            as_alone(rank, Static, prepare, what, **options, **ahead)
            alone, there, found = (dict(enumerate(evaluated[i : i + 3])) for i in (0, 3, 6))
            assert_as_alone(alone, there, found, f"{what}: evaluated before step")

    world.run(body)


@requirement(
    "TP-FROZEN-91",
    "Layers under FSDP that are frozen from the start, or frozen or thawed between two steps, train as on one device, "
    "and a frozen layer reduces nothing.",
    source=f"{SOURCE}; test_fsdp_fine_tune.py: test_parity_with_ddp, test_backward_reshard_hooks",
)
@pytest.mark.world(2)
def test_frozen(world: World) -> None:
    """Freeze the first layer, the one that is used twice, or the last; inputs require gradients or not."""

    def body(rank: Rank) -> None:
        ways = itertools.product(STRATEGIES, ("first", "again", "last"), ("always", "thawed", "frozen"))
        for (strategy, name, when), original in zip(ways, itertools.cycle((True, False)), strict=False):
            what = f"{strategy}, {original=}, {name} {when}"
            options = {"sharding_strategy": strategy, "use_orig_params": original}

            def made(name: str = name, when: str = when) -> nn.Module:
                model = Layers()
                getattr(model, name).requires_grad_(when == "frozen")
                return model

            def prepare(model: Any, step: int, name: str = name, when: str = when) -> None:
                if step == 1 and when != "always":
                    layer = getattr(model.module if isinstance(model, FullyShardedDataParallel) else model, name)
                    for parameter in layer.parameters():
                        parameter.requires_grad_(when == "thawed")

            as_alone(rank, made, prepare, what, auto_wrap_policy=policies()[1], **options)
        for strategy, original, asks in itertools.product(STRATEGIES, (True, False), (True, False)):
            frozen = Weight(4, 3.0).requires_grad_(False)
            model = wrapped(rank, frozen, sharding_strategy=strategy, use_orig_params=original)
            model = wrapped(rank, Outer(8, 5.0, model), sharding_strategy=strategy, use_orig_params=original)
            for _ in range(2):
                x = inputs(rank).requires_grad_(asks)
                y = model(x)
                at = messages.mark()
                y.sum().backward()
                reduced = [m for m in messages.since(at) if "gather" not in m.op]
                what = f"{strategy}, {original=}, {asks=}: {reduced}"
                assert [m.shape for m in reduced] == [(8,)], what
                assert x.grad is None or x.grad.tolist() == [5.0 * 8 + 3.0 * 4], what
                assert own(model) == {7.5}, what
                model.zero_grad()

    world.run(body)


class Block(nn.Module):
    """A weight, and perhaps a block inside, which takes what this one makes."""

    def __init__(self, name: str, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(dyadic(2, 2, key=name, dtype=torch.float32))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        x = x @ self.weight
        return x if self.inner is None else self.inner(x) + x


class Nested(nn.Module):
    """A trunk of three blocks inside each other, and a head; the input has a gradient or none."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.trunk = Block("trunk", Block("middle", Block("inner")))
        self.head, self.asks = Block("head"), asks

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        result: torch.Tensor = self.head(self.trunk(x.requires_grad_(self.asks)))
        return result


FROZEN: dict[str, tuple[bool, ...]] = {
    "inner": (False, False, True, False),
    "middle": (False, True, False, False),
    "middle and inner": (False, True, True, False),
    "trunk": (True, False, False, False),
    "trunk and inner": (True, False, True, False),
    "all of the trunk": (True, True, True, False),
    "all but inner": (True, True, False, True),
    "head": (False, False, False, True),
}
"""Whether each block is frozen, from the outside to the inside, and the head at last."""


@requirement(
    "TP-FROZEN-7004",
    "FSDP modules inside each other train as on one device, whichever are frozen, from the start or between steps.",
    source=f"{SOURCE}; test_fsdp_fine_tune.py: test_parity_with_ddp, test_backward_reshard_hooks",
)
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.world(2)
def test_frozen_inside(world: World, frozen: str) -> None:
    """Freeze blocks always, in the first step alone, or from the second on; inputs require gradients or not."""

    def body(rank: Rank) -> None:
        ways = [*itertools.product(STRATEGIES, ("always", "at first", "later"), (True, False))]
        number = list(FROZEN).index(frozen)
        for index, (strategy, when, asks) in list(enumerate(ways))[number % 3 :: 3]:
            original = index % 4 < 2 and strategy != STRATEGIES[2]  # docs/findings/tp_idle_unit.py

            def freeze(model: Any, on: bool) -> None:
                for block, chosen in zip(
                    [m for m in model.modules() if isinstance(m, Block)], FROZEN[frozen], strict=True
                ):
                    for parameter in block.parameters(recurse=False):
                        parameter.requires_grad_(not (on and chosen))

            def made(asks: bool = asks, on: bool = when != "later") -> nn.Module:
                model = Nested(asks)
                freeze(model, on)
                return model

            def prepare(model: Any, step: int, when: str = when) -> None:
                if step == 1 and when != "always":
                    freeze(model, when == "later")

            options = {"sharding_strategy": strategy, "use_orig_params": original}
            what = f"{strategy}, {original=}, {when}, {asks=}"
            as_alone(rank, made, prepare, what, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)

    world.run(body)


class Apart(nn.Module):
    """A frozen weight of four elements, times the first of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, used: torch.Tensor, *, other: Any) -> torch.Tensor:
        """Return four times the first input."""
        return self.weight.sum() * used


class Using(nn.Module):
    """A weight, and a frozen module that it calls with its two inputs in one order or another."""

    def __init__(self, part: nn.Module, calls: str) -> None:
        super().__init__()
        self.part, self.calls, self.weight = part, calls, nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Call the module once for each letter, which is the name of the input that it uses."""
        parts = [self.part(*((x,) if used == "x" else (y,)), other={"z": [y, x]}) for used in self.calls]
        return self.weight.sum() * torch.stack(parts).sum(0) * y


@requirement(
    "TP-FROZEN-301",
    "A backward through a frozen FSDP module gives its inputs their gradients and shards it again, whichever of them "
    "it uses, once or several times.",
    source=f"{SOURCE}; torch/distributed/fsdp/_runtime_utils.py: 'parameters that do not require gradient'",
)
@pytest.mark.world(2)
def test_inputs_of_frozen(world: World) -> None:
    """It uses an input with a gradient, one without, or both in turn; the inputs are in a container as well."""

    def body(rank: Rank) -> None:
        for strategy, original, calls in itertools.product(STRATEGIES, (True, False), ("x", "y", "xx", "xy", "yyx")):
            what = f"{strategy}, {original=}, {calls}"
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            alone = Using(Apart(), calls)
            model = wrapped(rank, Using(wrapped(rank, Apart(), **options), calls), **options)
            sizes = [p.numel() for p in model.parameters()]
            for step in range(2):
                right, found = (torch.full((1,), 2.0 + step).to(d).requires_grad_() for d in ("cpu", rank.device))
                alone(torch.ones(1) + rank.index, right).sum().backward()
                model(inputs(rank), found).sum().backward()
                assert found.grad is not None, what
                assert right.grad is not None, what
                assert found.grad.tolist() == right.grad.tolist(), what
                y, number = 2.0 + step, len(calls)
                # inputs x of 1 and 2 have the average 1.5
                assert own(model) == {4 * y * (1.5 * calls.count("x") + y * (number - calls.count("x")))}, what
                assert [p.numel() for p in model.parameters()] == sizes, f"{what}: it stays unsharded"
                model.zero_grad()

    world.run(body)


class Named(NamedTuple):
    """Two tensors with names."""

    one: torch.Tensor
    two: Any


@dataclass
class Record:
    """Two tensors with names."""

    one: torch.Tensor
    two: Any


@requirement(
    "TP-CALLS-92",
    "A module under FSDP gets lists, dicts, tuples or data classes of inputs as they are, and trains if its outputs "
    "are in them, used or not.",
    source=f"{SOURCE}.forward; test_fsdp_input.py: test_input_type; test_fsdp_misc.py: test_fsdp_namedtuple",
)
@pytest.mark.world(2)
def test_kinds(world: World) -> None:
    """Give each kind by position and by name, and return each; the loss uses one output or both."""
    kinds: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
        "list": (lambda a, b: [a, b], lambda x: (x[0], x[1])),
        "tuple": (lambda a, b: (a, [b]), lambda x: (x[0], x[1][0])),
        "dict": (lambda a, b: {"one": a, "two": {"in": b}}, lambda x: (x["one"], x["two"]["in"])),
        "named": (lambda a, b: Named(a, b), lambda x: (x.one, x.two)),
        "record": (lambda a, b: Record(a, b), lambda x: (x.one, x.two)),
    }

    class Pair(nn.Module):
        """Two modules, each of which has an output."""

        def __init__(self, kind: str) -> None:
            super().__init__()
            self.a, self.b, self.kind, self.seen = Weight(4, 3.0), Weight(8, 5.0), kind, list[Any]()

        def forward(self, given: Any, *, also: Any = None) -> Any:
            put, get = kinds[self.kind]
            self.seen.append(type(given if also is None else also))
            x, y = get(given if also is None else also)
            return put(self.a(x), self.b(y))

    def body(rank: Rank) -> None:
        ways = zip(itertools.product(kinds, STRATEGIES), itertools.cycle((True, False)), strict=False)
        for (kind, strategy), original in ways:
            # whole original parameters that a backward skips disappear, a known defect
            uses = ("both",) if original and strategy == ShardingStrategy.NO_SHARD else ("one", "two", "both")
            module = Pair(kind)
            module.a = wrapped(rank, module.a, sharding_strategy=strategy, use_orig_params=original)
            model = wrapped(rank, module, sharding_strategy=strategy, use_orig_params=original)
            put, get = kinds[kind]
            sizes = [p.numel() for p in model.parameters()]
            for by_name, used in itertools.product((False, True), uses):
                what = f"{kind}, {strategy}, {original=}, {by_name=}, {used}"
                given = put(inputs(rank), inputs(rank) * 2)
                output = model(None, also=given) if by_name else model(given)
                one, two = get(output)
                assert type(output) is type(given), what
                (one + two if used == "both" else one if used == "one" else two).sum().backward()
                right = ({4.5} if used != "two" else set()) | ({15.0} if used != "one" else set())
                assert own(model) == right, f"{what}: {own(model)}"
                assert [p.numel() for p in model.parameters()] == sizes, f"{what}: it stays unsharded"
                model.zero_grad()
            assert set(module.seen) == {type(given)}, kind

    world.run(body)


@requirement(
    "TP-SYNC-51",
    "After no_sync, even if its block raised an error, the next backward reduces all gradients that have accumulated.",
    source=f"{SOURCE}.no_sync",
)
@pytest.mark.world(2)
def test_interleaved(world: World) -> None:
    """Every order of four backwards with and without no_sync; the last synchronizes, and then a step takes them."""

    def body(rank: Rank) -> None:
        orders = itertools.product(STRATEGIES, itertools.product((True, False), repeat=3))
        for (strategy, order), original in zip(orders, itertools.cycle((True, True, False, False, True)), strict=False):
            model = nested(rank, sharding_strategy=strategy, use_orig_params=original)
            for synced in (*order, True):
                with contextlib.nullcontext() if synced else model.no_sync():
                    model(inputs(rank)).sum().backward()
            assert own(model) == {3.0 * 6, 5.0 * 6}, f"{strategy}, {original=}, {order}: {own(model)}"

    world.run(body)


@requirement(
    "TP-COMM-91",
    "Each FSDP module gathers once in a forward and, if the strategy freed it, once in the backward, which reduces "
    "once, or not at all in no_sync.",
    source="torch.distributed.fsdp.ShardingStrategy; test_fsdp_comm.py: test_communication",
)
@pytest.mark.world(2)
def test_collectives(world: World) -> None:
    """Count them by module in six steps, some in no_sync, of a root with two modules in it."""

    def body(rank: Rank) -> None:
        full, grads, none = STRATEGIES
        for strategy, original, unsynced in itertools.product(STRATEGIES, (True, False), (0, 2)):
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            parts = [wrapped(rank, Weight(size, 3.0), **options) for size in (4, 6)]
            model = wrapped(rank, Outer(8, 5.0, *parts), **options)
            kept = False  # a backward in no_sync leaves parameters whole that the strategy does not free
            for step in range(unsynced + 2):
                synced = step >= unsynced
                counts = []
                at = messages.mark()
                with contextlib.nullcontext() if synced else model.no_sync():
                    y = model(inputs(rank)).sum()
                    counts.append(messages.since(at))
                    at = messages.mark()
                    y.backward()
                    counts.append(messages.since(at))
                gathered, again = (sorted(m.shape[0] for m in found if "gather" in m.op) for found in counts)
                reduced = sorted(m.shape[0] for m in counts[1] if "gather" not in m.op)
                what = f"{strategy}, {original=}, step {step}, {synced=}: {gathered}, {again}, {reduced}"
                all_of_them, inner = [2, 3, 4], [2, 3]
                assert gathered == ([] if strategy == none or kept else all_of_them), what
                assert again == (inner if strategy == full else []), what
                assert reduced == ([4, 6, 8] if synced else []), what
                kept = strategy == grads and not synced
                model.zero_grad()

    world.run(body)


@requirement(
    "TP-ORDER-91",
    "In debug mode, ranks whose first forwards gather modules in other orders get an error, and a rank whose later "
    "training forward does is warned.",
    source="torch/distributed/fsdp/_exec_order_utils.py: _ExecOrderData; test_fsdp_exec_order.py",
)
@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=lambda strategy: strategy.name)
@pytest.mark.world(2, keeps="the debug level")
def test_order(world: World, strategy: ShardingStrategy) -> None:
    """Two modules of one size come in the other order, in training or evaluation, in the first step or later."""

    class Ordered(Outer):
        """It calls its modules in order or backwards."""

        backwards = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            others = [*self.others][:: -1 if self.backwards else 1]
            return self.weight.sum() * sum(other(x) for other in others)

    def body(rank: Rank) -> None:
        dist.set_debug_level(dist.DebugLevel.DETAIL)

        def made() -> Any:
            parts = [wrapped(rank, Weight(4, factor), sharding_strategy=strategy) for factor in (3.0, 5.0)]
            return wrapped(rank, Ordered(8, 1.0, *parts), sharding_strategy=strategy)

        for backwards in (0, 1):
            model = made()
            model.module.backwards = rank.index == backwards
            with pytest.raises(RuntimeError, match="Forward order differs across ranks"):
                model(inputs(rank))
        model = made()

        def warned(backwards: bool) -> bool:
            model.module.backwards = backwards
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                y = model(inputs(rank))
                if model.training:
                    y.sum().backward()
            return any("Forward order differs" in str(each.message) for each in seen)

        found = [warned(False), warned(False)]
        model.eval()
        found += [warned(True), warned(False)]
        model.train()
        found += [warned(False), warned(rank.index == 1), warned(rank.index == 1), warned(False)]
        assert found == [False] * 5 + [rank.index == 1, False, False], found

    world.run(body)


@requirement(
    "TP-ORIG-141",
    "With use_orig_params=True, parameter groups of an optimizer made before or after FSDP have settings, gradients "
    "and steps of their own, as on one device.",
    source=f"{SOURCE}: use_orig_params",
)
@pytest.mark.world(2)
def test_parameter_groups(world: World) -> None:
    """Two groups or two optimizers; one group's gradients are None, or zero, in every second step."""

    def body(rank: Rank) -> None:
        def made(model: Any, two: bool) -> list[torch.optim.Optimizer]:
            parameters = dict(model.named_parameters())
            groups = [[p for n, p in parameters.items() if n.rsplit(".", 1)[-1] == name] for name in ("a", "b")]
            settings = [{"lr": 0.5, "weight_decay": 0.5}, {"lr": 0.125}]
            given: list[Any] = [{"params": of, **with_} for of, with_ in zip(groups, settings, strict=True)]
            if two:
                return [torch.optim.Adam([given[0]], foreach=False), torch.optim.AdamW([given[1]], foreach=True)]
            return [torch.optim.Adam(given, foreach=True)]

        def train(model: Any, optimizers: list[torch.optim.Optimizer], to_none: bool, size: int) -> None:
            device = next(model.parameters()).device
            for step in range(4):
                for part in range(size) if size > 1 else [rank.index]:
                    x = torch.full((1,), 1.0 + part, device=device)
                    (model(x).sum() / max(1, size)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                for i, group in enumerate(group for o in optimizers for group in o.param_groups):
                    for parameter in group["params"]:
                        if parameter.grad is not None and (step % 2 or i == 0):
                            parameter.grad = None if to_none else torch.zeros_like(parameter)

        ways = itertools.product(STRATEGIES, (True, False), (True, False))
        for (strategy, before, two), to_none in zip(ways, itertools.cycle((True, False, False)), strict=False):
            what = f"{strategy}, {before=}, {two=}, {to_none=}"
            alone: Any = nn.Sequential(Two(), Two())
            there: Any = nn.Sequential(Two(), Two()).to(rank.device)
            for one in (alone, there):
                train(one, made(one, two), to_none, rank.size)
            module: Any = nn.Sequential(Two(), Two()).to(rank.device)
            optimizers = made(module, two) if before else []
            options = {"sharding_strategy": strategy, "use_orig_params": True}
            model = wrapped(rank, module, auto_wrap_policy=ModuleWrapPolicy({Two}), **options)
            train(model, optimizers or made(model, two), to_none, 1)
            expected, on_device = ({n: p.detach() for n, p in one.named_parameters()} for one in (alone, there))
            assert_as_alone(expected, on_device, whole(model), what, rounded=True)

    world.run(body)


@requirement(
    "TP-ORIG-142",
    "With use_orig_params=True, a module has its whole parameters by their names in its forward, and each rank its "
    "parts of them outside, before the backward too.",
    source=f"{SOURCE}: use_orig_params; test_fsdp_use_orig_params.py: test_access_params_after_forward",
)
@pytest.mark.world(2)
def test_parameters_seen(world: World) -> None:
    """Look before the forward, in it, before the backward and after it; concatenated, the parts are the whole."""

    class Looking(Two):
        """It notes what its parameters are."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = {name: p.tolist() for name, p in self.named_parameters()}
            return super().forward(x)

    def body(rank: Rank) -> list[tuple[bool, list[tuple[str, list[float]]]]]:
        found: list[tuple[bool, list[tuple[str, list[float]]]]] = []

        def look(model: Any) -> None:
            sharded = model.sharding_strategy != ShardingStrategy.NO_SHARD
            found.append((sharded, [(name[-1], p.flatten().tolist()) for name, p in model.named_parameters()]))
            asks = {name[-1]: p.requires_grad for name, p in model.named_parameters()}
            assert asks == {"a": True, "b": False}, asks

        for strategy, policy in itertools.product(STRATEGIES, (None, ModuleWrapPolicy({Looking}))):
            module = Looking()
            with torch.no_grad():
                module.a.copy_(torch.arange(4.0))
                module.b.copy_(torch.arange(4.0) + 4)
            module.b.requires_grad_(False)
            options = {"sharding_strategy": strategy, "use_orig_params": True, "auto_wrap_policy": policy}
            model = wrapped(rank, nn.Sequential(module), **options)
            look(model)
            y = model(inputs(rank)).sum()
            assert module.seen == {"a": [0.0, 1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0, 7.0]}
            if strategy != ShardingStrategy.SHARD_GRAD_OP:  # of which parameters stay whole until the backward
                look(model)
            y.backward()
            look(model)
            assert own(model) <= {1.5}
        return found

    right = [("a", [0.0, 1.0, 2.0, 3.0]), ("b", [4.0, 5.0, 6.0, 7.0])]
    for i, ((sharded, one), (_, other)) in enumerate(zip(*world.run(body), strict=True)):
        parts = [(name, values + dict(other)[name] if sharded else values) for name, values in one]
        assert parts == right, f"{i}: {one}, {other}"


@requirement(
    "TP-ORIG-143",
    "With use_orig_params=True, a replacement of another shape, or between a forward and the backward of whole "
    "parameters, raises an error.",
    source="torch/distributed/fsdp/_flat_param.py: 'Cannot writeback'; test_fsdp_use_orig_params.py: "
    "test_writeback_shape_mismatch, test_writeback_between_fwd_and_bwd_for_no_reshard_raises",
)
@pytest.mark.world(2)
def test_replacements_refused(world: World) -> None:
    """Replace a parameter or its data; each rank has elements of one of two parameters."""

    def body(rank: Rank) -> None:
        for strategy, how in itertools.product(STRATEGIES[:2], ("data", "parameter")):
            module = Two()
            model = wrapped(rank, module, sharding_strategy=strategy, use_orig_params=True)
            name = "ab"[rank.index]

            def replace(size: int, module: Any = module, name: str = name, how: str = how) -> None:
                new = torch.ones(size, device=rank.device)
                if how == "data":
                    getattr(module, name).data = new
                else:
                    setattr(module, name, nn.Parameter(new))

            replace(5)
            with pytest.raises(RuntimeError, match="Cannot writeback"):
                model(inputs(rank))
        for how in ("data", "parameter"):
            module = Two()
            grads = STRATEGIES[1]
            model = wrapped(rank, nn.Sequential(module), sharding_strategy=grads, use_orig_params=True)
            y = model(inputs(rank)).sum()
            for name in "ab":  # each rank looks at the one that it has elements of
                if how == "data":
                    getattr(module, name).data = getattr(module, name).detach().clone()
                else:
                    setattr(module, name, nn.Parameter(getattr(module, name).detach().clone()))
            with pytest.raises(AssertionError, match="between forward and backward"):
                y.backward()

    world.run(body)
