"""The operators, constants, guards and breaks of graphs with constructs of torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.oracles.tracing import broken
from harness.stacks import dynamo
from harness.stacks.tracing import Tracer, traced
from suites.dynamo.backends import INDUCTOR
from suites.dynamo.contracts import CONSTRUCTS, NAMED, Setting
from suites.dynamo.sized_contracts import CHANGES, rows, sized


def setting(rank: Rank) -> tuple[Setting, dict[str, Any]]:
    """Create the objects that constructs use, and the facts about this rank that contracts refer to."""
    groups = [dist.new_group(members) for members in ([0, 1], [0], [1])]
    mesh = rank.mesh(1, 2, names=("a", "b"))
    about = Setting(torch.ones(2, device=rank.device), groups[0], groups[1 + rank.index], mesh, rank.mesh(2))
    return about, {
        "rank": rank.index,
        "name": about.group.group_name,
        "own": about.own.group_name,
        "mesh_name": mesh.get_group(1).group_name,
        "letters": len(about.group.group_name),
        "same_name": rank.backend == NAMED,
    }


@requirement(
    "DYN-TRACE-01",
    "The graph of each construct in suites/dynamo/contracts.py has the operators, constants and guards listed there.",
    source="torch/_dynamo/variables/distributed.py; torch.compile: guards, recompilation, graph breaks",
)
@requirement(
    "DYN-TRACE-06",
    "A construct of torch.distributed recompiles or breaks the graph only for the reasons that "
    "suites/dynamo/contracts.py lists.",
    source="torch/_dynamo/variables/distributed.py; torch.compile: guards, recompilation, graph breaks",
)
@requirement(
    "DYN-TRACE-07",
    "A compiled construct of torch.distributed computes what it computes uncompiled.",
    source="torch/_dynamo/variables/distributed.py; torch.compile: guards, recompilation, graph breaks",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", INDUCTOR])
@pytest.mark.parametrize("family", CONSTRUCTS)
@pytest.mark.world(2, timeout=180)
@pytest.mark.each_choice
def test_contract(world: World, family: str, backend: str) -> None:
    """Check every construct of a family on both ranks."""

    def body(rank: Rank) -> list[Any]:
        about, facts = setting(rank)
        wrong, prints = [], []
        for construct in CONSTRUCTS[family]:
            function, calls = construct.code(about), construct.given(about)
            results, trace = traced(function, [(x.clone(), *more) for x, *more in calls], backend=backend)
            wrong += broken(construct.contract, trace, facts)
            prints.append([graph.fingerprint() for graph in trace.graphs])
            for (x, *more), result in zip(calls, results, strict=True):
                right = function(x.clone(), *more)
                if right is not None:
                    assert_same(right + 0, result + 0, str(construct))
        assert wrong == []
        return prints

    one, other = world.run(body)
    assert one == other


@requirement(
    "DYN-TRACE-02",
    "With dynamic=True, the graph of each construct in suites/dynamo/contracts.py has symbolic sizes, so that it "
    "serves every size except 0 or 1.",
    source="torch.compile: dynamic, fullgraph; torch/_dynamo/variables/distributed.py",
)
@requirement(
    "DYN-TRACE-08",
    "With dynamic=True, the graph of each construct keeps the constants and guards that "
    "suites/dynamo/sized_contracts.py lists.",
    source="torch.compile: dynamic, fullgraph; torch/_dynamo/variables/distributed.py",
)
@requirement(
    "DYN-TRACE-09",
    "fullgraph=True accepts exactly the constructs that suites/dynamo/contracts.py lists without a graph break.",
    source="torch.compile: dynamic, fullgraph; torch/_dynamo/variables/distributed.py",
)
@requirement(
    "DYN-TRACE-07",
    "A compiled construct of torch.distributed computes what it computes uncompiled.",
    source="torch/_dynamo/variables/distributed.py; torch.compile: guards, recompilation, graph breaks",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("family", CONSTRUCTS)
@pytest.mark.world(2, timeout=180)
@pytest.mark.each_choice
def test_sized(world: World, family: str, backend: str) -> None:
    """Check every construct of a family with tensors of three sizes."""

    def body(rank: Rank) -> list[Any]:
        about, facts = setting(rank)
        wrong, prints = [], []
        for construct in CONSTRUCTS[family]:
            function, more = construct.code(about), construct.given(about)[0][1:]
            calls = [torch.arange(1.0, 1 + count, device=rank.device) + rank.index for count in rows(construct)]
            whole, contract = not construct.contract.breaks, sized(construct.contract)
            if not whole:
                with pytest.raises(dynamo.REFUSED):
                    traced(function, [(calls[0], *more)], fullgraph=True)
            given = [(x.clone(), *more) for x in calls]
            results, trace = traced(function, given, backend=backend, dynamic=True, fullgraph=whole)
            assert trace.graphs
            wrong += broken(contract, trace, facts)
            prints.append([graph.fingerprint() for graph in trace.graphs])
            for before, (x, *_), result in zip(calls, given, results, strict=True):
                alone = before.clone()
                right = function(alone, *more)
                assert_same(alone, x, f"{construct}: what it was given")
                if right is not None:
                    assert_same(right + 0, result + 0, str(construct))
        assert wrong == []
        return prints

    one, other = world.run(body)
    assert one == other


def test_changes_are_of_constructs() -> None:
    """Each change names an existing construct."""
    assert set(CHANGES) <= {str(construct) for constructs in CONSTRUCTS.values() for construct in constructs}


INTO: dict[str, tuple[Any, str, int]] = {
    "all_reduce": (lambda out, x: dist.all_reduce(out), "all_reduce", 4),
    "reduce_scatter_tensor": (dist.reduce_scatter_tensor, "reduce_scatter_tensor", 2),
    "all_gather_into_tensor": (dist.all_gather_into_tensor, "all_gather_into_tensor", 8),
    "all_gather": (lambda out, x: dist.all_gather([*out.split(4)], x), "all_gather_into_tensor", 8),
    "all_to_all_single": (dist.all_to_all_single, "all_to_all_single", 4),
}
"""Collectives that write into a tensor, with the operator that does the same, and the elements of the result."""


@requirement(
    "DYN-TRACE-6300",
    "In a graph, a collective that writes into a tensor is the operator of its name, which moves no more than it does.",
    source="torch/_dynamo/variables/functions.py: CollectiveFunctionRewriteVariable",
)
@pytest.mark.world(2)
def test_written_into(world: World) -> None:
    """Compile one collective after the other."""

    def body(rank: Rank) -> dict[str, list[str]]:
        found = {}
        for name, (collective, _, elements) in INTO.items():

            def code(x: torch.Tensor, out: torch.Tensor, collective: Any = collective) -> torch.Tensor:
                collective(out, x)
                return out + 1

            torch.compiler.reset()
            tracer = Tracer("aot_eager")
            compiled = torch.compile(code, backend=tracer, fullgraph=True)
            compiled(torch.ones(4, device=rank.device), torch.ones(elements, device=rank.device))
            found[name] = [o.name.split(".")[1] for o in tracer.forwards[0].operators if o.is_collective]
        return found

    assert_on_ranks([{name: [operator] for name, (_, operator, _) in INTO.items()}] * 2, world.run(body))
