"""Hybrid sharding: which collectives a step needs over shards and over replicas, in which order, and their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp
from suites.replicate_fsdp.schedule.test_sharded_schedule import FORWARD, LAYERS, Log, Model, step

SOURCE = "torch.distributed.fsdp.fully_shard: mesh"

BACKWARD = "g2 g1 b2 r2 a2 g0 b1 r1 a1 b0 r0 a0 b3 r3 a3"
KEPT = "b2 r2 a2 b1 r1 a1 b0 r0 a0 b3 r3 a3"
UNREDUCED = "g2 g1 b2 g0 b1 b0 b3"
SHARDED = "g2 g1 b2 r2 g0 b1 r1 b0 r0 b3 r3"


def made(rank: Rank, **options: Any) -> tuple[Any, Log]:
    """Shard each layer and the root over neighbors, with a replica on the other pair of ranks."""
    mesh = options.pop("mesh", None) or rank.mesh(2, 2, names=("replicas", "shards"))
    log = Log(2, (rank.index % 2, rank.index % 2 + 2))
    model: Any = Model(log).to(rank.device)
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, **options)
    log.parameters = [module.weight for module in (*model.layers, model)]
    return model, log


def check_gradients(log: Log, what: str, weight: float) -> None:
    """Assert that each gradient is that of one device for inputs of this sum, sharded and replicated; clear it."""
    sums = [2.0 * (i + 1) for i in range(LAYERS + 1)]
    for index, parameter in enumerate(log.parameters):
        gradient, parameter.grad = parameter.grad, None
        assert isinstance(gradient, DTensor), f"{what}: gradient of {index}"
        assert gradient.placements == (Replicate(), Shard(0)), f"{what}: gradient of {index}"
        right = float(torch.tensor(sums).prod()) / sums[index] * weight
        assert gradient.to_local().tolist() == [right] * (index + 1), f"{what}: gradient of {index}"


MEAN = 2.5
"""The mean over four ranks of the input of a step."""
SETTINGS: dict[str, tuple[dict[str, Any], Callable[[Any], None], str]] = {
    "plain": ({}, lambda model: None, BACKWARD),
    "kept": ({"reshard_after_forward": False}, lambda model: None, KEPT),
    "resharded": ({"reshard_after_forward": True}, lambda model: None, f"g3 {BACKWARD}"),
    "reduced-wide": (
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
        lambda model: None,
        BACKWARD,
    ),
    "sums": ({}, lambda model: [m.set_force_sum_reduction_for_comms(True) for m in (*model.layers, model)], BACKWARD),
    "prefetched": (
        {},
        lambda model: model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]]),
        "g2 g1 g0 b2 r2 a2 b1 r1 a1 b0 r0 a0 b3 r3 a3",
    ),
}


class Either(nn.Module):
    """Multiply by one of two parameters of four elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the product with the parameter of this name."""
        result: torch.Tensor = x * getattr(self, name)
        return result


@requirement(
    "RFSDP-HYBRID-03",
    "Without all-reduce, gradients are summed over micro-batches in shards, and reduced over replicas in the next "
    "all-reduce.",
    source="torch.distributed.fsdp.FSDPModule.set_requires_all_reduce",
)
@pytest.mark.parametrize("first", ["both", "b", "a"])
@pytest.mark.world(4)
def test_held_back(world: World, first: str) -> None:
    """A backward without all-reduce uses both parameters, b or a, and the next one, which has it, b."""

    def body(rank: Rank) -> None:
        model: Any = Either().to(rank.device)
        fully_shard(model, mesh=rank.mesh(2, 2, names=("replicas", "shards")))
        model.set_requires_all_reduce(False)
        x = torch.full((4,), 2.0, device=rank.device)
        sum(model(x, name).sum() for name in ("a", "b") if first in (name, "both")).backward()
        model.set_requires_all_reduce(True)
        model(x * 5, "b").sum().backward()
        right = {"both": (2.0, 12.0), "b": (None, 12.0), "a": (2.0, 10.0)}[first]
        found = [None if p.grad is None else p.grad.full_tensor().tolist() for p in (model.a, model.b)]
        assert found == [None if value is None else [value] * 4 for value in right], f"gradients {found}"

    world.run(body)


@requirement(
    "RFSDP-HYBRID-01",
    "With hybrid sharding, parameters are gathered over the shards only.",
    source=SOURCE,
)
@requirement(
    "RFSDP-HYBRID-02",
    "With hybrid sharding, each gradient is scattered over the shards once, and its shard reduced over the replicas.",
    source=SOURCE,
)
@pytest.mark.world(4)
def test_schedule(world: World) -> None:
    """Run a step with each setting, two with the first, and one over a mesh of given groups; compare gradients."""

    def body(rank: Rank) -> None:
        for name, (options, set_it, backward) in SETTINGS.items():
            model, log = made(rank, **options)
            set_it(model)
            for number in range(2 if name == "plain" else 1):
                assert step(rank, model, log) == (FORWARD, backward), f"{name}, step {number}"
                check_gradients(log, f"{name}, step {number}", MEAN)
        own = rank.mesh(2, 2, names=("replicas", "shards"))
        groups = [own.get_group(name) for name in ("replicas", "shards")]
        given = DeviceMesh.from_group(groups, rank.device.type, mesh=own.mesh, mesh_dim_names=("replicas", "shards"))
        model, log = made(rank, mesh=given)
        assert step(rank, model, log) == (FORWARD, BACKWARD), "a mesh of given groups"
        check_gradients(log, "a mesh of given groups", MEAN)

    world.run(body)


@requirement(
    "RFSDP-HYBRID-03",
    "Without all-reduce, gradients are summed over micro-batches in shards, and reduced over replicas in the next "
    "all-reduce.",
    source="torch.distributed.fsdp.FSDPModule.set_requires_all_reduce",
)
@requirement(
    "RFSDP-HYBRID-04",
    "With hybrid sharding and without synchronization, a backward reduces nothing, neither over shards nor replicas.",
    source="torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync",
)
@pytest.mark.parametrize("reduced", ["", "float64"], ids=["plain", "reduced-wide"])
@pytest.mark.world(4)
def test_accumulation(world: World, reduced: str) -> None:
    """Run micro-batches with neither, with sharding alone and with both, in several orders, and then a plain step."""
    policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduced)) if reduced else MixedPrecisionPolicy()
    events = {"nothing": UNREDUCED, "shards": SHARDED, "both": BACKWARD}
    orders = (["shards", "shards", "both"], ["nothing", "shards", "both"], ["nothing", "both"])

    def body(rank: Rank) -> None:
        model, log = made(rank, mp_policy=policy)
        for order in orders:
            for number, how in enumerate(order):
                model.set_requires_gradient_sync(how != "nothing")
                model.set_requires_all_reduce(how == "both")
                assert step(rank, model, log) == (FORWARD, events[how]), (order, number)
                if "both" not in order[: number + 1]:
                    assert [parameter.grad for parameter in log.parameters] == [None] * 4, (order, number)
            check_gradients(log, f"{order}", MEAN * len(order))
        model.set_requires_all_reduce(False, recurse=False)
        assert step(rank, model, log) == (FORWARD, BACKWARD.removesuffix(" a3")), "without the root's"
        assert [parameter.grad is None for parameter in log.parameters] == [False, False, False, True]

    world.run(body)


@requirement(
    "RFSDP-HYBRID-05",
    "With hybrid sharding, an all-reduce hook gets each shard's gradient once its replicas are reduced.",
    source="torch.distributed.fsdp.FSDPModule.set_all_reduce_hook: 'or the all-reduce output if using native HSDP'",
)
@pytest.mark.world(4)
def test_all_reduce_hook(world: World) -> None:
    """A hook of one layer doubles what it gets; backwards without all-reduce do not call it; a stream is refused."""

    def body(rank: Rank) -> None:
        model, log = made(rank)
        seen: list[list[float]] = []
        layer = model.layers[1]

        def hook(reduced: torch.Tensor) -> None:
            seen.append(reduced.tolist())
            reduced.mul_(2)

        layer.set_all_reduce_hook(hook)
        whole = 2.0 * 6 * 8 * MEAN  # of the other layers and the root
        for synced, times in ((True, 1), (False, 1), (True, 2)):
            model.set_requires_all_reduce(synced)
            step(rank, model, log)
            assert seen == ([[whole * times] * 2] if synced else []), f"{synced=}"
            if synced:
                assert layer.weight.grad.to_local().tolist() == [2 * whole * times] * 2
                for parameter in log.parameters:
                    parameter.grad = None
            seen.clear()
        with pytest.raises(ValueError, match="stream"):
            layer.set_all_reduce_hook(hook, stream=object())

    world.run(body)


FACTORS = {
    "float64": ({"dtype": torch.float64}, None, False, (1.0, 4.0, 0.5)),
    "float16": ({"dtype": torch.float16}, None, False, (2.0, 8.0)),
    "reduced-wide": ({}, torch.float64, False, (4.0, 2.0)),
    "sums": ({}, None, True, (1.0, 4.0, 0.5)),
    "narrow-sums": ({"dtype": torch.bfloat16}, None, True, (2.0, 8.0)),
    "float32": ({}, None, False, ("shards",)),
    "bfloat16": ({"dtype": torch.bfloat16}, None, False, ("shards",)),
    "reduced-narrow": ({}, torch.bfloat16, False, ("shards",)),
}
"""Options of a layer, the dtype of reduction, whether sums are forced, and gradient divide factors.

The number of shards needs no multiplication, as an average over them divides by it. Factors that need multiplication
in a reduction, which not every backend has, are left out.
"""


@requirement(
    "RFSDP-DIV-05",
    "With full or hybrid sharding, the sum of all ranks' gradients is divided by a gradient divide factor once.",
    source="torch.distributed.fsdp.FSDPModule: set_gradient_divide_factor, set_force_sum_reduction_for_comms",
)
@pytest.mark.world(4)
def test_divide_factor(world: World) -> None:
    """Step without a factor and with several, in all dtypes and reductions, at once or over two micro-batches."""

    def body(rank: Rank) -> None:
        for name, (options, reduced, sums, factors) in FACTORS.items():
            for shape in ((4,), (2, 2)):
                mesh = rank.mesh(*shape, names=("replicas", "shards")[-len(shape) :])
                model: Any = nn.Linear(4, 4, bias=False, device=rank.device, **options)
                fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced))
                model.set_force_sum_reduction_for_comms(sums)
                for given in (None, *factors):
                    factor: Any = float(shape[-1]) if given == "shards" else given
                    if factor is not None:
                        model.set_gradient_divide_factor(factor)
                    for synced in ([True], [False, True]) if given == factors[-1] else ([True],):
                        for on in synced:
                            model.set_requires_all_reduce(on)
                            x = torch.full((1, 4), 8.0 * (1 + rank.index), device=rank.device, **options)
                            model(x).sum().backward()
                        found = replicate_fsdp.gradients(model)["weight"].unique().tolist()
                        right = 80.0 * len(synced) / (factor or 4.0)
                        assert found == [right], f"{name}, {shape}, {factor}, {len(synced)} micro-batches"
                        model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-DIV-05",
    "With full or hybrid sharding, the sum of all ranks' gradients is divided by a gradient divide factor once.",
    source="torch.distributed.fsdp.FSDPModule: set_gradient_divide_factor, set_force_sum_reduction_for_comms",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.world(4)
def test_factor_in_the_reduction(world: World, dtype: str) -> None:
    """Step with two factors that the reduction multiplies by; where it can't, every rank raises."""

    def body(rank: Rank) -> list[list[float]] | str:
        options: Any = {"dtype": getattr(torch, dtype), "device": rank.device}
        found = []
        for shape in ((4,), (2, 2)):
            mesh = rank.mesh(*shape, names=("replicas", "shards")[-len(shape) :])
            for factor in (8.0, 0.5):
                model: Any = nn.Linear(4, 4, bias=False, **options)
                fully_shard(model, mesh=mesh)
                model.set_gradient_divide_factor(factor)
                out = model(torch.full((1, 4), 8.0 * (1 + rank.index), **options)).sum()
                try:
                    out.backward()
                except (RuntimeError, ValueError):
                    return "refused"
                found.append(replicate_fsdp.gradients(model)["weight"].unique().tolist())
        return found

    ends = world.run(body)
    assert ends in (["refused"] * 4, [[[10.0], [160.0], [10.0], [160.0]]] * 4), f"gradients of {dtype}: {ends}"
