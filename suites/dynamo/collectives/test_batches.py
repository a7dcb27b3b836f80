"""Batches of messages in compiled code: tags, groups, dtypes and shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo

SOURCE = "torch/_dynamo/variables/functions.py: batch_isend_irecv"
KINDS = [
    (torch.float32, (3,)),
    (torch.int64, (2, 2)),
    (torch.bfloat16, (4, 1)),
    (torch.float64, (1,)),
]
"""The dtypes and shapes of the messages of one batch."""


@requirement(
    "DYN-P2P-03",
    "Compiled batches match messages by their tags, in whichever order the other rank receives them.",
    source=SOURCE,
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.world(2, timeout=15)
def test_tags(world: World, backend: str) -> None:
    """Rank 0 sends four messages, and rank 1 receives the last three in another order, which is different each time."""

    def body(rank: Rank) -> None:
        for order in ([0, 2, 1, 3], [0, 3, 2, 1], [0, 2, 3, 1], [0, 1, 2, 3]):

            def exchange(tensors: list[torch.Tensor], order: list[int] = order) -> list[torch.Tensor]:
                if rank.index == 0:
                    ops = [dist.P2POp(dist.isend, tensors[i], 1, tag=10 + i) for i in range(4)]
                else:
                    ops = [dist.P2POp(dist.irecv, tensors[i], 0, tag=10 + i) for i in order]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                return [t + 1 for t in tensors]

            with dynamo.compiled_messages():
                function, counter = dynamo.compiled(exchange, backend=backend)
                for call in range(2):
                    sent = [dyadic(3, key=(call, i), dtype=torch.float32).to(rank.device) for i in range(4)]
                    tensors = [x.clone() if rank.index == 0 else torch.zeros_like(x) for x in sent]
                    results = function(tensors)
                    for i, (right, tensor, result) in enumerate(zip(sent, tensors, results, strict=True)):
                        assert_same(right, tensor, f"message {i} of call {call}, received as {order}")
                        assert_same(right + 1, result, f"result {i} of call {call}, received as {order}")
                assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-P2P-04",
    "A compiled batch in a group reaches the ranks that its operations name, by global rank or by group rank.",
    source=f"{SOURCE}; torch.distributed.P2POp: group, group_peer",
)
@requirement(
    "DYN-P2P-05",
    "A compiled batch gives each message its own dtype and shape.",
    source=SOURCE,
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.parametrize("named", ["global", "group"])
@pytest.mark.parametrize("members", [(0, 1), (1, 2)], ids=["first-two", "last-two"])
@pytest.mark.world(3, timeout=15)
@pytest.mark.each_choice
def test_groups(world: World, members: tuple[int, int], named: str) -> None:
    """Two of three ranks send each other four messages of other kinds."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(members))
        if rank.index not in members:
            return
        member = members.index(rank.index)
        other_rank = members[1 - member]
        peer: dict[str, Any] = {"peer": other_rank} if named == "global" else {"group_peer": 1 - member}

        def exchange(mine: list[torch.Tensor], other: list[torch.Tensor]) -> list[torch.Tensor]:
            ops = []
            for i in range(len(KINDS)):
                ops.append(dist.P2POp(dist.isend, mine[i], group=group, tag=i, **peer))
                ops.append(dist.P2POp(dist.irecv, other[i], group=group, tag=i, **peer))
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            return [t * 2 for t in other]

        with dynamo.compiled_messages():
            function, counter = dynamo.compiled(exchange)
            for call in range(2):
                of = [
                    [
                        (dyadic(*shape, key=(i, call), dtype=torch.float32) * 8).to(rank.device, dtype)
                        for dtype, shape in KINDS
                    ]
                    for i in range(3)
                ]
                mine, other = [x.clone() for x in of[rank.index]], [torch.zeros_like(x) for x in of[rank.index]]
                results = function(mine, other)
                for i, (dtype, shape) in enumerate(KINDS):
                    what = f"message {i} of call {call}"
                    assert results[i].dtype == dtype, what
                    assert results[i].shape == shape, what
                    assert_same(of[rank.index][i], mine[i], f"{what}, as it was sent")
                    assert_same(of[other_rank][i], other[i], what)
                    assert_same(of[other_rank][i] * 2, results[i], f"{what}, in the result")
            assert counter.graphs == 1

    world.run(body)
