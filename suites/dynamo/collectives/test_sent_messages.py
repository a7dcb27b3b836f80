"""What compiled code keeps of messages that it has waited for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import unwaited
from harness.stacks.limit import runs_with


@requirement(
    "DYN-P2P-5411",
    "Nothing of a message is pending any more after compiled code has waited for it, so that its memory is free again.",
    source="torch/_dynamo/variables/functions.py: isend, irecv; torch.distributed.Work.wait",
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.parametrize(
    ("batch", "compiled"),
    [
        pytest.param(False, "sender", id="alone-sender"),
        pytest.param(False, "receiver", id="alone-receiver"),
        pytest.param(
            True,
            "sender",
            id="batch-sender",
            marks=pytest.mark.skipif(runs_with("<2.15"), reason="before 2.15, as alone: compiled_sent_kept"),
        ),
        pytest.param(True, "receiver", id="batch-receiver"),
    ],
)
@pytest.mark.world(2, timeout=30)
def test_waited_for(world: World, batch: bool, compiled: str) -> None:
    """Send a tensor in code of which one side is compiled, and wait for it."""

    def body(rank: Rank) -> tuple[list[float], int]:
        operation = (dist.isend, dist.irecv)[rank.index]

        def code(x: torch.Tensor) -> torch.Tensor:
            if batch:
                works = dist.batch_isend_irecv([dist.P2POp(operation, x, 1 - rank.index, tag=1)])
            else:
                works = [operation(x, 1 - rank.index, tag=1)]  # type: ignore[list-item]
            for work in works:
                work.wait()
            return x + 1

        run = dynamo.compiled(code, backend="eager")[0] if compiled == ("sender", "receiver")[rank.index] else code
        pending = unwaited()
        with dynamo.compiled_messages():
            result = run(torch.full((2,), 1.0 - rank.index, device=rank.device))
        return (result + 0).tolist(), unwaited() - pending

    assert_on_ranks([([2.0, 2.0], 0)] * 2, world.run(body))
