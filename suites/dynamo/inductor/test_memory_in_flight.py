"""Memory that Inductor gives to other tensors while a collective is under way."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.postponing import Postponing
from harness import Rank, World, assert_same, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional, unwaited

CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], Any]] = {
    "gather": lambda y, z, group: functional.all_gather_tensor(y, 0, group),
    "gathers of a list": lambda y, z, group: functional.all_gather_into_tensor_coalesced([y, z], group),
    "scatter": lambda y, z, group: functional.reduce_scatter_tensor(y, "sum", 0, group),
    "scatters of a list": lambda y, z, group: functional.reduce_scatter_tensor_coalesced([z, y], "sum", [0, 0], group),
    "exchange": lambda y, z, group: functional.all_to_all_single(y, None, None, group),
}
"""Collectives of which each result has memory of its own."""


@requirement(
    "DYN-PASS-8001",
    "Code that Inductor has reordered writes to no input of a collective before it has waited for that collective.",
    source="torch._inductor: memory planning, waits of collectives; pytorch/pytorch#108811",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(1, warm=False, timeout=180)
def test_inputs_in_flight(world: World) -> None:
    """Wait as late as possible, after products for which there would be room in the inputs of the collectives."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        def make(store: dist.Store, index: int, size: int, timeout: Any) -> Any:
            return Postponing(index, size)

        dist.Backend.register_backend("postponing", make, devices=[rank.device.type])
        group: Any = dist.new_group([0], backend="postponing")
        options = {
            "reorder_for_compute_comm_overlap": True,
            "reorder_for_compute_comm_overlap_passes": ["sink_waits"],
        }

        def code(x: torch.Tensor) -> list[Any]:
            power, results = x, []
            for call in CALLS.values():
                power = power @ x
                results.append(call(power, x @ power, group))
            product = x.t() @ x
            for _ in range(6):
                product = product @ x
            return [*results, product]

        x = torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]], device=rank.device)
        with dynamo.cached_as(tag), dynamo.inductor_options(options):
            results = dynamo.compiled(code, backend="inductor")[0](x)
        flat = [y for each in (code(x), results) for one in each for y in (one if isinstance(one, list) else [one])]
        half = len(flat) // 2
        for number, (right, result) in enumerate(zip(flat[:half], flat[half:], strict=True)):
            assert_same(right + 0, result + 0, f"tensor {number}")
        assert unwaited() == 0

    world.run(body)
