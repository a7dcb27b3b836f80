"""Messages of real models: DistributedDataParallel's buckets and FSDP's units of three transformers.

Models are built on the meta device, so that a model of any size takes no memory.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from harness.bench.measuring.collectives import Timed
from harness.stacks.replicate import buckets_of

MIB = 1 << 20
BUCKET = 25 * MIB
"""DistributedDataParallel's default size of a bucket in bytes."""
GATHERED, REDUCED = torch.bfloat16, torch.float32
"""The usual mixed precision of FSDP: parameters are gathered in bfloat16, gradients are reduced in float32."""


@dataclass(frozen=True)
class Transformer:
    """The shape of a decoder-only transformer."""

    layers: int
    width: int
    hidden: int
    """Width of the feed-forward part."""
    vocabulary: int
    context: int = 0
    """Learned positions; 0: none."""
    gated: bool = False
    """Whether it is built as LLaMA: three matrices in the feed-forward part, RMSNorm, no biases, a head of its own.
    Otherwise as GPT-2: two, LayerNorm, biases, a head tied to the embedding."""


MODELS = {
    "gpt-125m": Transformer(12, 768, 3072, 50257, 1024),
    "gpt-1.3b": Transformer(24, 2048, 8192, 50257, 2048),
    "llama-7b": Transformer(32, 4096, 11008, 32000, gated=True),
}


class Block(nn.Module):
    """A layer of a transformer: its parameters, in the order of their use."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        width, bias = shape.width, not shape.gated
        norm = functools.partial(nn.RMSNorm if shape.gated else nn.LayerNorm, width)
        self.norm_before = norm()
        self.attention = nn.ModuleList(
            [nn.Linear(width, width, bias=False) for _ in range(3)] if shape.gated else [nn.Linear(width, 3 * width)]
        )
        self.projection = nn.Linear(width, width, bias=bias)
        self.norm_after = norm()
        self.up = nn.ModuleList([nn.Linear(width, shape.hidden, bias=bias) for _ in range(2 if shape.gated else 1)])
        self.down = nn.Linear(shape.hidden, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every parameter in order, without attention between positions: ``float[..., width]`` to the same."""
        inside = self.norm_before(x)
        inside = sum(part(inside) for part in self.attention)
        x = x + self.projection(inside[..., : x.shape[-1]])
        inside = self.norm_after(x)
        out: torch.Tensor = x + self.down(math.prod(part(inside) for part in self.up))
        return out


class Model(nn.Module):
    """A transformer, as far as the sizes of its parameters and the order of its gradients go."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width) if shape.context else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if shape.gated else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ``int[rows]`` to logits, ``float[rows, vocabulary]``."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(len(tokens), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        out: torch.Tensor = self.head(x) if self.head is not None else x @ self.embedding.weight.T
        return out


@functools.cache
def built(name: str) -> Model:
    """Return a model of :data:`MODELS` on the meta device."""
    with torch.device("meta"):
        return Model(MODELS[name])


def buckets(model: Model, limit: int = BUCKET) -> list[int]:
    """Return the bytes of the buckets that DistributedDataParallel reduces, in the order of a backward pass."""
    return buckets_of(list(model.parameters()), limit)


def units(model: Model) -> list[list[nn.Parameter]]:
    """Return the parameters of the units that FSDP gathers: each block, and what is left, which belongs to the root."""
    blocks = [list(block.parameters()) for block in model.blocks]
    inside = {id(parameter) for block in blocks for parameter in block}
    return [*blocks, [p for p in model.parameters() if id(p) not in inside]]


def padded(parameters: Iterable[torch.Tensor], ranks: int) -> int:
    """Return the elements that FSDP gathers for parameters: each is padded on its first dimension to equal shards."""
    return sum(-(-p.shape[0] // ranks) * ranks * math.prod(p.shape[1:]) for p in parameters)


@dataclass(frozen=True)
class Payload:
    """One of the messages of a model: which, and with which collective."""

    model: str
    kind: str
    """One of :data:`KINDS`."""

    @property
    def collective(self) -> str:
        """The collective that carries it."""
        return KINDS[self.kind][0]

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return KINDS[self.kind][1]

    @property
    def op(self) -> str:
        """Its reduction."""
        return "SUM"

    def timed(self, ranks: int) -> Timed:
        """Return what is timed on so many ranks."""
        size, times, total = message(self.model, self.kind, ranks)
        what = self.kind.replace(".", " ")
        return Timed(self.collective, size, self.dtype, payload=f"{self.model} {what}, {times} of {total}")


KINDS = {
    "ddp.first": ("all_reduce", torch.float32),
    "ddp.typical": ("all_reduce", torch.float32),
    "ddp.largest": ("all_reduce", torch.float32),
    "fsdp.gather.block": ("all_gather_into_tensor", GATHERED),
    "fsdp.gather.root": ("all_gather_into_tensor", GATHERED),
    "fsdp.reduce.block": ("reduce_scatter_tensor", REDUCED),
    "fsdp.reduce.root": ("reduce_scatter_tensor", REDUCED),
}
"""The messages of a model, with collective and dtype.  ``first``, ``typical`` (the most frequent size) and ``largest``
are buckets of DistributedDataParallel; ``block`` and ``root`` are units of FSDP."""

PAYLOADS = [Payload(model, kind) for model in MODELS for kind in KINDS]
SMALLEST = Payload("gpt-125m", "ddp.first")


@functools.cache
def message(model: str, kind: str, ranks: int) -> tuple[int, int, int]:
    """Return the bytes of a message, how often a training step has it, and how many messages of its kind there are."""
    which = kind.rpartition(".")[2]
    if which in ("block", "root"):
        dtype = KINDS[kind][1]
        found = [padded(unit, ranks) * dtype.itemsize for unit in units(built(model))]
        return (found[0] if which == "block" else found[-1]), (len(found) - 1 if which == "block" else 1), len(found)
    sizes = buckets(built(model))
    size = {"first": sizes[0], "typical": _typical(sizes), "largest": max(sizes)}[which]
    return size, sizes.count(size), len(sizes)


def _typical(sizes: Sequence[int]) -> int:
    counts = Counter(sizes)
    return max(counts, key=lambda size: (counts[size], size))
