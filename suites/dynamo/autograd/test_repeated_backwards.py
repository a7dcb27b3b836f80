"""Graphs of compiled code with DTensors and collectives, of which more than one backward is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()


def _local(d: Any) -> torch.Tensor:
    local: torch.Tensor = d.to_local()
    return local


def _gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.all_gather_tensor_autograd(x, 0, group)


def _scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.reduce_scatter_tensor_autograd(x, "sum", 0, group)


def _exchanged(x: torch.Tensor, group: Any) -> torch.Tensor:
    return functional.all_to_all_single_autograd(x, None, None, group)


def _inside(x: torch.Tensor, mesh: Any) -> Any:
    return DTensor.from_local(x * x, mesh, [ROWS], run_check=False)


CASES: dict[str, dict[str, Callable[[Any, Any, Any], Any]]] = {
    "given": {
        "squares": lambda d, e, m: d * d,
        "products": lambda d, e, m: (d * 2) @ (d * 3).t(),
        "of two meshes": lambda d, e, m: [d * d, e * e * e],
        "beside a tensor": lambda d, e, m: [d.sin(), _local(e) * 2],
        "local": lambda d, e, m: _local(d) * _local(d) + _local(e)[:4],
    },
    "redistributed": {
        "whole": lambda d, e, m: (d * d).redistribute(placements=[WHOLE]) * 2,
        "columns": lambda d, e, m: (d * d).redistribute(placements=[COLUMNS]),
        "sums": lambda d, e, m: (d * d).sum(0).redistribute(placements=[WHOLE]),
        "over two meshes": lambda d, e, m: d.redistribute(placements=[WHOLE]).to_local() * e.full_tensor(),
    },
    "made": {
        "rows": lambda d, e, m: _inside(_local(d), m) * 2,
        "gathered": lambda d, e, m: _inside(_local(d), m).redistribute(placements=[WHOLE]).sin(),
        "taken": lambda d, e, m: _inside(_local(d), m).full_tensor() * 3,
    },
    "collectives": {
        "of a mesh": lambda d, e, m: _gathered(_local(d) * _local(d), (m, 0)).sin(),
        "of a group": lambda d, e, m: _scattered(_local(d) * _local(d), m.get_group()) * 2,
        "of all": lambda d, e, m: _exchanged(_local(d) * _local(d), dist.group.WORLD).cos(),
    },
}
"""Functions of DTensors on two meshes and the first of these meshes."""


def _total(result: Any) -> torch.Tensor:
    parts = [y.to_local() if isinstance(y, DTensor) else y for y in (result if isinstance(result, list) else [result])]
    total: torch.Tensor = torch.stack([y.sum() for y in parts]).sum()
    return total


def _leaves(rank: Rank, meshes: dict[str, Any], rows: int, *key: int) -> list[Any]:
    """Return a DTensor whose rows are sharded over mesh b, and one of twice the rows, which is whole on mesh a."""
    return [
        DTensor.from_local(
            dyadic(count, 4, key=(name, *key, rank.index), dtype=torch.float32).to(rank.device),
            meshes[name],
            [placement],
            run_check=False,
        ).requires_grad_()
        for name, count, placement in (("b", rows, ROWS), ("a", 2 * rows, WHOLE))
    ]


@requirement(
    "DYN-RETAIN-8600",
    "Each further backward of compiled code whose graph is retained adds the gradients of the first one.",
    source="torch.Tensor.backward: retain_graph; torch.compile; torch.distributed.tensor.DTensor",
)
@requirement(
    "DYN-RETAIN-8601",
    "A backward of compiled code whose graph was not retained raises the error of uncompiled code.",
    source="torch.Tensor.backward: retain_graph, 'the graph used to compute the grads will be freed'; torch.compile",
)
@pytest.mark.parametrize("of", CASES)
@pytest.mark.world(2)
def test_repeated(world: World, of: str) -> None:
    """Take three backwards of two calls by turns, and a fourth one, for which the graphs are gone."""

    def body(rank: Rank) -> None:
        both = rank.mesh(1, 2, names=("a", "b"))
        meshes: dict[str, Any] = {name: both[name] for name in "ab"}

        def gradients(run: Callable[[Any, Any, Any], Any]) -> list[Any]:
            leaves, totals = [], []
            for call in range(2):
                d, e = _leaves(rank, meshes, 4, call)
                leaves += [d, e]
                totals.append(_total(run(d, e, meshes["b"])))
            found: list[Any] = []
            for last in (False, False, True):
                for total in totals:
                    total.backward(retain_graph=not last)
                found += [None if leaf.grad is None else leaf.grad.to_local() + 0 for leaf in leaves]
            for total in totals:
                with pytest.raises(RuntimeError, match="second time"):
                    total.backward()
            return found

        for name, case in CASES[of].items():
            compiled, counter = dynamo.compiled(case)
            for number, (right, result) in enumerate(zip(gradients(case), gradients(compiled), strict=True)):
                assert (right is None) == (result is None), f"{name}: gradient {number}"
                if right is not None:
                    assert_same(right, result, f"{name}: gradient {number}")
            assert counter.graphs == 1, name

    world.run(body)


@requirement(
    "DYN-RETAIN-8602",
    "Gradients of single results of compiled code are those of uncompiled code, in whatever order they are taken.",
    source="torch.autograd.grad: retain_graph, allow_unused; torch.compile; torch.distributed.tensor.DTensor",
)
@pytest.mark.world(2)
def test_of_each_result(world: World) -> None:
    """Take the gradients of three results, one on another mesh, forwards and backwards, by torch.autograd.grad."""

    def several(d: Any, e: Any) -> list[Any]:
        whole = d.redistribute(placements=[WHOLE])
        return [_local(d * d * 2), _local(e * e), _local(whole.sin()) * _local(e)]

    def body(rank: Rank) -> None:
        both = rank.mesh(1, 2, names=("a", "b"))
        meshes: dict[str, Any] = {name: both[name] for name in "ab"}
        compiled, counter = dynamo.compiled(several)
        for order in ((0, 1, 2, 0), (2, 1, 0, 2)):
            found = []
            for run in (several, compiled):
                d, e = _leaves(rank, meshes, 2)
                results = run(d, e)
                for number in order:
                    given = torch.autograd.grad(_total(results[number]), [d, e], retain_graph=True, allow_unused=True)
                    found.append(given)
            for number, rights, gradients in zip(order, found[: len(order)], found[len(order) :], strict=True):
                for right, gradient, mesh in zip(rights, gradients, (meshes["b"], meshes["a"]), strict=True):
                    what = f"result {number} of {order}, mesh {mesh}"
                    if right is None:  # compiled code has zeros where uncompiled code has no gradient
                        assert gradient is None or not gradient.to_local().any(), what
                        continue
                    assert isinstance(gradient, DTensor), what
                    assert (gradient.device_mesh, gradient.placements) == (mesh, right.placements), what
                    assert_same(right.to_local() + 0, gradient.to_local() + 0, what)
        assert counter.graphs == 1

    world.run(body)
