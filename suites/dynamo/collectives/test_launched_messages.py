"""When compiled code waits for messages that it launches one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from harness.stacks import dynamo
from harness.stacks.tracing import Tracer

OPPOSITE = {"isend": "irecv", "irecv": "isend"}


@requirement(
    "DYN-P2P-6103",
    "Compiled code that launches several messages waits for none of them before it has launched all.",
    source="torch/_dynamo/variables/functions.py: isend, irecv; torch.distributed.irecv: 'asynchronously'",
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.parametrize("first", ["isend", "irecv"])
@pytest.mark.world(2, timeout=30)
def test_launched_together(world: World, first: str) -> None:
    """Compile the messages of rank 0, two at a time; rank 1 launches both of its own before it waits for any."""

    def body(rank: Rank) -> None:
        early = []
        for second in "isend", "irecv":
            names = (first, second) if rank.index == 0 else (OPPOSITE[first], OPPOSITE[second])

            def exchange(x: torch.Tensor, y: torch.Tensor, names: Any = names) -> torch.Tensor:
                works: list[Any] = [
                    getattr(dist, name)(tensor, 1 - rank.index, tag=tag)
                    for tag, (name, tensor) in enumerate(zip(names, (x, y), strict=True))
                ]
                for work in works:
                    work.wait()
                return x - y

            given = [torch.tensor([1.0 + tag + 8 * rank.index], device=rank.device) for tag in range(2)]
            if rank.index == 1:
                exchange(*given)
                continue
            tracer = Tracer("aot_eager")
            torch.compiler.reset()
            with dynamo.compiled_messages():
                result = torch.compile(exchange, backend=tracer, fullgraph=True)(*given)
            x, y = (1.0 + tag + (8 if name == "irecv" else 0) for tag, name in enumerate(names))
            assert_same(torch.tensor([x - y]), result + 0, f"{first}, then {second}")
            of_messages = [o.name.split(".")[1] for o in tracer.forwards[0].operators if "c10d_" in o.name]
            launched = of_messages[: of_messages.index("wait_tensor")]
            if launched != [*names]:
                early.append(" ".join(of_messages))
        assert not early, f"waits before it has launched all: {early}"

    world.run(body)
