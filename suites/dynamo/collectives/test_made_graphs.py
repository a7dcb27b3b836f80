"""Graphs that make_fx makes of functional collectives, with real tensors and with symbolic sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks.collectives import functional, unwaited
from harness.stacks.limit import runs_with

SOURCE = (
    "torch.fx.experimental.proxy_tensor.make_fx: tracing_mode; "
    "torch/distributed/_functional_collectives.py: wait_tensor, collectives while code is traced"
)
MODES = ("real", "symbolic")

Code = Callable[[torch.Tensor, Any], Any]


def gradient(call: Code, mesh: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that gives the gradient of a collective's input, weighted by the rank."""

    def code(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = call(x, mesh) * (mesh.get_rank() + 2)
        return torch.autograd.grad(y.sum(), x)[0]

    return code


CALLS: dict[str, tuple[Code, str, int]] = {
    "sum": (lambda x, m: functional.all_reduce(x, "sum", m), "all_reduce", 1),
    "largest": (lambda x, m: functional.all_reduce(x, "max", m), "all_reduce", 1),
    "gather": (lambda x, m: functional.all_gather_tensor(x, 0, m), "all_gather_into_tensor", 1),
    "gather of columns": (lambda x, m: functional.all_gather_tensor(x, 1, m), "all_gather_into_tensor", 1),
    "gather with gradients": (
        lambda x, m: functional.all_gather_tensor_autograd(x, 0, m),
        "all_gather_into_tensor",
        1,
    ),
    "scatter": (lambda x, m: functional.reduce_scatter_tensor(x, "sum", 0, m), "reduce_scatter_tensor", 1),
    "scatter of columns": (lambda x, m: functional.reduce_scatter_tensor(x, "min", 1, m), "reduce_scatter_tensor", 1),
    "scatter with gradients": (
        lambda x, m: functional.reduce_scatter_tensor_autograd(x, "sum", 0, m),
        "reduce_scatter_tensor",
        1,
    ),
    "exchange": (lambda x, m: functional.all_to_all_single(x, None, None, m), "all_to_all_single", 1),
    "uneven exchange": (
        lambda x, m: functional.all_to_all_single(x, [[1, 2], [3, 2]][m.get_rank()], [[1, 3], [2, 2]][m.get_rank()], m),
        "all_to_all_single",
        1,
    ),
    "exchange with gradients": (
        lambda x, m: functional.all_to_all_single_autograd(x, [2, 2], [2, 2], m),
        "all_to_all_single",
        1,
    ),
    "broadcast": (lambda x, m: functional.broadcast(x, 1, m), "broadcast", 1),
    "permutation": (lambda x, m: functional.permute_tensor(x.view(-1), [1, 0], m), "all_to_all_single", 1),
    "sums of a list": (lambda x, m: functional.all_reduce_coalesced([x, x[:2]], "sum", m), "all_reduce_coalesced", 2),
    "gathers of a list": (
        lambda x, m: functional.all_gather_into_tensor_coalesced([x, x[:2]], m),
        "all_gather_into_tensor_coalesced",
        2,
    ),
    "scatters of a list": (
        lambda x, m: functional.reduce_scatter_tensor_coalesced([x, x[:2]], "sum", [0, 1], m),
        "reduce_scatter_tensor_coalesced",
        2,
    ),
}
"""Collectives of a tensor of four rows and an even number of columns: their operator, and how many results it has."""


def named(graph: torch.fx.GraphModule) -> Counter[str]:
    """Return how often a graph has each operator of collectives, by its name; a wait for a list is one for each."""
    counts = Counter[str]()
    for node in graph.graph.nodes:
        if node.op == "call_function" and "c10d" in (name := str(node.target)):
            several = "wait_tensors" in name
            counts["wait_tensor" if several else name.split(".")[1]] += len(node.args[0]) if several else 1
    return counts


def flat(found: Any) -> list[torch.Tensor]:
    """Return a result, or each of several."""
    return list(found) if isinstance(found, list | tuple) else [found]


def kind(mesh: Any, x: torch.Tensor) -> type:
    """Return the class of the result of a functional collective that is not traced."""
    result = functional.all_reduce(x, "sum", mesh)
    functional.wait_tensor(result)
    return type(result)


def given(rank: Rank, number: int) -> torch.Tensor:
    """Return a tensor of four rows and six columns."""
    return dyadic(4, 6, key=(rank.index, number), dtype=torch.float32, span=4).to(rank.device)


@requirement(
    "DYN-RESULT-8652",
    "A graph that make_fx makes has a wait for each result of a functional collective, in every tracing mode.",
    source=SOURCE,
)
@requirement(
    "DYN-RESULT-8653",
    "A graph that make_fx has made of functional collectives returns plain tensors with the values of the function.",
    source=SOURCE,
)
@requirement(
    "DYN-RESULT-8654",
    "After make_fx, functional collectives return results in flight as before, of which none is left unwaited.",
    source=SOURCE,
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.world(2)
def test_made_graphs(world: World, mode: str) -> None:
    """Make one graph of all collectives, which returns results as they are and plus one; call it with other values."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        before = kind(mesh, given(rank, 0))
        assert before is not torch.Tensor

        def code(x: torch.Tensor) -> list[torch.Tensor]:
            results = [y for number, (call, _, _) in enumerate(CALLS.values()) for y in flat(call(x + number, mesh))]
            return [*results, *(y + 1 for y in results)]

        pending = unwaited()
        graph = make_fx(code, tracing_mode=mode)(given(rank, 0))
        assert unwaited() == pending
        wanted = Counter(operator for _, operator, _ in CALLS.values())
        wanted["wait_tensor"] = sum(count for *_, count in CALLS.values())
        assert named(graph) == wanted
        for number in range(2):
            x = given(rank, number)
            found = graph(x)
            assert unwaited() == pending
            for place, (one, y) in enumerate(zip(code(given(rank, number)), found, strict=True)):
                assert type(y) is torch.Tensor, f"result {place}"
                assert_same(one + 0, y, f"result {place} of call {number}")
            assert_same(given(rank, number), x, f"what call {number} was given")
        assert kind(mesh, given(rank, 0)) is before

    world.run(body)


GRADIENTS = (
    ("sum", "all_reduce"),
    ("gather with gradients", "reduce_scatter_tensor"),
    ("scatter with gradients", "all_gather_into_tensor"),
    ("exchange with gradients", "all_to_all_single"),
)
"""Collectives, and the operator of their gradient."""


@requirement(
    "DYN-RESULT-8655",
    "A graph that make_fx makes of a gradient through a functional collective has the backward's collective with a "
    "wait of its own.",
    source=SOURCE,
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, not all of these collectives have gradients")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.world(2)
def test_made_gradients(world: World, mode: str) -> None:
    """Differentiate each collective in the function that is traced, and call the graph with other values."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        for name, operator in GRADIENTS:
            code = gradient(CALLS[name][0], mesh)
            graph = make_fx(code, tracing_mode=mode)(given(rank, 0))
            wanted = Counter([CALLS[name][1], operator, "wait_tensor", "wait_tensor"])
            assert named(graph) == wanted, f"{name}: {named(graph)}"
            for number in range(2):
                found = graph(given(rank, number))
                assert type(found) is torch.Tensor, name
                assert_same(code(given(rank, number)) + 0, found, f"gradient of {name}, call {number}")

    world.run(body)


MOVES: list[tuple[Placement, Placement]] = [
    (Shard(0), Replicate()),
    (Shard(1), Replicate()),
    (Shard(0), Shard(1)),
    (Partial(), Replicate()),
    (Partial("max"), Shard(0)),
    (Replicate(), Shard(1)),
]


@requirement(
    "DYN-RESULT-8656",
    "A graph that make_fx makes of DTensors in other placements has a wait for each collective of the redistribution.",
    source=f"{SOURCE}; torch.distributed.tensor.DTensor: from_local, redistribute, to_local",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.world(2)
def test_made_of_dtensors(world: World, mode: str) -> None:
    """Redistribute local tensors between all placements, and call the graph with other values."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)

        def code(x: torch.Tensor) -> list[torch.Tensor]:
            made = [(DTensor.from_local(x, mesh, [source], run_check=False), target) for source, target in MOVES]
            return [d.redistribute(placements=[target]).to_local() * 2 for d, target in made]

        graph = make_fx(code, tracing_mode=mode)(given(rank, 0))
        launches = named(graph)
        waits = launches.pop("wait_tensor", 0)
        assert waits == sum(launches.values()) == sum(not source.is_replicate() for source, _ in MOVES), launches
        for number in range(2):
            for (source, target), one, y in zip(
                MOVES, code(given(rank, number)), graph(given(rank, number)), strict=True
            ):
                assert type(y) is torch.Tensor, f"{source} to {target}"
                assert_same(one + 0, y, f"{source} to {target}, call {number}")

    world.run(body)
