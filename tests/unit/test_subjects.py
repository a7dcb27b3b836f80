"""Which subjects there are, and what each implements."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType

import pytest

from harness import entry_points
from harness.subjects import Subject, SubjectError, find, known, put


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Entry points that packages have, by name."""
    points: dict[str, str] = {}

    def found(group: str) -> list[importlib.metadata.EntryPoint]:
        assert group == entry_points.SUBJECTS
        return [importlib.metadata.EntryPoint(name, value, group) for name, value in points.items()]

    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    monkeypatch.setattr(entry_points, "_points", entry_points._points.__wrapped__)  # what is remembered is of others
    return points


def test_ours(registered: dict[str, str]) -> None:
    """Without packages there are two: torch, which puts nothing anywhere, and the reference."""
    assert list(known()[0]) == ["torch", "reference"]
    assert find("torch").first == ()
    assert [where for _, where in find("reference").first] == [
        "harness.reference:put_replicate",
        "harness.reference:put_replicate_fsdp",
        "harness.reference:put_tp_extension",
    ]


def test_of_packages(registered: dict[str, str]) -> None:
    """A subject has a function for each stack that it implements, perhaps from several packages."""
    registered |= {"mine.replicate": "a:b", "mine.dynamo": "c:d", "yours.replicate": "e:f"}
    assert find("mine") == Subject("mine", {"replicate": "a:b", "dynamo": "c:d"})
    assert find("yours").first == (("harness.subjects:put", "e:f"),)


def test_unknown(registered: dict[str, str]) -> None:
    """A name that there is not is told with those that there are."""
    registered["mine.replicate"] = "a:b"
    with pytest.raises(SubjectError, match="^no such subject; there are torch, reference, mine$"):
        find("min")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine", "call it mine.STACK"),
        ("mine.replicat", "with a stack of collectives, replicate"),
        (".replicate", "call it subject.STACK"),
        ("torch.replicate", "torch is Concord's own"),
        ("reference.dynamo", "reference is Concord's own"),
    ],
)
def test_wrong(registered: dict[str, str], name: str, said: str) -> None:
    """An entry point that can't be one of a subject is named."""
    registered |= {name: "a:b", "yours.replicate": "e:f"}
    (broken,) = known()[1]
    assert str(broken).startswith(f"entry point {name!r} of concord.subjects (no package): ")
    assert said in broken.why
    assert find("yours").puts == {"replicate": "e:f"}  # nothing is taken away from others


def test_broken_and_meant(registered: dict[str, str]) -> None:
    """A subject whose entry points are all broken is refused with what is wrong with them."""
    registered["mine.replicat"] = "a:b"
    with pytest.raises(SubjectError, match=r"entry point 'mine.replicat' of .*: call it mine.STACK, with a stack of "):
        find("mine")


@pytest.mark.parametrize(
    ("subject", "stack", "lacks"),
    [
        (Subject("torch"), "dynamo", False),
        (Subject("mine", {"replicate": "a:b"}), "replicate", False),
        (Subject("mine", {"replicate": "a:b"}), "", False),
        (Subject("mine", {"replicate": "a:b"}), "dynamo", True),
    ],
)
def test_lacks(subject: Subject, stack: str, lacks: bool) -> None:
    """torch has every stack, others those that they put; a test of no stack needs none."""
    assert bool(subject.lacks(stack)) == lacks


def test_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function is called by its module and name."""
    module, calls = ModuleType("subject_of_a_test"), []
    module.install = lambda: calls.append(1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "subject_of_a_test", module)
    put("subject_of_a_test:install")
    assert calls == [1]
