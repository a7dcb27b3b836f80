"""When fully_shard gathers parameters and reduces gradients, and what each scheduling setting changes about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from harness import Rank, World, requirement
from harness.stacks import messages

SOURCE = "torch.distributed.fsdp.fully_shard"
LAYERS, ROOT = 3, 3
"""The number of layers, and the index of the root's own weight."""


class Log:
    """What one rank did: ``g1`` all-gathers layer 1, ``f1`` and ``b1`` compute it, ``r1`` reduces its gradient.

    With ``replicas``, the members of a group that has the same shards, ``a1`` reduces the shard's gradient over them.
    """

    parameters: list[nn.Parameter]
    """The sharded parameters of the layers and of the root."""

    def __init__(self, ranks: int, replicas: tuple[int, ...] = ()) -> None:
        self.ranks, self.events, self.seen = ranks, list[str](), dict[int, torch.Tensor]()
        self.replicas, self.at = replicas, messages.mark()

    def note(self, event: str = "") -> None:
        """Enter the collectives since the last call, then an event."""
        found = messages.since(self.at)
        for message in found:
            if message.members == self.replicas:
                self.events.append(f"a{message.shape[0] - 1}")
                continue
            gathers = "gather" in message.op
            elements = message.shape[0] * (len(message.members) if gathers else 1)
            self.events.append(f"{'g' if gathers else 'r'}{elements // self.ranks - 1}")
        self.at = messages.mark() if found else self.at
        self.events += [event] if event else []

    def read(self) -> str:
        """Return the events since the last call."""
        self.note()
        events, self.events = self.events, []
        return " ".join(events)


class Layer(nn.Module):
    """Multiply by the sum of a weight, and keep a log; layer i has i + 1 elements for each rank."""

    def __init__(self, log: Log, index: int) -> None:
        super().__init__()
        self.log, self.index = log, index
        self.weight = nn.Parameter(torch.ones(log.ranks * (index + 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.log.note(f"f{self.index}")
        self.log.seen[self.index] = self.weight
        y: torch.Tensor = x * self.weight.sum()
        if y.requires_grad:
            y.register_hook(lambda gradient: self.log.note(f"b{self.index}"))
        return y * 1


class Model(Layer):
    """A weight of its own, followed by layers."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, ROOT)
        self.layers = nn.ModuleList(Layer(log, i) for i in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scaled(x)
        for layer in self.layers:
            x = layer(x)
        return x * 1


def made(rank: Rank, layers: Any = None, root: Any = None, mesh: Any = None) -> tuple[Any, Log]:
    """Shard each layer and the root, with ``reshard_after_forward`` as given, over this mesh or all ranks."""
    mesh = mesh or rank.mesh()
    log = Log(rank.size)
    model: Any = Model(log).to(rank.device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=layers)
    fully_shard(model, mesh=mesh, reshard_after_forward=root)
    log.parameters = [module.weight for module in (*model.layers, model)]
    return model, log


def step(rank: Rank, model: Any, log: Log) -> tuple[str, str]:
    """Run a step on an input that differs by rank, and return the events of its forward and of its backward."""
    log.read()
    loss = model(torch.full((1,), 1.0 + rank.index, device=rank.device, requires_grad=True)).sum()
    forward = log.read()
    loss.backward()
    return forward, log.read()


def check(rank: Rank, model: Any, log: Log, expected: tuple[str, str], what: str, steps: int = 1) -> None:
    """Assert the events of a step, and the gradients that ``steps`` steps have accumulated, and clear them."""
    assert step(rank, model, log) == expected, what
    check_gradients(rank, log, what, steps)


def check_gradients(rank: Rank, log: Log, what: str, steps: int) -> None:
    """Assert that each gradient is the sum over steps of the average over ranks, sharded as its parameter; clear it."""
    sums = [float(rank.size * (i + 1)) for i in range(LAYERS + 1)]
    whole = torch.tensor(sums).prod() * (rank.size + 1) / 2 * steps
    for index, parameter in enumerate(log.parameters):
        gradient, parameter.grad = parameter.grad, None
        assert isinstance(gradient, DTensor), f"{what}: gradient of {index}"
        assert gradient.placements == (Shard(0),), f"{what}: gradient of {index}"
        assert gradient.to_local().tolist() == [float(whole / sums[index])] * (index + 1), (
            f"{what}: gradient of {index}"
        )


FORWARD = "g3 f3 g0 f0 g1 f1 g2 f2"
BACKWARD = "g2 g1 b2 r2 g0 b1 r1 b0 r0 b3 r3"
DEFAULT = FORWARD, BACKWARD
KEPT = FORWARD, "b2 r2 b1 r1 b0 r0 b3 r3"
AGAIN = FORWARD, f"g3 {BACKWARD}"


@requirement(
    "RFSDP-SHARDSCHED-01",
    "reshard_after_forward decides which layers are gathered again for the backward, None meaning all but the root.",
    source=f"{SOURCE}: reshard_after_forward",
)
@requirement(
    "RFSDP-SHARDSCHED-02",
    "set_reshard_after_forward changes reshard_after_forward of its module, and of those inside it if recurse=True.",
    source="torch.distributed.fsdp.FSDPModule.set_reshard_after_forward",
)
@pytest.mark.world(2)
def test_reshard_after_forward(world: World) -> None:
    """Give the layers and the root each value, then set each value with and without recursion, and set it back."""
    every = {
        (None, None): DEFAULT,
        (True, True): AGAIN,
        (False, False): KEPT,
        (True, False): DEFAULT,
        (False, True): (FORWARD, "g3 " + KEPT[1]),
        (None, True): AGAIN,
        (False, None): KEPT,
    }

    def body(rank: Rank) -> None:
        for (layers, root), expected in every.items():
            check(rank, *made(rank, layers, root), expected, f"layers {layers}, root {root}")
        given = DeviceMesh.from_group(rank.mesh().get_group(), rank.device.type)
        check(rank, *made(rank, mesh=given), DEFAULT, "a mesh of a given group")
        for started in False, True:
            model, log = made(rank)
            if started:
                check(rank, model, log, DEFAULT, "before")
            for value, recurse, expected in (
                (True, False, AGAIN),
                (False, True, KEPT),
                (True, True, AGAIN),
                (False, False, DEFAULT),
            ):
                model.set_reshard_after_forward(value, recurse=recurse)
                check(rank, model, log, expected, f"set to {value}, {recurse=}, {started=}")
            model.layers[1].set_reshard_after_forward(False)
            check(rank, model, log, (FORWARD, "g2 b2 r2 g0 b1 r1 b0 r0 b3 r3"), "one layer")
            with pytest.raises(ValueError, match="bool"):
                model.set_reshard_after_forward(2)

    world.run(body)


def prefetch(direction: str, **of: list[int]) -> Callable[[Any], None]:
    """Return a function that makes modules, by their letter, prefetch layers; ``r`` is the root."""

    def set_it(model: Any) -> None:
        for name, layers in of.items():
            module = model if name == "root" else model.layers[int(name[-1])]
            getattr(module, f"set_modules_to_{direction}_prefetch")([model.layers[i] for i in layers])

    return set_it


PREFETCHES: dict[str, tuple[Callable[[Any], None], tuple[str, str]]] = {
    "forward-next": (
        prefetch("forward", root=[0], layer_0=[1], layer_1=[2]),
        ("g3 g0 f3 g1 f0 g2 f1 f2", BACKWARD),
    ),
    "forward-two": (prefetch("forward", root=[0, 1], layer_0=[1, 2]), ("g3 g0 g1 f3 g2 f0 f1 f2", BACKWARD)),
    "forward-one-module": (prefetch("forward", layer_0=[2]), ("g3 f3 g0 g2 f0 g1 f1 f2", BACKWARD)),
    "forward-nothing": (prefetch("forward", root=[], layer_0=[], layer_1=[], layer_2=[]), DEFAULT),
    "backward-previous": (prefetch("backward", root=[2], layer_2=[1], layer_1=[0]), (FORWARD, BACKWARD)),
    "backward-two": (
        prefetch("backward", layer_2=[1, 0]),
        (FORWARD, "g2 g1 g0 b2 r2 b1 r1 b0 r0 b3 r3"),
    ),
    "backward-from-the-root": (
        prefetch("backward", root=[2, 1, 0]),
        (FORWARD, "g2 g1 g0 b2 r2 b1 r1 b0 r0 b3 r3"),
    ),
    "backward-another": (prefetch("backward", layer_2=[0]), (FORWARD, "g2 g0 b2 r2 g1 b1 r1 b0 r0 b3 r3")),
    "backward-too-late": (
        prefetch("backward", layer_0=[2]),
        (FORWARD, "g2 g1 b2 r2 g0 b1 r1 g2 b0 r0 b3 r3"),
    ),
    "backward-nothing": (prefetch("backward", root=[], layer_2=[], layer_1=[], layer_0=[]), DEFAULT),
}


@requirement(
    "RFSDP-SHARDSCHED-03",
    "A module gathers the modules set to be prefetched right after itself, in the order of their list.",
    source="torch.distributed.fsdp.FSDPModule: set_modules_to_forward_prefetch, set_modules_to_backward_prefetch",
)
@requirement(
    "RFSDP-SHARDSCHED-04",
    "With empty lists of modules to prefetch, parameters are gathered as if no list had been set.",
    source="torch.distributed.fsdp.FSDPModule: set_modules_to_forward_prefetch, set_modules_to_backward_prefetch",
)
@pytest.mark.world(2)
def test_prefetched(world: World) -> None:
    """Set lists for one direction, run a step, and set empty lists again; at last set both directions."""

    def body(rank: Rank) -> None:
        model, log = made(rank)
        check(rank, model, log, DEFAULT, "before")
        for name, (set_it, expected) in PREFETCHES.items():
            set_it(model)
            check(rank, model, log, expected, name)
            for direction in "forward", "backward":
                PREFETCHES[f"{direction}-nothing"][0](model)
            check(rank, model, log, DEFAULT, f"after {name}")
        PREFETCHES["forward-next"][0](model)
        PREFETCHES["backward-two"][0](model)
        both = PREFETCHES["forward-next"][1][0], PREFETCHES["backward-two"][1][1]
        for _ in range(2):
            check(rank, model, log, both, "both directions")

    world.run(body)


@requirement(
    "RFSDP-SHARDSCHED-05",
    "Without gradient synchronization, nothing is reduced until a synchronized backward reduces each layer once.",
    source="torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync",
)
@requirement(
    "RFSDP-SHARDSCHED-06",
    "With set_reshard_after_backward(False), parameters stay gathered after each backward, synchronized or not.",
    source="torch.distributed.fsdp.FSDPModule.set_reshard_after_backward",
)
@pytest.mark.world(2)
def test_accumulation(world: World) -> None:
    """Accumulate over three micro-batches with and without resharding, for all modules, the root or one layer."""
    local = FORWARD, "g2 g1 b2 g0 b1 b0 b3"
    unreduced, reduced = "b2 b1 b0 b3", "b2 r2 b1 r1 b0 r0 b3 r3"
    ungathered = "f3 f0 f1 f2"

    def body(rank: Rank) -> None:
        for again in range(2):
            model, log = made(rank)
            if again:
                check(rank, model, log, DEFAULT, "before")
            model.set_requires_gradient_sync(False)
            for _ in range(2):
                assert step(rank, model, log) == local, "resharded, without synchronization"
            model.set_requires_gradient_sync(True)
            check(rank, model, log, DEFAULT, "synchronized", steps=3)

            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
            assert step(rank, model, log) == local, "kept, first"
            assert step(rank, model, log) == (ungathered, "g2 g1 b2 g0 b1 b0 b3"), "kept, second"
            model.set_reshard_after_forward(False)
            assert step(rank, model, log) == (ungathered, unreduced), "kept after the forward, too"
            model.set_requires_gradient_sync(True)
            check(rank, model, log, (ungathered, reduced), "kept, synchronized", steps=4)
            check(rank, model, log, (ungathered, reduced), "kept over a synchronized backward")
            model.set_reshard_after_backward(True)
            check(rank, model, log, (ungathered, reduced), "resharded again")
            check(rank, model, log, KEPT, "resharded again, next step")
            model.set_reshard_after_backward(False, recurse=False)
            check(rank, model, log, KEPT, "root alone")
            check(rank, model, log, ("f3 g0 f0 g1 f1 g2 f2", reduced), "root alone, second")
            model.set_reshard_after_backward(True)
            model.layers[1].set_reshard_after_backward(False)
            check(rank, model, log, ("f3 g0 f0 g1 f1 g2 f2", reduced), "one layer")
            check(rank, model, log, ("g3 f3 g0 f0 f1 g2 f2", reduced), "one layer, second")

    world.run(body)


@requirement(
    "RFSDP-SHARDSCHED-07",
    "A layer with set_unshard_in_backward(False) is not gathered for the backward, until it is set back.",
    source="torch.distributed.fsdp.FSDPModule.set_unshard_in_backward",
)
@pytest.mark.world(2)
def test_not_in_backward(world: World) -> None:
    """The derivative of a layer does not need its weight; set it for the first, then the last, then all layers."""

    def body(rank: Rank) -> None:
        model, log = made(rank)
        for layers, expected in {
            (0,): "g2 g1 b2 r2 b1 r1 b0 r0 b3 r3",
            (2,): "g1 b2 r2 g0 b1 r1 b0 r0 b3 r3",
            (0, 1, 2): KEPT[1],
        }.items():
            for on in False, True:
                for i in layers:
                    model.layers[i].set_unshard_in_backward(on)
                check(rank, model, log, DEFAULT if on else (FORWARD, expected), f"layers {layers}: {on}")

    world.run(body)


@requirement(
    "RFSDP-SHARDSCHED-08",
    "Parameters that unshard() gathered are not gathered again by the forward, unless reshard() came between.",
    source="torch.distributed.fsdp.FSDPModule: unshard, reshard, UnshardHandle.wait",
)
@pytest.mark.world(2)
def test_by_hand(world: World) -> None:
    """Unshard each module alone, at once or asynchronously, wait for it or not, or twice; a second wait is no error."""

    def body(rank: Rank) -> None:
        without = {0: "g3 f3 f0 g1 f1 g2 f2", 1: "g3 f3 g0 f0 f1 g2 f2", ROOT: "f3 g0 f0 g1 f1 g2 f2"}
        for started in False, True:
            model, log = made(rank)
            if started:
                check(rank, model, log, DEFAULT, "before")
            for index, forward in without.items() if started else [(0, without[0])]:
                module = model if index == ROOT else model.layers[index]
                for how in ("at once", "asynchronously", "waited", "twice", "given back") if started else ("at once",):
                    log.read()
                    handle = module.unshard(async_op=how != "at once")
                    what = f"{index} {how}, {started=}"
                    assert (handle is None) == (how == "at once"), what
                    if how in ("waited", "given back"):
                        handle.wait()
                        handle.wait()
                    if how == "twice":
                        module.unshard()
                    if how != "asynchronously":
                        assert not isinstance(module.weight, DTensor), what
                        assert module.weight.tolist() == [1.0] * rank.size * (index + 1), what
                    assert log.read() == f"g{index}", what
                    if how == "given back":
                        module.reshard()
                        assert isinstance(module.weight, DTensor), what
                    check(rank, model, log, DEFAULT if how == "given back" else (forward, BACKWARD), what)

    world.run(body)


@requirement(
    "RFSDP-SHARDSCHED-09",
    "A forward without gradients gathers each layer that reshard_after_forward does not keep, once.",
    source=f"{SOURCE}: reshard_after_forward",
)
@requirement(
    "RFSDP-SHARDSCHED-10",
    "Forwards without gradients change no later training step.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_evaluation(world: World) -> None:
    """Evaluate alone, twice between steps, then with the layers kept, as set_reshard_after_forward's page suggests."""

    def evaluated(rank: Rank, model: Any, log: Log) -> str:
        log.read()
        model(torch.ones(1, device=rank.device))
        return log.read()

    def body(rank: Rank) -> None:
        for mode in torch.no_grad, torch.inference_mode:
            root_kept = "f3 g0 f0 g1 f1 g2 f2"
            model, log = made(rank)
            with mode():
                for turn, events in enumerate((FORWARD, root_kept)):
                    assert evaluated(rank, model, log) == events, (mode, "only evaluated", turn)
            model, log = made(rank)
            for started in False, True:
                if started or mode is torch.no_grad:  # a first forward in inference mode: RFSDP-INF-01
                    with mode():
                        assert evaluated(rank, model, log) == FORWARD, (mode, started)
                        assert evaluated(rank, model, log) == root_kept, (mode, started)
                    check(rank, model, log, (root_kept, BACKWARD), f"{mode}, {started=}")
                check(rank, model, log, DEFAULT, f"a step after {mode}, {started=}")
            model.set_reshard_after_forward(False)
            with mode():
                assert evaluated(rank, model, log) == FORWARD, mode
                assert evaluated(rank, model, log) == "f3 f0 f1 f2", mode
            model.set_reshard_after_forward(True)
            for module in (*model.layers, model):
                module.reshard()
            check(rank, model, log, AGAIN, f"after {mode}")

    world.run(body)


@requirement(
    "RFSDP-SHARDSCHED-11",
    "Over several forwards before a backward, each forward gathers its layers and the gradients are reduced once.",
    source=SOURCE,
)
@requirement(
    "RFSDP-SHARDSCHED-12",
    "set_is_last_backward(False) changes no collective of a step and no gradient.",
    source="torch.distributed.fsdp.FSDPModule.set_is_last_backward",
)
@pytest.mark.world(2)
def test_forwards_and_backwards(world: World) -> None:
    """Run two forwards and one backward of their sum; then three steps, of which only the last is said to be."""

    def body(rank: Rank) -> None:
        model, log = made(rank)
        for _ in range(2):
            log.read()
            x = torch.full((1,), 1.0 + rank.index, device=rank.device, requires_grad=True)
            first, second = model(x), model(x)
            assert log.read() == f"{FORWARD} f3 g0 f0 g1 f1 g2 f2"
            (first + second).sum().backward()
            events = log.read().split()
            assert all(events.count(f"b{i}") == 2 for i in range(4)), events
            check_gradients(rank, log, "two forwards", steps=2)
        for steps in 1, 2, 3:
            model.set_is_last_backward(steps == 3)
            assert step(rank, model, log) == DEFAULT, f"backward {steps}"
        check_gradients(rank, log, "three backwards", steps=3)

    world.run(body)


LISTED = {
    (1, 2): ("g3 f3 g0 f0 g4 f1 f2", "g4 g0 b2 b1 r4 b0 r0 b3 r3"),
    (0, 1, 2): ("g3 f3 g5 f0 f1 f2", "g5 b2 b1 b0 r5 b3 r3"),
    (0, 2): ("g3 f3 g3 f0 g1 f1 f2", "g3 g1 b2 b1 r1 b0 r3 b3 r3"),
}
"""What a step does if these layers are given as a list; a group of layers counts as one with all of their elements."""


@requirement(
    "RFSDP-SHARDSCHED-13",
    "Modules in one list are gathered in one collective before the first of them, and resharded after the last.",
    source=f"{SOURCE}: module, 'group together for communication'",
)
@requirement(
    "RFSDP-SHARDSCHED-14",
    "The gradients of modules in one list are reduced in one collective.",
    source=f"{SOURCE}: module, 'group together for communication'",
)
@pytest.mark.world(2)
def test_listed(world: World) -> None:
    """List two or three layers, neighbors or not, that are resharded after the forward or not; run several steps."""

    def body(rank: Rank) -> None:
        for listed, (forward, backward) in LISTED.items():
            for kept in False, True:
                log = Log(rank.size)
                model: Any = Model(log).to(rank.device)
                fully_shard([model.layers[i] for i in listed], mesh=rank.mesh(), reshard_after_forward=not kept)
                for layer in (model.layers[i] for i in range(LAYERS) if i not in listed):
                    fully_shard(layer, mesh=rank.mesh(), reshard_after_forward=not kept)
                fully_shard(model, mesh=rank.mesh())
                log.parameters = [module.weight for module in (*model.layers, model)]
                without = " ".join(event for event in backward.split() if event[0] != "g")
                for number in range(2):
                    what = f"{listed}, {kept=}, step {number}"
                    check(rank, model, log, (forward, without if kept else backward), what)
                model.set_requires_gradient_sync(False)
                unsynced = " ".join(e for e in (without if kept else backward).split() if e[0] != "r")
                assert step(rank, model, log) == (forward, unsynced), f"{listed}, {kept=}, without synchronization"

    world.run(body)
