"""Messages of real models: as many parameters as published, and the messages that PyTorch really sends."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness import Pool, Rank, World, WorldSpec
from harness.bench.measuring.payloads import (
    GATHERED,
    KINDS,
    PAYLOADS,
    REDUCED,
    SMALLEST,
    Model,
    Payload,
    Transformer,
    buckets,
    built,
    message,
    padded,
    units,
)
from harness.stacks import messages

GPT, LLAMA = Transformer(3, 48, 192, 503, 32), Transformer(3, 48, 129, 501, gated=True)
SHAPES = pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
LIMIT = 100_000
TOKENS = torch.arange(16)


@pytest.fixture(scope="module")
def two(pool: Pool) -> World:
    return pool.acquire(WorldSpec(2, record=False))


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt-125m", 124_439_808), ("gpt-1.3b", 1_315_723_264), ("llama-7b", 6_738_415_616)]
)
def test_as_many_parameters_as_published(name: str, parameters: int) -> None:
    """GPT-2's smallest model and LLaMA's have exactly as many; none of them takes memory."""
    model = built(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["gpt-125m", "gpt-1.3b", "llama-7b"])
def test_every_parameter_is_in_one_bucket_and_one_unit(name: str) -> None:
    """Buckets have the bytes of all gradients; units have every parameter once."""
    model = built(name)
    assert sum(buckets(model)) == sum(p.nbytes for p in model.parameters())
    inside = [id(p) for unit in units(model) for p in unit]
    assert sorted(inside) == sorted(id(p) for p in model.parameters())


def test_padding() -> None:
    """Each parameter is padded on its first dimension, so that all ranks have equal shards."""
    assert padded([torch.empty(5, 3), torch.empty(4)], 4) == 8 * 3 + 4
    assert padded([torch.empty(5, 3), torch.empty(4)], 1) == 19


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda p: f"{p.model}-{p.kind}")
def test_every_message_can_be_timed(payload: Payload, ranks: int) -> None:
    """What is timed has the bytes of the message, less than an element for each rank."""
    size, times, total = message(payload.model, payload.kind, ranks)
    timed = payload.timed(ranks)
    assert 0 <= size - timed.message(ranks) < timed.dtype.itemsize * ranks
    assert 1 <= times <= total
    assert (timed.collective, timed.dtype) == KINDS[payload.kind]


def test_the_smallest() -> None:
    """No other message is smaller than the one that is measured if nobody asks for more."""
    assert min(PAYLOADS, key=lambda p: message(p.model, p.kind, 2)[0]) == SMALLEST


def reduced_by_ddp(rank: Rank, shape: Transformer) -> list[int]:
    """The bytes that a backward pass of DistributedDataParallel reduces, once its buckets are rebuilt."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(shape), bucket_cap_mb=LIMIT / (1 << 20))
    for _ in range(2):
        model(TOKENS).square().mean().backward()
    mark = messages.mark()
    model(TOKENS).square().mean().backward()
    return [m.bytes for m in messages.since(mark) if m.op.endswith("all_reduce") or "allreduce" in m.op]


def sent_by_fsdp(rank: Rank, shape: Transformer) -> tuple[list[int], list[int]]:
    """The bytes that FSDP gathers and reduces in a step, the message being the whole of all ranks."""
    torch.manual_seed(0)
    model = Model(shape)
    policy = MixedPrecisionPolicy(param_dtype=GATHERED, reduce_dtype=REDUCED)
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh(), mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=rank.mesh(), mp_policy=policy, reshard_after_forward=False)
    model(TOKENS).square().mean().backward()
    mark = messages.mark()
    model(TOKENS).square().mean().backward()
    sent = messages.since(mark)
    return [m.bytes * rank.size for m in sent if "gather" in m.op], [m.bytes for m in sent if "gather" not in m.op]


@SHAPES
def test_buckets_are_those_of_ddp(two: World, shape: Transformer) -> None:
    """DistributedDataParallel reduces messages of these sizes, in this order."""
    with torch.device("meta"):
        model = Model(shape)
    expected = buckets(model, LIMIT)
    assert len(expected) > 3
    for found in two.run(reduced_by_ddp, shape):
        assert found == expected


@SHAPES
def test_units_are_those_of_fsdp(two: World, shape: Transformer) -> None:
    """FSDP gathers and reduces messages of these sizes."""
    with torch.device("meta"):
        model = Model(shape)
    elements = [padded(unit, 2) for unit in units(model)]
    for gathered, reduced in two.run(sent_by_fsdp, shape):
        assert Counter(gathered) == Counter(count * GATHERED.itemsize for count in elements)
        assert Counter(reduced) == Counter(count * REDUCED.itemsize for count in elements)
