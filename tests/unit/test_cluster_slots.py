"""The cores of a cluster's machines as slots for worlds."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cluster.facts import facts, slots
from harness.devices import cores
from harness.plugin import numprocesses

OURS = {"kernel": "here"}
HERE, THERE = {"kernel": "here", "cores": [0, 3]}, {"kernel": "there", "cores": [0, 1]}


def test_each_core_once() -> None:
    """Two agents on a machine have the same cores, and our own cores have the names that they have without agents."""
    assert slots([HERE, THERE, THERE], OURS) == ("cpu-0", "cpu-3", "there-cpu-0", "there-cpu-1")
    assert slots([HERE, THERE], {"kernel": "elsewhere"})[0] == "here-cpu-0"
    assert slots([], OURS) == ()


def test_facts_say_them() -> None:
    """An agent says which cores it may use."""
    assert len(facts()["cores"]) == cores()


@pytest.mark.parametrize(
    ("asked", "slots", "most", "workers"),
    [
        (True, 3, None, 3),
        (True, 10_000, None, min(32, 4 * cores())),
        (True, 3, 2, 2),
        (True, 0, None, 1),
        (False, 3, None, 1),
    ],
)
def test_workers(asked: bool, slots: int, most: int | None, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """-n gpus is as many workers as there are slots, and no more than pytest's own machine can have."""
    monkeypatch.setattr(numprocesses, "asked_for_gpus", asked)
    config: Any = SimpleNamespace(option=Namespace(numprocesses=1, maxprocesses=most, tx=["popen"]))
    numprocesses.across_hosts(config, slots)
    assert (config.option.numprocesses, config.option.tx) == (workers, ["popen"] * workers)
