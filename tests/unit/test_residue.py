"""What a test may leave on an accelerator, a made-up one, and in what remembers meshes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from harness.worlds import meshes, residue

BEFORE = 1000
"""Bytes that tensors took before the test."""


@pytest.mark.parametrize(
    ("later", "left"),
    [
        pytest.param([0], [], id="nothing"),
        pytest.param([-500], [], id="less"),
        pytest.param([16 << 20], [], id="little"),
        pytest.param([(16 << 20) + 1] * 100, ["16777217 bytes of device memory more than before"], id="too-much"),
        pytest.param([1 << 30, 1 << 30, 512], [], id="given-back-late"),
    ],
)
def test_memory_of_a_device(monkeypatch: pytest.MonkeyPatch, later: list[int], left: list[str]) -> None:
    """Little may stay, and what a library gives back late has a second."""
    taken: Iterator[int] = iter(later)
    monkeypatch.setattr(residue, "_PATIENCE", 0.1)
    monkeypatch.setattr(residue.OnDevice, "restore", lambda self: None)
    monkeypatch.setattr(residue.OnDevice, "take", lambda: residue.OnDevice(0, None, BEFORE + next(taken, later[-1])))
    before = dataclasses.replace(residue.take(on_device=False), device=residue.OnDevice(0, None, BEFORE), files=10**6)
    assert residue.compare(before) == left


def test_meshes_that_nobody_can_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with other caches, or one that a test broke, keeps the groups of its meshes; the rank goes on."""

    def other(*, on_device: bool) -> None:
        raise AttributeError("no such cache")

    assert meshes.forget([], on_device=False)
    monkeypatch.setattr(meshes, "_empty", other)
    assert not meshes.forget([], on_device=False)
