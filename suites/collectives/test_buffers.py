"""Tensors that are parts of one buffer, as engines lay them out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement, spmd
from harness.oracles.collectives import Case, inputs, outputs
from harness.oracles.exact import assert_same
from harness.stacks.collectives import issue


@requirement(
    "COLL-BUFFER-01",
    "The tensors of a list may be parts of one buffer.",
    source="torch.distributed.all_gather, gather, scatter, reduce_scatter, all_to_all",
)
@pytest.mark.parametrize("collective", ["all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"])
@pytest.mark.world(2, 3, 4)
def test_lists_of_parts(world: World, collective: str) -> None:
    """Inputs and outputs, each list the parts of a tensor that holds a border as well; twice."""

    def parts(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        count = sum(tensor.numel() for tensor in tensors)
        buffer = torch.full((count + 2,), -7.0)
        views = [*buffer[1 : count + 1].split([tensor.numel() for tensor in tensors])] if tensors else []
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        return buffer, views

    def body(rank: Rank) -> None:
        for call in range(2):
            case = Case(collective, shape=(5,), form="async")
            expected = outputs(case, rank.size, rank.index, call)
            _, given = parts(inputs(case, rank.size, rank.index, call))
            buffer, found = parts([torch.full_like(right, -1) for right in expected])
            issue(case, given, found, None).wait()
            whole = torch.cat([torch.tensor([-7.0]), *expected, torch.tensor([-7.0])])
            assert_same(whole, buffer, f"{case}, call {call}")

    world.run(body)


@requirement(
    "COLL-BUFFER-02",
    "all_gather_into_tensor may be given the rank's own part of its output.",
    source="torch.distributed.all_gather_into_tensor, as torch.distributed.fsdp.fully_shard calls it",
)
@spmd(1, 2, 3)
def test_gathering_in_place(rank: Rank) -> None:
    """Each rank has written its part of the buffer that is gathered into; twice."""
    for call in range(2):
        case = Case("all_gather_into_tensor", shape=(5,))
        (right,) = outputs(case, rank.size, rank.index, call)
        buffer = torch.full_like(right, -1)
        mine = buffer.chunk(rank.size)[rank.index]
        mine.copy_(inputs(case, rank.size, rank.index, call)[0])
        dist.all_gather_into_tensor(buffer, mine)
        assert_same(right, buffer, f"call {call}")


@requirement(
    "COLL-BUFFER-03",
    "reduce_scatter_tensor may be given the rank's own part of its input as output.",
    source="torch.distributed.reduce_scatter_tensor; NCCL, in-place operations",
)
@spmd(1, 2, 3)
def test_scattering_in_place(rank: Rank) -> None:
    """What is reduced is written over the rank's own part; twice."""
    for call in range(2):
        case = Case("reduce_scatter_tensor", shape=(5,))
        (buffer,) = inputs(case, rank.size, rank.index, call)
        mine = buffer.chunk(rank.size)[rank.index]
        dist.reduce_scatter_tensor(mine, buffer)
        assert_same(outputs(case, rank.size, rank.index, call)[0], mine, f"call {call}")
