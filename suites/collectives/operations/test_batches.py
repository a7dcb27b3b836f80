"""Batches of messages whose operations are made once, or some of whose messages have no elements."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from harness import Rank, assert_same, requirement, spmd
from suites.collectives.operations.test_point_to_point import incoming, message, outgoing


@requirement(
    "COLL-P2P-4803",
    "A batch has a request for each operation, or one for all, whether its messages have elements or none.",
    source="torch.distributed.batch_isend_irecv: 'distributed request objects returned by calling the corresponding op "
    "in the op_list'",
)
@pytest.mark.needs(features=["messages", "tags"])
@spmd(2)
def test_requests_for_empty_messages(rank: Rank) -> None:
    """Exchange two or three messages, each with five elements or none."""
    other = 1 - rank.index
    for counts in (*itertools.product((0, 5), repeat=2), (5, 0, 5), (0, 5, 0)):
        received = [incoming(rank, count) for count in counts]
        batch = []
        for tag, count in enumerate(counts):
            batch.append(dist.P2POp(dist.isend, outgoing(rank, count, tag), other, tag=tag))
            batch.append(dist.P2POp(dist.irecv, received[tag], other, tag=tag))
        works = dist.batch_isend_irecv(batch)
        assert len(works) in (1, len(batch)), counts
        for work in works:
            work.wait()
        for tag, (count, tensor) in enumerate(zip(counts, received, strict=True)):
            assert_same(message(other, count=count, call=tag), tensor, f"message {tag} of {counts}")


@requirement(
    "COLL-P2P-4804",
    "A list of operations is left as it is by batch_isend_irecv, so that it may be given again.",
    source="torch.distributed.batch_isend_irecv, P2POp",
)
@pytest.mark.needs(features=["messages"])
@pytest.mark.parametrize("peers", ["one", "both"])
@spmd(3)
def test_same_operations_again(rank: Rank, peers: str) -> None:
    """Make a batch for the next rank and the previous one, or two batches, and send new messages three times."""
    after, before = (rank.index + 1) % 3, (rank.index - 1) % 3
    sent, received = outgoing(rank), incoming(rank)
    batch = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    back, returned = outgoing(rank), incoming(rank)
    if peers == "both":
        batch += [dist.P2POp(dist.isend, back, before), dist.P2POp(dist.irecv, returned, after)]
    kept = [(op, op.op, op.tensor, op.peer, op.tag) for op in batch]
    for call in range(3):
        sent.copy_(message(rank.index, call=call))
        back.copy_(message(rank.index, call=10 + call))
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert [(op, op.op, op.tensor, op.peer, op.tag) for op in batch] == kept
        assert_same(message(before, call=call), received, f"round {call}")
        if peers == "both":
            assert_same(message(after, call=10 + call), returned, f"round {call}, back")
