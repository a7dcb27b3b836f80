"""FSDP1 in a module that is none itself, with several FSDP modules side by side, and what FSDP passes on."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from fixtures.wrapped import STRATEGIES, Weight, inputs, nested, own, wrapped
from harness import Rank, World, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"
PREFIX = "_fsdp_wrapped_module."


class Sides(nn.Module):
    """Modules side by side, whose results are added up."""

    def __init__(self, *sides: nn.Module) -> None:
        super().__init__()
        self.sides = nn.ModuleList(sides)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([side(x) for side in self.sides]).sum(0)


def alone() -> Sides:
    return Sides(nn.Sequential(Weight(4, 3.0), Weight(5, 7.0)), Weight(3, 2.0), Weight(2, 11.0))


def parts(rank: Rank, **options: Any) -> Any:
    """Wrap the first module and one of its parts, and the second; the last is a plain module."""
    model = alone().to(rank.device)
    first, second, _ = model.sides
    first[0] = wrapped(rank, first[0], **options)
    model.sides[0], model.sides[1] = wrapped(rank, first, **options), wrapped(rank, second, **options)
    return model


NAMES = list(alone().state_dict())
SIZES = {name: value.numel() for name, value in alone().state_dict().items()}
PLAIN = NAMES[-1]


@requirement(
    "TP-STATE-5540",
    "state_dict_type or set_state_dict_type of a plain module sets all FSDP modules in it, and returns what was set.",
    source=f"{SOURCE}: set_state_dict_type, get_state_dict_type: 'The target module does not have to be a FSDP module'",
)
@requirement(
    "TP-SUMMON-5541",
    "summon_full_params of a plain module gives whole parameters of all FSDP modules in it.",
    source=f"{SOURCE}.summon_full_params: 'will apply to all contained FSDP units'",
)
@requirement(
    "TP-STATE-5542",
    "Optimizer states of a plain module with FSDP modules have those of every parameter, and load into another one.",
    source=f"{SOURCE}: optim_state_dict, optim_state_dict_to_load: 'which may or may not be a FSDP instance'",
)
@pytest.mark.world(2)
def test_plain_module_around(world: World) -> None:
    """Three FSDP modules, two of them outermost, beside a plain one; whole and sharded, before and after a step."""
    fsdp = FullyShardedDataParallel
    full, sharded = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT

    def body(rank: Rank) -> None:
        for strategy, original in itertools.product(STRATEGIES, (True, False)):
            what = f"{strategy}, {original=}"
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            model, other = parts(rank, **options), parts(rank, **options)
            modules = fsdp.fsdp_modules(model)
            assert len(modules) == 3, what
            sgd, fresh = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) for m in (model, other))
            for step in range(2):
                before = fsdp.get_state_dict_type(model)
                with fsdp.state_dict_type(
                    model, sharded, ShardedStateDictConfig(True), ShardedOptimStateDictConfig(True)
                ):
                    within = [fsdp.get_state_dict_type(module) for module in (model, *modules)]
                    assert {each.state_dict_type for each in within} == {sharded}, what
                    state = model.state_dict()
                    assert list(state) == NAMES, f"{what}: {list(state)}"
                    plain = NAMES if strategy == ShardingStrategy.NO_SHARD else [PLAIN]
                    assert [name for name in NAMES if type(state[name]) is torch.Tensor] == plain, what
                assert [fsdp.get_state_dict_type(module) for module in (model, *modules)] == [before] * 4, what
                given = fsdp.set_state_dict_type(model, full, FullStateDictConfig(rank0_only=True))
                assert given == before, what
                if strategy != ShardingStrategy.NO_SHARD:  # with which every rank has a whole state
                    assert list(model.state_dict()) == (NAMES if rank.index == 0 else [PLAIN]), what
                fsdp.set_state_dict_type(model, full)
                with fsdp.summon_full_params(model), torch.no_grad():
                    found = {name.replace(PREFIX, ""): p for name, p in model.named_parameters()}
                    assert {name: p.numel() for name, p in found.items()} == SIZES, what
                    for parameter in found.values():
                        parameter.fill_(2.0 + step)
                right = (2.0 + step) * (4 * 3 * 5 * 7 * (2.0 + step) + 3 * 2 + 2 * 11) * (1 + rank.index)
                y = model(inputs(rank))
                assert y.item() == right, f"{what}: {y.item()}"
                y.sum().backward()
                sgd.step()
                sgd.zero_grad()
                for kind in full, sharded:
                    with fsdp.state_dict_type(model, kind), fsdp.state_dict_type(other, kind):
                        momenta = fsdp.optim_state_dict(model, sgd)
                        assert sorted(momenta["state"]) == sorted(NAMES), f"{what}, {kind}"
                        assert sorted(momenta["param_groups"][0]["params"]) == sorted(NAMES), f"{what}, {kind}"
                        fresh.load_state_dict(fsdp.optim_state_dict_to_load(other, fresh, momenta))
                    kept = [state["momentum_buffer"] for state in fresh.state.values()]
                    expected = [sgd.state[p]["momentum_buffer"] for p in model.parameters() if p in sgd.state]
                    assert len(kept) >= len([e for e in expected if e.numel()]), f"{what}, {kind}"
                    assert sorted(v for k in kept for v in k.flatten().tolist()) == sorted(
                        v for e in expected for v in e.flatten().tolist()
                    ), f"{what}, {kind}"

    world.run(body)


class Named(nn.Sequential):
    """Modules in a row, with attributes of its own."""

    tag: Any = None
    empty: Any = None

    def described(self, mark: str) -> str:
        return f"{self.tag}{mark}"


@requirement(
    "TP-WRAP-5543",
    "An FSDP module has the attributes and items of its module, lacks what that lacks, but is what its apply returns.",
    source=f"{SOURCE}: 'Forward missing attributes to the wrapped module', 'Forward indexing calls'; apply: 'Returns'",
)
@requirement(
    "TP-HOOK-5544",
    "In no_sync, FSDP calls no communication hook, which gets all accumulated gradients in the next backward.",
    source=f"{SOURCE}: register_comm_hook, no_sync: 'Disable gradient synchronizations across FSDP instances'",
)
@pytest.mark.world(2)
def test_passed_on(world: World) -> None:
    """Ask for what there is, is None or is missing; a hook counts its calls in backwards with and without no_sync."""

    def body(rank: Rank) -> None:
        for strategy, original in itertools.product(STRATEGIES, (True, False)):
            what = f"{strategy}, {original=}"
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            module = Named(Weight(4, 3.0), nn.Identity(), Weight(2, 1.0))
            module.tag = "a"
            last = module[2]
            model = wrapped(rank, module, **options)
            for _ in range(2):
                assert (model.tag, model.empty, model.described("b")) == ("a", None, "ab"), what
                assert (model[0], model[-1], model.module) == (module[0], last, module), what
                assert [*model[1:]] == [*module[1:]], what
                assert not hasattr(model, "missing"), what
                for name in "missing", "lambda_", "weight":
                    with pytest.raises(AttributeError, match=name):
                        getattr(model, name)
                assert model.apply(lambda each: None) is model, what
                model(inputs(rank)).sum().backward()
            model = nested(rank, **options)
            calls: list[int] = []

            def hook(state: Any, gradient: torch.Tensor, *shard: torch.Tensor, calls: Any = calls) -> None:
                calls.append(int(gradient.flatten()[0]))
                if shard:
                    shard[0].copy_(gradient.view(2, -1)[rank.index])

            model.register_comm_hook(None, hook)
            for synced in (False, False, True, False, True):
                if synced:
                    model(inputs(rank)).sum().backward()
                    continue
                before = list(calls)
                with model.no_sync():
                    model(inputs(rank)).sum().backward()
                assert calls == before, f"{what}: {calls}"
            x = 1 + rank.index
            again = 5 if strategy == STRATEGIES[2] else 2  # a whole gradient has what was reduced before
            right = sorted([3 * 3 * x, 3 * 5 * x, again * 3 * x, again * 5 * x])
            assert sorted(calls) == right, f"{what}: {calls}"

    world.run(body)


@requirement(
    "TP-SYNC-7008",
    "no_sync of an FSDP module holds for the modules inside, and not for others, whose gradients are reduced.",
    source=f"{SOURCE}.no_sync: 'Disable gradient synchronizations across FSDP instances'",
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.world(2)
def test_no_sync_of_one_root(world: World, strategy: ShardingStrategy) -> None:
    """None, one, both in either order, and none again: of models apart, or in one backward."""

    def body(rank: Rank) -> None:
        for original, chained in itertools.product((True, False), (False, True)):
            models = [nested(rank, sharding_strategy=strategy, use_orig_params=original) for _ in range(2)]
            for without in ((), (0,), (1,), (0, 1), (1, 0), ()):
                with contextlib.ExitStack() as stack:
                    for number in without:
                        stack.enter_context(models[number].no_sync())
                    outputs = [model(inputs(rank)) for model in models]
                    for loss in [sum(outputs)] if chained else outputs:
                        loss.sum().backward()
                what = f"{original=}, {chained=}, without {without}"
                for number, model in enumerate(models):
                    factor = 1.0 + rank.index if number in without else 1.5
                    assert own(model) == {3.0 * factor, 5.0 * factor}, f"{what}: {number}: {own(model)}"
                for number in without:  # what has accumulated is reduced with the next gradients
                    models[number](inputs(rank)).sum().backward()
                    found = own(models[number])
                    assert found == {3.0 * 3, 5.0 * 3}, f"{what}: {number} with the next: {found}"
                for model in models:
                    model.zero_grad()

    world.run(body)


@requirement(
    "TP-SYNC-9408",
    "A no_sync or state_dict_type block of an FSDP module lasts to its own end, in whatever order blocks nest.",
    source=f"{SOURCE}: no_sync, state_dict_type: 'context manager'",
)
@pytest.mark.parametrize("error", [False, True], ids=["ended", "by an error"])
@pytest.mark.world(2)
def test_nested_blocks(world: World, error: bool) -> None:
    """Nest a block in one of another kind or model, and that in the first again; ask and go backward around each."""
    full, sharded = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    first, second, waits = (0, full), (0, sharded), (0, None)
    pairs: list[Any] = [(first, second), (first, waits), (waits, first), (waits, (1, None)), (waits, waits)]
    pairs += [(first, (1, sharded))]

    def body(rank: Rank) -> None:
        fsdp = FullyShardedDataParallel
        models = [nested(rank, use_orig_params=original) for original in (True, False)]
        default = fsdp.get_state_dict_type(models[0]).state_dict_type

        def check(entered: list[tuple[int, Any]]) -> None:
            for number, model in enumerate(models):
                types = [kind for other, kind in entered if other == number and kind is not None]
                right = types[-1] if types else default
                found = [fsdp.get_state_dict_type(each).state_dict_type for each in fsdp.fsdp_modules(model)]
                assert found == [right] * len(found), (number, entered)
                model(inputs(rank)).sum().backward()
                factor = 1.0 + rank.index if (number, None) in entered else 1.5
                assert own(model) == {3.0 * factor, 5.0 * factor}, (number, entered, own(model))
                model.zero_grad()

        def enter(entered: list[tuple[int, Any]], left: list[tuple[int, Any]]) -> None:
            check(entered)
            if left:
                number, kind = left[0]
                model = models[number]
                raises = error and kind is None  # an error leaves the type of state dicts
                block = model.no_sync() if kind is None else fsdp.state_dict_type(model, kind)
                with pytest.raises(KeyError) if raises else contextlib.nullcontext(), block:
                    enter([*entered, left[0]], left[1:])
                    if raises:
                        raise KeyError
                check(entered)

        for one, other in pairs:
            enter([], [one, other, one])

    world.run(body)
