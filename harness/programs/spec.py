"""Programs: training runs as plain data.

A :class:`Program` says which model is trained on which data, how it is laid out over ranks, and what is done step by
step.  It is frozen, it compares by value, and it is JSON: :func:`dumps` and :func:`loads` are inverse.  What a program
*means* is in :mod:`harness.programs.source`, which writes it down as Python that needs only torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

VERSION = 1
"""Of the format; goes into the JSON."""

MOST_RANKS = 1024
"""Of a stored program: who asks for more has made a mistake."""
DTYPES = ("float64", "float32", "bfloat16", "float16")
STACKS = ("replicate", "replicate_fsdp", "tp_extension", "dynamo")
EXACT_ACTIVATIONS = ("relu", "abs")
SMOOTH_ACTIVATIONS = ("tanh", "silu", "gelu", "softplus")

# What msgspec holds a stored program against.
_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Positive: TypeAlias = Annotated[int, Meta(ge=1)]
_Size: TypeAlias = Annotated[float, Meta(ge=0)]


def _one_of(*words: str) -> Meta:
    return Meta(pattern=rf"^({'|'.join(words)})\Z")


_Own: TypeAlias = Annotated[str, _one_of("", *DTYPES)]
"""The dtype of a layer's parameters, where it is not the program's."""


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Frozen, equal by value, strict about unknown names."""


# layers


class Linear(_Data, frozen=True, tag=True):
    """``nn.Linear`` over the last dimension."""

    out: _Count
    bias: bool = True
    frozen: bool = False
    dtype: _Own = ""


class Conv(_Data, frozen=True, tag=True):
    """``nn.Conv1d`` or ``nn.Conv2d`` over rows of (channels, length) or (channels, height, width)."""

    out: _Count
    kernel: _Positive = 1
    bias: bool = True


class Activation(_Data, frozen=True, tag=True):
    """A function of each element."""

    kind: Annotated[str, _one_of(*EXACT_ACTIVATIONS, *SMOOTH_ACTIVATIONS)] = "relu"


class Norm(_Data, frozen=True, tag=True):
    """``layer`` and ``rms`` over the last dimension; ``batch`` over channels, with running statistics."""

    kind: Annotated[str, _one_of("layer", "rms", "batch")] = "layer"
    dtype: _Own = ""


class Embedding(_Data, frozen=True, tag=True):
    """``nn.Embedding`` of the program's tokens; only as the first layer."""

    width: _Count


class Attention(_Data, frozen=True, tag=True):
    """Self-attention over (length, width): one projection in, softmax, one projection out."""

    heads: _Positive = 1


class Scale(_Data, frozen=True, tag=True):
    """Multiplies with a buffer of one float for each feature.

    ``kind``: ``plain``; ``rebound``: a new tensor takes the buffer's name in every forward; ``per_rank``: every part
    of a batch is multiplied by values of its own, which those who train on that part have in the buffer.
    """

    kind: Annotated[str, _one_of("plain", "rebound", "per_rank")] = "plain"


class Mask(_Data, frozen=True, tag=True):
    """Zeroes every other feature, by a buffer of bool."""


class Tied(_Data, frozen=True, tag=True):
    """A linear layer without bias whose weight *is* that of an earlier layer (its name in the model).

    ``alias``: the earlier layer's parameter is registered here once more under a name of its own, and used through it.
    """

    of: str
    alias: bool = False


class Residual(_Data, frozen=True, tag=True):
    """``x + body(x)``; the body keeps the shape."""

    body: tuple[Layer, ...]


class Twice(_Data, frozen=True, tag=True):
    """The same module called on its own output; the body keeps the shape."""

    body: Layer


class Branch(_Data, frozen=True, tag=True):
    """A body that is used in some micro-batches: ``never``, ``even``, ``odd``, counted from 0; it keeps the shape."""

    body: Layer
    when: Annotated[str, _one_of("never", "even", "odd")] = "never"


class Hooked(_Data, frozen=True, tag=True):
    """A layer with a hook of torch.nn that changes what goes through; the body keeps the shape.

    ``kind``: ``forward`` doubles the output, ``before`` negates the input, ``backward`` doubles the gradient of the
    input.  Calls are counted, and compared.
    """

    body: Layer
    kind: Annotated[str, _one_of("forward", "before", "backward")] = "forward"


class Container(_Data, frozen=True, tag=True):
    """Layers in an ``nn.Sequential`` (``sequential``), ``nn.ModuleList`` (``list``) or ``nn.ModuleDict`` (``dict``)."""

    kind: Annotated[str, _one_of("sequential", "list", "dict")]
    body: tuple[Layer, ...]


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


class Model(_Data, frozen=True):
    """Layers one after another, on rows of shape ``inputs``.

    ``tokens``: the size of a vocabulary, for rows of whole numbers; 0 for rows of floats.
    """

    inputs: tuple[_Count, ...]
    layers: Annotated[tuple[Layer, ...], Meta(min_length=1)]
    tokens: _Count = 0


# schedule


class Optimizer(_Data, frozen=True):
    """``sgd`` (with ``momentum`` and ``weight_decay``) or ``adamw``.  Figures are powers of two."""

    kind: Annotated[str, _one_of("sgd", "adamw")] = "sgd"
    rate: _Size = 0.0625
    momentum: _Size = 0.0
    weight_decay: _Size = 0.0


class Step(_Data, frozen=True):
    """Micro-batches whose gradients add up, and what is done with them."""

    rows: Annotated[tuple[_Count, ...], Meta(min_length=1)] = (4,)
    """Of each micro-batch, over all ranks; ranks take as even parts as there are."""
    joint: bool = False
    """The micro-batches are slices of one batch, in order; the same whatever the slices."""
    synced: tuple[bool, ...] = ()
    """Whether ranks average after a micro-batch; () for only after the last.  The last one is always synced."""
    zero: Annotated[str, _one_of("none", "zero", "keep")] = "none"
    """What becomes of the gradients after the step: ``none``, ``zero``, or ``keep``: they add up over steps."""
    clip: _Size = 0.0
    """Largest norm of all gradients together; 0 for no clipping."""
    evaluate: bool = False
    """A forward in evaluation mode, without gradients, before the first micro-batch."""
    toggle: str = ""
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

Option: TypeAlias = bool | int | float | str | tuple[str, ...]


class Compile(_Data, frozen=True):
    """How ``torch.compile`` is asked."""

    backend: str = "aot_eager"
    fullgraph: bool = False
    dynamic: bool = False
    in_place: bool = False
    """``module.compile()`` instead of ``torch.compile(module)``."""
    first: bool = False
    """The plain model, before it is put on ranks."""


class Layout(_Data, frozen=True):
    """How a model lies on ranks."""

    stack: Annotated[str, _one_of(*STACKS)] = "replicate"
    world: _Positive = 2
    tensor: _Positive = 1
    """Ranks that share a tensor-parallel group; the others are data parallel."""
    wrapped: tuple[str, ...] = ()
    """Layers that the stack wraps on their own, before the whole model."""
    plan: tuple[tuple[str, Annotated[str, _one_of("columns", "rows")]], ...] = ()
    """Tensor-parallel style of layers: ``columns`` or ``rows``."""
    options: tuple[tuple[str, Option], ...] = ()
    """Of the stack, by its own names; see :mod:`harness.stacks.training`."""
    compiled: Compile | None = None

    @property
    def under(self) -> str:
        """The stack that puts the model on ranks; what is compiled is on one of the other three."""
        return str(dict(self.options).get("inner", "replicate")) if self.stack == "dynamo" else self.stack

    @property
    def two_dimensional(self) -> bool:
        """Whether some ranks share layers, and others the batch."""
        return bool(self.plan) and 1 < self.tensor < self.world

    @property
    def dtypes(self) -> set[str]:
        """Those to which the stack casts parameters, gradients, or what it sends."""
        options = dict(self.options)
        hook = {"fp16_compress_hook": "float16", "bf16_compress_hook": "bfloat16"}.get(str(options.get("hook")), "")
        named = (options.get(key, "") for key in ("param_dtype", "reduce_dtype", "output_dtype"))
        return {str(dtype) for dtype in (*named, hook) if dtype}


class Program(_Data, frozen=True):
    """A training run."""

    model: Model
    layout: Layout = Layout()
    steps: Annotated[tuple[Step, ...], Meta(min_length=1)] = (Step(),)
    optimizer: Optimizer = Optimizer()
    dtype: Annotated[str, _one_of(*DTYPES)] = "float64"
    seed: int = 0
    """Of weights and data."""
    span: _Count = 2
    """Weights and data are whole numbers from -span to span without 0, over ``denominator``; with 0 any numbers from -1
    to 1, over it: sums of such numbers don't cancel by chance, as those of small whole numbers do."""
    denominator: _Positive = 2
    sparse: bool = False
    """One number in each row of a weight is not zero: sums are short, and fit into narrow dtypes."""
    rotated: int = 0
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
    def dtypes(self) -> set[str]:
        """Every dtype in which something is stored or sent."""
        return {self.dtype, *(n.dtype for n in walk(self.model) if n.dtype), *self.layout.dtypes}

    @property
    def even(self) -> bool:
        """Whether every rank has the same number of rows in every micro-batch."""
        return all(rows % self.parts == 0 for step in self.steps for rows in step.rows)

    @property
    def gradients_promised(self) -> bool:
        """Whether the stack can show whole gradients."""
        return not (self.layout.under == "tp_extension" and dict(self.layout.options).get("use_orig_params") is False)


class _File(_Data, frozen=True):
    program: Program
    version: int


def dumps(program: Program) -> str:
    """A program as JSON, with the version of the format."""
    return msgspec.json.format(msgspec.json.encode(_File(program, VERSION)), indent=1).decode()


def loads(text: str | bytes) -> Program:
    """A program from JSON.

    Errors: ValueError that says what is wrong where.
    """
    try:
        found = msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, RecursionError) as e:
        raise ValueError(f"this is no program: {e}") from e
    if found.version != VERSION:
        raise ValueError(f"a program of version {found.version}; this Concord reads version {VERSION}")
    _require_sense(found.program)
    return found.program


def _require_sense(program: Program) -> None:
    """Errors: ValueError for what no single field can be blamed for."""
    layout, layers = program.layout, {n.name for n in walk(program.model)}
    if layout.world > MOST_RANKS:
        raise ValueError(f"{layout.world} ranks; at most {MOST_RANKS} can be asked for")
    if layout.world % layout.tensor:
        raise ValueError(f"{layout.world} ranks can't be divided into groups of {layout.tensor}")
    if layout.under not in STACKS or layout.under == "dynamo":
        raise ValueError(f"there is no stack {layout.under!r} to compile")
    meant = [*layout.wrapped, *(name for name, _ in layout.plan), *(step.toggle for step in program.steps)]
    for name in meant:
        if name and name not in layers:
            raise ValueError(f"there is no layer {name!r} among {', '.join(sorted(layers))}")


# names and shapes

Shape: TypeAlias = tuple[int, ...]


def children(layer: Layer) -> tuple[Layer, ...]:
    """Layers inside a layer."""
    if isinstance(layer, (Residual, Container)):
        return layer.body
    return (layer.body,) if isinstance(layer, (Twice, Branch, Hooked)) else ()


class Named(_Data, frozen=True):
    """A layer with its name as ``get_submodule`` takes it, and the shapes of a row before and after it."""

    name: str
    layer: Layer
    before: Shape
    after: Shape
    optional: bool = False
    """Whether some micro-batch may leave it out."""

    @property
    def dtype(self) -> str:
        """Of the layer's own parameters, where it is not the program's; else ""."""
        return getattr(self.layer, "dtype", "")

    @property
    def trains(self) -> bool:
        """Whether the layer has parameters of its own that require gradients."""
        if isinstance(self.layer, Linear):
            return not self.layer.frozen
        return isinstance(self.layer, (Conv, Embedding, Attention, Norm))


def walk(model: Model) -> Iterator[Named]:
    """Every layer in the order of use, an outer one before those inside it.

    Errors: ValueError where a layer can't stand where it is.
    """
    yield from _walk(model, model.layers, "", model.inputs, False)


def _walk(model: Model, layers: tuple[Layer, ...], prefix: str, shape: Shape, optional: bool) -> Iterator[Named]:
    for number, layer in enumerate(layers):
        name = f"{prefix}{number}" if prefix else f"{word(layer)}{number}"
        after = shape_after(layer, shape, model, first=not prefix and number == 0)
        yield Named(name, layer, shape, after, optional)
        inner = children(layer)
        if inner:
            dropped = optional or isinstance(layer, Branch)
            yield from _walk(model, inner, f"{name}.", shape, dropped)
        shape = after


def word(layer: Layer) -> str:
    """What a layer is called in a model."""
    return type(layer).__name__.lower()


def shape_after(layer: Layer, shape: Shape, model: Model, *, first: bool = False) -> Shape:
    """The shape of a row after a layer.

    Errors: ValueError where a layer can't stand where it is.
    """
    if isinstance(layer, Embedding):
        if not first or not model.tokens:
            raise ValueError("an embedding is the first layer of a model on tokens")
        return (*shape, layer.width)
    if first and model.tokens:
        raise ValueError("a model on tokens begins with an embedding")
    if not shape:
        raise ValueError("rows have no dimension")
    if isinstance(layer, Linear):
        return (*shape[:-1], layer.out)
    if isinstance(layer, Conv):
        if len(shape) not in (2, 3) or min(shape[1:]) < layer.kernel:
            raise ValueError(f"no convolution of size {layer.kernel} over rows of shape {shape}")
        return (layer.out, *(extent - layer.kernel + 1 for extent in shape[1:]))
    if isinstance(layer, Attention) and (len(shape) != 2 or shape[1] % layer.heads):
        raise ValueError(f"no attention with {layer.heads} heads over rows of shape {shape}")
    if isinstance(layer, Norm) and layer.kind == "batch" and len(shape) > 2:
        raise ValueError(f"no batch norm over rows of shape {shape}")
    if isinstance(layer, Tied):
        return _shape_after_tied(layer, shape, model)
    inner = shape
    for part in children(layer):
        inner = shape_after(part, inner, model)
    if isinstance(layer, Container):
        return inner
    if inner != shape:
        raise ValueError(f"the body of {word(layer)} makes {inner} of {shape}")
    return shape


def _shape_after_tied(layer: Tied, shape: Shape, model: Model) -> Shape:
    weights = {n.name: weight_shape(n, model) for n in walk(_before(model, layer))}
    rows, columns = weights.get(layer.of) or (-1, -1)
    if columns != shape[-1]:
        raise ValueError(f"{layer.of!r} has no weight for {shape[-1]} features")
    return (*shape[:-1], rows)


def _before(model: Model, layer: Layer) -> Model:
    """The model up to the top-level layer in which ``layer`` is."""
    for number, top in enumerate(model.layers):
        if _within(layer, top):
            return msgspec.structs.replace(model, layers=model.layers[:number])
    return model


def _within(layer: Layer, top: Layer) -> bool:
    return layer is top or any(_within(layer, inner) for inner in children(top))


def weight_shape(named: Named, model: Model) -> tuple[int, int] | None:
    """(rows, columns) of a layer's matrix of weights, for those that have one to share."""
    if isinstance(named.layer, Linear):
        return named.layer.out, named.before[-1]
    if isinstance(named.layer, Embedding):
        return model.tokens, named.layer.width
    return None
