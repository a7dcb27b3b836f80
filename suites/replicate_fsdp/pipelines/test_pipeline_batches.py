"""Batches that pipelines split into microbatches: of any number of rows, and in shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.distributed.tensor import Shard, distribute_tensor

from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.pipelining"


@requirement(
    "RFSDP-PIPE-6202",
    "A pipeline's output for a batch has the rows of the whole model's output for it.",
    source=f"{SOURCE}: ScheduleGPipe: 'Will chunk the input into microbatches automatically'; pytorch#126600",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="unsupported: 2.11 refuses such batches on the first rank alone")
@pytest.mark.parametrize("rows", [6, 7], ids=["divided", "undivided"])
@pytest.mark.world(2)
def test_rows(world: World, rows: int) -> None:
    """Evaluate three microbatches."""

    def body(rank: Rank) -> None:
        stage = PipelineStage(nn.Identity(), rank.index, rank.size, rank.device)
        data = torch.arange(1.0, rows + 1, device=rank.device).view(rows, 1)
        with torch.no_grad():
            output = ScheduleGPipe(stage, 3).eval(*((data,) if rank.index == 0 else ()))
        if rank.index == rank.size - 1:
            assert len(output) == rows, f"{len(output)} rows for a batch of {rows}"
            assert output.tolist() == data.tolist()

    world.run(body)


@requirement(
    "RFSDP-PIPE-6203",
    "The microbatches of a batch in shards have each of its rows once.",
    source=f"{SOURCE}.microbatch.split_args_kwargs_into_chunks; torch.distributed.tensor.DTensor.full_tensor",
)
@pytest.mark.parametrize("rows", [8, 6], ids=["divided", "undivided"])
@pytest.mark.world(2)
def test_shards(world: World, rows: int) -> None:
    """Split rows over two ranks into four microbatches."""

    def body(rank: Rank) -> None:
        data = torch.arange(float(rows), device=rank.device)
        batch = distribute_tensor(data, rank.mesh(), [Shard(0)])
        chunks = split_args_kwargs_into_chunks((batch,), {}, 4)[0]
        found = torch.cat([chunk.full_tensor() for (chunk,) in chunks])
        assert sorted(found.tolist()) == data.tolist(), f"rows: {found.tolist()}"

    world.run(body)
