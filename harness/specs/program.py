"""Programs: training runs as plain data.

A :class:`Program` says which model is trained on which data, how it is laid out over ranks, and what is done step by
step.  It is frozen, it compares by value, and it is JSON (:mod:`harness.programs.stored`).  What a program *means* is
in :mod:`harness.programs.source`, which writes it down as Python that needs only torch.

The types here say what a field may hold; :mod:`harness.programs.validity` holds a program against them.
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
"""Of ``torch.compile``.  Others are looked up among installed packages, which a program must not choose from."""
EXACT_ACTIVATIONS = ("relu", "abs")
SMOOTH_ACTIVATIONS = ("tanh", "silu", "gelu", "softplus")

Extent: TypeAlias = Annotated[int, Meta(ge=0, le=limits.EXTENT)]
PositiveExtent: TypeAlias = Annotated[int, Meta(ge=1, le=limits.EXTENT)]
Ranks: TypeAlias = Annotated[int, Meta(ge=1, le=limits.RANKS)]
Figure: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Word: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.]*\Z", max_length=limits.WORD)]
"""A word of a stack's: the name of an option, or of what it is set to."""
LayerName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z0-9.]*\Z", max_length=limits.WORD)]
"""As ``get_submodule`` takes it.  Whether there is such a layer is another question."""


def one_of(*words: str) -> Meta:
    """The constraint of a string that is one of some words."""
    return Meta(pattern=rf"^({'|'.join(words)})\Z")


StackName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*\Z", max_length=limits.WORD)]
"""Whether there is such a stack is another question (:mod:`harness.stacks.registry`)."""
OwnDtype: TypeAlias = Annotated[str, one_of("", *DTYPES)]
"""A dtype that is not the program's; empty where it is."""


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Frozen, equal by value, strict about unknown names."""


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
    """``layer`` and ``rms`` over the last dimension; ``batch`` over channels, with running statistics."""

    kind: Annotated[str, one_of("layer", "rms", "batch")] = "layer"
    dtype: OwnDtype = ""


class Embedding(Data, frozen=True, tag=True):
    """``nn.Embedding`` of the program's tokens; only as the first layer."""

    width: Extent


class Attention(Data, frozen=True, tag=True):
    """Self-attention over (length, width): one projection in, softmax, one projection out."""

    heads: PositiveExtent = 1


class Scale(Data, frozen=True, tag=True):
    """Multiplies with a buffer of one float for each feature.

    ``kind``: ``plain``; ``rebound``: a new tensor takes the buffer's name in every forward; ``per_rank``: every part
    of a batch is multiplied by values of its own, which those who train on that part have in the buffer.
    """

    kind: Annotated[str, one_of("plain", "rebound", "per_rank")] = "plain"


class Mask(Data, frozen=True, tag=True):
    """Zeroes every other feature, by a buffer of bool."""


class Tied(Data, frozen=True, tag=True):
    """A linear layer without bias whose weight *is* that of an earlier layer (its name in the model).

    ``alias``: the earlier layer's parameter is registered here once more under a name of its own, and used through it.
    """

    of: LayerName
    alias: bool = False


class Residual(Data, frozen=True, tag=True):
    """``x + body(x)``; the body keeps the shape."""

    body: Annotated[tuple[Layer, ...], Meta(max_length=limits.LAYERS)]


class Twice(Data, frozen=True, tag=True):
    """The same module called on its own output; the body keeps the shape."""

    body: Layer


class Branch(Data, frozen=True, tag=True):
    """A body that is used in some micro-batches: ``never``, ``even``, ``odd``, counted from 0; it keeps the shape."""

    body: Layer
    when: Annotated[str, one_of("never", "even", "odd")] = "never"


class Hooked(Data, frozen=True, tag=True):
    """A layer with a hook of torch.nn that changes what goes through; the body keeps the shape.

    ``kind``: ``forward`` doubles the output, ``before`` negates the input, ``backward`` doubles the gradient of the
    input.  Calls are counted, and compared.
    """

    body: Layer
    kind: Annotated[str, one_of("forward", "before", "backward")] = "forward"


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
    | Container
)


class Model(Data, frozen=True):
    """Layers one after another, on rows of shape ``inputs``.

    ``tokens``: the size of a vocabulary, for rows of whole numbers; 0 for rows of floats.
    """

    inputs: Annotated[tuple[Extent, ...], Meta(max_length=limits.DIMENSIONS)]
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1, max_length=limits.LAYERS)]
    tokens: Extent = 0


# layers inside layers


def children(layer: Layer) -> tuple[Layer, ...]:
    """Layers inside a layer."""
    if isinstance(layer, (Residual, Container)):
        return layer.body
    return (layer.body,) if isinstance(layer, (Twice, Branch, Hooked)) else ()


def every(layers: Iterable[Layer]) -> Iterator[Layer]:
    """These layers and those inside them, an outer one before those inside it."""
    waiting = list(layers)[::-1]
    while waiting:
        layer = waiting.pop()
        yield layer
        waiting += children(layer)[::-1]


def own_dtype(layer: Layer) -> str:
    """The dtype of a layer's own parameters, where it is not the program's; else ""."""
    return layer.dtype if isinstance(layer, (Linear, Norm)) else ""


# schedule


class Optimizer(Data, frozen=True):
    """``sgd`` (with ``momentum`` and ``weight_decay``) or ``adamw``.  Figures are powers of two."""

    kind: Annotated[str, one_of("sgd", "adamw")] = "sgd"
    rate: Figure = 0.0625
    momentum: Figure = 0.0
    weight_decay: Figure = 0.0


class Step(Data, frozen=True):
    """Micro-batches whose gradients add up, and what is done with them."""

    rows: Annotated[tuple[Extent, ...], Meta(min_length=1, max_length=limits.MICRO_BATCHES)] = (4,)
    """Of each micro-batch, over all ranks; ranks take as even parts as there are."""
    joint: bool = False
    """The micro-batches are slices of one batch, in order; the same whatever the slices."""
    synced: Annotated[tuple[bool, ...], Meta(max_length=limits.MICRO_BATCHES)] = ()
    """Whether ranks average after a micro-batch; () for only after the last.  The last one is always synced."""
    zero: Annotated[str, one_of("none", "zero", "keep")] = "none"
    """What becomes of the gradients after the step: ``none``, ``zero``, or ``keep``: they add up over steps."""
    clip: Figure = 0.0
    """Largest norm of all gradients together; 0 for no clipping."""
    evaluate: bool = False
    """A forward in evaluation mode, without gradients, before the first micro-batch."""
    toggle: LayerName = ""
    """A layer whose parameters stop, or begin again, to require gradients before the step."""
    reload: bool = False
    """After the step, model and optimizer save their state dicts, are disturbed, and load them."""

    @property
    def averages(self) -> tuple[bool, ...]:
        """For each micro-batch, whether ranks average after it."""
        last = len(self.rows) - 1
        return tuple(i == last or (i < len(self.synced) and self.synced[i]) for i in range(len(self.rows)))

    @property
    def accumulates(self) -> bool:
        """Whether some micro-batch is not averaged at once."""
        return not all(self.averages)


# layout

Option: TypeAlias = bool | int | float | Word | Annotated[tuple[Word, ...], Meta(max_length=limits.NAMES)]
"""Which of them an option takes is said by its stack."""

Style: TypeAlias = Annotated[str, one_of("columns", "rows")]


class Compile(Data, frozen=True):
    """How ``torch.compile`` is asked."""

    backend: Annotated[str, one_of(*BACKENDS)] = "aot_eager"
    fullgraph: bool = False
    dynamic: bool = False
    in_place: bool = False
    """``module.compile()`` instead of ``torch.compile(module)``."""
    first: bool = False
    """The plain model, before it is put on ranks."""


class Layout(Data, frozen=True):
    """How a model lies on ranks."""

    stack: StackName = "replicate"
    world: Ranks = 2
    tensor: Ranks = 1
    """Ranks that share a tensor-parallel group; the others are data parallel."""
    wrapped: Annotated[tuple[LayerName, ...], Meta(max_length=limits.NAMES)] = ()
    """Layers that the stack wraps on their own, before the whole model."""
    plan: Annotated[tuple[tuple[LayerName, Style], ...], Meta(max_length=limits.NAMES)] = ()
    """Tensor-parallel style of layers: ``columns`` or ``rows``."""
    options: Annotated[tuple[tuple[Word, Option], ...], Meta(max_length=limits.NAMES)] = ()
    """Of the stack, by its own names (:attr:`harness.stacks.stack.Stack.options`)."""
    compiled: Compile | None = None

    @property
    def two_dimensional(self) -> bool:
        """Whether some ranks share layers, and others the batch."""
        return bool(self.plan) and 1 < self.tensor < self.world


class Program(Data, frozen=True):
    """A training run."""

    model: Model
    layout: Layout = Layout()
    steps: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=limits.STEPS)] = (Step(),)
    optimizer: Optimizer = Optimizer()
    dtype: Annotated[str, one_of(*DTYPES)] = "float64"
    seed: Annotated[int, Meta(ge=-limits.SEED, le=limits.SEED)] = 0
    """Of weights and data."""
    span: Annotated[int, Meta(ge=0, le=limits.SPAN)] = 2
    """Weights and data are whole numbers from -span to span without 0, over ``denominator``; with 0 any numbers from -1
    to 1, over it: sums of such numbers don't cancel by chance, as those of small whole numbers do."""
    denominator: Annotated[int, Meta(ge=1, le=limits.DENOMINATOR)] = 2
    sparse: bool = False
    """One number in each row of a weight is not zero: sums are short, and fit into narrow dtypes."""
    rotated: Annotated[int, Meta(ge=-limits.RANKS, le=limits.RANKS)] = 0
    """How far the parts of a batch are moved on among the ranks."""
    same_data: bool = False
    """Every rank has the whole batch, and not its part (for layers that look at the whole batch)."""

    @property
    def parts(self) -> int:
        """Among how many the batch is divided."""
        return 1 if self.same_data else self.layout.world // self.layout.tensor

    def part(self, rank: int) -> int:
        """Which part of a batch a rank has."""
        return (rank // self.layout.tensor + self.rotated) % self.parts

    @property
    def stored_dtypes(self) -> set[str]:
        """Every dtype that a parameter has on one device."""
        return {self.dtype, *filter(None, map(own_dtype, every(self.model.layers)))}

    @property
    def even(self) -> bool:
        """Whether every rank has the same number of rows in every micro-batch."""
        return all(rows % self.parts == 0 for step in self.steps for rows in step.rows)
