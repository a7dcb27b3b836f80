"""A function's pickle is remembered exactly as long as nothing that it depends on can have changed."""

from __future__ import annotations

import gc
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from harness.worlds import shipping, wire

SOURCE = """
import math

LIMIT = 3
SEEN = []
COUNT = 0

def plain(rank):
    return math.floor(2.5) + LIMIT

def mutable(rank):
    SEEN.append(1)
    return SEEN

def assigns(rank):
    global COUNT
    COUNT += 1
    return COUNT

def calls(rank):
    return plain(rank) + 1

def defaults(rank, seen=[]):
    return seen

def closure(value):
    def inner(rank):
        return value
    return inner
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of test code that no other process could import."""
    found = types.ModuleType("shipped_in_this_test")
    found.__file__ = "/nowhere/shipped_in_this_test.py"
    monkeypatch.setitem(__import__("sys").modules, found.__name__, found)
    exec(SOURCE, found.__dict__)
    return found


def shipped(fn: Callable[..., Any]) -> object:
    """What travels for a function: its pickle, or the function itself where that can't be remembered."""
    frame = shipping.frame_of(1, fn, (), {}, "test")
    return wire.loads((bytearray(frame[1]), [bytearray(b) for b in frame[2:]]))[2][0]


def value_of(fn: Callable[..., Any]) -> object:
    """What the shipped function returns where it arrives."""
    arrived = shipped(fn)
    return (pickle.loads(arrived) if isinstance(arrived, bytes) else arrived)(None)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["plain", "calls"])
def test_unchanging_function_is_remembered(module: types.ModuleType, name: str) -> None:
    """A function of constants, modules and functions like it is pickled once."""
    fn = getattr(module, name)
    assert isinstance(shipped(fn), bytes)
    assert shipped(fn) == shipped(fn)


@pytest.mark.parametrize("name", ["mutable", "assigns", "defaults"])
def test_changing_function_is_not(module: types.ModuleType, name: str) -> None:
    """A function that holds a list, or assigns to a global, travels anew each time."""
    assert not isinstance(shipped(getattr(module, name)), bytes)


def test_mutated_list_is_seen(module: types.ModuleType) -> None:
    """What a list holds at the time of the run is what arrives."""
    assert value_of(module.mutable) == [1]
    module.SEEN.extend([7, 8])
    assert value_of(module.mutable) == [7, 8, 1]


def test_rebound_global_is_seen(module: types.ModuleType) -> None:
    """A global that has another value is pickled anew, also for a function that is only called."""
    assert (value_of(module.plain), value_of(module.calls)) == (5, 6)
    module.LIMIT = 10
    assert (value_of(module.plain), value_of(module.calls)) == (12, 13)


def test_replaced_function_is_seen(module: types.ModuleType) -> None:
    """A function that is called and was replaced is pickled anew."""
    assert value_of(module.calls) == 6
    module.plain = module.closure(41)
    assert value_of(module.calls) == 42


def test_new_code_is_seen(module: types.ModuleType) -> None:
    """A function whose code was replaced is pickled anew."""
    assert value_of(module.plain) == 5
    module.plain.__code__ = (lambda rank: 1).__code__
    assert value_of(module.plain) == 1


def test_closure_over_a_rebound_variable_is_seen(module: types.ModuleType) -> None:
    """A closed-over variable that has another value is pickled anew."""
    inner = module.closure(1)
    assert value_of(inner) == 1
    inner.__closure__[0].cell_contents = 2
    assert value_of(inner) == 2


def test_closure_over_a_list_is_not_remembered(module: types.ModuleType) -> None:
    """A closed-over list travels as it is at the time."""
    held = [1]
    inner = module.closure(held)
    assert value_of(inner) == [1]
    held.append(2)
    assert value_of(inner) == [1, 2]


def test_function_is_not_kept_alive(module: types.ModuleType) -> None:
    """The memory goes with the function."""
    inner = module.closure(1)
    assert isinstance(shipped(inner), bytes)
    reference = weakref.ref(inner)
    del inner
    gc.collect()
    assert reference() is None
