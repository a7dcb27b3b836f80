"""DTensors on a mesh of some ranks of the world, as the ranks within the mesh and those outside it see them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dtensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fixtures.placements import MORE_OPERATORS, laid_out
from fixtures.tensors import numbers
from harness import Rank, World, assert_same, requirement
from harness.stacks import messages

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.device_mesh.DeviceMesh; torch.distributed.tensor.DTensor"
LAYOUTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
OPERATORS: dict[str, Callable[[Any], Any]] = {
    "number": lambda x: x + 2,
    "product": lambda x: x * x,
    "comparison": lambda x: x > 3,
    "converted": lambda x: x.to(torch.int64),
    "in place": lambda x: x.mul_(2),
    "transposed": lambda x: x.t(),
    "several": lambda x: x.split([2, 4], 1),
    "two": lambda x: x.topk(2, 1),
    "total": lambda x: x.sum(),
    "rows": lambda x: x.sum(1),
    "maximum": lambda x: x.amax(),
    "alike": torch.zeros_like,
}
"""Functions of one DTensor, whose results are one or several."""


def check(rank: Rank, found: DTensor, whole: torch.Tensor, mesh: DeviceMesh, what: str) -> None:
    """Assert that a tensor has its whole size everywhere, and that only ranks of the mesh have a part of its values."""
    assert (found.shape, found.dtype, found.device_mesh) == (whole.shape, whole.dtype, mesh), what
    local = found.to_local()
    if mesh.get_coordinate() is None:
        assert local.dtype == whole.dtype, what
        assert (local.numel(), local.tolist()) == ((0, []) if whole.dim() else (1, 0)), what
    elif not any(placement.is_partial() for placement in found.placements):
        assert_same(laid_out(whole, mesh, found.placements), local, what)


@requirement(
    "TP-OUT-01",
    "On a rank outside its mesh, a DTensor has the whole's size but no elements, and what is done with it neither "
    "computes nor communicates.",
    source=SOURCE,
)
@requirement(
    "TP-OUT-02",
    "torch.equal of DTensors gives a rank outside their mesh the answer of all ranks of the mesh.",
    source=SOURCE,
)
@pytest.mark.world(3)
def test_outside(world: World) -> None:
    """The mesh has the first and the last of three ranks; make, move, compute and compare tensors in each layout."""

    def body(rank: Rank) -> None:
        mesh, whole = DeviceMesh(rank.device.type, [0, 2]), (numbers(4, 6) * 2).to(rank.device)
        outside, at = rank.index == 1, messages.mark()
        assert (mesh.get_coordinate() is None) == outside

        def made(layout: Placement) -> DTensor:
            own = torch.full((4, 6), 9.0, device=rank.device) if outside else whole
            local = own if outside else laid_out(own, mesh, [layout]) / (2 if layout == Partial() else 1)
            return DTensor.from_local(local.clone(), mesh, [layout], shape=whole.shape, stride=whole.stride())

        for layout in LAYOUTS:
            what = f"{layout}"
            check(rank, made(layout), whole, mesh, what)
            check(rank, distribute_tensor(whole.clone(), mesh, [layout]), whole, mesh, f"{what}, distributed")
            for name, operator in OPERATORS.items():
                right, results = operator(whole.clone()), operator(made(layout))
                for one, found in zip(*(r if isinstance(r, tuple) else [r] for r in (right, results)), strict=True):
                    check(rank, found, one, mesh, f"{what}, {name}")
            if layout != Partial():
                ones = dtensors.ones(4, 6, device_mesh=mesh, placements=[layout])
                check(rank, ones, torch.ones_like(whole), mesh, f"{what}, ones")
            full = made(layout).full_tensor()
            assert_same(full.new_empty(0) if outside else whole, full + 0, f"{what}, full")
        for layout, target, late in itertools.product(LAYOUTS, LAYOUTS[:3], (False, True)):
            moved = made(layout).redistribute(placements=[target], async_op=late)
            check(rank, moved, whole, mesh, f"{layout} to {target}")
        if outside:
            assert not messages.since(at)
        for layout in LAYOUTS[:3]:
            for changed in None, 0, 2:
                other = made(layout)
                if rank.index == changed:
                    other.to_local()[-1, -1] += 1
                assert made(layout).equal(other) == (changed is None), f"{layout}, rank {changed} has another value"

    world.run(body)


@requirement(
    "TP-OUT-01",
    "On a rank outside its mesh, a DTensor has the whole's size but no elements, and what is done with it neither "
    "computes nor communicates.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_backward(world: World) -> None:
    """The mesh has the first of two ranks; both run the backwards of elements and of a sum, in each layout."""

    def body(rank: Rank) -> None:
        mesh = DeviceMesh(rank.device.type, [0])
        for layout, total in itertools.product(LAYOUTS[:3], (False, True)):
            local = torch.ones(2, 3, device=rank.device, requires_grad=True)
            given: Any = DTensor.from_local(local, mesh, [layout]) * 2
            (given.sum() if total else given).to_local().sum().backward()
            right = torch.full((2, 3), 2.0 * (rank.index == 0))
            found = torch.zeros_like(local) if local.grad is None and rank.index else local.grad
            assert found is not None
            assert_same(right, found, f"gradient, {layout}, {total=}")

    world.run(body)
