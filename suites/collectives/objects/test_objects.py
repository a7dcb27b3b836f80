"""Collectives of Python objects."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, requirement, spmd


def thing(rank: int, call: int = 0) -> Any:
    """Return an object whose size and kind depend on the rank and the call."""
    kinds = [None, {"rank": rank, "call": call}, "x" * (1000 * rank + call), [rank] * 7, (call, {rank}), b"\0" * rank]
    return [rank, call, kinds[(rank + call) % len(kinds)]]


@requirement(
    "COLL-OBJECT-01",
    "all_gather_object gives every rank every rank's object, in group order.",
    source="torch.distributed.all_gather_object",
)
@spmd(1, 2, 3, 4)
def test_all_gather_object(rank: Rank) -> None:
    """Objects differ in kind and size; ten calls, each after an all_reduce."""
    for call in range(10):
        dist.all_reduce(torch.ones(3, device=rank.device), async_op=True).wait()
        gathered: list[Any] = [None] * rank.size
        dist.all_gather_object(gathered, thing(rank.index, call))
        assert gathered == [thing(i, call) for i in range(rank.size)]


@requirement(
    "COLL-OBJECT-02",
    "gather_object gives the destination every rank's object, in group order.",
    source="torch.distributed.gather_object",
)
@pytest.mark.needs(collective="gather")
@spmd(1, 2, 3)
def test_gather_object(rank: Rank) -> None:
    """Each rank in turn is the destination."""
    for root in range(rank.size):
        gathered: list[Any] | None = [None] * rank.size if rank.index == root else None
        dist.gather_object(thing(rank.index, root), gathered, dst=root)
        assert gathered == ([thing(i, root) for i in range(rank.size)] if rank.index == root else None)


@requirement(
    "COLL-OBJECT-03",
    "broadcast_object_list gives every rank the source's objects.",
    source="torch.distributed.broadcast_object_list",
)
@spmd(1, 2, 3)
def test_broadcast_object_list(rank: Rank) -> None:
    """Each rank in turn is the source of two objects."""
    for root in range(rank.size):
        objects = [thing(root), thing(root, 1)] if rank.index == root else [None, None]
        dist.broadcast_object_list(objects, src=root)
        assert objects == [thing(root), thing(root, 1)]


@requirement(
    "COLL-OBJECT-04",
    "scatter_object_list gives each rank its own object of the source's list.",
    source="torch.distributed.scatter_object_list",
)
@pytest.mark.needs(collective="scatter")
@spmd(1, 2, 3)
def test_scatter_object_list(rank: Rank) -> None:
    """Each rank in turn is the source."""
    for root in range(rank.size):
        received: list[Any] = [None]
        given = [thing(i, root) for i in range(rank.size)] if rank.index == root else None
        dist.scatter_object_list(received, given, src=root)
        assert received == [thing(rank.index, root)]


@requirement(
    "COLL-OBJECT-05",
    "recv_object_list receives what the peer's send_object_list sent.",
    source="torch.distributed.send_object_list, recv_object_list",
)
@spmd(2, 3)
def test_send_recv_object_list(rank: Rank) -> None:
    """The last rank sends to rank 0."""
    last = rank.size - 1
    if rank.index == last:
        dist.send_object_list([thing(last), thing(last, 1)], 0)
    elif rank.index == 0:
        received = [None, None]
        assert dist.recv_object_list(received, last) == last
        assert received == [thing(last), thing(last, 1)]


@requirement(
    "COLL-OBJECT-1200",
    "recv_object_list receives from the rank that it names or, without one, from any, returning the sender's rank.",
    source="torch.distributed.recv_object_list: src, 'Will receive from any rank if set to None', group_src",
)
@pytest.mark.parametrize(
    "source",
    [
        pytest.param({"src": 2}, id="global"),
        pytest.param({"group_src": 2}, id="group"),
        pytest.param({}, id="any", marks=pytest.mark.needs(features=["messages", "any_source"])),
    ],
)
@spmd(3)
def test_sources_of_objects(rank: Rank, source: dict[str, int]) -> None:
    """The last of three ranks sends to rank 0."""
    if rank.index == 2:
        dist.send_object_list([thing(2), thing(2, 1)], 0)
    elif rank.index == 0:
        received = [None, None]
        assert dist.recv_object_list(received, **source) == 2
        assert received == [thing(2), thing(2, 1)]


@requirement(
    "COLL-OBJECT-06",
    "Object collectives work in a subgroup without rank 0, with roots given by global rank or by group rank.",
    source="torch.distributed.broadcast_object_list: group_src; pytorch/pytorch#149200",
)
@spmd(3)
def test_in_a_subgroup(rank: Rank) -> None:
    """Use the group of ranks 1 and 2, with rank 2 as the root."""
    group = dist.new_group([1, 2])
    if rank.index == 0:
        return
    both: list[Any] = [None, None]
    dist.all_gather_object(both, thing(rank.index), group=group)
    assert both == [thing(1), thing(2)]
    for names in ({"src": 2}, {"group_src": 1}):
        objects = [thing(2)] if rank.index == 2 else [None]
        dist.broadcast_object_list(objects, group=group, **names)
        assert objects == [thing(2)]


@requirement(
    "COLL-OBJECT-07",
    "An object that cannot be pickled raises an error.",
    source="torch.distributed.all_gather_object",
)
@spmd(2)
def test_unpicklable(rank: Rank) -> None:
    """Every rank raises, and the group stays usable."""
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):  # the last since Python 3.14
        dist.all_gather_object([None] * rank.size, lambda: None)
    gathered: list[Any] = [None] * rank.size
    dist.all_gather_object(gathered, rank.index)
    assert gathered == list(range(rank.size))


@requirement(
    "COLL-OBJECT-09",
    "In any subgroup, objects are gathered, scattered and sent with roots or peers given by global rank or by "
    "group rank.",
    source="torch.distributed.gather_object: group_dst, scatter_object_list: group_src, send_object_list: group_dst, "
    "recv_object_list: group_src, use_batch; pytorch/pytorch#149200",
)
@pytest.mark.parametrize("named", ["global", "group"])
@pytest.mark.parametrize("ranks", [(1, 2, 3), (0, 2), (1, 3)], ids=str)
@pytest.mark.world(4)
def test_roots_in_subgroups(world: World, ranks: tuple[int, ...], named: str) -> None:
    """The last member is the root and sends to the first, one message after another or in a batch."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        first, root = ranks[0], ranks[-1]

        def by(role: str, member: int) -> dict[str, int]:
            return {role: member} if named == "global" else {f"group_{role}": ranks.index(member)}

        gathered: list[Any] | None = [None] * len(ranks) if rank.index == root else None
        dist.gather_object(thing(rank.index), gathered, group=group, **by("dst", root))
        assert gathered == ([thing(member) for member in ranks] if rank.index == root else None)
        given = [thing(member, 3) for member in ranks] if rank.index == root else [None] * len(ranks)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, given, group=group, **by("src", root))
        assert mine == [thing(rank.index, 3)]
        for batch in (False, True):
            if rank.index == root:
                dist.send_object_list([thing(root, 1), None], group=group, use_batch=batch, **by("dst", first))
            elif rank.index == first:
                received: list[Any] = ["", ""]
                assert dist.recv_object_list(received, group=group, use_batch=batch, **by("src", root)) == root
                assert received == [thing(root, 1), None]

    world.run(body)


@requirement(
    "COLL-OBJECT-10",
    "Object collectives accept large objects, even if their sizes differ greatly between ranks.",
    source="torch.distributed.all_gather_object, broadcast_object_list, gather_object, scatter_object_list",
)
@pytest.mark.parametrize("collective", ["all_gather", "broadcast", "gather", "scatter"])
@pytest.mark.parametrize("large", [0, 1])
@pytest.mark.world(2)
def test_large_objects(world: World, large: int, collective: str) -> None:
    """Send strings of a few bytes, 100 kB and 3 MB; one rank has the largest."""

    def text(count: int, of: int) -> str:
        return f"{of}:" + "".join(chr(97 + (i * 7 + of) % 26) for i in range(26)) * (count // 26)

    def body(rank: Rank) -> None:
        texts = [text(3_000_000 if i == large else 10, i) for i in range(2)]
        several = [text(100_000, 1), text(10, 2), text(3_000_000, 3)]
        gathered: list[Any] = [None, None]
        if collective == "all_gather":
            dist.all_gather_object(gathered, texts[rank.index])
            assert gathered == texts
        elif collective == "broadcast":
            given: list[Any] = list(several) if rank.index == large else [None] * 3
            dist.broadcast_object_list(given, large)
            assert given == several
        elif collective == "gather":
            dist.gather_object(texts[rank.index], gathered if rank.index == 0 else None)
            assert gathered == (texts if rank.index == 0 else [None, None])
        else:
            mine: list[Any] = [None]
            dist.scatter_object_list(mine, several[::2] if rank.index == 0 else [None, None])
            assert mine == [several[2 * rank.index]]

    world.run(body)


@requirement(
    "COLL-OBJECT-11",
    "Tensors among objects keep their dtype, shape and elements.",
    source="torch.distributed.all_gather_object",
)
@spmd(2, 3)
def test_tensors_among_objects(rank: Rank) -> None:
    """Gather tensors alone or in a dictionary, including a view, an empty and a zero-dimensional tensor."""

    def things(of: int) -> list[Any]:
        some = torch.arange(6, dtype=torch.float64).reshape(2, 3) + of
        return [some, some.t(), torch.tensor(of, dtype=torch.int16), {"half": some.half()[:0], "flag": some > 2}]

    for number in range(4):
        gathered: list[Any] = [None] * rank.size
        dist.all_gather_object(gathered, things(rank.index)[number])
        for sender, object_ in enumerate(gathered):
            right = things(sender)[number]
            pairs = [(right[k], object_[k]) for k in right] if isinstance(right, dict) else [(right, object_)]
            for expected, tensor in pairs:
                assert (expected.dtype, expected.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(expected, tensor)


class Witness:
    """An object whose unpickling leaves a trace."""

    seen: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return (Witness.seen.append, ("unpickled",))


COLLECTIVES: dict[str, Callable[[Rank, Any], Any]] = {
    "all_gather_object": lambda rank, given: _all_gathered(rank, given),
    "broadcast_object_list": lambda rank, given: _broadcast(rank, given),
    "gather_object": lambda rank, given: _gathered(rank, given),
    "scatter_object_list": lambda rank, given: _scattered(rank, given),
    "send_object_list": lambda rank, given: _received(rank, given),
}
"""Collectives of objects with ``weights_only``. Each returns on rank 0 what rank 1 has given."""


def _all_gathered(rank: Rank, given: Any) -> Any:
    gathered: list[Any] = [None] * rank.size
    dist.all_gather_object(gathered, given, weights_only=True)
    return gathered[1]


def _broadcast(rank: Rank, given: Any) -> Any:
    objects = [given if rank.index == 1 else None]
    dist.broadcast_object_list(objects, src=1, weights_only=True)
    return objects[0]


def _gathered(rank: Rank, given: Any) -> Any:
    gathered: list[Any] | None = [None] * rank.size if rank.index == 0 else None
    dist.gather_object(given, gathered, dst=0, weights_only=True)
    return gathered[1] if gathered is not None else given


def _scattered(rank: Rank, given: Any) -> Any:
    received: list[Any] = [None]
    dist.scatter_object_list(received, [given] * rank.size if rank.index == 1 else None, src=1, weights_only=True)
    return received[0]


def _received(rank: Rank, given: Any) -> Any:
    received: list[Any] = [None]
    if rank.index == 1:
        dist.send_object_list([given], 0, weights_only=True)
        return given
    dist.recv_object_list(received, 1, weights_only=True)
    return received[0]


NAMES = [
    pytest.param(name, marks=pytest.mark.needs(features=["messages"]) if "send" in name else ()) for name in COLLECTIVES
]
WITH_WEIGHTS_ONLY = pytest.mark.needs(torch="torch.distributed.all_gather_object(weights_only)")


@requirement(
    "COLL-OBJECT-12",
    "With weights_only, object collectives carry plain data and tensors.",
    source="torch.distributed.all_gather_object and the other collectives of objects: weights_only",
)
@WITH_WEIGHTS_ONLY
@pytest.mark.parametrize("collective", NAMES)
@pytest.mark.world(2)
def test_weights_only(world: World, collective: str) -> None:
    """Data are nested; a tensor among them keeps its dtype and elements."""
    plain = {"a": [1, 2.5, "x", None, True], "b": {"c": (3, b"y")}}

    def body(rank: Rank) -> Any:
        tensor = torch.arange(3, dtype=torch.bfloat16) + rank.index
        received = COLLECTIVES[collective](rank, {**plain, "tensor": tensor})
        return {**received, "tensor": [str(received["tensor"].dtype), received["tensor"].tolist()]}

    (received, _) = world.run(body)
    assert received == {**plain, "tensor": ["torch.bfloat16", [1.0, 2.0, 3.0]]}


@requirement(
    "COLL-OBJECT-13",
    "With weights_only, an object of any other class raises an error on the receiver before its code runs.",
    source="torch.distributed.all_gather_object and the other collectives of objects: weights_only",
)
@WITH_WEIGHTS_ONLY
@pytest.mark.parametrize("collective", NAMES)
@pytest.mark.world(2)
def test_weights_only_refuses_code(world: World, collective: str) -> None:
    """Rank 1 sends an object whose unpickling would call a function on rank 0."""

    def body(rank: Rank) -> list[str]:
        with contextlib.ExitStack() as stack:
            if rank.index == 0:
                stack.enter_context(pytest.raises(pickle.UnpicklingError))
            else:
                stack.enter_context(contextlib.suppress(pickle.UnpicklingError))  # it receives its own object
            COLLECTIVES[collective](rank, Witness() if rank.index == 1 else 7)
        return list(Witness.seen)

    assert_on_ranks([[], []], world.run(body))


@requirement(
    "COLL-OBJECT-14",
    "An object is sent as it is at the time of each call.",
    source="torch.distributed.all_gather_object and the other collectives of objects",
)
@pytest.mark.parametrize("kind", [list, dict, bytearray])
@pytest.mark.parametrize("collective", ["all_gather_object", "broadcast_object_list"])
@pytest.mark.world(2)
def test_changed_objects(world: World, collective: str, kind: Any) -> None:
    """Send one container three times, and change it in between."""

    def body(rank: Rank) -> list[Any]:
        mine: Any = kind()
        received = []
        for number in range(3):
            if isinstance(mine, dict):
                mine[number] = rank.index
            else:
                mine.append(number)
            if collective == "all_gather_object":
                gathered: list[Any] = [None] * rank.size
                dist.all_gather_object(gathered, mine)
                received.append(gathered[1])
            else:
                objects = [mine if rank.index == 1 else None]
                dist.broadcast_object_list(objects, src=1)
                received.append(kind(objects[0]))
        return received

    wanted = [kind(dict.fromkeys(range(n), 1) if kind is dict else range(n)) for n in (1, 2, 3)]
    assert_on_ranks([wanted] * 2, world.run(body))
