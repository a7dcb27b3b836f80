"""Clipping of gradients under FSDP1: in each dtype, with replicas, on ranks without gradients, and of infinite ones."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.wrapped import HYBRIDS, STRATEGIES, Outer, Weight, inputs, nested, own, wrapped
from harness import Rank, World, assert_on_ranks, requirement

COUNT = 4000
"""Elements of a weight: as many ones times the largest gradient below have a norm that float16 does not hold."""


@requirement(
    "TP-CLIP-4967",
    "clip_grad_norm_ clips gradients of any dtype to the bound, even if that dtype does not hold their norm.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
)
@pytest.mark.world(2)
def test_dtypes(world: World) -> None:
    """Clip small and large gradients by each kind of norm, with sharded parameters of each dtype."""
    dtypes = torch.float16, torch.bfloat16, torch.float32

    def body(rank: Rank) -> None:
        for dtype, (strategy, original) in itertools.product(dtypes, zip(STRATEGIES[:2], (True, False), strict=True)):
            module = Weight(COUNT, 1.0).to(dtype)
            model = wrapped(rank, module, sharding_strategy=strategy, use_orig_params=original)
            for size, norm in itertools.product((1.0, 2048.0), (1.0, 2.0, 3.0, math.inf)):
                for p in model.parameters():
                    p.grad = torch.full_like(p, size)
                whole = size if norm == math.inf else size * COUNT ** (1 / norm)
                model.clip_grad_norm_(whole / 1024, norm)
                for p in model.parameters():
                    grad = p.grad.to(torch.float64)
                    what = f"{dtype}, {size}, norm {norm}, {strategy}, {original=}"
                    near = 4 * torch.finfo(dtype).eps + 1e-6  # of float32 in the norm
                    assert torch.allclose(grad, torch.full_like(grad, size / 1024), rtol=near), what

    world.run(body)


@requirement(
    "TP-CLIP-5545",
    "clip_grad_norm_ counts each gradient once, over the ranks of a module's own shards, however many replicas it has.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_: 'viewed as a single vector'",
)
@pytest.mark.needs(features=["hybrid"])
@pytest.mark.world(4)
def test_replicas(world: World) -> None:
    """Shard over two of four ranks with two replicas, or over a group of two ranks that has its own data."""

    def body(rank: Rank) -> None:
        pairs = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        group, mesh = pairs[rank.index % 2], rank.mesh(2, 2, names=("replicas", "shards"))
        ways: list[tuple[Any, Any, float]] = [({"device_mesh": mesh}, kind, 2.5) for kind in HYBRIDS]
        ways += [({"process_group": group}, kind, 2.0 + rank.index % 2) for kind in STRATEGIES]
        for (where, strategy, x), original in itertools.product(ways, (True, False)):
            model = nested(rank, sharding_strategy=strategy, use_orig_params=original, **where)
            for norm, bound in itertools.product((1.0, 2.0, math.inf), (1.0, 1e6)):
                what = f"{strategy}, {original=}, norm {norm}, bound {bound}"
                model.zero_grad()
                model(inputs(rank)).sum().backward()
                right = torch.linalg.vector_norm(torch.tensor([5 * x] * 8 + [3 * x] * 4), norm).item()
                assert model.clip_grad_norm_(bound, norm).item() == pytest.approx(right, rel=1e-6), what
                scale = min(1.0, bound / right)
                assert {round(value / scale, 3) for value in own(model)} <= {5 * x, 3 * x}, what
                clipped = model.clip_grad_norm_(1e6, norm).item()
                assert clipped == pytest.approx(right * scale, rel=1e-5), what

    world.run(body)


@requirement(
    "TP-CLIP-5800",
    "clip_grad_norm_ clips by the norm of all ranks' gradients on each rank, even on one that has none itself.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_: 'viewed as a single vector'",
)
@pytest.mark.world(2)
def test_ranks_without_gradients(world: World) -> None:
    """Freeze what the first rank has, the other or neither, or shard a single number, which is on one rank."""
    cases = list(itertools.product(("first", "second", "neither", "single"), STRATEGIES[:2], (1.0, 2.0, math.inf)))

    def body(rank: Rank) -> list[set[float]]:
        found = []
        for case, strategy, norm in cases:
            first, second = (1, 0) if case == "single" else (4, 4)
            module = Outer(first, 5.0, Weight(second, 3.0)) if second else Weight(first, 5.0)
            for name, part in zip(("first", "second"), module.parameters(), strict=False):
                part.requires_grad_(name != case)
            model = wrapped(rank, module, sharding_strategy=strategy, use_orig_params=True)
            model(torch.ones(1, device=rank.device)).sum().backward()
            gradients = [5.0] * first * (case != "first") + [3.0] * second * (case != "second")
            right = torch.linalg.vector_norm(torch.tensor(gradients), norm).item()
            total = model.clip_grad_norm_(right / 2, norm).item()
            assert total == pytest.approx(right, rel=1e-6), f"{case}, {strategy}, norm {norm}"
            found.append({round(2 * value, 4) for value in own(model)})
        return found

    for (case, *how), *found in zip(cases, *world.run(body), strict=True):
        right = {5.0, 3.0} - {{"first": 5.0, "second": 3.0, "single": 3.0}.get(case)}
        assert set().union(*found) == right, f"{case}, {how}: {found}"


@requirement(
    "TP-CLIP-9302",
    "clip_grad_norm_ clips by the norm of the gradients that there are, whatever norms it had in earlier steps.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_: 'viewed as a single vector'",
)
@pytest.mark.parametrize("earlier", [1.0, 2.0, math.inf])
@pytest.mark.world(2)
def test_smaller_norms(world: World, earlier: float) -> None:
    """Clip large gradients by one norm, then small ones by each: on both ranks, or of a number that is on one rank."""
    cases = list(itertools.product((1, 4), STRATEGIES, (False, True), (1.0, 2.0, math.inf)))

    def body(rank: Rank) -> list[tuple[float, float]]:
        found = []
        for count, strategy, original, norm in cases:
            model = wrapped(rank, Weight(count, 1.0), sharding_strategy=strategy, use_orig_params=original)
            for size, kind in (8.0, earlier), (2.0, norm):
                model.zero_grad()
                model(torch.full((1,), size, device=rank.device)).sum().backward()
                total = model.clip_grad_norm_(1.0, kind).item()
            found.append((round(total, 4), round(max(own(model), default=0.0), 4)))
        return found

    for (count, *how, norm), *each in zip(cases, *world.run(body), strict=True):
        total = 2.0 if norm == math.inf else 2.0 * count ** (1 / norm)
        assert {found[0] for found in each} == {round(total, 4)}, f"{count}, {how}, norm {norm}: norms {each}"
        assert {found[1] for found in each} - {0.0} == {round(2.0 / total, 4)}, f"{count}, {how}, norm {norm}: {each}"


PLACES = "first rank", "second rank", "unsharded", "ignored"
"""Where a gradient has an element that is not finite: in one rank's shard, or in what all ranks have whole."""


@requirement(
    "TP-CLIP-9130",
    "clip_grad_norm_ scales all gradients by bound over norm, as one device does, also where a gradient is nan or "
    "infinite.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_: 'viewed as a single vector'; "
    "torch.nn.utils.clip_grad_norm_",
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.world(2)
def test_infinite_gradients(world: World, value: float) -> None:
    """Put a value into one element of a shard on either rank, of a whole parameter or of an ignored one."""
    norm = torch.tensor(value).abs()
    norms = (1.0, 2.0) if math.isnan(value) else (1.0, 2.0, math.inf)  # MAX over ranks may lose a nan

    def body(rank: Rank) -> list[str]:
        wrong = []
        for strategy, original in itertools.product(STRATEGIES[:2], (True, False)):
            parts = [Weight(4, factor).to(rank.device) for factor in (3.0, 7.0, 2.0)]
            for i, kind in enumerate((strategy, STRATEGIES[2])):
                parts[i] = wrapped(rank, parts[i], sharding_strategy=kind, use_orig_params=original)
            whole, ignored = parts[1], parts[2]
            model = wrapped(
                rank,
                Outer(8, 5.0, *parts),
                sharding_strategy=strategy,
                use_orig_params=original,
                ignored_modules=[ignored],
            )
            for i, (place, kind) in enumerate(itertools.product(PLACES, norms)):
                bound = (1.0, 1e6)[i % 2]
                what = f"{strategy}, {original=}, {place}, norm {kind}, bound {bound}"
                model.zero_grad()
                model(torch.ones(1, device=rank.device)).sum().backward()
                of: Any = {"unsharded": whole, "ignored": ignored}.get(place, model)
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                if of is not model or place == PLACES[rank.index]:
                    next(p.grad for p in of.parameters() if p.grad is not None).view(-1)[1] = value
                expected = [g * (bound / norm.to(rank.device)) for g in gradients]
                total = model.clip_grad_norm_(bound, kind)
                if not torch.equal(total.cpu(), norm) and not (total.isnan() and norm.isnan()):
                    wrong.append(f"{what}: the norm is {total.item()}")
                for g, right in zip(gradients, expected, strict=True):
                    if not torch.allclose(g, right, equal_nan=True):
                        wrong.append(f"{what}: {g.tolist()} and not {right.tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
