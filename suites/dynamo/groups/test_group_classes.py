"""``torch.distributed.group`` and ``GroupMember`` in compiled code, and backward hooks of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import BackwardHook

from harness import Rank, World, assert_same, requirement
from harness.stacks import dynamo

SOURCE = "torch/_dynamo/variables/distributed.py"
GROUP, MEMBER = dist.group, dist.GroupMember


def compare(rank: Rank, function: Callable[[torch.Tensor], Any], *, fullgraph: bool) -> None:
    """Assert that a function returns the same compiled as uncompiled: a tensor and another value."""
    x = torch.arange(3.0, device=rank.device)
    compiled, counter = dynamo.compiled(function, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        (right, expected), (result, actual) = function(x), compiled(x)
        assert_same(right, result, "tensor")
        assert actual == expected
        assert type(actual) is type(expected)
    assert counter.graphs == 1 or not fullgraph


@requirement(
    "DYN-WORLD-01",
    "In one graph, the classes group or GroupMember have the type, name, hash, truth value and members that they "
    "have uncompiled.",
    source=f"{SOURCE}: WorldMetaClassVariable",
)
@pytest.mark.world(1)
def test_known(world: World) -> None:
    """Test each property in its own function, called twice."""

    def body(rank: Rank) -> None:
        known: list[Callable[[torch.Tensor], Any]] = [
            lambda x: (x + 1, (type(GROUP) is type(MEMBER), isinstance(GROUP, type), isinstance(GROUP, int))),
            lambda x: (x + 1, (GROUP.__name__, MEMBER.__name__, type(GROUP).__name__)),
            lambda x: (x + hash(GROUP) % 7, (hash(GROUP), hash(MEMBER) // 3)),
            lambda x: (x + 1, (len({GROUP, MEMBER}), GROUP in {MEMBER: 1, GROUP: 2})),
            lambda x: (x + 1 if GROUP else x, GROUP is None),
            lambda x: (x + 1, (MEMBER.NON_GROUP_MEMBER, GROUP is MEMBER.NON_GROUP_MEMBER)),
            lambda x: (x + 1, (GROUP.WORLD is MEMBER.WORLD, GROUP.WORLD is MEMBER.NON_GROUP_MEMBER)),
            lambda x: (x + GROUP.WORLD.size(), GROUP.WORLD.rank()),  # type: ignore[union-attr]
        ]
        for function in known:
            compare(rank, function, fullgraph=True)

    world.run(body)


@requirement(
    "DYN-WORLD-02",
    "Comparisons of the classes group and GroupMember give the same answers compiled as uncompiled.",
    source=f"{SOURCE}: DistributedVariable.richcompare_impl",
)
@pytest.mark.world(1)
def test_compared(world: World) -> None:
    """Compare by ==, !=, is and in; graph breaks are allowed."""

    def body(rank: Rank) -> None:
        compared: list[Callable[[torch.Tensor], Any]] = [
            lambda x: (x + 1, GROUP == GROUP),
            lambda x: (x + 1, GROUP == MEMBER),
            lambda x: (x + 1, GROUP != MEMBER),
            lambda x: (x + 1, GROUP is MEMBER),
            lambda x: (x + 1, GROUP in (MEMBER, GROUP)),
        ]
        for function in compared:
            compare(rank, function, fullgraph=False)

    world.run(body)


@requirement(
    "DYN-WORLD-03",
    "Compiled code finds the value that a dictionary holds under the class group.",
    source=f"{SOURCE}: DistributedVariable.is_python_equal",
)
@pytest.mark.world(1)
@pytest.mark.parametrize("how", ["indexed", "asked"])
def test_key(world: World, how: str) -> None:
    """Index the dictionary or call its get; graph breaks are allowed."""
    found: dict[str, Callable[[torch.Tensor], Any]] = {
        "indexed": lambda x: (x + 1, {MEMBER: 1, GROUP: 2}[GROUP]),
        "asked": lambda x: (x + 1, {MEMBER: 1, GROUP: 2}.get(GROUP)),
    }

    def body(rank: Rank) -> None:
        compare(rank, found[how], fullgraph=False)

    world.run(body)


@requirement(
    "DYN-WORLD-04",
    "An unknown attribute of the class group or of a backward hook raises AttributeError in compiled code too.",
    source=f"{SOURCE}: var_getattr, call_method",
)
@pytest.mark.parametrize("of", ["group", "hook"])
@pytest.mark.world(1)
def test_unknown(world: World, of: str) -> None:
    """Ask for an attribute of the class and a method of the hook."""

    def body(rank: Rank) -> None:
        def ask(x: torch.Tensor) -> Any:
            return x + (GROUP.nothing if of == "group" else BackwardHook(None, (), ()).nothing())  # type: ignore[attr-defined]

        function, _ = dynamo.compiled(ask, backend="eager", fullgraph=False)
        with dynamo.compiled_backward("eager"), pytest.raises(AttributeError, match="nothing"):
            function(torch.ones(2, device=rank.device))

    world.run(body)


@requirement(
    "DYN-HOOK-03",
    "Without compiled autograd, fullgraph=True raises an error for a module's backward hook that names the "
    "setting to change.",
    source=f"{SOURCE}: BackwardHookVariable.create",
)
@pytest.mark.parametrize("kind", ["hook", "pre-hook"])
@pytest.mark.world(1)
def test_refused(world: World, kind: str) -> None:
    """A function calls a layer with a hook; with graph breaks the hook runs as in uncompiled code."""

    def body(rank: Rank) -> None:
        layer, called = nn.Linear(2, 2).to(rank.device), []
        if kind == "hook":
            layer.register_full_backward_hook(lambda *args: called.append(args[0]))
        else:
            layer.register_full_backward_pre_hook(lambda *args: called.append(args[0]))
        x = torch.ones(1, 2, device=rank.device, requires_grad=True)
        function, _ = dynamo.compiled(lambda x: layer(x) + 1)
        with pytest.raises(dynamo.REFUSED, match=r"require compiled autograd") as refused:
            function(x)
        assert "torch._dynamo.config.compiled_autograd = True" in str(refused.value)
        function, counter = dynamo.compiled(lambda x: layer(x) + 1, fullgraph=False)
        function(x).sum().backward()
        assert called == [layer]
        assert counter.graphs == 1

    world.run(body)
