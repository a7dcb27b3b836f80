"""What parallel layers communicate, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fixtures.placements import part
from fixtures.tensors import numbers
from harness import Rank, World, requirement

R, S0, S1, LAST = Replicate(), Shard(0), Shard(1), Shard(-1)
REDUCE, GATHER, SCATTER = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
Case = tuple[Callable[[], nn.Module], Callable[[], ParallelStyle], Placement, list[str], list[str], list[str]]


def linear() -> nn.Module:
    return nn.Linear(6, 4)


def embedding() -> nn.Module:
    return nn.Embedding(6, 4)


CASES: dict[str, Case] = {
    "columns": (linear, ColwiseParallel, R, [], [], [REDUCE]),
    "columns of a sequence": (linear, lambda: ColwiseParallel(input_layouts=S0), S0, [GATHER], [], [SCATTER]),
    "columns made whole": (linear, lambda: ColwiseParallel(output_layouts=R), R, [GATHER], [], [REDUCE]),
    "rows": (linear, RowwiseParallel, LAST, [REDUCE], [], []),
    "rows to a sequence": (linear, lambda: RowwiseParallel(output_layouts=S0), LAST, [SCATTER], [GATHER], []),
    "rows of the whole": (linear, lambda: RowwiseParallel(input_layouts=R), R, [REDUCE], [], [GATHER]),
    "columns of an embedding": (embedding, ColwiseParallel, R, [], [], []),
    "rows of an embedding": (embedding, lambda: RowwiseParallel(input_layouts=R), R, [REDUCE], [], []),
    **{
        f"rows of an embedding to {layout}": (
            embedding,
            lambda layout=layout: RowwiseParallel(input_layouts=R, output_layouts=layout),
            R,
            [SCATTER],
            [GATHER],
            [],
        )
        for layout in (S0, S1)
    },
    "a sequence": (lambda: nn.LayerNorm(6), SequenceParallel, S1, [], [], []),
    "a sequence over the first dimension": (
        lambda: nn.RMSNorm(6),
        lambda: SequenceParallel(sequence_dim=0),
        S0,
        [],
        [],
        [],
    ),
    "a sequence without a weight": (
        lambda: nn.LayerNorm(6, elementwise_affine=False),
        SequenceParallel,
        S1,
        [],
        [],
        [],
    ),
    "dropout of a sequence": (lambda: nn.Dropout(0.5), SequenceParallel, S1, [], [], []),
}
"""Layers and styles, the layout of their inputs, and the collectives of a forward, of its backward for the parameters
alone, and besides of the gradient of the input."""


def launched(counts: CommDebugMode) -> list[str]:
    """Return the names of the collectives that were counted, as often as they were launched."""
    return sorted(str(op).split(".")[-1] for op, times in counts.get_comm_counts().items() for _ in range(times))


@requirement(
    "TP-PLAN-21",
    "A parallel layer launches no collective but the one that its layouts need, forward and backward.",
    source="torch.distributed.tensor.parallel: ColwiseParallel, RowwiseParallel, SequenceParallel; CommDebugMode",
)
@requirement(
    "TP-PLAN-22",
    "A parallel layer whose input requires no gradient does not communicate a gradient for it.",
    source="torch.distributed.tensor.parallel: ColwiseParallel, RowwiseParallel, SequenceParallel; CommDebugMode",
)
@requirement(
    "TP-PLAN-23",
    "With src_data_rank=None, parallelizing a module does not communicate.",
    source="torch.distributed.tensor.parallel.parallelize_module: src_data_rank",
)
@pytest.mark.world(2, keeps="outputs that nothing waits for")
def test_collectives(world: World) -> None:
    """Give local tensors and DTensors that require a gradient or not, and tokens to embeddings."""

    def body(rank: Rank) -> None:
        x, tokens = numbers(4, 2, 6).to(rank.device), torch.arange(6, device=rank.device)
        nn.functional.dropout(distribute_tensor(x, rank.mesh(), [R]))  # with the first, an accelerator's ranks agree
        for name, (make, style, layout, forward, backward, besides) in CASES.items():
            module = make().to(rank.device)
            with CommDebugMode() as counts:
                parallelize_module(module, rank.mesh(), style(), src_data_rank=None)
            assert launched(counts) == [], f"{name}: parallelized"
            words = isinstance(module, nn.Embedding)
            for grad, as_dtensor in ((True, True), (True, False), (False, False)):
                what = f"{name}, {grad=}, {as_dtensor=}"
                if words and grad:
                    continue
                local = part(tokens if words else x, rank, layout).clone().requires_grad_(grad)
                given: Any = DTensor.from_local(local, rank.mesh(), [layout]) if as_dtensor else local
                with CommDebugMode() as counts:
                    output = module(given)
                    loss = (output.to_local() if isinstance(output, DTensor) else output).sum()
                assert launched(counts) == forward, f"{what}: forward"
                if loss.requires_grad:
                    with CommDebugMode() as counts:
                        loss.backward()
                    assert launched(counts) == sorted(backward + (besides if grad else [])), f"{what}: backward"

    world.run(body)


@requirement(
    "TP-PLAN-24",
    "A looked-up embedding keeps its weight in place, whole or in shards, or max_norm raises an error on every rank.",
    source="torch.nn.functional.embedding: max_norm; torch.distributed.tensor.DTensor",
)
@pytest.mark.world(2)
def test_max_norm(world: World) -> None:
    """Look up tokens with each norm in a replicated weight, in its rows and in its columns."""

    def body(rank: Rank) -> None:
        tokens = torch.tensor([0, 3, 5, 3], device=rank.device)
        for layout, norm in ((layout, norm) for layout in (R, S0, S1) for norm in (1.0, 2.0, 100.0)):
            plain = numbers(6, 4).double().to(rank.device) + 1
            weight = distribute_tensor(plain.clone(), rank.mesh(), [layout])
            expected = nn.functional.embedding(tokens, plain, max_norm=norm)
            try:
                found: Any = nn.functional.embedding(distribute_tensor(tokens, rank.mesh(), [R]), weight, max_norm=norm)
            except NotImplementedError:
                continue
            torch.testing.assert_close(found.full_tensor(), expected, msg=f"{layout}, {norm}")
            torch.testing.assert_close(weight.full_tensor(), plain, msg=f"{layout}, {norm}: weight")

    world.run(body)
