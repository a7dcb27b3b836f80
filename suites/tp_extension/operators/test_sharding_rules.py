"""Which placements operators take and give: register_sharding, and the context that refuses to redistribute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

from fixtures.placements import MORE_OPERATORS
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages
from harness.stacks.tp_extension import ExplicitRedistributionContext

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
WHOLE, ROWS, COLUMNS, SUM = Replicate(), Shard(0), Shard(1), Partial()
EVERY: tuple[Placement, ...] = (WHOLE, ROWS, COLUMNS, SUM)
ACCUMULATE = "accumulate(str name, Tensor x, int dim, *, Tensor scale) -> (Tensor, Tensor)"
ADD = "add(Tensor[] xs, int times) -> Tensor"


def placed(whole: torch.Tensor, rank: Rank, layout: Placement) -> DTensor:
    """Distribute a tensor without communication; each rank has an equal part of a sum."""
    if layout == SUM:
        return DTensor.from_local(whole / rank.size, rank.mesh(), [layout])
    return distribute_tensor(whole, rank.mesh(), [layout], src_data_rank=None)


@requirement(
    "TP-RULE-01",
    "An operator that is new to DTensor gets and gives placements that its function of register_sharding offers.",
    source="torch.distributed.tensor.experimental.register_sharding",
)
@requirement(
    "TP-RULE-02",
    "The function of register_sharding is asked for each value of a number, and only once for the same inputs.",
    source="torch.distributed.tensor.experimental.register_sharding",
)
@pytest.mark.world(2)
def test_registered(world: World) -> None:
    """Register operators with a leading name, numbers, keywords, lists and two results."""

    def body(rank: Rank) -> None:
        library = torch.library.Library("concord_rules", "FRAGMENT")
        library.define(ACCUMULATE)
        library.define(ADD)
        kind = "CompositeExplicitAutograd"
        library.impl("accumulate", lambda name, x, dim, *, scale: (x.cumsum(dim) * scale, x.sum(1 - dim)), kind)
        library.impl("add", lambda xs, times: torch.stack(xs).sum(0) * times, kind)
        ops: Any = torch.ops.concord_rules
        whole = numbers(4, 6).to(rank.device) * 2
        scale = placed(torch.tensor([[2.0]], device=rank.device), rank, WHOLE)
        with pytest.raises(NotImplementedError):
            ops.accumulate("sums", placed(whole, rank, WHOLE), 0, scale=scale)
        asked: list[tuple[str, int]] = []

        @register_sharding(ops.accumulate.default)
        def accumulate(name: str, x: Any, dim: int, scale: Any) -> list[Any]:
            asked.append((name, dim))
            kept: list[Any] = [([Shard(1 - dim), SUM], [None, Shard(1 - dim), None, WHOLE])]
            return [([WHOLE, WHOLE], [None, WHOLE, None, WHOLE]), *kept]

        @register_sharding([ops.add.default])
        def add(xs: Any, times: int) -> list[Any]:
            return [([WHOLE], [WHOLE] * len(xs) + [None]), ([ROWS], [ROWS] * len(xs) + [None])]

        for layout in EVERY:
            for dim in (0, 1, 0, 1):
                what = f"{layout} along {dim}"
                x = placed(whole, rank, layout)
                at, before = messages.mark(), len(asked)
                sums, total = ops.accumulate("sums", x, dim, scale=scale)
                assert (len(asked) > before) == (before < 2 * EVERY.index(layout) + 1 + dim), what
                kept = layout == Shard(1 - dim)
                assert len(messages.since(at)) == (not kept and layout != WHOLE), what
                if kept:
                    assert (sums.placements, total.placements) == ((layout,), (SUM,)), what
                assert_same(whole.cumsum(dim) * 2, sums.full_tensor() + 0, what)
                assert_same(whole.sum(1 - dim), total.full_tensor() + 0, what)
        assert asked == [("sums", dim) for _ in EVERY for dim in (0, 1)]
        for layout in EVERY:
            for count in 2, 3:
                result = ops.add([placed(whole, rank, layout) for _ in range(count)], 5)
                assert result.placements in ((WHOLE,), (ROWS,))
                assert_same(whole * count * 5, result.full_tensor() + 0, f"{count} of {layout}")

    world.run(body)


@requirement(
    "TP-RULE-04",
    "An operator that DTensor knows gets and gives only the placements that a function of register_sharding offers "
    "for it.",
    source="torch.distributed.tensor.experimental.register_sharding: will override the default sharding strategy",
)
@pytest.mark.parametrize("name", ["unsqueeze", "cumsum", "neg"])
@pytest.mark.world(2)
def test_registered_anew(world: World, name: str) -> None:
    """Offer only whole tensors for a view, a scan or a pointwise operator that has kept other shards just before."""

    def call(x: Any, dim: int) -> Any:
        return x.neg() if name == "neg" else getattr(x, name)(dim)

    def body(rank: Rank) -> None:
        whole = numbers(4, 6).to(rank.device) * 2
        assert call(placed(whole, rank, ROWS), 1).placements == (ROWS,)

        @register_sharding(getattr(torch.ops.aten, name).default)
        def replicated(x: Any, *dims: int) -> list[Any]:
            return [([WHOLE], [WHOLE, *(None for _ in dims)])]

        for layout in COLUMNS, SUM:
            found = call(placed(whole, rank, layout), 0)
            assert found.placements == (WHOLE,), f"{name} of {layout} gives {found.placements}"
            assert_same(call(whole, 0), found.to_local() + 0, f"{name} of {layout}")

    world.run(body)


@requirement(
    "TP-RULE-9307",
    "A rule that register_sharding was given holds for the next call, also for one that repeats an earlier call.",
    source="torch.distributed.tensor.experimental.register_sharding: will override the default sharding strategy",
)
@pytest.mark.parametrize("earlier", ["no call", "another call", "the same call", "another function"])
@pytest.mark.world(2)
def test_registered_after_calls(world: World, earlier: str) -> None:
    """Offer only whole tensors for an operator after calls that kept rows, of its own rule or of a registered one."""

    def body(rank: Rank) -> list[Any]:
        x = placed(numbers(4, 6).to(rank.device), rank, ROWS)
        if earlier == "another function":

            @register_sharding(torch.ops.aten.unsqueeze.default)
            def of_rows(x: Any, dim: int) -> list[Any]:
                return [([WHOLE], [WHOLE, None]), ([ROWS], [ROWS, None])]

        if earlier != "no call":
            assert x.unsqueeze(2 if earlier == "another call" else 1).placements == (ROWS,)

        @register_sharding(torch.ops.aten.unsqueeze.default)
        def replicated(x: Any, dim: int) -> list[Any]:
            return [([WHOLE], [WHOLE, None])]

        found = x.unsqueeze(1)
        return [found.placements == (WHOLE,), found.to_local().shape[0]]

    assert_on_ranks([[True, 4]] * 2, world.run(body))


TYPES: dict[str, tuple[str, Callable[[int], Any]]] = {
    "number": ("int at", int),
    "optional number": ("int? at", lambda dim: dim or None),
    "number with default": ("int at=1", int),
    "numbers": ("int[] at", lambda dim: [dim]),
    "truth": ("bool at", bool),
    "float": ("float at", float),
    "text": ("str at", str),
    "keyword number": ("*, int at", int),
    "keyword optional number": ("*, int? at", lambda dim: dim or None),
    "keyword number with default": ("*, int at=1", int),
}
"""Declarations of an argument that names a dimension, and how it does that."""


@requirement(
    "TP-RULE-7351",
    "An operator with a function of register_sharding has the plain result for each value of an argument, "
    "be it a number, list, truth or text.",
    source="torch.distributed.tensor.experimental.register_sharding: takes the same inputs as the original op",
)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.world(2)
def test_registered_by_argument(world: World, kind: str) -> None:
    """Flip one dimension and then the other one, each twice; offer shards of the dimension that is not flipped."""
    declared, value = TYPES[kind]
    keyword, name = declared.startswith("*"), f"flip_{kind.replace(' ', '_')}"

    def dim_of(at: Any) -> int:
        return int(at[0] if isinstance(at, (list, tuple)) else at or 0)

    def body(rank: Rank) -> list[str]:
        library = torch.library.Library("concord_rules", "FRAGMENT")
        library.define(f"{name}(Tensor x, {declared}) -> Tensor")
        library.impl(name, lambda x, at=1: x.flip(dim_of(at)), "CompositeExplicitAutograd")
        flip: Any = getattr(torch.ops.concord_rules, name)

        @register_sharding(flip.default)
        def other(x: Any, *given: Any, **named: Any) -> list[Any]:
            kept, others = Shard(1 - dim_of([*given, *named.values(), 1][0])), [None] * len(given)
            return [([WHOLE], [WHOLE, *others]), ([kept], [kept, *others])]

        whole, wrong = numbers(4, 6).to(rank.device), []
        for layout, dim in itertools.product((COLUMNS, ROWS), (0, 1, 0, 1)):
            x = placed(whole, rank, layout)
            found = flip(x, at=value(dim)) if keyword else flip(x, value(dim))
            if not torch.equal(whole.flip(dim), found.full_tensor()):
                wrong.append(f"{value(dim)} of {layout}: {found.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-RULE-03",
    "In ExplicitRedistributionContext, an operator that would redistribute its inputs raises, if that communicates "
    "or with strict=True, but redistribute does not.",
    source="torch/distributed/tensor/_utils.py: ExplicitRedistributionContext",
)
@pytest.mark.world(2)
def test_explicit_redistribution(world: World) -> None:
    """Multiply and add in contexts, nested ones and after exceptions; the backward of a product cuts a replica."""

    def body(rank: Rank) -> None:
        x, y = numbers(4, 6).to(rank.device), numbers(6, 4).to(rank.device)
        rows, factor, whole = placed(x, rank, ROWS), placed(y, rank, ROWS), placed(x, rank, WHOLE)

        def refused(run: Any) -> None:
            at = messages.mark()
            with pytest.raises(RuntimeError, match="redistribution"):
                run()
            assert not messages.since(at)

        def free(run: Any, right: torch.Tensor) -> None:
            assert_same(right, run().full_tensor().detach() + 0, "result")

        def multiply() -> Any:
            return rows @ factor

        def add() -> Any:
            return whole + rows

        for strict in False, True:
            free(multiply, x @ y)
            with ExplicitRedistributionContext(strict=strict):
                refused(multiply)
                refused(add) if strict else free(add, x + x)
                free(lambda: rows @ factor.redistribute(placements=[WHOLE]), x @ y)
                free(lambda: whole.redistribute(placements=[ROWS]) + rows, x + x)
                with ExplicitRedistributionContext(enable=False):
                    free(multiply, x @ y)
                    with ExplicitRedistributionContext(strict=not strict):
                        free(add, x + x) if strict else refused(add)
                refused(multiply)
                with pytest.raises(KeyError), ExplicitRedistributionContext(enable=False):
                    raise KeyError
                refused(multiply)
                with ExplicitRedistributionContext(mode="warn"):
                    free(multiply, x @ y)
            leaf = placed(x, rank, ROWS).requires_grad_()
            with ExplicitRedistributionContext(strict=True):
                loss = (leaf @ placed(y, rank, WHOLE).requires_grad_()).sum()
                refused(loss.backward)
                with ExplicitRedistributionContext(strict=strict, enable=not strict):
                    loss.backward()
            gradient: Any = leaf.grad
            assert_same(y.sum(1).expand(4, 6).contiguous(), gradient.full_tensor() + 0, "gradient")
        with pytest.raises(RuntimeError, match="mode"):
            ExplicitRedistributionContext(mode="another")
        free(multiply, x @ y)

    world.run(body)


NESTED: dict[str, list[int]] = {
    "after itself": [0],
    "in another": [1, 0],
    "in itself": [0, 0],
    "around another": [0, 1, 0],
}
"""Which of two contexts are entered within each other, by the way in which the first is entered again."""


@requirement(
    "TP-RULE-9343",
    "After the blocks of an ExplicitRedistributionContext, operators redistribute their inputs as before, also where "
    "one object was entered several times.",
    source="torch/distributed/tensor/_utils.py: ExplicitRedistributionContext: 'Can be used nested'",
)
@pytest.mark.parametrize("again", NESTED)
@pytest.mark.world(2)
def test_explicit_redistribution_again(world: World, again: str) -> None:
    """Enter an object twice, and multiply in the blocks and after them, in a thread, which has settings of its own."""

    def body(rank: Rank) -> list[str]:
        rows = placed(numbers(4, 4).to(rank.device), rank, ROWS)
        contexts = [ExplicitRedistributionContext() for _ in range(2)]

        def multiplied() -> str:
            try:
                return str((rows @ rows).shape)
            except RuntimeError as e:
                return str(e)

        def enter(order: list[int]) -> list[str]:
            if not order:
                return [multiplied()]
            with contexts[order[0]]:
                return [*enter(order[1:]), multiplied()]

        with ThreadPoolExecutor(1) as pool:
            inside = [*pool.submit(enter, NESTED[again]).result(), *pool.submit(enter, NESTED[again]).result()]
            after = pool.submit(multiplied).result()
        assert all("redistribution" in each for each in inside), inside
        return [after]

    assert_on_ranks([["torch.Size([4, 4])"]] * 2, world.run(body))
