"""The operators, constants, guards and breaks of graphs with constructs of torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement
from harness.oracles.tracing import broken
from harness.stacks import dynamo
from harness.stacks.tracing import traced
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
