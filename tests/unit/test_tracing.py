"""Trace contracts: what a trace is held against, and how a trace is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.oracles.tracing import Contract, Graph, Guard, Operator, Trace, broken
from harness.stacks.tracing import Tracer, attributes, traced

KEPT = Contract(
    "a construct",
    ("mul", "all_reduce"),
    ("{rank}", "sum"),
    ((r"\.WORLD$", "ID_MATCH"),),
    recompiles=("size mismatch",),
    breaks=("async_op",),
)
TRACE = Trace(
    (Graph((Operator("mul", ("1",), "float32[2]"), Operator("all_reduce", ("sum",), "float32[2]"))),),
    (Guard("G['dist'].group.WORLD", "ID_MATCH"), Guard("L['x']", "TENSOR_MATCH")),
    ("tensor 'x' size mismatch at index 0",),
    ("async_op=True for distributed collectives",),
)


def test_kept() -> None:
    """A trace that is as promised breaks nothing, with what a rank knows put into the promise."""
    assert broken(KEPT, TRACE, {"rank": 1}) == []


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (replace(TRACE, graphs=()), "operators [], promised ['mul', 'all_reduce']"),
        (replace(TRACE, graphs=(Graph(TRACE.graphs[0].operators[::-1]),)), "operators ['all_reduce', 'mul']"),
        (replace(TRACE, graphs=TRACE.graphs * 2), "operators ['mul', 'all_reduce', 'mul', 'all_reduce']"),
        (replace(TRACE, guards=TRACE.guards[1:]), r"no guard ID_MATCH on \.WORLD$; there are none"),
        (replace(TRACE, guards=(Guard("group.WORLD", "TYPE_MATCH"),)), "there are ['TYPE_MATCH']"),
        (replace(TRACE, recompiles=()), "compiled again for []"),
        (replace(TRACE, recompiles=TRACE.recompiles * 2), "compiled again for ["),
        (replace(TRACE, recompiles=("n == 1.5",)), "promised ['size mismatch']"),
        (replace(TRACE, breaks=()), "graphs broken by []"),
        (replace(TRACE, breaks=("barrier",)), "graphs broken by ['barrier']"),
    ],
)
def test_broken(trace: Trace, said: str) -> None:
    """Each thing that differs is said, with what was promised."""
    sentences = broken(KEPT, trace, {"rank": 1})
    assert all(sentence.startswith("a construct: ") for sentence in sentences)
    assert any(said in sentence for sentence in sentences)


def test_other_results() -> None:
    """A tensor of another size breaks a contract that names sizes; what is no tensor has none."""
    named = replace(KEPT, results=r"\[s\d+\]")
    (graph,) = TRACE.graphs
    results = ("float32[s7]", "int")
    symbols = [replace(operator, result=result) for operator, result in zip(graph.operators, results, strict=True)]
    assert broken(named, replace(TRACE, graphs=(Graph(tuple(symbols)),)), {"rank": 1}) == []
    assert broken(named, TRACE, {"rank": 1}) == [
        rf"a construct: {name} gives float32[2], promised \[s\d+\]" for name in ("mul", "all_reduce")
    ]


def test_other_constants() -> None:
    """A constant of another rank breaks a contract."""
    assert broken(KEPT, TRACE, {"rank": 0}) == ["a construct: constants ['1', 'sum'], promised ['0', 'sum']"]


def test_fingerprint() -> None:
    """Ranks may have other constants in their graphs, and neither other operators nor other shapes."""
    graph = Graph((Operator("add", ("0",), "float32[2]"),))
    assert graph.fingerprint() == Graph((Operator("add", ("1",), "float32[2]"),)).fingerprint()
    assert graph.fingerprint() != Graph((Operator("mul", ("0",), "float32[2]"),)).fingerprint()
    assert graph.fingerprint() != Graph((Operator("add", ("0",), "float32[3]"),)).fingerprint()


def test_collectives() -> None:
    """What a graph launches is what is a collective and no wait, in order."""
    names = ("aten.mul.Tensor", "_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default")
    graph = Graph(tuple(Operator(name, ("sum", "0"), "float32[2]") for name in names))
    assert graph.collectives() == ["_c10d_functional.all_reduce.default(sum, 0) -> float32[2]"]


def test_taken() -> None:
    """Operators, constants, guards, reasons to compile again and breaks of a function are found."""

    def function(x: torch.Tensor, number: int) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + number

    found, trace = traced(function, [(torch.ones(2), 3), (torch.ones(2), 3)])
    assert [t.tolist() for t in found] == [[5.0, 5.0]] * 2
    assert [[o.name for o in graph.operators] for graph in trace.graphs] == [["mul"], ["add"]]
    assert [o.constants for graph in trace.graphs for o in graph.operators] == [("2",), ("3",)]
    assert trace.graphs[0].operators[0].result == "float32[2]"
    assert Guard("L['x']", "TENSOR_MATCH") in [replace(guard, text="") for guard in trace.guards]
    assert trace.recompiles == ()
    assert trace.breaks == ("Call to `torch._dynamo.graph_break()`",)

    def summed(x: torch.Tensor, all: dict[str, list[int]]) -> torch.Tensor:
        for name in all:
            x = x * all[name][0]
        return x

    _, trace = traced(summed, [(torch.ones(2), {"one": [5], "two": [7]})])
    of = {guard.text: guard.source for guard in trace.guards}
    assert of["list(dict.keys(L['all']))[1] == 'two'"] == "list(dict.keys(L['all']))[1]"
    assert of["len(L['all']['two']) == 1"] == "L['all']['two']"
    assert of["L['all']['two'][0] == 7"] == "L['all']['two'][0]"

    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    _, trace = traced(scaled, [(torch.ones(2), 1.5), (torch.ones(2), 2.5)])
    assert [reason.split(": ")[1] for reason in trace.recompiles] == ["factor == 1.5"]
    assert ("L['factor']", "EQUALS_MATCH", "L['factor'] == 1.5") in [(g.source, g.kind, g.text) for g in trace.guards]


def test_backwards() -> None:
    """With aot_eager the graphs of forward and backward are kept before either runs."""
    torch.compiler.reset()
    tracer = Tracer()
    function: Any = torch.compile(lambda x: (x * x).sum(), backend=tracer)
    x = torch.ones(2, requires_grad=True)
    loss = function(x)
    assert [len(kept) for kept in (tracer.graphs, tracer.forwards, tracer.backwards)] == [1, 1, 1]
    assert tracer.launched() == []
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("L['g'].group_name", "L['g'].group_name"),
        ("object.__getattribute__(g, 'group_name') == '1'", "g.group_name == '1'"),
        (
            "object.__getattribute__(object.__getattribute__(L['m'], '_groups')['0'], 'name')",
            "L['m']._groups['0'].name",
        ),
    ],
)
def test_attributes(text: str, plain: str) -> None:
    """Sources of guards are the same in all versions, whichever way Dynamo reads attributes of opaque objects."""
    assert attributes(text) == plain
