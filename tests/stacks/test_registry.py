"""Stacks are found by their names: Concord's own, a file each, and those of packages."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from harness import entry_points
from harness.entry_points import PluginError
from harness.programs import prelude
from harness.programs.definitions import definitions, module_of
from harness.programs.options import options_of
from harness.programs.reproducer import reproducer
from harness.programs.stored import dumps, loads
from harness.specs.program import Layout, Linear, Model, Program
from harness.stacks import registry, training

VENDORS = Path(__file__).parents[2] / "fixtures" / "vendors"
ON_DDP = Program(Model((3,), (Linear(2),)), Layout("ddp", options=(("bucket_cap_mb", 0.5),)))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Entry points that packages have, by name; the sample package can be imported."""
    points: dict[str, str] = {}

    def found(group: str) -> list[importlib.metadata.EntryPoint]:
        return (
            [importlib.metadata.EntryPoint(n, v, group) for n, v in points.items()]
            if group == entry_points.STACKS
            else []
        )

    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    monkeypatch.setattr(entry_points, "_points", entry_points._points.__wrapped__)
    monkeypatch.syspath_prepend(str(VENDORS / "ddp"))
    yield points
    registry._brought.cache_clear()
    sys.modules.pop("concord_ddp", None)


def test_own() -> None:
    """Concord's own stacks, the one that is put over others last; files without a stack are none."""
    assert registry.own_names() == ("replicate", "replicate_fsdp", "tp_extension", "dynamo")
    assert registry.compilable() == ("replicate", "replicate_fsdp", "tp_extension")
    with pytest.raises(ValueError, match="there is no stack 'training'; there are replicate, "):
        registry.stack("training")


@pytest.mark.parametrize("name", registry.own_names())
def test_stands_on_torch_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reproducer carries along of a stack names nothing of Concord, and every name in it means something."""
    modules = [training, module_of(registry.stack(name).apply), prelude]
    text = definitions(modules, {f"on_{name}", "Run", "Party", "compiled"})
    assert "harness" not in text.replace("harness's", "")
    compile(text, name, "exec")
    cut = ModuleType("cut")
    monkeypatch.setitem(sys.modules, "cut", cut)  # dataclasses look for it
    exec(text, vars(cut))
    assert callable(vars(cut)[f"on_{name}"])


def test_brought(registered: dict[str, str]) -> None:
    """A package's stack is read, validated and written into reproducers as Concord's own are."""
    registered["ddp"] = "concord_ddp:STACK"
    assert "ddp" in registry.names()
    assert loads(dumps(ON_DDP)) == ON_DDP
    assert options_of(ON_DDP.layout).bucket_cap_mb == 0.5  # type: ignore[attr-defined]
    text = reproducer(ON_DDP, what="x", backend="b")
    assert "class Ddp(Handle):" in text
    assert "import harness" not in text
    assert "from harness" not in text
    with pytest.raises(ValueError, match="ddp has no option 'hook'; it has broadcast_buffers, "):
        options_of(Layout("ddp", options=(("hook", ""),)))
    with pytest.raises(ValueError, match="ddp has no tensor parallelism"):
        loads(dumps(Program(ON_DDP.model, Layout("ddp", 2, 2))))
    with pytest.raises(ValueError, match="there is no stack 'ddp' to compile"):
        options_of(Layout("dynamo", options=(("inner", "ddp"),)))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("other", "concord_ddp:STACK", "the stack is called 'ddp'"),
        ("ddp", "concord_ddp:Options", "concord_ddp:Options is not a harness.stacks.stack.Stack"),
        ("ddp", "concord_ddp:nothing", "AttributeError"),
        ("ddp", "nowhere:STACK", "ModuleNotFoundError"),
    ],
)
def test_badly_registered(registered: dict[str, str], name: str, value: str, said: str) -> None:
    """A stack that can't be had is one line that names the entry point."""
    registered[name] = value
    with pytest.raises(PluginError, match=said) as error:
        registry.stack(name)
    assert str(error.value).startswith(f"entry point '{name}' of concord.stacks")


def test_broken(registered: dict[str, str]) -> None:
    """Concord's own stacks can't be replaced, and an entry point names an attribute; nothing is imported."""
    registered |= {"replicate": "nowhere:STACK", "mine": "nowhere"}
    assert [each.why for each in registry.broken()] == [
        "'nowhere' is not module:attribute",
        "Concord has a stack of that name",
    ]
    assert registry.stack("replicate").apply.__module__ == "harness.stacks.replicate"
