"""ShardedGradScaler, the scaler of gradients that FSDP shards."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from fixtures.wrapped import Weight, wrapped
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

SCALER = "torch/distributed/fsdp/sharded_grad_scaler.py: ShardedGradScaler"
SINCE = pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, a fused Adagrad scales nothing itself")


@requirement(
    "TP-SCALE-3705",
    "A ShardedGradScaler unscales sparse gradients as dense ones, and skips a step if their values, or sums of them in "
    "float16, are not finite.",
    source=f"{SCALER}.unscale_; torch.amp.GradScaler",
)
@pytest.mark.world(2)
def test_sparse(world: World) -> None:
    """A gradient names a row twice; in float16 only the sum of both is infinite; one rank or none has such a one."""

    def body(rank: Rank) -> None:
        rows = torch.tensor([[0, 2, 0]], device=rank.device)
        for dtype, spoilt, sparse in itertools.product((torch.float32, torch.float16), (None, 0, 1), (True, False)):
            what = f"{dtype}, {spoilt=}, {sparse=}"
            weight = nn.Parameter(torch.ones(4, 2, dtype=dtype, device=rank.device))
            sgd = torch.optim.SGD([weight], lr=0.5)
            scaler = ShardedGradScaler(rank.device.type, init_scale=4.0, backoff_factor=0.25, growth_interval=1)
            scaler.scale(torch.ones((), device=rank.device))
            infinite = torch.finfo(dtype).max if dtype == torch.float16 else torch.inf
            large = infinite if rank.index == spoilt else 16.0
            values = torch.tensor([[4.0, large], [8.0, 2.0], [12.0, large]], dtype=dtype, device=rank.device)
            gradient = torch.sparse_coo_tensor(rows, values, (4, 2), check_invariants=True)
            weight.grad = gradient if sparse else gradient.to_dense()
            scaler.unscale_(sgd)
            assert weight.grad.is_sparse == sparse, what
            if rank.index != spoilt:
                expected = torch.tensor([[4.0, 8.0], [0.0, 0.0], [2.0, 0.5], [0.0, 0.0]], dtype=dtype)
                assert weight.grad.to_dense().tolist() == expected.tolist(), what
            scaler.step(sgd)
            scaler.update()
            skipped = spoilt is not None
            assert scaler.get_scale() == (1.0 if skipped else 8.0), f"{what}: {scaler.get_scale()}"
            after = [[1.0, 1.0]] * 4 if skipped else [[-1.0, -3.0], [1.0, 1.0], [0.0, 0.75], [1.0, 1.0]]
            assert weight.tolist() == after, f"{what}: {weight.tolist()}"

    world.run(body)


@requirement(
    "TP-SCALE-51",
    "If a ShardedGradScaler steps several optimizers, one with a non-finite gradient on any rank shrinks the scale, "
    "and skips its own step on every rank.",
    source=SCALER,
)
@pytest.mark.world(2)
def test_scaled(world: World) -> None:
    """Step one to three optimizers, each in turn with an infinity or a NaN on one rank, then all of them twice."""
    values = (math.inf, -math.inf, math.nan)

    def body(rank: Rank) -> None:
        for count in (1, 2, 3):
            spoilt = [set[int](), *({i} for i in range(count)), set(range(count))]
            for number, chosen in enumerate(spoilt):
                unscaled = (number + count) % 2 == 0
                what = f"{count} optimizers, {unscaled=}, {chosen}"
                models = [wrapped(rank, Weight(4, 1.0), use_orig_params=True) for _ in range(count)]
                optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
                scaler = ShardedGradScaler(
                    rank.device.type, init_scale=16.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2
                )
                scale, expected = 16.0, [1.0] * count
                for step in range(4):
                    for model, sgd in zip(models, optimizers, strict=True):
                        sgd.zero_grad()
                        scaler.scale(model(torch.ones(1, device=rank.device)).sum()).backward()
                    for i in chosen if step == 1 else ():
                        if rank.index == (number + i) % 2:
                            next(models[i].parameters()).grad[0] = values[number % 3]
                    for i, sgd in enumerate(optimizers):
                        if unscaled and i != 1:
                            scaler.unscale_(sgd)
                        scaler.step(sgd)
                    scaler.update()
                    bad = step == 1 and chosen
                    grown = step == 3 or (step == 1 and not chosen)
                    scale *= 0.25 if bad else 4.0 if grown else 1.0
                    expected = [e - 0.5 * (not bad or i not in chosen) for i, e in enumerate(expected)]
                    assert scaler.get_scale() == scale, f"{what}, step {step}"
                    found = [p.tolist() for model in models for p in model.parameters()]
                    assert found == [[e] * 2 for e in expected], f"{what}, step {step}"

    world.run(body)


@requirement(
    "TP-SCALE-1601",
    "unscale_ of a ShardedGradScaler divides every gradient by the scale, also those beside one that is not finite.",
    source=f"{SCALER}.unscale_",
)
@pytest.mark.world(2)
def test_unscaled(world: World) -> None:
    """Put an infinity or a NaN into the first, the second or the last of three gradients, on one rank or on both."""

    def body(rank: Rank) -> None:
        for value, place, everywhere in itertools.product((math.inf, math.nan), range(3), (True, False)):
            parameters = [nn.Parameter(torch.ones(4, device=rank.device)) for _ in range(3)]
            sgd = torch.optim.SGD(parameters, lr=1.0)
            scaler = ShardedGradScaler(rank.device.type, init_scale=8.0)
            scaler.scale(torch.ones((), device=rank.device))
            for number, parameter in enumerate(parameters, 1):
                parameter.grad = torch.full_like(parameter.detach(), 8.0 * number)
            if everywhere or rank.index == 1:
                assert parameters[place].grad is not None
                parameters[place].grad[1] = value
            scaler.unscale_(sgd)
            found = [float(p.grad[-1]) for p in parameters if p.grad is not None]
            assert found == [1.0, 2.0, 3.0], f"{value} in gradient {place}, {everywhere=}: {found}"

    world.run(body)


@requirement(
    "TP-SCALE-52",
    "A ShardedGradScaler scales nested lists, takes a new scale, asks the ranks of its group only, and does nothing if "
    "disabled.",
    source=SCALER,
)
@pytest.mark.world(2)
def test_scaler_options(world: World) -> None:
    """One rank has an infinity, and groups have one rank or both."""

    def body(rank: Rank) -> None:
        groups = [dist.new_group([i]) for i in range(2)]
        for group, alone in ((dist.group.WORLD, False), (groups[rank.index], True)):
            scaler = ShardedGradScaler(rank.device.type, init_scale=8.0, process_group=group)
            one = torch.ones(2, device=rank.device)
            low = one.bfloat16()
            tensor, pair = scaler.scale([one, (low, [one * 2])])
            assert (tensor.tolist(), type(pair), pair[1][0].tolist()) == ([8.0] * 2, tuple, [16.0] * 2)
            losses = [pair[0], scaler.scale(low.sum()), *scaler.scale([low.sum()])]
            assert {loss.dtype for loss in losses} == {torch.bfloat16}
            weight = nn.Parameter(torch.ones(2, device=rank.device))
            sgd = torch.optim.SGD([weight], lr=1.0)
            weight.grad = torch.full((2,), math.inf if rank.index else 8.0, device=rank.device)
            scaler.step(sgd)
            scaler.update()
            skipped = rank.index == 1 or not alone
            assert (weight.tolist(), scaler.get_scale()) == ([float(skipped)] * 2, 4.0 if skipped else 8.0), f"{alone=}"
            weight.grad = torch.ones(2, device=rank.device)
            scaler.step(sgd)
            scaler.update(32.0)
            assert scaler.get_scale() == 32.0
        off = ShardedGradScaler(rank.device.type, enabled=False)
        weight.grad = torch.full((2,), math.inf, device=rank.device)
        assert off.scale(one) is one
        off.step(sgd)
        off.update()
        assert (weight.tolist(), off.get_scale()) == ([-math.inf] * 2, 1.0)

    world.run(body)


@requirement(
    "TP-SCALE-262",
    "If a gradient is not finite on one rank, a ShardedGradScaler skips the step on every rank and shrinks the scale, "
    "also with a fused optimizer.",
    source=SCALER,
)
@pytest.mark.parametrize("form", ["plain", "unscaled", "fused"])
@pytest.mark.world(2)
def test_infinity_of_a_rank(world: World, form: str) -> None:
    """Step a plain optimizer, a fused one, or a fused one after unscale_, with an infinity on the first rank."""

    def body(rank: Rank) -> tuple[list[float], float]:
        model = wrapped(rank, Weight(4, 1.0), use_orig_params=True)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5, fused=form != "plain")
        scaler = ShardedGradScaler(rank.device.type, init_scale=4.0)
        scaler.scale(model(torch.ones(1, device=rank.device)).sum()).backward()
        if rank.index == 0:
            next(model.parameters()).grad[0] = torch.inf
        if form == "unscaled":
            scaler.unscale_(sgd)
        scaler.step(sgd)
        scaler.update()
        return next(model.parameters()).tolist(), scaler.get_scale()

    assert_on_ranks([([1.0, 1.0], 2.0)] * 2, world.run(body))


@requirement(
    "TP-SCALE-263",
    "A fused optimizer steps after unscale_ of a ShardedGradScaler with the unscaled gradients.",
    source=SCALER,
)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", pytest.param("Adagrad", marks=SINCE)])
@pytest.mark.world(2)
def test_fused_after_unscaling(world: World, name: str) -> None:
    """Unscale gradients of 16, and step optimizers whose first step depends on them little or much."""
    rates = {"SGD": 0.25}

    def body(rank: Rank) -> list[float]:
        model = wrapped(rank, Weight(4, 4.0), use_orig_params=True)
        options = {"lr": rates.get(name, 1.0), "fused": True, "weight_decay": 0.0}
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        scaler = ShardedGradScaler(rank.device.type, init_scale=4.0)
        scaler.scale(model(torch.ones(1, device=rank.device)).sum()).backward()
        scaler.unscale_(optimizer)
        assert next(model.parameters()).grad.tolist() == [4.0, 4.0]
        scaler.step(optimizer)
        return [round(value, 4) + 0.0 for value in next(model.parameters()).tolist()]

    assert_on_ranks([[0.0, 0.0]] * 2, world.run(body))


@requirement(
    "TP-SCALE-264",
    "The scale of a ShardedGradScaler stays finite, however often it grows, as that of a GradScaler does.",
    source=f"{SCALER}; torch.amp.GradScaler",
)
@pytest.mark.parametrize("start", [0, 126], ids=["small", "largest"])
@pytest.mark.world(2)
def test_growth(world: World, start: int) -> None:
    """Grow a scale of 1, or of almost the largest number, three times."""

    def body(rank: Rank) -> list[float]:
        weight = nn.Parameter(torch.ones(1, device=rank.device))
        sgd = torch.optim.SGD([weight], lr=0.5)
        scaler = ShardedGradScaler(rank.device.type, init_scale=2.0**start, growth_interval=1)
        scales = []
        for _ in range(3):
            weight.grad = torch.zeros_like(weight)
            scaler.scale(torch.ones(1, device=rank.device))
            scaler.step(sgd)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    right = [2.0 ** min(start + 1 + step, 127) for step in range(3)]
    assert_on_ranks([right] * 2, world.run(body))


@requirement(
    "TP-SCALE-3612",
    "update of a ShardedGradScaler takes the scale that it is given, as a number or as a tensor of one element.",
    source=f"{SCALER}.update: new_scale; its error: 'a float or a 1-element' tensor",
)
@pytest.mark.parametrize("shape", [None, (), (1,)], ids=["number", "zero-dimensional", "vector"])
@pytest.mark.world(2)
def test_given_scale(world: World, shape: tuple[int, ...] | None) -> None:
    """Give a scale, then another one; change the tensor afterwards."""

    def body(rank: Rank) -> list[float]:
        scaler = ShardedGradScaler(rank.device.type, init_scale=2.0)
        scaler.scale(torch.ones(1, device=rank.device))
        scales = []
        for scale in 8.0, 16.0:
            given = scale if shape is None else torch.full(shape, scale, device=rank.device)
            scaler.update(given)
            if isinstance(given, torch.Tensor):
                given.zero_()
            scales.append(scaler.get_scale())
        return scales

    assert_on_ranks([[8.0, 16.0]] * 2, world.run(body))


@requirement(
    "TP-SCALE-3200",
    "Ranks without gradients take part in a ShardedGradScaler's steps: all ranks step, or skip a step, together.",
    source=SCALER,
)
@pytest.mark.parametrize("way", ["step", "unscale_"])
@pytest.mark.world(2, 3)
def test_ranks_without_gradients(world: World, way: str) -> None:
    """A weight has one element, which one rank has; its gradient is finite in the first and the third of four steps."""

    def body(rank: Rank) -> None:
        model = wrapped(rank, Weight(1, 1.0), use_orig_params=True)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        scaler = ShardedGradScaler(rank.device.type, init_scale=4.0)
        value, scale = 1.0, 4.0
        for step in range(4):
            sgd.zero_grad()
            scaler.scale(model(torch.ones(1, device=rank.device)).sum()).backward()
            for parameter in model.parameters():
                if step % 2 and parameter.grad is not None:
                    parameter.grad.fill_(torch.inf)
            if way == "unscale_":
                scaler.unscale_(sgd)
            scaler.step(sgd)
            scaler.update()
            value -= 0 if step % 2 else 0.5
            scale *= 0.5 if step % 2 else 1.0
            assert scaler.get_scale() == scale, f"step {step}"
            assert [x for p in model.parameters() for x in p.flatten().tolist()] in ([], [value]), f"step {step}"

    world.run(body)


@requirement(
    "TP-SCALE-3201",
    "update of a ShardedGradScaler copies a new scale, given as a number or as a tensor.",
    source=f"{SCALER}.update: new_scale (float or torch.Tensor)",
)
@pytest.mark.world(2)
def test_new_scale(world: World) -> None:
    """Give each kind in turn, before a step and after one, and change the tensor afterwards."""

    def body(rank: Rank) -> None:
        scaler = ShardedGradScaler(rank.device.type, init_scale=4.0)
        weight = nn.Parameter(torch.ones(2, device=rank.device))
        sgd = torch.optim.SGD([weight], lr=1.0)
        assert scaler.scale(weight.detach()).tolist() == [4.0] * 2
        given: list[Any] = [
            32.0,
            torch.tensor(16.0, device=rank.device),
            torch.tensor(2.0, dtype=torch.float64, device=rank.device),
        ]
        for new, stepped in itertools.product(given, (False, True)):
            if stepped:
                weight.grad = torch.ones(2, device=rank.device)
                scaler.step(sgd)
            right = float(new)
            scaler.update(new)
            if isinstance(new, torch.Tensor):
                new.fill_(128.0)
            assert scaler.get_scale() == right, f"{new}, {stepped=}"
            assert scaler.scale(torch.ones((), device=rank.device)).item() == right, f"{new}, {stepped=}"
            if isinstance(new, torch.Tensor):
                new.fill_(right)

    world.run(body)
