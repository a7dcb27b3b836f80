"""Methods of groups that are given several tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness import Rank, requirement, spmd


@requirement(
    "COLL-CALL-116",
    "If a group's method is given several tensors, it reduces, sends or gathers each of them, or all ranks raise an "
    "error.",
    source="torch.distributed.ProcessGroup: allreduce, broadcast, allgather; test_c10d_gloo.py: ProcessGroupGlooTest",
)
@spmd(2)
def test_several_tensors(rank: Rank) -> None:
    """Give two and three tensors to each method, whole ones or sparse ones."""
    group: Any = dist.group.WORLD
    for count in (2, 3):

        def own(count: int = count) -> list[torch.Tensor]:
            return [torch.tensor([10.0**i * (1 + rank.index), 1.0], device=rank.device) for i in range(count)]

        total = [sum(10.0**i for i in range(count)) * 3.0, 2.0 * count]
        given = own()
        if done(lambda given=given: group.allreduce(given)):
            assert [x.tolist() for x in given] == [total] * count
        given = [x.to_sparse() for x in own()]
        if done(lambda given=given: group.allreduce(given)):
            assert [x.to_dense().tolist() for x in given] == [total] * count
        for root in range(2):
            for which in range(count):
                options = dist.BroadcastOptions()
                options.rootRank, options.rootTensor = root, which
                given = own()
                if done(lambda given=given, options=options: group.broadcast(given, options)):
                    assert [x.tolist() for x in given] == [[10.0**which * (1 + root), 1.0]] * count
        into = [[torch.zeros(2, device=rank.device) for _ in range(2 * count)] for _ in range(count)]
        if done(lambda into=into: group.allgather(into, own())):
            right = [[10.0**i * (1 + r), 1.0] for r in range(2) for i in range(count)]
            assert [[x.tolist() for x in some] for some in into] == [right] * count


def done(call: Any) -> bool:
    """Return whether a call gave a result; otherwise it has raised an error."""
    try:
        call().wait()
    except (RuntimeError, ValueError):
        return False
    return True
