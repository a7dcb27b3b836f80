"""Inductor's code for each kind of collective: results, dtypes and strides as in uncompiled code."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional, unwaited

SOURCE = "torch/_inductor/comm_lowering.py"

Tensors = list[torch.Tensor]


@requirement(
    "DYN-PASS-5070",
    "Inductor's code for each kind of collective has the results of uncompiled code in values, dtype and strides.",
    source=SOURCE,
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(2, timeout=180)
def test_results(world: World) -> None:
    """Launch coalesced, uneven, transposed and in-place collectives, and gathers in a bucket, in one graph."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        group = dist.group.WORLD
        mesh = init_device_mesh(rank.device.type, (2,))
        received, sent = [[1, 2], [3, 2]][rank.index], [[1, 3], [2, 2]][rank.index]

        def code(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Tensors:
            dist.all_reduce(y[1:3], group=group)
            dist.all_reduce(z, dist.ReduceOp.MAX, group=group)
            rows = DTensor.from_local(x, mesh, [Shard(0)])
            return [
                functional.all_reduce(x.t(), "sum", group),
                functional.all_gather_tensor(x, 0, group),
                functional.all_gather_tensor(x[2], 0, group),
                functional.reduce_scatter_tensor(x, "max", 1, group),
                functional.all_to_all_single(x[0], received, sent, group),
                functional.broadcast(x[1], 1, group),
                *functional.all_reduce_coalesced([x[1], x], "sum", group),
                *functional.all_gather_into_tensor_coalesced([x[3], x], group),
                *functional.reduce_scatter_tensor_coalesced([x[1], x], "sum", [0, 0], group),
                rows.redistribute(placements=[Shard(1)]).to_local(),
                y[2] + 1,
            ]

        given = [dyadic(4, 4, key=(rank.index, k), dtype=torch.float32).to(rank.device) for k in range(3)]
        alone = [x.clone() for x in given]
        raw = code(*alone)
        right = [(x + 0, x.stride()) for x in (*raw, *alone)]
        pending = unwaited()
        with dynamo.cached_as(f"{tag} {rank.index}"), dynamo.inductor_options({"bucket_all_gathers_fx": "all"}):
            function, counter = dynamo.compiled(code, backend="inductor")
            results = function(*given)
        assert unwaited() == pending
        assert counter.graphs == 1
        for number, ((one, stride), result) in enumerate(zip(right, [*results, *given], strict=True)):
            assert_same(one, result + 0, f"tensor {number}")
            assert stride == result.stride(), f"tensor {number}"

    world.run(body)


STRIDED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "broadcast": (lambda x: functional.broadcast(x, 0, dist.group.WORLD), 1),
    "all_reduce": (lambda x: functional.all_reduce(x, "sum", dist.group.WORLD), 2),
}
"""Collectives whose result is a multiple of what all ranks give."""


@requirement(
    "DYN-PASS-9002",
    "Inductor's code for a collective has the values of uncompiled code where ranks give tensors of other strides.",
    source="torch/distributed/_functional_collectives.py: all_reduce, broadcast",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.world(2, timeout=180)
def test_strides_of_ranks(world: World, name: str) -> None:
    """Give a sum that is transposed on rank 1 alone."""
    collective, times = STRIDED[name]

    def body(rank: Rank) -> None:
        whole = torch.arange(24.0, device=rank.device).view(4, 6)
        x = whole if rank.index == 0 else whole.t().contiguous().t()
        with dynamo.cached_as(f"{name} {rank.index}"):
            function, _ = dynamo.compiled(lambda x: collective(x + 3), backend="inductor")
            assert_same((whole + 3) * times, function(x) + 0, name)

    world.run(body)


@requirement(
    "DYN-PASS-5071",
    "Inductor's code sends a tensor as it is at that time and writes what it receives, alone or in a batch.",
    source=SOURCE,
)
@pytest.mark.needs(features=["inductor"], torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.world(2, timeout=180)
def test_messages(world: World) -> None:
    """Rank 0 sends a product that it has transposed; then both send a tensor and a part of it, and change it after."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        peer = 1 - rank.index

        def code(x: torch.Tensor, *others: torch.Tensor) -> Tensors:
            if rank.index == 0:
                dist.isend((x * 2).t().contiguous(), peer, tag=1).wait()  # type: ignore[union-attr]
            else:
                dist.irecv(others[0], peer, tag=1).wait()  # type: ignore[union-attr]
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, peer, tag=2),
                    dist.P2POp(dist.irecv, others[1], peer, tag=2),
                    dist.P2POp(dist.isend, x[1], peer, tag=3),
                    dist.P2POp(dist.irecv, others[2], peer, tag=3),
                ]
            )
            for work in works:
                work.wait()
            x += 1
            return [other * 2 for other in others]

        x, others = (dyadic(4, 4, key=key, dtype=torch.float32).to(rank.device) for key in (rank.index, peer))
        first = (others * 2).t().contiguous() if rank.index else torch.zeros_like(x)
        right = [first, others, others[1]]
        given = [torch.zeros_like(one) for one in right]
        with dynamo.compiled_messages(), dynamo.cached_as(f"{tag} {rank.index}"):
            function, counter = dynamo.compiled(code, backend="inductor")
            results = function(x.clone(), *given)
        assert counter.graphs == 1
        for number, (one, into, result) in enumerate(zip(right, given, results, strict=True)):
            assert_same(one, into + 0, f"message {number}")
            assert_same(one * 2, result + 0, f"twice message {number}")

    world.run(body)


@requirement(
    "DYN-PASS-5072",
    "The passes that PyTorch recommends to reorder move a gather before products, and another's wait behind them.",
    source="torch/_inductor/config.py: reorder_for_compute_comm_overlap_passes",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(2, timeout=180)
def test_recommended_passes(world: World) -> None:
    """Gather for the end, and for a product of products."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        group = dist.group.WORLD

        def code(x: torch.Tensor, y: torch.Tensor) -> Tensors:
            first = functional.all_gather_tensor(x, 0, group)
            product = x @ y
            square = product @ product
            second = functional.all_gather_tensor(y, 0, group)
            return [first, square, second[:4] @ square]

        def seen(nodes: list[Any]) -> list[Any]:
            orders.append([node.get_name() for node in nodes])
            return list(nodes)

        x, y = (dyadic(4, 4, key=(rank.index, k), dtype=torch.float32, span=2).to(rank.device) for k in range(2))
        right = [one + 0 for one in code(x, y)]
        orders = list[list[str]]()
        reorder = "reorder_communication_preserving_peak_memory"
        options = {
            "reorder_for_compute_comm_overlap": True,
            "reorder_for_compute_comm_overlap_passes": [seen, reorder, "sink_waits_iterative", reorder, seen],
        }
        with dynamo.cached_as(f"{tag} {rank.index}"), dynamo.inductor_options(options):
            results = dynamo.compiled(code, backend="inductor")[0](x, y)
        for number, (one, result) in enumerate(zip(right, results, strict=True)):
            assert_same(one, result + 0, f"tensor {number}")
        gather, other, wait, other_wait, product, square, last = orders[0]
        assert orders[-1] == [gather, other, product, square, other_wait, last, wait]

    world.run(body)
