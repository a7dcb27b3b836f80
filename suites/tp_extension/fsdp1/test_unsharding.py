"""Whole parameters and gradients of FSDP1: what summon_full_params shows, keeps and refuses, and apply."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from fixtures.wrapped import STRATEGIES, Outer, Two, Weight, inputs, nested, own, wrapped
from harness import Rank, World, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params"
SIZES = {"weight": 5, "others.0.weight": 3, "others.1.weight": 1}


def filled() -> Outer:
    """Return a module of five numbers, with modules of three and of one in it, which ranks divide unevenly."""
    model = Outer(5, 5.0, Weight(3, 3.0), Weight(1, 7.0))
    with torch.no_grad():
        for start, parameter in enumerate(model.parameters()):
            parameter.copy_(10.0 * start + torch.arange(parameter.numel()))
    return model


WHOLE = {name: parameter.tolist() for name, parameter in filled().named_parameters()}


OPTIONS: tuple[dict[str, bool], ...] = (
    {"writeback": False},
    {"writeback": True, "recurse": False},
    {"writeback": False, "rank0_only": True},
    {"writeback": True, "with_grads": True},
    {"writeback": False, "rank0_only": True, "with_grads": True},
)
"""Options of summon_full_params; those with gradients are for original parameters."""


def parts(rank: Rank, **options: Any) -> Any:
    """Wrap two inner modules, each on its own, and then the outer one."""
    model = filled()
    for i in range(2):
        model.others[i] = wrapped(rank, model.others[i], **options)
    return wrapped(rank, model, **options)


def named(model: Any) -> dict[str, list[float]]:
    """Return what the parameters of a module are now, by their names without FSDP's prefixes."""
    found = [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in model.named_parameters()]
    return {name: p.detach().cpu().tolist() for name, p in found}


def read(model: Any, **options: Any) -> dict[str, list[float]]:
    with FullyShardedDataParallel.summon_full_params(model, **options):
        return named(model)


@requirement(
    "TP-SUMMON-91",
    "summon_full_params gives whole parameters in their own dtype, of the modules that recurse chooses, on rank 0 "
    "alone with rank0_only, and leaves each rank its shards.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_shown(world: World) -> None:
    """Ask for the root, an inner module or a module around them, before and after a step, with each strategy."""
    low = MixedPrecision(param_dtype=torch.bfloat16)

    def body(rank: Rank) -> None:
        options = itertools.product((True, False), (True, False))
        ways = itertools.product(STRATEGIES, (True, False), (None, low))
        cases = itertools.product(ways, options)
        for (strategy, original, cast), (recurse, first_only) in cases:
            if first_only and strategy == ShardingStrategy.NO_SHARD:
                continue  # each rank has them whole anyway
            what = f"{strategy}, {original=}, {cast}, {recurse=}, {first_only=}"
            model = parts(rank, sharding_strategy=strategy, use_orig_params=original, mixed_precision=cast)
            shards = named(model)
            here = rank.index == 0 or not first_only
            chosen: dict[str, Any] = {"rank0_only": first_only, "writeback": not first_only}
            for step in range(2):
                with FullyShardedDataParallel.summon_full_params(model, recurse=recurse, **chosen):
                    assert not here or model.module.weight.tolist() == WHOLE["weight"], what
                    if recurse and here:
                        assert named(model) == WHOLE, what
                        assert {(type(p), p.dtype) for p in model.parameters()} == {(nn.Parameter, torch.float32)}, what
                    elif original:
                        others = {name for name in WHOLE if not here or name != "weight"}
                        assert {name: of for name, of in named(model).items() if name in others} == {
                            name: of for name, of in shards.items() if name in others
                        }, what
                assert named(model) == shards, what
                with FullyShardedDataParallel.summon_full_params(model.module.others[0], **chosen):
                    assert not here or model.module.others[0].weight.tolist() == WHOLE["others.0.weight"], what
                outside = nn.ModuleList([model, nn.Linear(2, 1)])
                with FullyShardedDataParallel.summon_full_params(outside, recurse=True, **chosen):
                    assert not here or named(model) == WHOLE, what
                if step == 0:
                    model(inputs(rank)).sum().backward()
                    model.zero_grad()

    world.run(body)


@requirement(
    "TP-SUMMON-3450",
    "A forward computes with what was written within summon_full_params or loaded before it, whatever FSDP gathered "
    "earlier and in whatever dtype.",
    source=f"{SOURCE}: writeback; torch/distributed/fsdp/_flat_param.py: 'persist the modifications'",
)
@pytest.mark.world(2)
def test_written_used(world: World) -> None:
    """Write after nothing, after a forward with gradients or without, and after a backward; then evaluate as well."""
    low = MixedPrecision(param_dtype=torch.bfloat16)

    def body(rank: Rank) -> None:
        befores = "nothing", "forward", "evaluation", "backward"
        cases = itertools.product(STRATEGIES, (None, low), befores)
        ways = itertools.cycle(((True, False), (False, True), (False, False), (True, True), (True, False)))
        for (strategy, cast, before), (original, loads) in zip(cases, ways, strict=False):
            what = f"{strategy}, {original=}, {cast}, {loads=}, {before}"
            model = nested(rank, sharding_strategy=strategy, use_orig_params=original, mixed_precision=cast)
            if before != "nothing":
                with torch.set_grad_enabled(before != "evaluation"):
                    y = model(inputs(rank))
                if before == "backward":
                    y.sum().backward()
            if loads:
                model.load_state_dict({name: p * 2 for name, p in model.state_dict().items()})
            else:
                with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(2)
            right = [2.0 * (5 * 8 + 3 * 4) * (1 + rank.index)]
            with torch.no_grad():
                assert model(inputs(rank)).tolist() == right, what
            assert model(inputs(rank)).tolist() == right, what

    world.run(body)


@requirement(
    "TP-SUMMON-301",
    "Within summon_full_params, named_parameters and named_buffers of a module with FSDP give the names that it has "
    "without FSDP.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: named_parameters, named_buffers",
)
@pytest.mark.world(2)
def test_names(world: World) -> None:
    """Name those of the root and of modules inside, with a prefix and without, before and after a step."""

    def made() -> Any:
        model = filled()
        for module in (model, *model.others):
            module.register_buffer("scale", torch.ones(2))
        return model

    def body(rank: Rank) -> None:
        alone = made()
        for strategy, original, step in itertools.product(STRATEGIES, (True, False), range(2)):
            what = f"{strategy}, {original=}, {step=}"
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            model = made().to(rank.device)  # which may make other buffers
            buffers = dict(model.named_buffers())
            model.others[0] = wrapped(rank, model.others[0], **options)
            model = wrapped(rank, model, **options)
            for _ in range(step):
                model(inputs(rank)).sum().backward()
            outside = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            assert all(name.startswith("_fsdp_wrapped_module.") for name in outside), f"{what}: {outside}"
            with FullyShardedDataParallel.summon_full_params(model):
                of_parts = [(model, alone), (model.module.others[0], alone.others[0])]
                for given in {}, {"prefix": "some"}, {"prefix": "a.b", "remove_duplicate": False}:
                    for found, right in of_parts:
                        for call in ("named_parameters", "named_buffers"):
                            names = [name for name, _ in getattr(found, call)(**given)]
                            expected = [name for name, _ in getattr(right, call)(**given)]
                            assert names == expected, f"{what}, {given}: {names}"
                assert {name: p.tolist() for name, p in model.named_parameters()} == WHOLE, what
                assert all(buffer is buffers[name] for name, buffer in model.named_buffers()), what
            again = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            assert again == outside, f"{what}: {again}"

    world.run(body)


@requirement(
    "TP-SUMMON-92",
    "With with_grads=True, summon_full_params gives whole gradients, or None if no rank has one, whose changes stay "
    "with writeback=True alone.",
    source=f"{SOURCE}: with_grads",
)
@pytest.mark.world(2)
def test_gradients(world: World) -> None:
    """Double the gradients before a backward, after one, and between the next forward and its backward."""

    def body(rank: Rank) -> None:
        for strategy, writeback in itertools.product(STRATEGIES, (True, False)):
            what = f"{strategy}, {writeback=}"
            model = parts(rank, sharding_strategy=strategy, use_orig_params=True)
            right: dict[str, Any] = dict.fromkeys(SIZES)

            def double(right: Any = right, model: Any = model, writeback: bool = writeback, what: str = what) -> None:
                with FullyShardedDataParallel.summon_full_params(model, writeback=writeback, with_grads=True):
                    found = {n.replace("_fsdp_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}
                    assert {n: g if g is None else g.tolist() for n, g in found.items()} == right, what
                    for gradient in found.values():
                        if gradient is not None:
                            gradient.mul_(2)

            def doubled(right: Any, by: float = 2.0 if writeback or strategy == STRATEGIES[2] else 1.0) -> Any:
                return {name: [value * by for value in values] for name, values in right.items()}

            double()
            factors = {"weight": 5.0, "others.0.weight": 3.0, "others.1.weight": 7.0}
            once = {name: [factors[name] * 1.5] * size for name, size in SIZES.items()}
            model(inputs(rank)).sum().backward()
            double(once)
            right = doubled(once)
            y = model(inputs(rank)).sum()
            double(right)
            right = doubled(right)
            y.backward()
            right = {name: [a + b for a, b in zip(right[name], once[name], strict=True)] for name in right}
            double(right)

    world.run(body)


@requirement(
    "TP-SUMMON-91",
    "summon_full_params gives whole parameters in their own dtype, of the modules that recurse chooses, on rank 0 "
    "alone with rank0_only, and leaves each rank its shards.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_offloaded(world: World) -> None:
    """Read them on all ranks and on the first alone, before and after a step; NO_SHARD refuses the option."""

    def body(rank: Rank) -> None:
        for strategy, original, first_only in itertools.product(STRATEGIES[:2], (True, False), (True, False)):
            what = f"{strategy}, {original=}, {first_only=}"
            model = parts(rank, sharding_strategy=strategy, use_orig_params=original)
            shards = named(model)
            for _ in range(2):
                options = {"rank0_only": first_only, "writeback": not first_only, "offload_to_cpu": True}
                with FullyShardedDataParallel.summon_full_params(model, **options):
                    if rank.index == 0 or not first_only:
                        assert named(model) == WHOLE, what
                        assert {p.device.type for p in model.parameters()} == {"cpu"}, what
                assert named(model) == shards, what
                model(inputs(rank)).sum().backward()
                model.zero_grad()

    world.run(body)


@requirement(
    "TP-SUMMON-93",
    "summon_full_params in a forward, a backward or itself, and with options that exclude each other, raises an "
    "error, after which the model trains as before.",
    source=f"{SOURCE}: 'can not be used within a forward or backward pass'",
)
@pytest.mark.world(2)
def test_refused(world: World) -> None:
    """Give the excluded options for the root and for an inner module."""

    class Asking(Two):
        """It asks for its whole parameters in its forward."""

        asks: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.asks is not None:
                with pytest.raises(AssertionError, match="forward"), summon(self.asks):
                    pass
            return super().forward(x)

    summon = FullyShardedDataParallel.summon_full_params

    def body(rank: Rank) -> None:
        for strategy, original in itertools.product(STRATEGIES, (True, False)):
            what = f"{strategy}, {original=}"
            module = Asking()
            model = wrapped(rank, module, sharding_strategy=strategy, use_orig_params=original)
            vars(module)["asks"] = model

            def ask(gradient: Any, model: Any = model) -> None:
                with pytest.raises(AssertionError, match="backward"), summon(model):
                    pass

            bad: list[dict[str, bool]] = [{"rank0_only": True}, {"with_grads": True, "offload_to_cpu": True}]
            for options in bad[strategy == ShardingStrategy.NO_SHARD :] + [{"with_grads": True}] * (not original):
                with pytest.raises(NotImplementedError), summon(model, **options):
                    pass
            with summon(model):
                with pytest.raises(AssertionError), summon(model):
                    pass
                with pytest.raises(ValueError, match="state"):
                    model.apply(lambda module: None)
            y = model(inputs(rank))
            y.register_hook(ask)
            y.sum().backward()
            assert own(model) <= {1.5, 3.0}, what
            assert read(model) == {"a": [1.0] * 4, "b": [1.0] * 4}, what

    world.run(body)


@requirement(
    "TP-SUMMON-8552",
    "After an exception within summon_full_params or apply, each rank has its shards again, and whole parameters can "
    "be asked for as before.",
    source=f"{SOURCE}; torch.distributed.fsdp.FullyShardedDataParallel.apply",
)
@pytest.mark.parametrize("raising", [(0, 1), (0,), (1,)], ids=["all", "first", "second"])
@pytest.mark.world(2, timeout=10)
def test_left_by_exceptions(world: World, raising: tuple[int, ...]) -> None:
    """Some ranks raise in blocks of all options, or all in a function that is applied; then read, and train."""
    fsdp = FullyShardedDataParallel

    def body(rank: Rank) -> None:
        def fail(module: Any = None) -> None:
            if rank.index in raising:
                raise KeyError

        for strategy, original in itertools.product(STRATEGIES, (True, False)):
            model = parts(rank, sharding_strategy=strategy, use_orig_params=original)
            model(inputs(rank)).sum().backward()
            shards, gradients = named(model), own(model)
            for options in (*OPTIONS, None) if len(raising) == rank.size else OPTIONS:  # to apply is to communicate
                if options is not None and "with_grads" in options and not original:
                    continue
                if options is not None and "rank0_only" in options and strategy == ShardingStrategy.NO_SHARD:
                    continue  # each rank has them whole anyway
                what = f"{strategy}, {original=}, {options or 'apply'}"
                with pytest.raises(KeyError) if rank.index in raising else nullcontext():
                    if options is None:
                        model.apply(fail)
                    else:
                        with fsdp.summon_full_params(model, **options):
                            fail()
                assert (named(model), own(model)) == (shards, gradients), what
                assert read(model) == WHOLE, what
            model.zero_grad()
            model(inputs(rank)).sum().backward()
            assert own(model) == gradients, f"{strategy}, {original=}"

    world.run(body)


@requirement(
    "TP-APPLY-451",
    "Moving a module under FSDP to a device keeps its gradients, and brings none back that zero_grad removed.",
    source="torch.nn.Module.to; torch.nn.Module.zero_grad",
)
@pytest.mark.world(2)
@pytest.mark.parametrize("case", ["kept", "removed-flat", "removed-original"])
def test_moved(world: World, case: str) -> None:
    """Move it to where it is, and then accumulate; gradients without shards stay away with original parameters too."""

    def body(rank: Rank) -> None:
        for strategy, original in itertools.product(STRATEGIES, (True, False)):
            removed, sharded = case != "kept", strategy != ShardingStrategy.NO_SHARD
            if removed and (case == "removed-original") != (original and sharded):
                continue
            what = f"{strategy}, {original=}"
            model = nested(rank, sharding_strategy=strategy, use_orig_params=original)
            model(inputs(rank)).sum().backward()
            if removed:
                model.zero_grad()
            model.to(rank.device)
            once = {3 * 1.5, 5 * 1.5}
            assert own(model) == (set() if removed else once), f"{what}: {sorted(own(model))} after the move"
            model(inputs(rank)).sum().backward()
            assert own(model) == (once if removed else {2 * value for value in once}), what

    world.run(body)


@requirement(
    "TP-APPLY-91",
    "FSDP.apply applies a function to every module with its whole parameters, and each rank keeps its shards of what "
    "it does.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.apply",
)
@pytest.mark.world(2)
def test_applied(world: World) -> None:
    """Apply it to the root and to an inner module, with each strategy, before and after a step."""

    def body(rank: Rank) -> None:
        for strategy, original in itertools.product(STRATEGIES, (True, False)):
            what = f"{strategy}, {original=}"
            model = parts(rank, sharding_strategy=strategy, use_orig_params=original)
            for step in range(2):
                sizes: list[int] = []

                def reset(module: nn.Module, sizes: Any = sizes) -> None:
                    if isinstance(module, Weight):
                        sizes.append(module.weight.numel())
                        with torch.no_grad():
                            module.weight.copy_(torch.arange(module.weight.numel()) + 100.0)

                model.apply(reset)
                assert sorted(sizes) == [1, 3, 5], what
                assert read(model) == {n: [100.0 + i for i in range(size)] for n, size in SIZES.items()}, what
                model.module.others[0].apply(lambda module: nn.init.zeros_(module.weight))
                assert read(model)["others.0.weight"] == [0.0] * 3, what
                if step == 0:
                    model(inputs(rank)).sum().backward()
                    assert own(model) <= {7.5, 4.5, 10.5}, what

    world.run(body)
