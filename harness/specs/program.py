"""Programs: training runs as plain data.

A :class:`Program` defines which model is trained on which data, how it is laid out over ranks, and what happens in each
step. It is frozen, is compared by value, and can be stored as JSON (:mod:`harness.programs.stored`).
:mod:`harness.programs.source` defines what a program *means*: it writes the program as Python that needs only torch.

The types here define what a field may hold, and :mod:`harness.programs.validity` checks a program against them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from harness.specs import limits

DTYPES = ("float64", "float32", "bfloat16", "float16")
BACKENDS = ("aot_eager", "eager", "inductor")
"""Backends of ``torch.compile``.  It looks up other names in installed packages, which a program must not choose from.
"""
HOOKS = ("forward", "before", "backward", "tensor", "node", "saved")
EXACT_ACTIVATIONS = ("relu", "abs")
SMOOTH_ACTIVATIONS = ("tanh", "silu", "gelu", "softplus")

Extent: TypeAlias = Annotated[int, Meta(ge=0, le=limits.EXTENT)]
PositiveExtent: TypeAlias = Annotated[int, Meta(ge=1, le=limits.EXTENT)]
Ranks: TypeAlias = Annotated[int, Meta(ge=1, le=limits.RANKS)]
Figure: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Word: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.]*\Z", max_length=limits.WORD)]
"""The name of a stack's option, or the name of an option's value."""
LayerName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z0-9.]*\Z", max_length=limits.WORD)]
"""The name of a layer, as ``get_submodule`` takes it.  The type does not check that the layer exists."""


def one_of(*words: str) -> Meta:
    """Return the constraint for a string that must be one of some words."""
    return Meta(pattern=rf"^({'|'.join(words)})\Z")


StackName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*\Z", max_length=limits.WORD)]
"""The name of a stack.  The type does not check that the stack exists (:mod:`harness.stacks.registry`)."""
OwnDtype: TypeAlias = Annotated[str, one_of("", *DTYPES)]
"""A dtype that differs from the program's; empty for the program's dtype."""


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of all specs: frozen, compared by value, and strict about unknown fields."""


# layers


class Linear(Data, frozen=True, tag=True):
    """``nn.Linear`` over the last dimension."""

    out: Extent
    bias: bool = True
    frozen: bool = False
    dtype: OwnDtype = ""


class Conv(Data, frozen=True, tag=True):
    """``nn.Conv1d`` or ``nn.Conv2d`` over rows of (channels, length) or (channels, height, width)."""

    out: Extent
    kernel: PositiveExtent = 1
    bias: bool = True


class Activation(Data, frozen=True, tag=True):
    """A function of each element."""

    kind: Annotated[str, one_of(*EXACT_ACTIVATIONS, *SMOOTH_ACTIVATIONS)] = "relu"


class Norm(Data, frozen=True, tag=True):
    """A norm: ``layer`` and ``rms`` over the last dimension, ``batch`` over channels with running statistics."""

    kind: Annotated[str, one_of("layer", "rms", "batch")] = "layer"
    dtype: OwnDtype = ""


class Embedding(Data, frozen=True, tag=True):
    """``nn.Embedding`` of the program's tokens, which must be the first layer."""

    width: Extent


class Attention(Data, frozen=True, tag=True):
    """Self-attention over (length, width): one projection in, softmax, one projection out."""

    heads: PositiveExtent = 1


class Scale(Data, frozen=True, tag=True):
    """A product with a buffer that has one float for each feature.

    ``kind``: ``plain``; ``rebound``: each forward in training assigns a new tensor to the buffer's name; ``per_rank``:
    each part of a batch has values of its own, which are in the buffer on the ranks that train on that part.
    """

    kind: Annotated[str, one_of("plain", "rebound", "per_rank")] = "plain"


class Mask(Data, frozen=True, tag=True):
    """A mask that sets every other feature to zero, with a buffer of bool."""


class Tied(Data, frozen=True, tag=True):
    """A linear layer without bias that shares the weight of an earlier layer (``of``, its name in the model).

    ``alias``: whether the earlier layer's parameter is also registered here, under another name, and used by that name.
    """

    of: LayerName
    alias: bool = False


class Residual(Data, frozen=True, tag=True):
    """``x + body(x)``; the body keeps the shape."""

    body: Annotated[tuple[Layer, ...], Meta(max_length=limits.LAYERS)]


class Twice(Data, frozen=True, tag=True):
    """A module that is called again on its own output; the body keeps the shape."""

    body: Layer


class Branch(Data, frozen=True, tag=True):
    """A body that only some micro-batches use: ``never``, ``even`` or ``odd`` ones, from 0; it keeps the shape."""

    body: Layer
    when: Annotated[str, one_of("never", "even", "odd")] = "never"


class Hooked(Data, frozen=True, tag=True):
    """A layer with a hook that changes tensors; the body keeps the shape.

    ``kind``: of torch.nn's hooks, ``forward`` doubles the output, ``before`` negates the input, ``backward`` doubles
    the gradient of the input.  Of autograd's, ``tensor`` and ``node`` double the gradient of the output, and ``saved``
    keeps what the forward saves for the backward negated.  The calls of the hook are counted and compared, except for
    ``saved``: what a layer saves depends on the stack.
    """

    body: Layer
    kind: Annotated[str, one_of(*HOOKS)] = "forward"


class Checkpointed(Data, frozen=True, tag=True):
    """A layer whose forward the backward repeats, instead of keeping what it computed; the body keeps the shape.

    It is ``torch.utils.checkpoint.checkpoint`` without reentrance.
    """

    body: Layer


class Container(Data, frozen=True, tag=True):
    """Layers in an ``nn.Sequential`` (``sequential``), ``nn.ModuleList`` (``list``) or ``nn.ModuleDict`` (``dict``)."""

    kind: Annotated[str, one_of("sequential", "list", "dict")]
    body: Annotated[tuple[Layer, ...], Meta(max_length=limits.LAYERS)]


Layer: TypeAlias = (
    Linear
    | Conv
    | Activation
    | Norm
    | Embedding
    | Attention
    | Scale
    | Mask
    | Tied
    | Residual
    | Twice
    | Branch
    | Hooked
    | Checkpointed
    | Container
)


class Model(Data, frozen=True):
    """A model: layers in sequence, on rows of shape ``inputs``.

    ``tokens``: the size of the vocabulary for rows of whole numbers; 0 for rows of floats.
    """

    inputs: Annotated[tuple[Extent, ...], Meta(max_length=limits.DIMENSIONS)]
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1, max_length=limits.LAYERS)]
    tokens: Extent = 0


# layers inside layers


def children(layer: Layer) -> tuple[Layer, ...]:
    """Return the layers directly inside a layer."""
    if isinstance(layer, (Residual, Container)):
        return layer.body
    return (layer.body,) if isinstance(layer, (Twice, Branch, Hooked, Checkpointed)) else ()


def every(layers: Iterable[Layer]) -> Iterator[Layer]:
    """Iterate over these layers and all layers inside them, each before the layers inside it."""
    waiting = list(layers)[::-1]
    while waiting:
        layer = waiting.pop()
        yield layer
        waiting += children(layer)[::-1]


def own_dtype(layer: Layer) -> str:
    """Return the dtype of a layer's own parameters if it is not the program's; else ""."""
    return layer.dtype if isinstance(layer, (Linear, Norm)) else ""


# schedule


class Optimizer(Data, frozen=True):
    """An optimizer: ``sgd`` (with ``momentum`` and ``weight_decay``) or ``adamw``.  Numbers are powers of two."""

    kind: Annotated[str, one_of("sgd", "adamw")] = "sgd"
    rate: Figure = 0.0625
    momentum: Figure = 0.0
    weight_decay: Figure = 0.0
    decay: Figure = 0.0
    """The factor by which a scheduler multiplies the rate after each step; 0 for no scheduler."""
    form: Annotated[str, one_of("each", "foreach", "fused")] = "each"
    """It updates each parameter by itself, all with operations on lists of them, or all with one operation."""


class Step(Data, frozen=True):
    """A training step: micro-batches whose gradients are added, and an optimizer step."""

    rows: Annotated[tuple[Extent, ...], Meta(min_length=1, max_length=limits.MICRO_BATCHES)] = (4,)
    """The rows of each micro-batch over all ranks, which share them as evenly as possible."""
    joint: bool = False
    """Whether the micro-batches are slices of one batch, in order.  The batch does not depend on the slices."""
    synced: Annotated[tuple[bool, ...], Meta(max_length=limits.MICRO_BATCHES)] = ()
    """Whether ranks average gradients after each micro-batch.  They always do after the last one; () for only then."""
    zero: Annotated[str, one_of("none", "zero", "keep")] = "none"
    """What happens to the gradients after the step: ``none``, ``zero``, or ``keep``, which adds them up over steps."""
    clip: Figure = 0.0
    """The largest norm of all gradients together; 0 for no clipping."""
    evaluate: bool = False
    """Whether a forward in evaluation mode, without gradients, comes before the first micro-batch."""
    toggle: LayerName = ""
    """A layer whose parameters switch between frozen and trainable before the step."""
    reload: bool = False
    """Whether, after the step, model and optimizer save their state dicts, are disturbed, and load them again."""
    clip_values: Figure = 0.0
    """The largest magnitude of a gradient's elements; 0 for no clipping.  Clipping by norm comes before."""
    abandoned: Annotated[str, one_of("", "loss", "layer")] = ""
    """A forward that comes before the first micro-batch, and that no backward follows: ``loss``, because its loss is
    not used; ``layer``, because the last layer raises an exception that the training loop catches; "" for none.  It has
    the gradient synchronization of the first micro-batch."""
    averaged: bool = False
    """Whether, after the step, an exponential moving average of all parameters is updated, and evaluated in their
    place."""

    @property
    def averages(self) -> tuple[bool, ...]:
        """Whether ranks average gradients after each micro-batch."""
        last = len(self.rows) - 1
        return tuple(i == last or (i < len(self.synced) and self.synced[i]) for i in range(len(self.rows)))

    @property
    def accumulates(self) -> bool:
        """Whether ranks do not average after some micro-batch."""
        return not all(self.averages)


# layout

Option: TypeAlias = bool | int | float | Word | Annotated[tuple[Word, ...], Meta(max_length=limits.NAMES)]
"""The value of an option.  Its stack decides which of these types the option takes."""

Style: TypeAlias = Annotated[str, one_of("columns", "rows")]


class Compile(Data, frozen=True):
    """The arguments of ``torch.compile``."""

    backend: Annotated[str, one_of(*BACKENDS)] = "aot_eager"
    fullgraph: bool = False
    dynamic: bool = False
    in_place: bool = False
    """Whether to call ``module.compile()`` instead of ``torch.compile(module)``."""
    first: bool = False
    """Whether to compile the plain model before it is put on ranks."""


class Layout(Data, frozen=True):
    """The layout of a model over ranks."""

    stack: StackName = "replicate"
    world: Ranks = 2
    tensor: Ranks = 1
    """The size of a tensor-parallel group.  Ranks in different groups are data parallel."""
    wrapped: Annotated[tuple[LayerName, ...], Meta(max_length=limits.NAMES)] = ()
    """The layers that the stack wraps separately, before the whole model."""
    plan: Annotated[tuple[tuple[LayerName, Style], ...], Meta(max_length=limits.NAMES)] = ()
    """The tensor-parallel style of layers: ``columns`` or ``rows``."""
    options: Annotated[tuple[tuple[Word, Option], ...], Meta(max_length=limits.NAMES)] = ()
    """The stack's options, by its own names (:attr:`harness.stacks.stack.Stack.options`)."""
    compiled: Compile | None = None

    @property
    def two_dimensional(self) -> bool:
        """Whether the layout is tensor parallel in one dimension and data parallel in the other."""
        return bool(self.plan) and 1 < self.tensor < self.world


class Program(Data, frozen=True):
    """A program: a training run as data."""

    model: Model
    layout: Layout = Layout()
    steps: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=limits.STEPS)] = (Step(),)
    optimizer: Optimizer = Optimizer()
    dtype: Annotated[str, one_of(*DTYPES)] = "float64"
    seed: Annotated[int, Meta(ge=-limits.SEED, le=limits.SEED)] = 0
    """The seed of weights and data."""
    span: Annotated[int, Meta(ge=0, le=limits.SPAN)] = 2
    """Weights and data are whole numbers from -span to span without 0, divided by ``denominator``.  If span is 0, they
    are any numbers from -1 to 1, divided by it.  Sums of such numbers do not cancel by chance, unlike those of small
    whole numbers."""
    denominator: Annotated[int, Meta(ge=1, le=limits.DENOMINATOR)] = 2
    sparse: bool = False
    """Whether each row of a weight has only one nonzero number, so that sums are short and fit into narrow dtypes."""
    rotated: Annotated[int, Meta(ge=-limits.RANKS, le=limits.RANKS)] = 0
    """By how many positions the parts of a batch are rotated among the ranks."""
    same_data: bool = False
    """Whether every rank has the whole batch rather than its part, for layers that depend on the whole batch."""

    @property
    def parts(self) -> int:
        """The number of parts into which the batch is divided."""
        return 1 if self.same_data else self.layout.world // self.layout.tensor

    def part(self, rank: int) -> int:
        """Return the index of a rank's part of a batch."""
        return (rank // self.layout.tensor + self.rotated) % self.parts

    @property
    def stored_dtypes(self) -> set[str]:
        """Every dtype that a parameter has on a single device."""
        return {self.dtype, *filter(None, map(own_dtype, every(self.model.layers)))}

    @property
    def even(self) -> bool:
        """Whether every rank has the same number of rows in every micro-batch."""
        return all(rows % self.parts == 0 for step in self.steps for rows in step.rows)
