"""Messages that Inductor's code receives: into constants, products and transposed tensors."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import dynamo

INTO: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "product": lambda x: x * 3,
    "given": lambda x: x,
}
"""How a tensor is made that a message is received into."""


@requirement(
    "DYN-P2P-5412",
    "Compiled code computes with the numbers of a message once it has received that into a tensor of its own.",
    source="torch/_dynamo/variables/functions.py: isend, irecv; torch.distributed.irecv: tensor",
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.parametrize("into", INTO)
@pytest.mark.world(2, timeout=60)
def test_computed_of_received(world: World, into: str) -> None:
    """Receive, alone or in a batch, and compute; Inductor's passes run, but no code is generated."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> list[list[float]]:
        def alone(x: torch.Tensor) -> torch.Tensor:
            received = INTO[into](x)
            dist.irecv(received, 0).wait()  # type: ignore[union-attr]
            return received * 2

        def in_batch(x: torch.Tensor) -> torch.Tensor:
            received = INTO[into](x)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, 0)]):
                work.wait()
            return received * 2

        found = []
        for number, code in enumerate((alone, in_batch)):
            x = torch.full((2,), 5.0 + number, device=rank.device)
            if rank.index == 0:
                dist.send(x, 1)
                found.append((x * 2).tolist())
                continue
            options = dynamo.inductor_options({"fallback_by_default": True})
            with dynamo.compiled_messages(), dynamo.cached_as(f"{tag} {number}"), options:
                found.append(dynamo.compiled(code, backend="inductor")[0](x * 0 + 1).tolist())
        return found

    assert_on_ranks([[[10.0, 10.0], [12.0, 12.0]]] * 2, world.run(body))


@requirement(
    "DYN-P2P-5414",
    "Inductor's code receives a message into a tensor of any strides, or refuses it as uncompiled code does.",
    source="torch/_inductor/comm_lowering.py; torch.distributed.irecv: tensor",
)
@pytest.mark.needs(features=["inductor"], torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.parametrize("strides", ["contiguous", "transposed"])
@pytest.mark.world(2, timeout=180)
def test_strides(world: World, strides: str) -> None:
    """Receive a message of half a megabyte; send another one for a receiver that refuses."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> list[float]:
        def code(x: torch.Tensor) -> torch.Tensor:
            dist.irecv(x, 0).wait()  # type: ignore[union-attr]
            return x * 2

        message = torch.ones(512, 256, device=rank.device)
        if rank.index == 0:
            dist.send(message, 1)
            return [2.0, 2.0]
        into = torch.zeros_like(message) if strides == "contiguous" else message.new_zeros(256, 512).t()
        with dynamo.compiled_messages(), dynamo.cached_as(tag):
            function, _ = dynamo.compiled(code, backend="inductor")
            try:
                result = function(into)
            except RuntimeError:  # as gloo refuses it
                dist.recv(message, 0)
                result = message * 2
        return [result.min().item(), result.max().item()]

    assert_on_ranks([[2.0, 2.0]] * 2, world.run(body))
