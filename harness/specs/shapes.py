"""What the layers of a model are called, and the shapes of a row before and after each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from harness.specs import limits
from harness.specs.program import (
    Attention,
    Branch,
    Container,
    Conv,
    Data,
    Embedding,
    Layer,
    Linear,
    Model,
    Norm,
    Tied,
    children,
    own_dtype,
)

Shape: TypeAlias = tuple[int, ...]


class Named(Data, frozen=True):
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
        return own_dtype(self.layer)

    @property
    def trains(self) -> bool:
        """Whether the layer has parameters of its own that require gradients."""
        if isinstance(self.layer, Linear):
            return not self.layer.frozen
        return isinstance(self.layer, (Conv, Embedding, Attention, Norm))


Weights: TypeAlias = Mapping[str, tuple[int, int]]
"""(rows, columns) of the weights that a layer can share, by the names of the layers that have them."""


def walk(model: Model) -> Iterator[Named]:
    """Every layer in the order of use, an outer one before those inside it.

    Errors: ValueError where a layer can't stand where it is, or is too deep inside others.
    """
    weights: dict[str, tuple[int, int]] = {}
    shape = model.inputs
    for number, layer in enumerate(model.layers):
        found: list[Named] = []
        place = _Place(model, weights, first=number == 0)
        shape = place.put(f"{word(layer)}{number}", layer, shape, found)
        yield from found
        for named in found:
            if (sizes := weight_shape(named, model)) is not None:
                weights[named.name] = sizes


def shape_after(layer: Layer, shape: Shape, model: Model) -> Shape:
    """The shape of a row after a layer that comes after those of a model.

    Errors: ValueError where the layer can't stand there.
    """
    weights: dict[str, tuple[int, int]] = {}
    if isinstance(layer, Tied):
        weights = {n.name: sizes for n in walk(model) if (sizes := weight_shape(n, model)) is not None}
    return _Place(model, weights, first=False).put(word(layer), layer, shape, [])


class _Place:
    """Where a layer of the model itself stands, and those inside it."""

    def __init__(self, model: Model, weights: Weights, *, first: bool) -> None:
        """``weights``: of the layers before it; ``first``: whether there are none."""
        self.model, self.weights, self.first = model, weights, first

    def put(
        self, name: str, layer: Layer, shape: Shape, found: list[Named], *, optional: bool = False, depth: int = 0
    ) -> Shape:
        """Append the layer, and those inside it, to ``found``; returns the shape of a row after it."""
        if depth > limits.DEPTH:
            raise ValueError(f"layers inside layers, more than {limits.DEPTH} deep")
        if depth and (
            isinstance(layer, (Tied, Branch)) or (isinstance(layer, Container) and layer.kind != "sequential")
        ):
            raise ValueError(f"{name}: {_called(layer)} is no part of another layer, but of the model itself")
        number, inner = len(found), shape
        dropped = optional or isinstance(layer, Branch)
        parts = children(layer)
        found.append(Named(name, layer, shape, shape, optional))
        for i, part in enumerate(parts):
            inner = self.put(f"{name}.{i}", part, inner, found, optional=dropped, depth=depth + 1)
        after = self._after(layer, shape, inner, first=self.first and not depth)
        found[number] = Named(name, layer, shape, after, optional)
        return after

    def _after(self, layer: Layer, shape: Shape, inner: Shape, *, first: bool) -> Shape:
        """``inner``: the shape of a row after the layers inside the layer."""
        if isinstance(layer, Embedding):
            if not first or not self.model.tokens:
                raise ValueError("an embedding is the first layer of a model on tokens")
            return (*shape, layer.width)
        if first and self.model.tokens:
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
            rows, columns = self.weights.get(layer.of, (-1, -1))
            if columns != shape[-1]:
                raise ValueError(f"{layer.of!r} has no weight for {shape[-1]} features")
            return (*shape[:-1], rows)
        if inner != shape and not isinstance(layer, Container):
            raise ValueError(f"the body of {word(layer)} makes {inner} of {shape}")
        return inner


def _called(layer: Layer) -> str:
    return f"a {layer.kind} of layers" if isinstance(layer, Container) else f"a {word(layer)} layer"


def word(layer: Layer) -> str:
    """What a layer is called in a model."""
    return type(layer).__name__.lower()


def weight_shape(named: Named, model: Model) -> tuple[int, int] | None:
    """(rows, columns) of a layer's matrix of weights, for those that have one to share."""
    if isinstance(named.layer, Linear):
        return named.layer.out, named.before[-1]
    if isinstance(named.layer, Embedding):
        return model.tokens, named.layer.width
    return None
