"""Lists of collectives of objects: which entries change, whose they are, and how many messages they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement, spmd
from harness.stacks import messages
from harness.stacks.training import launched, since


@requirement(
    "COLL-OBJECT-15",
    "scatter_object_list changes the first entry of its output list, and nothing else of its lists.",
    source="torch.distributed.scatter_object_list: 'whose first element will store the object scattered to this rank'",
)
@pytest.mark.needs(collective="scatter")
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.world(1, 2)
def test_entries_of_scatter(world: World, length: int) -> None:
    """Each rank in turn is the source, and passes a list that has other entries already."""

    def body(rank: Rank) -> None:
        for root in range(rank.size):
            given = [[f"from {root} for {i}"] for i in range(rank.size)]
            kept = list(given)
            entries: list[Any] = [[f"entry {i}"] for i in range(length)]
            rest = entries[1:]
            dist.scatter_object_list(entries, given if rank.index == root else None, src=root)
            assert entries[0] == kept[rank.index]
            assert len(entries) == length
            assert all(entry is same for entry, same in zip(entries[1:], rest, strict=True))
            assert len(given) == len(kept)
            assert all(entry is same for entry, same in zip(given, kept, strict=True))

    world.run(body)


@requirement(
    "COLL-OBJECT-16",
    "all_gather_object and gather_object fill the given list from its first entry, leaving further entries.",
    source="torch.distributed.all_gather_object, gather_object",
)
@requirement(
    "COLL-OBJECT-17",
    "Objects that a collective of objects gives to a rank are copies, also of the rank's own object.",
    source="torch.distributed.all_gather_object, gather_object, scatter_object_list",
)
@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.world(1, 2, 3)
def test_entries_of_gather(world: World, more: int) -> None:
    """Gather lists, change what was gathered, and look at what was given; with entries to spare and without."""

    def body(rank: Rank) -> None:
        for name in ("all_gather_object", "gather_object"):
            given = [rank.index, [f"of {rank.index}"]]
            entries: list[Any] = [None] * rank.size + [["more"]] * more
            last = entries[rank.size :]
            if name == "all_gather_object":
                dist.all_gather_object(entries, given)
            else:
                dist.gather_object(given, entries if rank.index == 0 else None, dst=0)
            filled = name == "all_gather_object" or rank.index == 0
            wanted = [[i, [f"of {i}"]] for i in range(rank.size)] if filled else [None] * rank.size
            assert entries[: rank.size] == wanted
            assert len(entries) == rank.size + more
            assert all(entry is same for entry, same in zip(entries[rank.size :], last, strict=True))
            for entry in entries[: rank.size] if filled else ():
                entry[1].append("changed")
            assert given == [rank.index, [f"of {rank.index}"]]
        received: list[Any] = [None]
        mine = [[i] for i in range(rank.size)]
        dist.scatter_object_list(received, mine if rank.index == 0 else None, src=0)
        received[0].append("changed")
        assert mine == [[i] for i in range(rank.size)]

    world.run(body)


@requirement(
    "COLL-OBJECT-18",
    "broadcast_object_list and send_object_list leave the source's list of objects as it is.",
    source="torch.distributed.broadcast_object_list: 'Only objects on the src rank will be broadcast'",
)
@requirement(
    "COLL-OBJECT-19",
    "broadcast_object_list, send_object_list and recv_object_list accept the device that the objects travel over.",
    source="torch.distributed.broadcast_object_list: device; send_object_list: device, use_batch",
)
@pytest.mark.needs(features=["messages"])
@spmd(2)
def test_lists_of_the_source(rank: Rank) -> None:
    """Give the device or leave it out, and send one by one or in a batch; rank 1 receives in place."""
    for device in (None, rank.device, torch.device("cpu") if rank.device.type == "cpu" else rank.device):
        for count in (1, 3):
            things = [[f"{i}"] for i in range(count)]
            entries: list[Any] = list(things) if rank.index == 0 else [["old"]] * count
            dist.broadcast_object_list(entries, src=0, device=device)
            assert entries == things
            if rank.index == 0:
                assert all(entry is thing for entry, thing in zip(entries, things, strict=True))
            for batch in (False, True):
                if rank.index == 0:
                    dist.send_object_list(entries, 1, device=device, use_batch=batch)
                    assert all(entry is thing for entry, thing in zip(entries, things, strict=True))
                else:
                    received: list[Any] = [None] * count
                    assert dist.recv_object_list(received, 0, device=device, use_batch=batch) == 0
                    assert received == things


@requirement(
    "COLL-OBJECT-20",
    "A collective of objects issues as many collectives for many objects as for one.",
    source="torch.distributed.broadcast_object_list: objects are concatenated",
)
@spmd(2)
def test_number_of_collectives(rank: Rank) -> None:
    """Compare sequence numbers of the group around calls with one object and with nine."""

    def issued(count: int, kind: str) -> dict[tuple[int, ...], int]:
        before = launched()
        if kind == "broadcast":
            entries: list[Any] = list(range(count)) if rank.index == 0 else [None] * count
            dist.broadcast_object_list(entries, src=0)
            assert entries == list(range(count))
        else:
            gathered: list[Any] = [None, None]
            dist.all_gather_object(gathered, list(range(count)))
            assert gathered == [list(range(count))] * 2
        return since(before)

    for kind in ("broadcast", "all_gather"):
        assert issued(9, kind) == issued(1, kind) == issued(2, kind), kind


@requirement(
    "COLL-OBJECT-21",
    "A rank outside of the group returns from a collective of objects with its lists unchanged.",
    source="torch.distributed.all_gather_object: 'If the calling rank is not part of the group, the passed in "
    "object_list will be unmodified'",
)
@pytest.mark.needs(features=["subgroups"])
@spmd(3)
def test_outside_of_the_group(rank: Rank) -> None:
    """Rank 0 calls with what new_group has given it."""
    group = dist.new_group([1, 2])
    entries: list[Any] = [rank.index, rank.index]
    dist.all_gather_object(entries, rank.index, group=group)
    assert entries == ([0, 0] if rank.index == 0 else [1, 2])
    objects = [f"of {rank.index}"]
    dist.broadcast_object_list(objects, group=group, group_src=0)
    assert objects == ["of 0" if rank.index == 0 else "of 1"]
    mine: list[Any] = ["old"]
    given = ["x", "y"] if rank.index < 2 else None
    dist.scatter_object_list(mine, given, group=group, group_src=0)
    assert mine == [["old", "x", "y"][rank.index]]


@requirement(
    "COLL-OBJECT-1500",
    "scatter_object_list and gather_object take None, or no argument, for the list that only the root needs.",
    source="torch.distributed.scatter_object_list: 'Can be None for non-src ranks', gather_object: 'Must be None on "
    "non-dst ranks'",
)
@pytest.mark.parametrize("root", [0, 2])
@spmd(3)
def test_lists_of_others(rank: Rank, root: int) -> None:
    """Leave the list out, by the position of what follows or by name, or give None."""
    here, objects = rank.index == root, ["x", {"y": 1}, (2,)]
    ways: list[dict[str, Any]] = [{}, {"scatter_object_input_list": None}]
    for given in [{"scatter_object_input_list": objects}] * 2 if here else ways:
        for named in {"src": root}, {"group_src": root}, {"src": root, "group": dist.group.WORLD}:
            mine: list[Any] = [None]
            dist.scatter_object_list(mine, **given, **named)
            assert mine == [objects[rank.index]]
    gathers: list[dict[str, Any]] = [{}, {"object_gather_list": None}]
    every: list[Any] = [None] * 3
    for given in [{"object_gather_list": every}] * 2 if here else gathers:
        for named in {"dst": root}, {"group_dst": root}, {"dst": root, "group": dist.group.WORLD}:
            every[:] = [None] * 3
            dist.gather_object(objects[rank.index], **given, **named)
            assert every == (objects if here else [None] * 3)


@requirement(
    "COLL-OBJECT-22",
    "Collectives of objects refuse a missing list on the root, an empty output list, and a root that is named twice.",
    source="torch.distributed.scatter_object_list, gather_object, broadcast_object_list: src, group_src",
)
@pytest.mark.world(1)
def test_refused_lists(world: World) -> None:
    """A rank alone is the root of every collective; afterwards each works."""

    def body(rank: Rank) -> None:
        errors = (ValueError, TypeError, AssertionError, RuntimeError)
        for wrong in (
            lambda: dist.scatter_object_list([], ["x"]),
            lambda: dist.scatter_object_list((None,), ["x"]),  # type: ignore[arg-type]
            lambda: dist.scatter_object_list([None], None),
            lambda: dist.scatter_object_list([None], ["x"], src=0, group_src=0),
            lambda: dist.broadcast_object_list(["x"], src=0, group_src=0),
            lambda: dist.gather_object("x", [None], dst=0, group_dst=0),
            lambda: dist.broadcast_object_list(["x"], src=1),
            lambda: dist.send_object_list(["x"], dst=0),
            lambda: dist.recv_object_list(["x"], src=0),
            lambda: dist.gather_object("x", None, dst=0),
        ):
            with pytest.raises(errors):
                wrong()
        mine: list[Any] = [None]
        for call in (
            lambda: dist.scatter_object_list(mine, ["x"]),
            lambda: dist.broadcast_object_list(mine),
            lambda: dist.gather_object("x", mine),
            lambda: dist.all_gather_object(mine, "x"),
        ):
            call()
            assert mine == ["x"]

    world.run(body)


@requirement(
    "COLL-OBJECT-23",
    "Collectives of objects move objects with the collective of their name, so that each goes where it belongs.",
    source="torch.distributed.gather_object, scatter_object_list, broadcast_object_list, all_gather_object",
)
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(collective="scatter")
@pytest.mark.world(3)
def test_who_gets_what(world: World) -> None:
    """Compare the names of the collectives that were recorded with those of collectives of tensors."""

    def body(rank: Rank) -> None:
        def sent(call: Callable[..., Any], *arguments: Any) -> list[str]:
            before = messages.mark()
            call(*arguments)
            return [message.op for message in messages.since(before)]

        one = torch.zeros(1, dtype=torch.uint8, device=rank.device)
        every = [torch.zeros_like(one) for _ in range(3)]
        for root in (0, 2):
            here = rank.index == root
            gather = sent(dist.gather, one, every if here else None, root)
            scatter = sent(dist.scatter, one, every if here else None, root)
            broadcast, all_gather = sent(dist.broadcast, one, root), sent(dist.all_gather, every, one)
            if not all_gather:
                return  # nothing records them
            large = ["x" * 1000 * (rank.index + 1)] * 3
            entries: list[Any] = [None] * 3
            found = {
                "gather": sent(dist.gather_object, large, entries if here else None, root),
                "scatter": sent(dist.scatter_object_list, [None], large if here else None, root),
                "broadcast": sent(dist.broadcast_object_list, list(large), root),
                "all_gather": sent(dist.all_gather_object, entries, large),
            }
            # Sizes come first, and everyone may be told them.
            assert found["gather"] == [*all_gather, *gather]
            assert found["scatter"][-1:] == scatter
            assert set(found["scatter"][:-1]) <= {*scatter, *broadcast}
            assert found["broadcast"] == broadcast * 2
            assert found["all_gather"] == all_gather * 2

    world.run(body)
