"""A stored program is data: whatever is in it, it is refused in one line, or is a program, and nothing of it runs."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import json
import math
import resource
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from harness.plugin.profiles import here
from harness.profiles.obeyed import obeying, of
from harness.profiles.shelf import OURS, Shelf
from harness.programs import literals
from harness.programs import source as source_module
from harness.programs.cost import cost
from harness.programs.laws import LAWS
from harness.programs.literals import Code, call, literal
from harness.programs.source import source
from harness.programs.stored import dumps, loads
from harness.programs.strategies import programs
from harness.specs import limits
from harness.specs.program import Attention, Conv, Layer, Layout, Linear, Model, Program, Step, Tied, Twice
from harness.specs.shapes import walk
from harness.stacks.registry import own_names, stack
from harness.stacks.replicate import HOOKS
from harness.stacks.tp_extension import STRATEGIES
from tests.programs.hostile import CANARY, PAYLOADS, PROGRAMS, changed

LONGEST = 600
"""Characters of an error."""


@pytest.fixture(autouse=True)
def canary() -> Iterator[None]:
    """No payload is executed, whatever a test does with it."""
    assert not hasattr(builtins, CANARY)
    yield
    executed = hasattr(builtins, CANARY)
    if executed:
        delattr(builtins, CANARY)
    assert not executed, "a payload was executed"


def refusal(refused: Callable[[], object]) -> str:
    """What it says to refuse something: one line that drives no terminal."""
    with pytest.raises(ValueError) as error:
        refused()
    check_said(str(error.value))
    return str(error.value)


def check_said(said: str) -> None:
    """Require that what is said is one line of bearable length that drives no terminal."""
    assert len(said) <= LONGEST
    assert not {c for c in said if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


@pytest.mark.parametrize("stack", own_names())
def test_payload_everywhere(stack: str) -> None:
    """With a payload in place of any string, number or key, a stored program is none."""
    whole = json.loads(dumps(PROGRAMS[stack]))
    for payload in PAYLOADS:
        for where, other in changed(whole, payload):
            assert refusal(functools.partial(loads, json.dumps(other))), where


class Posing(int):
    """A number that says something else of itself."""

    def __repr__(self) -> str:
        return PAYLOADS[0]

    __str__ = __format__ = __repr__  # type: ignore[assignment]


class PosingWord(str):
    """A word that says something else of itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return PAYLOADS[0]

    __str__ = __repr__


@pytest.mark.parametrize("types_checked", [True, False])
@pytest.mark.parametrize("stack", own_names())
def test_unvalidated(stack: str, types_checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was made in Python gets none of it into source either, nor if types were not looked at."""
    if not types_checked:
        monkeypatch.setattr(source_module, "check_types", lambda program: None)
    for payload in (*PAYLOADS[:: 1 if types_checked else 3], Posing(2), PosingWord("linear0"), math.inf, math.nan):
        for where, other in changed(PROGRAMS[stack], payload):
            try:
                text = source(other)
            except (ValueError, TypeError, LookupError, AttributeError):
                continue
            assert payload not in PAYLOADS or not types_checked, where
            assert CANARY not in text, where
            compile(text, "program", "exec")


@pytest.mark.parametrize(
    "value", [PAYLOADS[0], Posing(1), math.nan, -math.inf, 1 << 64, b"x", object(), {1: {2: {3: {4: {5: 6}}}}}, [{1}]]
)
def test_what_is_not_plain_is_not_written(value: Any) -> None:
    """Only plain values become literals: of their own types, finite, and in words of letters and digits."""
    for each in (lambda: literal(value), lambda: call("f", value), lambda: call("f", x=[value])):
        assert "that can't be written into a program's source" in refusal(each)


@pytest.mark.parametrize("name", [*PAYLOADS, "", "1x", "a-b", "class", "a b"])
def test_what_is_no_name_is_not_written(name: str) -> None:
    """Only names become names of arguments and functions."""
    for each in (lambda: literals.name(name), lambda: call("f", **{name: 1})):
        assert refusal(each).startswith("no name")
    assert refusal(lambda: call(name)).startswith("no name")


def test_plain_values_are_written() -> None:
    """Values are what Python makes of them again."""
    value = (1, -2.5, True, None, "linear0.1", ["", "1x2"], {"a": "rows"})
    assert ast.literal_eval(literal(value)) == value
    assert call("torch.f", Code("model"), "x", rows=(1,)) == "torch.f(model, 'x', rows=(1,))"


# what is taken


def test_options_are_those_of_the_stacks() -> None:
    """Every option that a stack takes is known with its default, and no other."""
    own = {"party", "model", "wrapped", "tensor", "plan", "options"}
    ddp = inspect.signature(DistributedDataParallel).parameters
    for found in map(stack, own_names()):
        parameters = inspect.signature(found.apply).parameters
        named = {name: p.default for name, p in parameters.items() if name not in own}
        passed_on = set(found.option_names) - set(named)
        assert passed_on <= (set(ddp) if found.name == "replicate" else set())
        assert set(named) <= set(found.option_names)
        assert all(getattr(found.options(), name) == default for name, default in named.items())
    assert all(callable(getattr(default_hooks, hook)) for hook in HOOKS)
    assert set(STRATEGIES) == set(ShardingStrategy.__members__)


@pytest.mark.parametrize("stack", own_names())
@pytest.mark.parametrize("profile", ["", *sorted(p.stem for p in OURS.glob("*.toml"))])
def test_whatever_is_drawn_is_taken(stack: str, profile: str) -> None:
    """Under every profile that is shipped, what is drawn for a stack, and what laws make of it, can be stored."""

    @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        program = data.draw(programs(stack, (1, 2, 3, 4, 8), any_world=data.draw(st.booleans())))
        made = [law.runs(program) for law in LAWS.values()]
        for each in {program, *(p for pair in made if pair for p in pair)}:
            if "mesh" not in dict(program.layout.options) or each.layout.world == program.layout.world:
                assert loads(dumps(each)) == each

    found = Shelf(OURS).read(OURS / f"{profile}.toml") if profile else None
    # whether Dynamo is claimed is asked by the tests that draw: its programs are those of other stacks, compiled
    nothing_claimed = found is not None and stack not in found.claims.stacks and stack != "dynamo"
    with obeying(of(found, here())), pytest.raises(Unsatisfiable) if nothing_claimed else contextlib.nullcontext():
        check()


def test_what_was_stored_before_is_taken() -> None:
    """Programs that were stored before names and sizes were held against anything are read as they were."""
    lines = (Path(__file__).parent / "stored_before.jsonl").read_text().splitlines()
    assert len(lines) == 40
    for line in lines:
        assert json.loads(dumps(loads(line))) == json.loads(line)


@pytest.mark.parametrize("stack", own_names())
def test_hostile_programs_are_honest_without_payloads(stack: str) -> None:
    """What payloads are put into is a program; and all of them together have every field of every struct."""
    assert loads(dumps(PROGRAMS[stack])) == PROGRAMS[stack]
    compile(source(PROGRAMS[stack]), "program", "exec")


# what is refused

LINEAR = {"type": "Linear", "out": 3}


def stored(layers: Any = (LINEAR,), version: Any = 1, **fields: Any) -> str:
    program = {"model": {"inputs": [3], "layers": layers}, **fields}
    return json.dumps({"program": program, "version": version})


def nested(depth: int, kind: str = "Twice") -> Any:
    layer: Any = LINEAR
    for _ in range(depth):
        layer = {"type": kind, "body": layer}
    return layer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (stored([{**LINEAR, "out": 1.5}]), "Expected `int`, got `float`"),
        (stored([{**LINEAR, "out": 3.0}]), "Expected `int`, got `float`"),
        (stored([{**LINEAR, "out": True}]), "Expected `int`, got `bool`"),
        (stored([{**LINEAR, "out": "3"}]), "Expected `int`, got `str`"),
        (stored([{**LINEAR, "out": -1}]), "Expected `int` >= 0"),
        (stored([{**LINEAR, "out": 10**9}]), "Expected `int` <= 4096"),
        (stored([{**LINEAR, "out": 10**30}]), "Expected `int` <= 4096"),
        (stored([{**LINEAR, "out": 10**3000}]), "Expected `int` <= 4096"),
        (stored(optimizer={"rate": math.nan}), "malformed"),
        (stored(optimizer={"rate": -math.inf}), "malformed"),
        (stored(optimizer={"rate": -1.0}), "Expected `float` >= 0"),
        (stored().replace('"version": 1', '"version": 1e999'), "Number out of range"),
        (stored(optimizer={"rate": 7}).replace("7", "1e999"), "Number out of range"),
        (stored([nested(9)]), "layers inside layers, more than 8 deep"),
        (stored([nested(200)]), "layers inside layers, more than 8 deep"),
        (stored([nested(500)]), "more than 256 layers"),
        (stored([LINEAR] * 257), "length <= 256"),
        (stored([{"type": "Residual", "body": [LINEAR] * 200}] * 2), "more than 256 layers"),
        (stored([{"type": "Twice", "body": {"type": "Tied", "of": "linear0"}}]), "a tied layer is no part of another"),
        (stored([{"type": "Twice", "body": {"type": "Branch", "body": LINEAR}}]), "a branch layer is no part of"),
        (stored([{"type": "Twice", "body": {"type": "Container", "kind": "list", "body": []}}]), "a list of layers"),
        (stored(steps=[{}] * 65), "length <= 64"),
        (stored(steps=[{"rows": [1] * 65}]), "length <= 64"),
        (stored(steps=[{"rows": [5000]}]), "Expected `int` <= 4096"),
        (stored(layout={"world": 65}), "Expected `int` <= 64"),
        (stored(layout={"options": [["mesh", "2x2"]]}), "a mesh of 2x2 has not 2 ranks"),
        (stored(layout={"options": [["mesh", "0x2"]]}), "matching regex"),
        (stored(layout={"options": [["recast", 1]]}), "layout.options: Expected `bool`, got `int` - at `$.recast`"),
        (stored(layout={"options": [["recast", True], ["recast", True]]}), "layout.options: 'recast' twice"),
        (stored(layout={"options": [["sums", True]]}), "replicate has no option 'sums'; it has broadcast_buffers,"),
        (stored(layout={"options": [["inner", "replicate"]]}), "replicate has no option 'inner'"),
        (stored(layout={"options": [["ignored", ["linear1"]]]}), "there is no layer 'linear1' among linear0"),
        (stored(layout={"options": [["hook", "torch"]]}), "matching regex"),
        (stored(layout={"wrapped": ["linear0", "linear0"]}), "layout.wrapped: a layer is named twice"),
        (stored(layout={"tensor": 2}), "replicate has no tensor parallelism"),
        (stored(layout={"plan": [["linear0", "rows"]]}), "replicate has no tensor parallelism"),
        (
            stored(layout={"stack": "tp_extension", "options": [["replicas", 3]]}),
            "2 data-parallel ranks can't be divided into 3 replicas",
        ),
        (stored(layout={"stack": "dynamo", "compiled": {"backend": "tvm"}}), "matching regex"),
        (stored([{"type": "Linear", "out": 4096}, {"type": "Linear", "out": 4096}]), "it is too large"),
        (stored([nested(8)] * 20, steps=[{"rows": [1] * 64}]), "it is too large"),
        (stored(seed=1 << 60), "Expected `int` <= 9007199254740992"),
        (stored(**{"\x1b[31m": 1}), "unknown field `\\x1b[31m`"),
        (stored([{"type": "\x1b]0;owned\x07"}]), "Invalid value '\\x1b]0;owned\\x07'"),
        (stored([{"type": "x" * 10_000}]), " … "),
        (stored().replace('"version"', '"version": 1, "version"'), "the key 'version' is there twice"),
        (stored().replace('"out"', '"out": 3, "out"'), "the key 'out' is there twice"),
        (stored() + " " * limits.FILE, "more than 1,048,576 bytes"),
        ("[" * 500_000, "this is no program"),
        ('{"program":' * 50_000, "this is no program"),
        (stored().encode("utf-16"), "this is no program"),
        (stored().encode() + b"\xff", "this is no program"),
        (stored([{"type": "Tied", "of": "\xff"}]).replace("\\u00ff", "\xff").encode("latin-1"), "this is no program"),
        (stored([{"type": "Tied", "of": "linear0"}]) + "\ud800", "this is no program"),
    ],
)
def test_refused(text: str | bytes, message: str) -> None:
    """What is of another type, too large, or does not fit together is refused with what and where."""
    assert message in refusal(lambda: loads(text))


def test_each_bound_is_one_of_programs() -> None:
    """What is exactly at a bound is a program."""
    layers: tuple[Layer, ...] = (Linear(3),)
    inner: Layer = Linear(3)
    for _ in range(limits.DEPTH):
        inner = Twice(inner)
    for program in (
        Program(Model((3,), (inner,))),
        Program(Model((3,), layers * limits.LAYERS)),
        Program(Model((3,), layers), Layout(world=limits.RANKS)),
        Program(Model((limits.EXTENT,), (Linear(3),))),
        Program(Model((3,), layers), steps=(Step(rows=(limits.EXTENT,)),)),
        Program(Model((3,), layers), steps=(Step(),) * limits.STEPS),
    ):
        assert loads(dumps(program)) == program


# what it costs


def test_many_tied_layers_are_walked_once() -> None:
    """A model of tied layers alone is walked in time proportional to its layers, and so is its source made."""
    model = Model((3,), (Linear(3), *(Tied("linear0", alias=bool(i % 2)) for i in range(limits.LAYERS - 1))))
    began = time.process_time()
    found = list(walk(model))
    source(Program(model))
    assert time.process_time() - began < 1
    assert [n.after for n in found] == [(3,)] * limits.LAYERS
    assert loads(dumps(Program(model))).model == model


def test_what_a_layer_is_tied_to_comes_before_it() -> None:
    """A layer shares weights of those before the layer of the model that it is, the same object or not."""
    tied = Tied("linear1")
    with pytest.raises(ValueError, match="has no weight for 3 features"):
        list(walk(Model((3,), (tied, Linear(3), tied))))
    assert list(walk(Model((3,), (Linear(3), Linear(2, bias=False), Linear(3), tied))))[-1].after == (2,)


@pytest.mark.parametrize(
    ("program", "calls", "elements", "products"),
    [
        (Program(Model((3,), (Linear(5),)), steps=(Step(rows=(4, 2)),)), 2, 6 * 5 + 6 * 8 + 5 * 20 + 20, 3 * 90 + 100),
        (Program(Model((3,), (Twice(Twice(Linear(3))),))), 7, 4 * (3 + 6 + 12) + 4 * 6 + 4 * 12 + 12, 3 * 4 * 63 + 48),
        (
            Program(Model((2, 4), (Conv(3, 2), Attention(3)))),
            2,
            4 * (9 + 5 * 9 + 81) + 4 * 17 + 4 * 63 + 63,
            3 * 4 * (36 + 108 + 54) + 252,
        ),
    ],
    ids=["linear", "twice", "convolution and attention"],
)
def test_cost(program: Program, calls: int, elements: int, products: int) -> None:
    """Costs are those by hand: of every row, layer by layer, and of what is kept."""
    found = cost(program)
    assert (found.calls, found.elements, found.products) == (calls, elements, products)


# whatever there is

_WORDS = st.sampled_from(
    [*PAYLOADS[:6], "", "linear0", "linear1", "replicate", "tp_extension", "dynamo", "rows", "float16", "1x2", "type"]
)
_NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 3, -1, 64, 65, 4096, 4097, 1 << 31, 1 << 63, 1 << 64, 10**40, 0.5, 1e308, 3.0]),
    st.integers(),
    st.floats(),
)
_LEAVES: st.SearchStrategy[Any] = st.none() | st.booleans() | _NUMBERS | _WORDS | st.text(max_size=20)


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["type", "body", "kind", "out", "of", "of", "when", "model", "options", *PAYLOADS[:2]])
    layer = st.fixed_dictionaries(
        {
            "type": st.sampled_from(
                ["Twice", "Residual", "Container", "Branch", "Hooked", "Checkpointed", "Tied", "Linear"]
            )
        },
        optional={"body": inner, "kind": _WORDS, "out": _NUMBERS, "of": _WORDS},
    )
    return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4) | layer


_ANYTHING = st.recursive(_LEAVES, _grown, max_leaves=12)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _places(part, (*path, key))


def _put(value: Any, path: tuple[Any, ...], what: Any) -> Any:
    if not path:
        return what
    if isinstance(value, dict):
        return {**value, path[0]: _put(value[path[0]], path[1:], what)}
    return [_put(part, path[1:], what) if i == path[0] else part for i, part in enumerate(value)]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@st.composite
def files(draw: st.DrawFn) -> str | bytes:
    """A stored program with anything, or parts of itself, in a few places; sometimes damaged as text."""
    whole = json.loads(dumps(PROGRAMS[draw(st.sampled_from(own_names()))]))
    for _ in range(draw(st.integers(0, 4))):
        places = list(_places(whole))
        place = draw(st.sampled_from(places))
        copied = st.sampled_from(places).map(lambda path, value=whole: _at(value, path))
        what = draw(_ANYTHING | copied)
        if isinstance(_at(whole, place), list) and draw(st.booleans()):
            what = _at(whole, place) * draw(st.sampled_from([2, 3, 100]))
        whole = _put(whole, place, what)
        if len(json.dumps(whole)) > 200_000:
            break
    text = json.dumps(whole)
    how = draw(st.sampled_from(["whole", "whole", "whole", "whole", "cut", "swapped", "bytes", "doubled"]))
    if how == "cut":
        return text[: draw(st.integers(0, len(text)))]
    if how == "swapped":
        old, new = draw(st.sampled_from(["[", "]", "{", ":", ",", '"', "1", "true"])), draw(st.text(max_size=3))
        return text.replace(old, new, draw(st.integers(1, 3)))
    if how == "bytes":
        at = draw(st.integers(0, len(text)))
        return text[:at].encode(errors="replace") + draw(st.binary(max_size=4)) + text[at:].encode(errors="replace")
    return text.replace('": ', '": 1, "version": ', 1) if how == "doubled" else text


_CALLED = {
    "fill",
    "Model",
    "narrower",
    "per_part",
    "super",
    "compiled",
    "toggle",
    "Run",
    *(f"on_{s}" for s in own_names()),
}
_CALLED |= {"Function", "Cast", "Scale", "Mask", "Attention", "Residual", "Twice", "Hooked", "Checkpointed"}
_MODULES = {"nn", "torch", "self", "model", "run", "optimizer", "scheduler", "party", "x", "layer", "turn"}


def _check(text: str | bytes) -> bool:
    """Require that a file is refused in one line, or is a program whose source says what sources say.

    Returns whether it is a program.
    """
    began = time.process_time()
    program: Program | None = None
    try:
        program = loads(text)
    except ValueError as e:
        check_said(str(e))
    else:
        tree = ast.parse(source(program))
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        assert names <= _CALLED | _MODULES
        assert not [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr.startswith("__")][1:]
        assert loads(dumps(program)) == program
    assert time.process_time() - began < 5
    return program is not None


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(files())
def test_any_file(text: str | bytes) -> None:
    """Any file is a program or is refused, in one line, at once."""
    _check(text)


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # it takes some minutes
def test_many_files() -> None:
    """So are 20,000 of them, with at most 300 MiB more than before; some are programs."""
    counts = {True: 0, False: 0}

    @settings(max_examples=20_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(files())
    def check(text: str | bytes) -> None:
        counts[_check(text)] += 1

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    assert min(counts.values()) > 200, counts
