"""Objects of every kind through every collective of objects: what is false, parameters, modules, shared parts."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.objects import Named, of_classes, plain
from harness import Rank, World, requirement, spmd

FALSE = (None, False, 0, 0.0, "", b"", (), [], {}, set(), frozenset(), range(0), torch.Size([]))
FULL = (True, 7, -0.5, "text", b"\0", (None,), [0], {"": None}, {0}, ..., int, NotImplementedError, torch.float16)


def arrived(rank: Rank, mine: Any) -> list[tuple[str, int, Any]]:
    """Give an object to every collective of objects, on two ranks, each of which is the root in turn.

    Return what has arrived on this rank in place of another object: how, from which rank, and the object.
    """
    me, other = rank.index, 1 - rank.index
    entries: list[Any] = ["old", "old"]
    dist.all_gather_object(entries, mine)
    found = [("all_gather_object", sender, entry) for sender, entry in enumerate(entries)]
    for root in range(2):
        entries = ["old", "old"]
        dist.gather_object(mine, entries if me == root else None, dst=root)
        if me == root:
            found += [("gather_object", sender, entry) for sender, entry in enumerate(entries)]
        entries = [mine, mine] if me == root else ["old", "old"]
        dist.broadcast_object_list(entries, src=root)
        found += [("broadcast_object_list", root, entry) for entry in entries]
        entries = ["old"]
        dist.scatter_object_list(entries, [mine, mine] if me == root else None, src=root)
        found.append(("scatter_object_list", root, entries[0]))
        for batch in (False, True):
            entries = ["old", "old"]
            if me == root:
                dist.send_object_list([mine, mine], other, use_batch=batch)
            else:
                dist.recv_object_list(entries, root, use_batch=batch)
                found += [(f"recv_object_list, use_batch={batch}", root, entry) for entry in entries]
    return found


@requirement(
    "COLL-OBJECT-24",
    "An object that arrives replaces what was in its place, also if it is None or false.",
    source="torch.distributed.all_gather_object, gather_object, broadcast_object_list, scatter_object_list, "
    "send_object_list, recv_object_list",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(collective="scatter")
@spmd(2)
def test_what_is_false(rank: Rank) -> None:
    """One rank gives what is false, the other something else; lists hold other objects before."""
    for number, (false, full) in enumerate(zip(FALSE, FULL, strict=True)):
        given = (false, full) if number % 2 else (full, false)
        for how, sender, entry in arrived(rank, given[rank.index]):
            right: Any = given[sender]
            assert type(entry) is type(right), f"{how} of {right!r}: {entry!r}"
            assert entry == right, f"{how} of {right!r}: {entry!r}"


@requirement(
    "COLL-OBJECT-25",
    "Parameters, modules, tensors that require a gradient and tensors that occur twice arrive as they were given.",
    source="torch.distributed.all_gather_object, gather_object, broadcast_object_list, scatter_object_list, "
    "send_object_list, recv_object_list; pickle; torch.nn.Parameter",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(collective="scatter")
@spmd(2)
def test_tensors_of_every_kind(rank: Rank) -> None:
    """Give them alone and in a dictionary, and compare class, requires_grad, strides and elements."""

    def made(of: int) -> dict[str, Any]:
        plain = torch.arange(6.0).view(2, 3) + of
        weight = torch.nn.Parameter(plain.clone())
        module = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1)).eval()
        torch.nn.utils.vector_to_parameters(torch.arange(5.0) + of, module.parameters())
        module[0].bias.requires_grad_(False)
        return {
            "parameter": weight,
            "frozen": torch.nn.Parameter(plain.clone(), requires_grad=False),
            "transposed": torch.nn.Parameter(plain.t()),
            "leaf": plain.clone().requires_grad_(),
            "plain": plain,
            "sparse": torch.sparse_coo_tensor([[of, 2]], [1.0, 2.0], (3,)).coalesce(),
            "module": module,
            "again": weight,
        }

    def told(tensor: torch.Tensor) -> tuple[Any, ...]:
        strides = tensor.stride() if tensor.layout is torch.strided else None
        what = type(tensor), tensor.dtype, tensor.layout, tensor.device, tensor.requires_grad, tensor.is_leaf, strides
        return *what, tensor.detach().to_dense().tolist()

    def described(thing: Any) -> Any:
        if isinstance(thing, torch.nn.Module):
            tensors = [*thing.named_parameters(), *thing.named_buffers()]
            return type(thing), thing.training, [(name, *told(tensor)) for name, tensor in tensors]
        return told(thing)

    mine = made(rank.index)
    for how, sender, entry in arrived(rank, mine):
        assert list(entry) == list(mine), how
        for name, right in made(sender).items():
            assert described(entry[name]) == described(right), f"{how}: {name}"
        assert entry["again"] is entry["parameter"], how
    for name in ("parameter", "frozen", "leaf", "module"):
        for how, sender, entry in arrived(rank, mine[name]):
            assert described(entry) == described(made(sender)[name]), f"{how}: {name} alone"


@requirement(
    "COLL-OBJECT-76",
    "An object of any class arrives as an object of this class that is equal to it, if pickle takes it.",
    source="torch.distributed.all_gather_object, gather_object, broadcast_object_list, scatter_object_list, "
    "send_object_list, recv_object_list: 'object must be picklable'",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(collective="scatter")
@spmd(2)
def test_classes(rank: Rank) -> None:
    """Give some alone, all in one dictionary, and in a list that holds itself and one of them twice."""

    def assert_alike(entry: Any, right: Any, where: str) -> None:
        assert type(entry) is type(right), f"{where}: {entry!r}"
        assert plain(entry) == plain(right), f"{where}: {entry!r}"

    mine = of_classes(rank.index)
    for how, sender, entry in arrived(rank, mine):
        right = of_classes(sender)
        assert list(entry) == list(right), how
        for name, thing in right.items():
            assert_alike(entry[name], thing, f"{how}: {name}")
    for name in ("namespace", "dataclass", "slots", "partial", "class"):
        for how, sender, entry in arrived(rank, mine[name]):
            assert_alike(entry, of_classes(sender)[name], f"{how}: {name} alone")
    knot: list[Any] = [mine["namespace"], mine["namespace"]]
    knot.append(knot)
    for how, _, entry in arrived(rank, knot):
        assert entry[2] is entry, how
        assert entry[0] is entry[1], how


@requirement(
    "COLL-OBJECT-77",
    "Collectives of objects and the making of groups do not depend on modes that are set for tensors of the program.",
    source="torch.device, torch.set_default_device, torch.set_default_dtype, torch.inference_mode; "
    "torch.distributed.all_gather_object, gather_object, broadcast_object_list, scatter_object_list",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(collective="scatter")
@spmd(2)
def test_within_modes(rank: Rank) -> None:
    """Give objects and a tensor while tensors are made without memory, in double precision, or without gradients."""

    @contextlib.contextmanager
    def default(setter: Any, value: Any, back: Any) -> Iterator[None]:
        setter(value)
        try:
            yield
        finally:
            setter(back)

    modes: dict[str, Any] = {
        "device as a context": torch.device("meta"),
        "default device": default(torch.set_default_device, "meta", None),
        "default dtype": default(torch.set_default_dtype, torch.float64, torch.get_default_dtype()),
        "inference": torch.inference_mode(),
        "no gradients": torch.no_grad(),
    }
    tensor = torch.arange(3.0) + rank.index
    for name, mode in modes.items():
        with mode:
            for how, sender, entry in arrived(rank, {"of": rank.index, "tensor": tensor}):
                kind = entry["tensor"].device, entry["tensor"].dtype
                assert kind == (tensor.device, torch.float32), f"{name}: {how}"
                assert (entry["of"], entry["tensor"].tolist()) == (sender, [sender + i for i in range(3)]), how
            group = dist.new_group([1, 0])
            entries: list[Any] = [None, None]
            dist.all_gather_object(entries, rank.index, group)
            assert entries == [0, 1], name
            dist.barrier(group)
            dist.destroy_process_group(group)


def _filled(tensor: torch.Tensor, value: int) -> None:
    with torch.no_grad():
        tensor.fill_(value)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda: Named("same"), lambda thing, value: setattr(thing, "held", value), lambda thing: thing.held),
    "what it holds": (
        lambda: Named("same", [0]),
        lambda thing, value: thing.held.append(value),
        lambda thing: thing.held[-1],
    ),
    "in a tuple": (
        lambda: (Named("same"),),
        lambda thing, value: setattr(thing[0], "held", value),
        lambda thing: thing[0].held,
    ),
    "tensor": (lambda: torch.zeros(2), _filled, lambda thing: int(thing[1])),
    "view": (lambda: torch.zeros(4)[::2], _filled, lambda thing: int(thing[1])),
    "parameter": (lambda: torch.nn.Parameter(torch.zeros(2)), _filled, lambda thing: int(thing[1])),
    "module": (
        lambda: torch.nn.Linear(1, 1),
        lambda thing, value: _filled(thing.weight, value),
        lambda thing: int(thing.weight),
    ),
    "deque": (collections.deque, lambda thing, value: thing.append(value), lambda thing: thing[-1]),
    "set": (lambda: {0}, lambda thing, value: thing.add(value), max),
}
"""Objects, most of which can be keys: how one is made, how a number is put into it, and how it is read."""

EQUAL: tuple[tuple[Any, ...], ...] = (
    (1, True, 1.0, 1 + 0j),
    (0.0, -0.0, False, 0),
    ((1,), (True,), (1.0,)),
    (frozenset({0}), frozenset({False}), frozenset({-0.0})),
    (Named("same", 1), Named("same", 2), Named("same", "other")),
)
"""Objects that are equal and are not alike."""


@requirement(
    "COLL-OBJECT-14",
    "An object is sent as it is at the time of each call.",
    source="torch.distributed.all_gather_object and the other collectives of objects",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(collective="scatter")
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.world(2)
def test_changed_between_calls(world: World, kind: str) -> None:
    """Give one object to every collective of objects, change it, and give it again."""
    make, change, read = CHANGES[kind]

    def body(rank: Rank) -> None:
        mine = make()
        for call in range(3):
            change(mine, 2 + 10 * call + rank.index)
            for how, sender, entry in arrived(rank, mine):
                assert read(entry) == 2 + 10 * call + sender, f"{how}, call {call}"

    world.run(body)


@requirement(
    "COLL-OBJECT-8402",
    "Of objects that are equal, each arrives as it was given, whichever was sent before.",
    source="torch.distributed.all_gather_object, gather_object, broadcast_object_list, scatter_object_list, "
    "send_object_list, recv_object_list",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(collective="scatter")
@spmd(2)
def test_equal_objects(rank: Rank) -> None:
    """Give them one after the other, the ranks in another order."""
    for objects in EQUAL:
        for call in range(len(objects)):
            given = objects[call], objects[-1 - call]
            for how, sender, entry in arrived(rank, given[rank.index]):
                right = given[sender]
                held = (entry.held, right.held) if isinstance(right, Named) else (repr(entry), repr(right))
                assert type(entry) is type(right), f"{how} of {right!r}: {entry!r}"
                assert held[0] == held[1], f"{how} of {right!r}: {entry!r}"
