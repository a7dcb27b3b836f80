"""Modules of a list that the model's forward skips, and that the training loop calls by themselves, in chunks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import messages, replicate_fsdp
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.fsdp.fully_shard: 'Chunked-loss training'"
CHUNKS = 3
OLDER = pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a list of modules of which one is called fails")


class Scale(nn.Module):
    """Multiply by a weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Model(nn.Module):
    """A body, a norm and a head, whose weights are 2, 3 and 4; the forward leaves the head out."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = Scale(2.0), Scale(3.0), Scale(4.0)

    def forward(self, x: torch.Tensor, skips: bool = True) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.body(x))
        return y if skips else self.head(y)


def chunked(model: Any, x: torch.Tensor) -> list[Any]:
    """Run the model and then its head chunk by chunk, and backwards of each chunk and of the model.

    Return the head's weight after each chunk.
    """
    h = model(x)
    parts, weights = [], []
    for chunk in h.detach().float().chunk(CHUNKS):
        chunk.requires_grad_()
        model.head(chunk).float().sum().backward()
        parts.append(chunk.grad)
        weights.append(model.head.weight)
    h.backward(torch.cat(parts).to(h.dtype))
    return weights


def rows(rank: int, part: int) -> torch.Tensor:
    """Return float[3, 2]: the rows of a micro-batch."""
    return torch.arange(6.0).reshape(3, 2) + rank + 2 * part


def right(*of: int) -> dict[str, list[float]]:
    """Return the average over two ranks of the gradients of these micro-batches."""
    x = sum(rows(rank, part).sum(0) for rank in range(2) for part in of) / 2
    assert isinstance(x, torch.Tensor)
    return {name: (x * 24 / value).tolist() for name, value in (("body", 2), ("norm", 3), ("head", 4))}


def read(model: Any) -> dict[str, list[float]]:
    return {name.partition(".")[0]: g.tolist() for name, g in replicate_fsdp.gradients(model).items()}


@requirement(
    "RFSDP-CHUNK-01",
    "A module of a list that the model's forward skips may be called by itself in chunks, whose gradients add up to "
    "those of one device.",
    source=SOURCE,
)
@OLDER
@pytest.mark.world(2)
def test_chunks(world: World) -> None:
    """Run steps with and without accumulation, whole forwards, and two forwards that skip the head before a backward.

    The list is kept gathered or not, and its outputs may be in another dtype.
    """
    policies = {
        torch.float32: MixedPrecisionPolicy(),
        torch.bfloat16: MixedPrecisionPolicy(output_dtype=torch.bfloat16),
    }

    def body(rank: Rank) -> None:
        every = ways(rank)
        cases = [("replicated", None), *itertools.product(("sharded", "hybrid"), (None, True, False))]
        for (way, kept), (dtype, policy) in zip(cases, itertools.cycle(policies.items()), strict=False):
            managed = every[way]
            what = f"{way}, {kept=}, {dtype}"
            options = {} if kept is None else {"reshard_after_forward": not kept}
            model: Any = Model().to(rank.device)
            managed(model.body, **options)
            managed([model.norm, model.head], mp_policy=policy, **options)
            managed(model, **options)
            x = [rows(rank.index, part).to(rank.device) for part in range(3)]
            for step in range(2):
                chunked(model, x[0])
                assert read(model) == right(0), f"{what}, step {step}"
                model.zero_grad()
            for part in range(3):
                model.set_requires_gradient_sync(part == 2)
                model.set_is_last_backward(part == 2)
                chunked(model, x[part])
            assert read(model) == right(0, 1, 2), f"{what}, accumulated"
            model.zero_grad()
            first, second = model(x[0]), model(x[1])
            assert first.dtype == dtype, what
            (4 * (first.float() + second.float())).sum().backward()
            expected = {name: gradient for name, gradient in right(0, 1).items() if name != "head"}
            assert read(model) == expected, f"{what}, two forwards"
            model.zero_grad()
            output = model(x[2], skips=False)
            assert output.dtype == dtype, what
            output.float().sum().backward()
            assert read(model) == right(2), f"{what}, a whole forward"

    world.run(body)


@requirement(
    "RFSDP-CHUNK-02",
    "Modules of a list that were told to stay gathered are not gathered again between chunks, until reshard() is "
    "called.",
    source=f"{SOURCE}; torch.distributed.fsdp.FSDPModule: set_reshard_after_forward, set_reshard_after_backward",
)
@OLDER
@pytest.mark.world(2)
def test_kept_between_chunks(world: World) -> None:
    """Tell the head so before the chunks, set it back and reshard after them, in two steps."""

    def body(rank: Rank) -> None:
        for way, kept in itertools.product(("sharded", "hybrid"), (None, True)):
            model: Any = Model().to(rank.device)
            managed = ways(rank)[way]
            managed(model.body)
            managed([model.norm, model.head], **({} if kept is None else {"reshard_after_forward": False}))
            managed(model)
            for step in range(2):
                what = f"{way}, {kept=}, step {step}"
                h = model(rows(rank.index, 0).to(rank.device))
                stays = bool(kept) and step == 0  # the step sets it back
                assert isinstance(model.head.weight, DTensor) == (not stays), what
                for on in False, True:
                    model.head.set_reshard_after_forward(on)
                    model.head.set_reshard_after_backward(on)
                    if on:
                        model.head.reshard()
                        assert isinstance(model.head.weight, DTensor), what
                        break
                    parts = []
                    for number, chunk in enumerate(h.detach().chunk(CHUNKS)):
                        at = messages.mark()
                        chunk.requires_grad_()
                        model.head(chunk).sum().backward()
                        gathered = [m for m in messages.since(at) if "gather" in m.op and len(m.members) > 1]
                        assert way == "hybrid" or len(gathered) == (0 if number or stays else 1), f"{what}, {number}"
                        assert not isinstance(model.head.weight, DTensor), f"{what}, chunk {number}"
                        parts.append(chunk.grad)
                h.backward(torch.cat(parts))
                assert all(isinstance(p, DTensor) for p in model.parameters()), what
                assert read(model) == right(0), what
                model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-CHUNK-3664",
    "A weight that modules of a list share has the gradients of the chunks and of the model's forward together, "
    "whether chunks are checkpointed or not.",
    source=SOURCE,
)
@OLDER
@pytest.mark.world(2)
def test_shared(world: World) -> None:
    """The norm and the head share a weight; run steps with and without accumulation, kept gathered between chunks."""

    def body(rank: Rank) -> None:
        x = [rows(rank.index, part).to(rank.device) for part in range(2)]
        for (way, managed), checkpointed, kept in itertools.product(ways(rank).items(), (False, True), (False, True)):
            if kept and way == "replicated":
                continue
            what = f"{way}, {checkpointed=}, {kept=}"
            model: Any = Model().to(rank.device)
            model.head.weight = model.norm.weight
            head = (
                (lambda part, of=model.head: checkpoint(of, part, use_reentrant=False)) if checkpointed else model.head
            )
            managed(model.body)
            managed([model.norm, model.head])
            managed(model)
            for step, given in enumerate(([0], [0, 1], [1])):
                for part in given:
                    model.set_requires_gradient_sync(part == given[-1])
                    model.set_is_last_backward(part == given[-1])
                    h = model(x[part])
                    if kept:
                        model.head.set_reshard_after_forward(False)
                        model.head.set_reshard_after_backward(False)
                    parts = []
                    for chunk in h.detach().chunk(CHUNKS):
                        chunk.requires_grad_()
                        head(chunk).sum().backward()
                        parts.append(chunk.grad)
                        assert model.head.weight is model.norm.weight, what
                    if kept:
                        model.head.set_reshard_after_forward(True)
                        model.head.set_reshard_after_backward(True)
                        model.head.reshard()
                    h.backward(torch.cat(parts))
                assert model.head.weight is model.norm.weight, what
                total = sum(rows(r, part).sum(0) for r in range(2) for part in given) / 2
                assert isinstance(total, torch.Tensor)
                expected = {"body": (9 * total).tolist(), "norm": (12 * total).tolist()}
                assert read(model) == expected, f"{what}, step {step}"
                model.zero_grad()

    world.run(body)
