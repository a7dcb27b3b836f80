"""Specifications by which pipelines split arguments into those of microbatches, and merge outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks

from harness import Rank, World, requirement

SOURCE = "torch.distributed.pipelining.microbatch"
DIMENSIONS = {"rows": 0, "columns": 1, "rows too": 0}
ORDERS = pytest.mark.parametrize("reverse", [False, True], ids=["same-order", "other-order"])


def tensors(device: Any) -> dict[str, torch.Tensor]:
    """Return three matrices, float[4, 4], whose elements all differ."""
    numbers = torch.arange(48.0, device=device).view(3, 4, 4)
    return dict(zip(DIMENSIONS, numbers, strict=True))


def specs(reverse: bool) -> dict[str, TensorChunkSpec]:
    """Return the dimension to split of each of them, in the same order or in another one."""
    names = list(DIMENSIONS)
    return {name: TensorChunkSpec(DIMENSIONS[name]) for name in (reversed(names[:2]) if reverse else names[:2])} | {
        "rows too": TensorChunkSpec(DIMENSIONS["rows too"])
    }


def listed(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as lists."""
    return {name: value.tolist() for name, value in values.items()}


@requirement(
    "RFSDP-PIPE-5205",
    "A pipeline splits each keyword argument by the specification of its name, whatever order these are in.",
    source=f"{SOURCE}: split_args_kwargs_into_chunks: kwargs_chunk_spec",
)
@ORDERS
@pytest.mark.world(1)
def test_split_by_name(world: World, reverse: bool) -> None:
    """Split matrices by rows and by columns into two parts."""

    def body(rank: Rank) -> None:
        values = tensors(rank.device)
        _, parts = split_args_kwargs_into_chunks((), values, 2, None, specs(reverse))
        for number, part in enumerate(parts):
            due = {name: value.chunk(2, DIMENSIONS[name])[number] for name, value in values.items()}
            assert listed(part) == listed(due), {name: tuple(value.shape) for name, value in part.items()}

    world.run(body)


@requirement(
    "RFSDP-PIPE-5206",
    "A pipeline merges each of its outputs by the specification of its name, whatever order these are in.",
    source=f"{SOURCE}: merge_chunks: chunk_spec",
)
@ORDERS
@pytest.mark.world(1)
def test_merge_by_name(world: World, reverse: bool) -> None:
    """Merge what was split by rows and by columns."""

    def body(rank: Rank) -> None:
        values = tensors(rank.device)
        parts = [{name: value.chunk(2, DIMENSIONS[name])[i] for name, value in values.items()} for i in range(2)]
        merged = merge_chunks(parts, specs(reverse))
        assert listed(merged) == listed(values), {name: tuple(value.shape) for name, value in merged.items()}

    world.run(body)
