"""Tensors are found, and changed, wherever they are."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from harness.reference.containers import mapped, tensors


class Own(list[Any]):
    """A list of a class of its own."""


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Data:
    value: Any
    text: str = "text"
    made: list[int] = field(init=False, default_factory=list)


ONE = torch.ones(1)
VALUES = {
    "tensor": ONE,
    "list": [ONE, 1],
    "tuple": (ONE, None),
    "named-tuple": Pair(ONE, "text"),
    "set": {ONE, 1},
    "own-list": Own([ONE]),
    "dict": {"a": ONE, "b": 2.0},
    "ordered": OrderedDict(a=ONE),
    "default": defaultdict(list, a=ONE),
    "dataclass": Data(ONE),
    "nested": [{"a": (Data(Pair([ONE], 3)),)}],
}


@pytest.mark.parametrize("name", VALUES)
def test_found(name: str) -> None:
    """One tensor, in each."""
    assert [tensor is ONE for tensor in tensors(VALUES[name])] == [True]


@pytest.mark.parametrize("name", VALUES)
def test_changed(name: str) -> None:
    """The same container with another tensor; the one that was given is as it was."""
    changed = mapped(lambda tensor: tensor + 1, VALUES[name])
    assert type(changed) is type(VALUES[name])
    assert [float(tensor) for tensor in tensors(changed)] == [2.0]
    assert [tensor is ONE for tensor in tensors(VALUES[name])] == [True]


@pytest.mark.parametrize("value", [None, 1, "text", Data, object])
def test_others(value: object) -> None:
    """What has no tensors is what it was."""
    assert mapped(torch.neg, value) is value
    assert list(tensors(value)) == []
