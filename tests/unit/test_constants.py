"""Hypothesis draws no constants of loaded modules while a property of a suite runs from a fixed seed."""

from __future__ import annotations

import pytest

from harness.plugin.constants import of_no_module

providers = pytest.importorskip("hypothesis.internal.conjecture.providers")


def test_nothing_is_left_behind() -> None:
    """Inside there are no constants of modules; afterwards Hypothesis is as it was, after an error too."""
    before = providers._get_local_constants
    found = []

    def fails() -> None:
        found.append(len(providers._get_local_constants()))
        raise KeyError

    with pytest.raises(KeyError), of_no_module():
        fails()
    assert found == [0]
    assert providers._get_local_constants is before
    assert len(providers._get_local_constants()) > 0


def test_an_older_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hypothesis without such constants is left as it is."""
    monkeypatch.delattr(providers, "_get_local_constants")
    with of_no_module():
        assert not hasattr(providers, "_get_local_constants")
