"""send, recv, isend, irecv and batches of them."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement, spmd
from harness.oracles.collectives import Case, inputs, poison
from harness.stacks.collectives import claimed
from suites.collectives.cases import DTYPES, OPTIONAL

SHORT = timedelta(seconds=5)


def message(sender: int, dtype: torch.dtype = torch.float32, count: int = 7, call: int = 0) -> torch.Tensor:
    """Return what a rank sends, dtype[count] on the host: any bits, different for each sender and call."""
    return inputs(Case("all_gather", dtype=dtype, shape=(count,)), 1, sender, call)[0]


def outgoing(rank: Rank, count: int = 7, call: int = 0) -> torch.Tensor:
    """Return a rank's message on its device, float32[count]."""
    return message(rank.index, count=count, call=call).to(rank.device)


def incoming(rank: Rank, count: int = 7) -> torch.Tensor:
    """Create a buffer for a message on a rank's device, float32[count], with other values than any message."""
    return poison((count,), torch.float32).to(rank.device)


@requirement(
    "COLL-P2P-01",
    "recv receives what the peer's send sent, whatever the dtype or count.",
    source="torch.distributed.send, recv",
)
@requirement(
    "COLL-P2P-13",
    "recv returns the sender's rank.",
    source="torch.distributed.send, recv",
)
@pytest.mark.world(2, 3)
def test_send_recv(world: World) -> None:
    """Rank 0 sends every dtype to each other rank, at counts from 0."""
    dtypes = claimed((*DTYPES, *OPTIONAL))

    def body(rank: Rank) -> None:
        for dtype, count in itertools.product(dtypes, (0, 1, 2, 7, 64, 65)):
            sent = message(0, dtype, count)
            if rank.index == 0:
                given = sent.to(rank.device, copy=True)
                for peer in range(1, rank.size):
                    dist.send(given, peer)
                assert_same(sent, given, "what was sent")
            else:
                received = poison((count,), dtype).to(rank.device)
                assert dist.recv(received, 0) == 0
                assert_same(sent, received, f"{dtype} of {count}")

    world.run(body)


@requirement(
    "COLL-P2P-02",
    "recv without a source receives a message from any rank and returns the sender's rank.",
    source="torch.distributed.recv: src=None",
)
@requirement(
    "COLL-P2P-5440",
    "The Work of irecv without a source knows the sender's rank.",
    source="torch.distributed.Work.source_rank",
)
@pytest.mark.needs(features=["tags"])
@spmd(2, 3, 4)
def test_any_source(rank: Rank) -> None:
    """Each other rank sends one message to rank 0, which waits for it in recv, and one that irecv takes."""
    if rank.index > 0:
        dist.send(outgoing(rank), 0)
        dist.send(outgoing(rank, call=1), 0, tag=1)
        return
    flying = [incoming(rank) for _ in range(rank.size - 1)]
    works = [dist.irecv(tensor, tag=1) for tensor in flying]
    seen = set()
    for _ in range(rank.size - 1):
        received = incoming(rank)
        sender = dist.recv(received)
        assert_same(message(sender), received, f"from rank {sender}")
        seen.add(sender)
    assert seen == set(range(1, rank.size))
    for work, tensor in zip(works, flying, strict=True):
        assert work is not None
        work.wait()
        assert_same(message(work.source_rank(), call=1), tensor, f"from rank {work.source_rank()}")
        seen.remove(work.source_rank())
    assert not seen


@requirement(
    "COLL-P2P-03",
    "A message is received under the tag it was sent with.",
    source="torch.distributed.isend: tag",
)
@spmd(2)
def test_tags_in_reverse(rank: Rank) -> None:
    """Four tags are received in reverse order."""
    if rank.index == 0:
        for work in [dist.isend(outgoing(rank, call=tag), 1, tag=tag) for tag in range(4)]:
            work.wait()
        return
    received = {tag: incoming(rank) for tag in reversed(range(4))}
    for work in [dist.irecv(tensor, 0, tag=tag) for tag, tensor in received.items()]:
        work.wait()
    for tag, tensor in received.items():
        assert_same(message(0, call=tag), tensor, f"tag {tag}")


@requirement(
    "COLL-P2P-04",
    "Messages with equal tags arrive in the order they were sent.",
    source="torch.distributed.send",
)
@spmd(2)
def test_order(rank: Rank) -> None:
    """Thirty messages alternate between small and large."""
    for call in range(30):
        count = (1, 5000)[call % 2]
        if rank.index == 0:
            dist.send(outgoing(rank, count, call), 1)
        else:
            received = incoming(rank, count)
            dist.recv(received, 0)
            assert_same(message(0, count=count, call=call), received, f"message {call}")


@requirement(
    "COLL-P2P-05",
    "batch_isend_irecv exchanges messages in all directions at once.",
    source="torch.distributed.batch_isend_irecv, P2POp",
)
@pytest.mark.parametrize("count", [1, 7, 1 << 18])
@spmd(2, 3, 4)
def test_ring(rank: Rank, count: int) -> None:
    """Each rank sends to the next and receives from the previous, for three rounds."""
    after, before = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
    for call in range(3):
        received = incoming(rank, count)
        sent = outgoing(rank, count, call)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)])
        for work in works:
            work.wait()
        assert_same(message(before, count=count, call=call), received, f"round {call}")
        assert_same(message(rank.index, count=count, call=call), sent, "what was sent")


@requirement(
    "COLL-P2P-06",
    "In a subgroup a peer is given by its global rank, or with group_dst or group_src by its rank in the group.",
    source="torch.distributed.send: dst, group_dst",
)
@spmd(3)
def test_in_a_subgroup(rank: Rank) -> None:
    """Use the group of ranks 1 and 2, with the peer given in both ways."""
    group = dist.new_group([1, 2])
    if rank.index == 1:
        dist.send(outgoing(rank), 2, group=group)
        dist.send(outgoing(rank, call=1), group_dst=1, group=group)
    elif rank.index == 2:
        for call, names in enumerate(({"src": 1}, {"group_src": 0})):
            received = incoming(rank)
            assert dist.recv(received, group=group, **names) == 1
            assert_same(message(1, call=call), received, str(names))


@requirement(
    "COLL-P2P-07",
    "send and recv transfer a strided tensor by its elements, or raise an error.",
    source="torch.distributed.send",
)
@spmd(2)
def test_strided(rank: Rank) -> None:
    """Send a column into a column; if the sender raises, nothing is sent and the receiver raises too."""
    sent = torch.arange(6.0, device=rank.device).reshape(3, 2)[:, 0]
    received = torch.zeros(3, 2, device=rank.device)
    refused = False
    try:
        dist.send(sent, 1) if rank.index == 0 else dist.recv(received[:, 0], 0)
    except (ValueError, RuntimeError):
        refused = True
    if rank.index == 1 and not refused:
        assert_same(torch.stack([sent, torch.zeros_like(sent)], 1), received, "the column, and what lies between")
    if rank.index == 0:
        dist.send(outgoing(rank), 1)
    else:
        received = incoming(rank)
        dist.recv(received, 0)
        assert_same(message(0), received, "the next message")


@requirement(
    "COLL-P2P-08",
    "A rank that sends to itself gets an error.",
    source="torch.distributed.send: dst",
)
@spmd(1, 2)
def test_to_itself(rank: Rank) -> None:
    """send raises ValueError."""
    with pytest.raises(ValueError, match="Invalid destination rank"):
        dist.send(torch.ones(1, device=rank.device), rank.index)


@requirement(
    "COLL-P2P-09",
    "In a subgroup, recv without a source returns the sender's global rank.",
    source="torch.distributed.recv: 'Sender rank'",
)
@pytest.mark.parametrize("ranks", [(1, 2, 3), (0, 3), (1, 3)], ids=str)
@pytest.mark.world(4)
def test_any_source_in_a_subgroup(world: World, ranks: tuple[int, ...]) -> None:
    """Each other member sends to the first."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index in ranks[1:]:
            dist.send(outgoing(rank), ranks[0], group=group)
        elif rank.index == ranks[0]:
            seen = set()
            for _ in ranks[1:]:
                received = incoming(rank)
                sender = dist.recv(received, group=group)
                assert_same(message(sender), received, f"from rank {sender}")
                seen.add(sender)
            assert seen == set(ranks[1:])

    world.run(body)


@requirement(
    "COLL-P2P-10",
    "Tags of any size keep messages apart.",
    source="torch.distributed.isend: tag",
)
@spmd(2)
def test_large_tags(rank: Rank) -> None:
    """Tags that share bytes are received in reverse order."""
    tags = (1, 257, 65537, 1 << 20, 0)
    if rank.index == 0:
        for work in [dist.isend(outgoing(rank, call=call), 1, tag=tag) for call, tag in enumerate(tags)]:
            work.wait()
        return
    received = {tag: incoming(rank) for tag in reversed(tags)}
    for work in [dist.irecv(tensor, 0, tag=tag) for tag, tensor in received.items()]:
        work.wait()
    for call, tag in enumerate(tags):
        assert_same(message(0, call=call), received[tag], f"tag {tag}")


@requirement(
    "COLL-P2P-11",
    "A batch may hold several messages to and from each peer, which arrive in order, in subgroups too.",
    source="torch.distributed.batch_isend_irecv, P2POp: group, group_peer",
)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("named", ["peer", "group_peer"])
@pytest.mark.world(3)
def test_larger_batches(world: World, ranks: tuple[int, ...], named: str) -> None:
    """Each member exchanges two messages of different sizes with every other member."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        members = sorted(ranks)
        others = [member for member in members if member != rank.index]
        counts = (7, 300)

        def to(member: int) -> dict[str, int]:
            return {"peer": member} if named == "peer" else {"group_peer": members.index(member)}

        received = {(other, call): incoming(rank, counts[call]) for other in others for call in range(2)}
        ops = []
        for other in others:
            for call in range(2):
                sent = outgoing(rank, counts[call], 10 * other + call)
                ops.append(dist.P2POp(dist.isend, sent, group=group, **to(other)))
                ops.append(dist.P2POp(dist.irecv, received[other, call], group=group, **to(other)))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for (other, call), tensor in received.items():
            expected = message(other, count=counts[call], call=10 * rank.index + call)
            assert_same(expected, tensor, f"message {call} from rank {other}")

    world.run(body)


@requirement(
    "COLL-P2P-12",
    "Messages of any size arrive, at each power of two and one element above it.",
    source="torch.distributed.send, recv",
)
@spmd(2)
def test_every_size(rank: Rank) -> None:
    """Send 256 bytes to half a megabyte there and back, blocking or not."""
    for power in range(6, 18):
        for more in (0, 1):
            count = (1 << power) + more
            received = incoming(rank, count)
            if rank.index == 0:
                dist.send(outgoing(rank, count), 1)
                dist.irecv(received, 1).wait()
            else:
                dist.recv(received, 0)
                dist.isend(outgoing(rank, count), 0).wait()
            assert_same(message(1 - rank.index, count=count), received, f"{count} elements")


@requirement(
    "COLL-P2P-14",
    "In a batch, too, a message is received under the tag it was sent with.",
    source="torch.distributed.P2POp: tag",
)
@requirement(
    "COLL-P2P-15",
    "Tags keep messages of a subgroup apart, whether peers are given by global rank or by group rank.",
    source="torch.distributed.P2POp, isend, irecv: tag, group_dst, group_src",
)
@pytest.mark.parametrize("how", ["batches", "batch-sent", "batch-received", "alone"])
@pytest.mark.world(3)
def test_tags_in_batches(world: World, how: str) -> None:
    """Messages of one pair are received by their tags in reverse; in the world, and among its last two ranks."""

    def body(rank: Rank) -> None:
        last = dist.new_group([1, 2])
        for group, members in ((None, [0, 1, 2]), (last, [1, 2])):
            for named in ("peer", "group_peer"):
                if rank.index not in (members[0], members[-1]):
                    continue
                sends = rank.index == members[-1]
                other = members[0] if sends else members[-1]
                place = {named: other if named == "peer" else members.index(other)}
                batch = how == "batches" or how == ("batch-sent" if sends else "batch-received")
                order = range(4) if sends else reversed(range(4))
                tensors = {tag: outgoing(rank, call=tag) if sends else incoming(rank) for tag in order}
                function = dist.isend if sends else dist.irecv
                if batch:
                    ops = [dist.P2POp(function, t, group=group, tag=tag, **place) for tag, t in tensors.items()]
                    works = dist.batch_isend_irecv(ops)
                else:
                    role = "dst" if sends else "src"
                    names = {role if named == "peer" else f"group_{role}": place[named]}
                    works = [function(t, group=group, tag=tag, **names) for tag, t in tensors.items()]
                for work in works:
                    work.wait()
                for tag, tensor in () if sends else tensors.items():
                    assert_same(message(other, call=tag), tensor, f"tag {tag} in {members}, by {named}")

    world.run(body, timeout=20)


@requirement(
    "COLL-P2P-16",
    "Blocking messages match by their tags as messages in flight do, with or without a source.",
    source="torch.distributed.send, recv: tag",
)
@spmd(2)
def test_tags_of_blocking_messages(rank: Rank) -> None:
    """Rank 0 sends three messages that wait, and rank 1 receives them in another order, half of them from any rank."""
    for source in (0, None):
        if rank.index == 0:
            works = [dist.isend(outgoing(rank, call=tag), 1, tag=tag) for tag in (1, 2)]
            dist.send(outgoing(rank, call=3), 1, tag=3)
            for work in works:
                work.wait()
            continue
        for tag in (2, 3, 1):
            received = incoming(rank)
            assert dist.recv(received, source, tag=tag) == 0
            assert_same(message(0, call=tag), received, f"tag {tag} from {source}")


@requirement(
    "COLL-P2P-17",
    "A P2POp has the operation, tensor, peer and tag that it is made with, in the default group unless one is given.",
    source="torch.distributed.P2POp",
)
@requirement(
    "COLL-P2P-18",
    "A batch that is no list of P2POps, or has them of several groups, is refused before anything is sent.",
    source="torch.distributed.batch_isend_irecv",
)
@spmd(3)
def test_operations_of_batches(rank: Rank) -> None:
    """Look at operations of the default group and of a subgroup, then give a batch what it does not take."""
    tensor = torch.ones(2, device=rank.device)
    group, other = dist.new_group([1, 2]), dist.new_group([1, 2])
    op = dist.P2POp(dist.isend, tensor, (rank.index + 1) % 3, tag=5)
    assert (op.op, op.tensor is tensor, op.tag) == (dist.isend, True, 5)
    assert op.peer == op.group_peer == (rank.index + 1) % 3
    assert op.group is dist.group.WORLD
    if rank.index > 0:
        peer = 3 - rank.index
        for names in ({"peer": peer}, {"group_peer": peer - 1}):
            op = dist.P2POp(dist.irecv, tensor, group=group, **names)
            assert (op.op, op.peer, op.group_peer, op.tag) == (dist.irecv, peer, peer - 1, 0)
            assert op.group is group
        ops = [dist.P2POp(dist.isend, tensor, peer, of) for of in (group, other)]
        with pytest.raises(ValueError, match=r"(?i)group"):
            dist.batch_isend_irecv(ops)
    for wrong in (dist.send, dist.all_reduce, None, "isend"):
        with pytest.raises((RuntimeError, ValueError)):
            dist.P2POp(wrong, tensor, 0)  # type: ignore[arg-type]
    for names in ({}, {"peer": 0, "group_peer": 0}):
        with pytest.raises(ValueError):  # noqa: PT011 - the words differ
            dist.P2POp(dist.isend, tensor, **names)
    for batch in (op, [op, None], [dist.isend]):
        with pytest.raises((ValueError, TypeError)):
            dist.batch_isend_irecv(batch)  # type: ignore[arg-type]
    dist.barrier()


@requirement(
    "COLL-P2P-19",
    "In a batch, the order of sends relative to receives does not matter, nor in which order the works are waited for.",
    source="torch.distributed.batch_isend_irecv: '[recv_from_1, send_to_1] is equivalent to [send_to_1, recv_from_1]'",
)
@spmd(2)
def test_order_in_batches(rank: Rank) -> None:
    """Exchange two messages each way in every order of sends and receives, the same on both ranks or not."""
    orders = sorted(set(itertools.permutations("ssrr")))
    other = 1 - rank.index
    for number, order in enumerate(orders):
        mine = order if rank.index == 0 else orders[-1 - number // 2]
        sent = iter([outgoing(rank, count, call) for call, count in enumerate((7, 300))])
        received = [incoming(rank, count) for count in (7, 300)]
        into = iter(received)
        ops = [
            dist.P2POp(dist.isend, next(sent), other) if kind == "s" else dist.P2POp(dist.irecv, next(into), other)
            for kind in mine
        ]
        works = dist.batch_isend_irecv(ops)
        for work in works if number % 2 else reversed(works):
            work.wait()
        for call, tensor in enumerate(received):
            assert_same(message(other, count=(7, 300)[call], call=call), tensor, f"message {call}, order {mine}")


@requirement(
    "COLL-P2P-20",
    "batch_isend_irecv returns the requests of its operations in their order, or one for all of them.",
    source="torch.distributed.batch_isend_irecv: 'distributed request objects returned by calling the corresponding op "
    "in the op_list'",
)
@pytest.mark.world(2)
def test_requests_in_order(world: World) -> None:
    """Rank 1 takes part in each operation of rank 0's batch only after rank 0 has waited for the one before.

    If rank 0 has one request for the whole batch, rank 1 gives a batch, too.
    """

    def body(rank: Rank) -> None:
        other = 1 - rank.index
        first = [dist.P2POp(dist.isend, outgoing(rank), other), dist.P2POp(dist.irecv, incoming(rank), other)]
        for work in dist.batch_isend_irecv(first):  # a group's first batch may wait until both ranks give one
            work.wait()
        for order in ("rr", "sr", "rs", "rrr", "srs", "rsr"):
            sends = [(kind == "s") == (rank.index == 0) for kind in order]
            tensors = [outgoing(rank, call=tag) if sent else incoming(rank) for tag, sent in enumerate(sends)]
            functions = [dist.isend if sent else dist.irecv for sent in sends]
            pairs = enumerate(zip(functions, tensors, strict=True))
            batch = [dist.P2POp(call, tensor, other, tag=tag) for tag, (call, tensor) in pairs]
            if rank.index == 0:
                works = dist.batch_isend_irecv(batch)
                assert len(works) in (1, len(order))
                rank.store.set(order, str(len(works)))
                for tag, work in enumerate(works):
                    rank.store.set(f"{order} {tag}", "")
                    work.wait()
            elif int(rank.store.get(order)) == 1:
                for work in dist.batch_isend_irecv(batch):
                    work.wait()
            else:
                for tag, (call, tensor) in enumerate(zip(functions, tensors, strict=True)):
                    rank.store.wait([f"{order} {tag}"])
                    work = call(tensor, 0, tag=tag)
                    assert work is not None
                    work.wait()
            for tag, (sent, tensor) in enumerate(zip(sends, tensors, strict=True)):
                assert_same(
                    message(rank.index if sent else 1 - rank.index, call=tag), tensor, f"{order}, operation {tag}"
                )

    world.run(body, timeout=8)


@requirement(
    "COLL-P2P-71",
    "A batch sends a tensor as often as it says, to several ranks or to one.",
    source="torch.distributed.batch_isend_irecv, P2POp",
)
@requirement(
    "COLL-P2P-72",
    "A batch may send parts of one tensor, or receive into such parts, as it does with tensors of their own.",
    source="torch.distributed.batch_isend_irecv, P2POp",
)
@pytest.mark.world(3)
def test_one_tensor_for_several(world: World) -> None:
    """Members send a tensor twice to every other, and its halves once; in the world, in a group of two, with tags."""

    def body(rank: Rank) -> None:
        everyone, last = dist.new_group(timeout=SHORT), dist.new_group([2, 1], timeout=SHORT)
        for group, members in ((everyone, [0, 1, 2]), (last, [1, 2])):
            if rank.index not in members:
                continue
            others = [member for member in members if member != rank.index]
            for tags in ((0, 0), (5, 6)):
                whole = outgoing(rank, 8)
                ops = [dist.P2POp(dist.isend, whole, other, group, tag) for tag in tags for other in others]
                ops += [dist.P2POp(dist.isend, half, other, group, 7) for other in others for half in whole.chunk(2)]
                received = {other: incoming(rank, 24).view(3, 8) for other in others}
                for other, rows in received.items():
                    ops += [
                        dist.P2POp(dist.irecv, row, other, group, tag) for row, tag in zip(rows[:2], tags, strict=True)
                    ]
                    ops += [dist.P2POp(dist.irecv, half, other, group, 7) for half in rows[2].chunk(2)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                for other, rows in received.items():
                    assert_same(torch.stack([message(other, count=8)] * 3), rows, f"from {other} of {members}, {tags}")
                assert_same(message(rank.index, count=8), whole, "what was sent")
                following = incoming(rank)  # no message is left over
                ops = [
                    dist.P2POp(dist.isend, outgoing(rank, call=1), others[0], group),
                    dist.P2POp(dist.irecv, following, others[-1], group),
                ]
                if members == [1, 2]:
                    for work in dist.batch_isend_irecv(ops):
                        work.wait()
                    assert_same(message(others[0], call=1), following, f"the next message, {tags}")

    world.run(body, timeout=20)
