"""Specifications by which pipelines split arguments into those of microbatches, and merge outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fixtures import pipelines as steps
from fixtures.pipelines import BATCHES, Pipeline, each_schedule, mean
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

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


LENGTHS = (5, 40, 17, 48, 33, 1, 24)
"""Of the keys of each sample, so many are not masked."""
DEPENDENT = ("sample", "head", "sample and head", "neither")
SIZES: list[tuple[int, int | None, int, int, Any]] = [
    (1, 2, 24, 40, (8, 16)),
    (6, None, 32, 48, 16),
    (7, 2, 24, 40, (8, 16)),
    (7, 3, 16, 48, (16, 8)),
]
"""Samples, heads, queries, keys and sizes of blocks."""
BLOCKS = tuple(
    f"{kind}{side}_{what}" for kind in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")
)
"""What a block mask says of its blocks, in tensors whose first dimension is that of samples."""


def rule(depends: str, lengths: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return a mask's function, which depends on the sample, the head, both or neither."""

    def masked(sample: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        shown = query + 24 >= key + (8 * head if "head" in depends else 0)
        return shown & (key < lengths[sample]) if "sample" in depends else shown

    return masked


def read(mask: BlockMask, part: slice) -> list[Any]:
    """Return what a block mask says of the blocks of these samples."""
    listed = [getattr(mask, name) for name in BLOCKS]
    return [mask.BLOCK_SIZE, mask.seq_lengths, *(None if each is None else each[part].tolist() for each in listed)]


def elements(mask: BlockMask) -> torch.Tensor:
    """Return which keys each query of a block mask sees, bool[samples, heads, queries, keys]."""
    grid = torch.meshgrid(*(torch.arange(n, device=mask.kv_indices.device) for n in mask.shape), indexing="ij")
    return mask.mask_mod(*grid)


@requirement(
    "RFSDP-PIPE-9050",
    "A microbatch's block mask is the mask of its own samples, in microbatches of equal or unequal sizes.",
    source=f"{SOURCE}: split_args_kwargs_into_chunks; torch.nn.attention.flex_attention: BlockMask, create_block_mask",
)
@requirement(
    "RFSDP-PIPE-9051",
    "A block mask for a single sample masks each microbatch of a larger batch, in any number of them.",
    source=f"{SOURCE}: split_args_kwargs_into_chunks; torch.nn.attention.flex_attention.BlockMask: "
    "'BlockMask will broadcast if B is 1'",
)
@pytest.mark.parametrize("depends", DEPENDENT)
@pytest.mark.world(1)
def test_block_masks(world: World, depends: str) -> None:
    """Split masks of one, six or seven samples beside a tensor, by position, by keyword and within a list."""

    def body(rank: Rank) -> None:
        masked = rule(depends, torch.tensor(LENGTHS, device=rank.device))
        for number, (samples, heads, queries, keys, block) in enumerate(SIZES):
            mask = create_block_mask(masked, samples, heads, queries, keys, rank.device.type, block)
            everything = slice(None)
            before, shown = read(mask, everything), elements(mask)
            ids = torch.arange(samples if samples > 1 else 7, device=rank.device)
            for parts in {1, 3, (2, 4, len(ids))[number % 3]}:
                given, named = split_args_kwargs_into_chunks((ids, mask), {"masks": [mask], "mask": mask}, parts)
                assert len(given) == len(named) == parts
                for (own, first), others in zip(given, named, strict=True):
                    what = f"{samples} samples, {heads} heads, {parts} parts, samples {own.tolist()}"
                    place = slice(int(own[0]), int(own[-1]) + 1) if samples > 1 else everything
                    for each in (first, others["mask"], *others["masks"]):
                        assert read(each, everything) == read(mask, place), what
                        assert torch.equal(elements(each), shown[place]), what
            assert read(mask, everything) == before

    world.run(body)


@requirement(
    "RFSDP-PIPE-9052",
    "A block mask without full blocks stays one without full blocks in each microbatch.",
    source=f"{SOURCE}: split_args_kwargs_into_chunks; torch.nn.attention.flex_attention.BlockMask.from_kv_blocks",
)
@requirement(
    "RFSDP-PIPE-9053",
    "A specification that splits a block mask along another dimension than that of samples is refused.",
    source=f"{SOURCE}: split_args_kwargs_into_chunks: 'BlockMask only supports split_dim=0'",
)
@pytest.mark.world(1)
def test_kinds_of_block_masks(world: World) -> None:
    """Split a mask that was made of the numbers of its blocks, and one along heads, queries and keys."""

    def body(rank: Rank) -> None:
        lengths = torch.tensor(LENGTHS, device=rank.device)
        counts = lengths.add(15).div(16, rounding_mode="floor").int()
        mask = BlockMask.from_kv_blocks(
            counts.view(7, 1, 1).expand(7, 1, 2).contiguous(),
            torch.arange(3, device=rank.device).int().expand(7, 1, 2, 3).contiguous(),
            BLOCK_SIZE=16,
            mask_mod=rule("sample", lengths),
            seq_lengths=(32, 48),
        )
        parts = [part for (part,) in split_args_kwargs_into_chunks((mask,), None, 3)[0]]
        for part, place in zip(parts, (slice(0, 3), slice(3, 5), slice(5, 7)), strict=True):
            assert (part.full_kv_num_blocks, part.full_kv_indices) == (None, None), place
            assert read(part, slice(None)) == read(mask, place), place
            assert torch.equal(elements(part), elements(mask)[place]), place
        for dim in (1, 2, 3):
            spec = TensorChunkSpec(dim)
            with pytest.raises(AssertionError, match="split_dim"):
                split_args_kwargs_into_chunks((mask,), None, 2, (spec,))
            with pytest.raises(AssertionError, match="split_dim"):
                split_args_kwargs_into_chunks((), {"mask": mask}, 2, None, {"mask": spec})

    world.run(body)


class Masked(nn.Module):
    """A layer after a sum of the elements of each sample that a mask shows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        """Map double[rows, 2] to double[rows, 2]."""
        shown = elements(mask)[:, 0]
        result: torch.Tensor = self.layer((shown * x[:, None]).sum(-1))
        return result


@requirement(
    "RFSDP-PIPE-9054",
    "Each stage of a pipeline schedule gets a microbatch's part of a block mask, which it takes by keyword.",
    source="torch.distributed.pipelining: PipelineStage: 'kwargs can be passed to all stages via respective step "
    "calls'; torch.nn.attention.flex_attention.BlockMask",
)
@each_schedule
@pytest.mark.skipif(runs_with("<2.12"), reason="unsupported: before 2.12, V-shaped schedules send to themselves")
@pytest.mark.world(2)
def test_masked_stages(world: World, schedule: Any) -> None:
    """Take a step with a mask that shows one or both elements of a sample, and one with a mask for all samples."""

    def body(rank: Rank) -> None:
        own = Pipeline(schedule, rank.device, rank.index, rank.size, wrap=Masked)
        model = own.alone(rank.device)
        shown = torch.tensor([1, 2, 2, 1, 2, 1, 1, 1], device=rank.device)
        for step, samples in enumerate((8, 1)):
            mask = create_block_mask(lambda b, h, q, k: k < shown[b], samples, 1, 2, 2, rank.device.type, 2)
            x, y = steps.batch(step, rank.device)
            result = x
            for layer in model:
                sums = torch.where(shown[:samples, None] > 1, result.sum(1, keepdim=True), result[:, :1])
                result = layer(sums.expand(-1, 2))
            losses: list[torch.Tensor] = []
            output = own.call("step", x, y, mask=mask, losses=losses)
            due = [steps.total(a, b) for a, b in zip(result.chunk(BATCHES), y.chunk(BATCHES), strict=True)]
            mean(due).backward()
            if own.is_last:
                assert output.tolist() == result.tolist(), step
                assert [v.item() for v in losses] == [v.item() for v in due], step
            for place, layer in own.layers.items():
                assert layer.weight.grad.tolist() == model[place].weight.grad.tolist(), f"step {step}, stage {place}"
                layer.weight.grad = model[place].weight.grad = None

    world.run(body)
