"""The names of a model's layers, and the shapes of a row before and after each layer."""

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
    """A layer with its name for ``get_submodule``, and the shapes of a row before and after it."""

    name: str
    layer: Layer
    before: Shape
    after: Shape
    optional: bool = False
    """Whether some micro-batch may not use the layer."""

    @property
    def dtype(self) -> str:
        """The dtype of the layer's own parameters if it is not the program's; else ""."""
        return own_dtype(self.layer)

    @property
    def trains(self) -> bool:
        """Whether the layer has parameters of its own that require gradients."""
        if isinstance(self.layer, Linear):
            return not self.layer.frozen
        return isinstance(self.layer, (Conv, Embedding, Attention, Norm))


Weights: TypeAlias = Mapping[str, tuple[int, int]]
"""(rows, columns) of each weight that a layer can share, by the name of the layer that owns it."""


def walk(model: Model) -> Iterator[Named]:
    """Iterate over all layers in the order of use, each before the layers inside it.

    Errors: ValueError if a layer is not possible in its place, or is nested too deeply.
    """
    weights: dict[str, tuple[int, int]] = {}
    shape = model.inputs
    for number, layer in enumerate(model.layers):
        named_layers: list[Named] = []
        place = _Place(model, weights, first=number == 0)
        shape = place.put(f"{word(layer)}{number}", layer, shape, named_layers)
        yield from named_layers
        for named in named_layers:
            if (sizes := weight_shape(named, model)) is not None:
                weights[named.name] = sizes


def shape_after(layer: Layer, shape: Shape, model: Model) -> Shape:
    """Return the shape of a row after a layer that is appended to a model.

    Errors: ValueError if the layer is not possible there.
    """
    weights: dict[str, tuple[int, int]] = {}
    if isinstance(layer, Tied):
        weights = {n.name: sizes for n in walk(model) if (sizes := weight_shape(n, model)) is not None}
    return _Place(model, weights, first=False).put(word(layer), layer, shape, [])


class _Place:
    """The place of one of the model's own layers, which computes shapes for it and the layers inside it."""

    def __init__(self, model: Model, weights: Weights, *, first: bool) -> None:
        """Set the place; ``weights``: those of the layers before it; ``first``: whether it has no layers before it."""
        self.model, self.weights, self.first = model, weights, first

    def put(
        self, name: str, layer: Layer, shape: Shape, found: list[Named], *, optional: bool = False, depth: int = 0
    ) -> Shape:
        """Append the layer and the layers inside it to ``found``, and return the shape of a row after it.

        Errors: ValueError if a layer is not possible in its place, or is nested too deeply.
        """
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
        """Return the shape of a row after the layer; ``inner``: the shape after the layers inside it.

        Errors: ValueError if the layer is not possible there.
        """
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
    """Return the word for a layer in its name, such as ``linear``."""
    return type(layer).__name__.lower()


def weight_shape(named: Named, model: Model) -> tuple[int, int] | None:
    """Return (rows, columns) of a layer's weight matrix; None if the layer has none that others can share."""
    if isinstance(named.layer, Linear):
        return named.layer.out, named.before[-1]
    if isinstance(named.layer, Embedding):
        return model.tokens, named.layer.width
    return None
