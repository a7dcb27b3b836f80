"""FSDP1 without tensor parallelism: policies, hooks, clipping, accumulation, settings of states, new parameters."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from fixtures.wrapped import STRATEGIES, Outer, Two, Weight, inputs, nested, own, wrapped
from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"


@requirement(
    "TP-WRAP-51",
    "A wrapping policy wraps the modules that it chooses and no others, without those that are ignored.",
    source="torch/distributed/fsdp/wrap.py: CustomPolicy, ModuleWrapPolicy, lambda_auto_wrap_policy, "
    "transformer_auto_wrap_policy, size_based_auto_wrap_policy",
)
@pytest.mark.world(2)
def test_chosen(world: World) -> None:
    """Choose by class, by a function, by a function's settings or by size; ignore one of two chosen modules."""

    def body(rank: Rank) -> None:
        big = functools.partial(size_based_auto_wrap_policy, min_num_params=6)
        of_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Outer})

        def chosen(module: nn.Module) -> bool:
            return isinstance(module, Weight) and module.factor in (3.0, 5.0)

        policies: dict[str, tuple[Any, set[str]]] = {
            "class": (ModuleWrapPolicy({Outer}), {"1"}),
            "classes": (ModuleWrapPolicy([Weight]), {"0", "1", "1.others.0", "1.others.1"}),
            "transformer": (of_class, {"1"}),
            "lambda": (functools.partial(lambda_auto_wrap_policy, lambda_fn=chosen), {"0", "1.others.1"}),
            "custom": (CustomPolicy(chosen), {"0", "1.others.1"}),
            "settings": (CustomPolicy(lambda m: {"forward_prefetch": True} if chosen(m) else {}), {"0", "1.others.1"}),
            "none": (CustomPolicy(lambda module: False), set()),
            "size": (big, {"0", "1"}),
        }
        for (name, (policy, right)), ignore in itertools.product(policies.items(), (None, "0", "1.others.1")):
            model = nn.Sequential(Weight(8, 3.0), Outer(5, 4.0, Weight(2, 7.0), Weight(4, 5.0)))
            ignored = [model.get_submodule(ignore)] if ignore else None
            names = {module: path for path, module in model.named_modules()}
            found = wrapped(rank, model, auto_wrap_policy=policy, ignored_modules=ignored)
            modules = {names[module.module] for module in FullyShardedDataParallel.fsdp_modules(found)} - {""}
            assert modules == right - {ignore}, f"{name}, {ignore=}: {modules}"
        for wrong in (None, 1, "a"):
            with pytest.raises(ValueError, match="lambda_fn"):
                wrapped(rank, Weight(2, 1.0), auto_wrap_policy=CustomPolicy(lambda module, wrong=wrong: wrong))

    world.run(body)


@requirement(
    "TP-WRAP-52",
    "Settings that a CustomPolicy gives for a module apply to that module, and the root's to all others.",
    source="torch.distributed.fsdp.wrap.CustomPolicy",
)
@pytest.mark.world(2)
def test_settings_of_one_module(world: World) -> None:
    """Give a strategy or dtypes for each module in turn, or the same dict for two, beside modules with the root's."""
    low = MixedPrecision(param_dtype=torch.bfloat16)

    def body(rank: Rank) -> None:
        settings: list[dict[str, Any]] = [{"sharding_strategy": ShardingStrategy.NO_SHARD}, {"mixed_precision": low}]
        paths = ["0", "1", "1.others.0", "2"]
        for given, picked in itertools.product(
            settings, [*([path] for path in paths), ["0", "2"], ["1.others.0", "2"]]
        ):
            what, before = f"{given}, {picked}", dict(given)
            model = nn.Sequential(Weight(4, 1.0), Outer(4, 1.0, Weight(4, 1.0)), Weight(4, 1.0))
            names = {module: path for path, module in model.named_modules()}
            seen: dict[str, tuple[bool, torch.dtype]] = {}

            def note(module: Any, arguments: Any, seen: Any = seen, names: Any = names) -> None:
                seen[names[module]] = (module.weight.numel() == 4, module.weight.dtype)

            def policy(module: nn.Module, given: Any = given, picked: Any = picked, names: Any = names) -> Any:
                return given if names[module] in picked else isinstance(module, Weight)

            for path in paths:
                model.get_submodule(path).register_forward_pre_hook(note)
            whole = wrapped(rank, model, auto_wrap_policy=CustomPolicy(policy), use_orig_params=True)
            local = {names[m]: sum(p.numel() for p in m.parameters(recurse=False)) for m in names if names[m] in paths}
            whole(inputs(rank)).sum().backward()
            assert given == before, f"{what}: changed"
            unsharded, cast = "sharding_strategy" in given, "mixed_precision" in given
            for path in paths:
                right = (4 if unsharded and path in picked else 2, cast and path in picked)
                assert (local[path], seen[path][1] == torch.bfloat16) == right, f"{what}: {path}"
            assert whole.sharding_strategy == ShardingStrategy.FULL_SHARD, what
            assert whole.mixed_precision.param_dtype is None, what

    world.run(body)


@requirement(
    "TP-META-151",
    "Parameters that FSDP ignores are not sharded, even if the module is on the meta device.",
    source=f"{SOURCE}: ignored_states, ignored_modules",
)
@pytest.mark.parametrize("way", ["module", "parameter-with-memory", "parameter"])
@pytest.mark.world(2)
def test_ignored_on_meta(world: World, way: str) -> None:
    """Ignore a layer, or one parameter, of a model on the meta device, or of one that has memory."""

    def body(rank: Rank) -> tuple[list[Any], int]:
        with torch.device(rank.device if way == "parameter-with-memory" else "meta"):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        ignored: Any = [model[0]] if way == "module" else [model[0].weight]
        model = FullyShardedDataParallel(model, ignored_states=ignored, use_orig_params=True, device_id=rank.device)
        parameters = dict(model.named_parameters())
        sharded = [p for name, p in parameters.items() if "0." not in name]
        return list(parameters["_fsdp_wrapped_module.0.weight"].shape), sum(p.numel() for p in sharded)

    found = world.run(body)
    assert_on_ranks([[2, 2]] * world.size, [shape for shape, _ in found])
    assert sum(numel for _, numel in found) >= 6


@requirement(
    "TP-CLIP-51",
    "clip_grad_norm_ clips by the norm of all gradients, each counted once, whether sharded, whole or ignored.",
    source=f"{SOURCE}.clip_grad_norm_",
)
@pytest.mark.world(2, 3)
def test_clipped(world: World) -> None:
    """Use each kind of norm, bounds above and below it, and models with sharded, unsharded and ignored parameters."""
    sizes = {"root": (8, 5.0), "part": (4, 3.0), "unsharded": (5, 7.0), "ignored": (3, 2.0)}
    models = [("part",), ("ignored",), ("unsharded",), ("part", "unsharded", "ignored"), ()]
    norms = list(itertools.product((1, 2.0, 3.0, math.inf, "inf"), (2.0, 1e6)))
    cases = [
        (kinds, strategy, bool((i + j) % 2), *norm)
        for (i, kinds), (j, strategy) in itertools.product(enumerate(models), enumerate(STRATEGIES[::2]))
        for norm in norms[(i + j) % 2 :: 2] + norms[1 - (i + j) % 2 : 4 : 2]
    ]

    def made(rank: Rank, kinds: tuple[str, ...], strategy: ShardingStrategy, original: bool) -> Any:
        modules = {kind: Weight(*sizes[kind]).to(rank.device) for kind in kinds}
        for kind, other in (("part", strategy), ("unsharded", ShardingStrategy.NO_SHARD)):
            if kind in kinds:
                modules[kind] = wrapped(rank, modules[kind], sharding_strategy=other, use_orig_params=original)
        ignored = [modules["ignored"]] if "ignored" in kinds else None
        outer = Outer(*sizes["root"], *modules.values()) if kinds else Weight(*sizes["root"])
        return wrapped(rank, outer, sharding_strategy=strategy, use_orig_params=original, ignored_modules=ignored)

    def body(rank: Rank) -> list[set[float]]:
        found = []
        for (kinds, strategy, original), same in itertools.groupby(cases, lambda case: case[:3]):
            model = made(rank, kinds, strategy, original)
            all_of_them = [sizes[kind] for kind in ("root", *kinds)]
            gradients = torch.tensor([factor for size, factor in all_of_them for _ in range(size)])
            for *_, norm, bound in same:
                model.zero_grad()
                model(torch.ones(1, device=rank.device)).sum().backward()
                total = float(model.clip_grad_norm_(bound, norm))
                right = float(torch.linalg.vector_norm(gradients, float(norm)))
                assert total == pytest.approx(right, rel=1e-6), f"{kinds}, {strategy}, {original=}, {norm=}, {bound=}"
                found.append({round(value / min(1.0, bound / right), 4) for value in own(model)})
        return found

    for case, *found in zip(cases, *world.run(body), strict=True):
        right = {sizes[kind][1] for kind in ("root", *case[0])}
        assert set().union(*found) == right, f"{case}: {found}"


@requirement(
    "TP-SYNC-51",
    "After no_sync, even if its block raised an error, the next backward reduces all gradients that have accumulated.",
    source=f"{SOURCE}.no_sync",
)
@pytest.mark.world(2)
def test_error_without_sync(world: World) -> None:
    """Raise an error before the forward, after it or after the backward, or none, in one block or in one of two."""
    ways = itertools.product(STRATEGIES, (True, False), (None, "forward", "backward", "end"))
    cases = [(*way, twice) for way, twice in zip(ways, itertools.cycle((False, True, True)), strict=False)]

    def train(model: Any, x: torch.Tensor, until: str | None) -> None:
        for step in ("forward", "backward", "end"):
            if until == step:
                raise ArithmeticError(step)
            if step == "forward":
                y = model(x)
            elif step == "backward":
                y.sum().backward()

    def body(rank: Rank) -> list[set[float]]:
        found = []
        for strategy, original, until, twice in cases:
            model = nested(rank, sharding_strategy=strategy, use_orig_params=original)
            try:
                with model.no_sync():
                    if twice:
                        with model.no_sync():
                            train(model, inputs(rank), until)
                    else:
                        train(model, inputs(rank), until)
            except ArithmeticError:
                assert until is not None
            for _ in range(2):
                train(model, inputs(rank), None)
            found.append(own(model))
        return found

    for case, *found in zip(cases, *world.run(body), strict=True):
        backwards = 3 if case[2] in (None, "end") else 2
        assert set().union(*found) == {3.0 * 1.5 * backwards, 5.0 * 1.5 * backwards}, f"{case}: {found}"


@requirement(
    "TP-STATE-51",
    "After a state_dict_type block, every FSDP module has the type and the configs again that were set before.",
    source=f"{SOURCE}: state_dict_type, set_state_dict_type, get_state_dict_type",
)
@pytest.mark.world(2)
def test_settings_of_states(world: World) -> None:
    """Set each type with its defaults or other configs, and use blocks of each, one inside another as well."""
    full, local, sharded = (
        StateDictType.FULL_STATE_DICT,
        StateDictType.LOCAL_STATE_DICT,
        StateDictType.SHARDED_STATE_DICT,
    )
    settings: list[tuple[Any, ...]] = [
        (full, FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullOptimStateDictConfig(rank0_only=True)),
        (full, FullStateDictConfig(rank0_only=True)),
        (full, None, FullOptimStateDictConfig(rank0_only=True)),
        (full,),
        (sharded, ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)),
        (sharded,),
        (local, LocalStateDictConfig(offload_to_cpu=True)),
        (local,),
    ]
    names = ["weight", "others.0.weight"]

    def body(rank: Rank) -> None:
        fsdp = FullyShardedDataParallel
        for original in True, False:
            model = nested(rank, use_orig_params=original)
            modules = fsdp.fsdp_modules(model)
            assert len(modules) == 2

            def read(model: Any = model, modules: Any = modules) -> list[Any]:
                return [fsdp.get_state_dict_type(module) for module in (model, *modules)]

            default = read()
            for before, within in itertools.product(settings, settings):
                what = f"{original=}, {before}, {within}"
                assert fsdp.set_state_dict_type(model, *before) == default[0], what
                right = read()
                assert right[0].state_dict_type == before[0], what
                assert len(before) < 2 or before[1] in (None, right[0].state_dict_config), what
                assert len(before) < 3 or right[0].optim_state_dict_config == before[2], what
                with fsdp.state_dict_type(model, *within):
                    assert read()[0].state_dict_type == within[0], what
                    with fsdp.state_dict_type(model, full, FullStateDictConfig(rank0_only=True)):
                        assert list(model.state_dict()) == (names if rank.index == 0 else []), what
                    assert len(within) < 2 or within[1] in (None, read()[0].state_dict_config), what
                assert read() == right, what
                fsdp.set_state_dict_type(
                    model,
                    default[0].state_dict_type,
                    default[0].state_dict_config,
                    default[0].optim_state_dict_config,
                )
                assert read() == default, what

    world.run(body)


@requirement(
    "TP-STATE-51",
    "After a state_dict_type block, every FSDP module has the type and the configs again that were set before.",
    source=f"{SOURCE}: state_dict_type, set_state_dict_type, get_state_dict_type",
)
@pytest.mark.world(2)
def test_settings_after_an_error(world: World) -> None:
    """Raise an error in a block, and in a block inside one."""

    def body(rank: Rank) -> None:
        fsdp = FullyShardedDataParallel
        model = nested(rank)
        fsdp.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True))
        modules = fsdp.fsdp_modules(model)
        right = [fsdp.get_state_dict_type(module) for module in modules]
        for depth in 1, 2:
            kinds = (StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT)[:depth]
            with contextlib.suppress(KeyError), contextlib.ExitStack() as blocks:
                for kind in kinds:
                    blocks.enter_context(fsdp.state_dict_type(model, kind))
                model.state_dict()["no such key"]
            assert [fsdp.get_state_dict_type(module) for module in modules] == right, f"{depth} blocks"

    world.run(body)


@requirement(
    "TP-HOOK-51",
    "A hook of register_comm_hook gets its state with the whole gradient of each FSDP module, whose shard it sets.",
    source=f"{SOURCE}.register_comm_hook",
)
@pytest.mark.world(2)
def test_communication_hook(world: World) -> None:
    """Sum up instead of averaging, with each strategy of the root and of the module inside it."""
    cases = list(itertools.product(STRATEGIES, STRATEGIES, (True, False)))

    def body(rank: Rank) -> list[set[float]]:
        found = []
        for root, part, original in cases:
            model = nested(rank, {"sharding_strategy": part}, sharding_strategy=root, use_orig_params=original)
            what, seen = f"{root}, {part}, {original=}", list[tuple[int, float]]()

            def hook(state: Any, gradient: torch.Tensor, shard: torch.Tensor | None = None, seen: Any = seen) -> None:
                state.append((gradient.numel(), gradient.flatten()[0].item(), shard is not None))
                if shard is None:
                    dist.all_reduce(gradient)
                else:
                    dist.reduce_scatter_tensor(shard, gradient)

            model.register_comm_hook(seen, hook)
            for step in range(2):
                model.zero_grad()
                model(inputs(rank)).sum().backward()
                x = 1.0 + rank.index
                shards = [strategy != ShardingStrategy.NO_SHARD for strategy in (part, root)]
                assert sorted(seen) == sorted([(4, 3.0 * x, shards[0]), (8, 5.0 * x, shards[1])] * (step + 1)), what
            found.append(own(model))
            with pytest.raises(AssertionError, match="already"):
                model.register_comm_hook(None, hook)
        other = nested(rank)
        with pytest.raises(ValueError, match="callable"):
            other.register_comm_hook(None, None)
        other(inputs(rank))
        with pytest.raises(AssertionError, match="root"):
            other.module.others[0].register_comm_hook(None, hook)
        return found

    for case, *found in zip(cases, *world.run(body), strict=True):
        assert set().union(*found) == {9.0, 15.0}, f"{case}: {found}"


@requirement(
    "TP-ORIG-1601",
    "The whole parameters of a module under FSDP have the values and the memory format that they had before.",
    source=f"{SOURCE}.summon_full_params",
)
@pytest.mark.world(2)
def test_memory_formats(world: World) -> None:
    """Weights of four and five dimensions with their channels last, beside others; look before and after a step."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def body(rank: Rank) -> None:
        for strategy, original, dims in itertools.product(STRATEGIES, (True, False), formats):
            kind: Any = nn.Conv2d if dims == 4 else nn.Conv3d
            convolution = kind(2, 3, 2).to(memory_format=formats[dims])
            before = {name: p.detach().clone() for name, p in convolution.named_parameters()}
            model = wrapped(rank, convolution, sharding_strategy=strategy, use_orig_params=original)
            x = torch.ones(1, *[2] * (dims - 1), device=rank.device)
            for step in range(2):
                with FullyShardedDataParallel.summon_full_params(model):
                    for name, p in model.module.named_parameters():
                        what = f"{strategy}, {original=}, step {step}: {name}"
                        assert p.stride() == before[name].stride(), what
                        if step == 0:
                            assert torch.equal(p.detach().cpu(), before[name]), what
                model(x).sum().backward()
                torch.optim.SGD(model.parameters(), lr=0.5).step()

    world.run(body)


@requirement(
    "TP-ORIG-51",
    "With use_orig_params=True, FSDP uses what replaced a parameter, its data or its gradient between two steps.",
    source="torch/distributed/fsdp/_flat_param.py: 'Write back any parameters that changed storage'",
)
@pytest.mark.world(2)
def test_replaced(world: World) -> None:
    """Replace one of two parameters or both, on both ranks or one, before or after a step, of one or two dimensions."""

    def replace(module: Any, name: str, how: str, value: float) -> None:
        parameter = getattr(module, name)
        new = torch.full_like(parameter.detach(), value)
        if how == "data":
            parameter.data = new
        elif how == "parameter":
            setattr(module, name, nn.Parameter(new))
        elif how == "in-place":
            with torch.no_grad():
                parameter.copy_(new)

    def body(rank: Rank) -> None:
        ways = itertools.product(STRATEGIES, ("data", "parameter", "in-place"), (("a",), ("b",), ("a", "b")))
        others = itertools.cycle(itertools.product((True, False), (0, 1), ((4,), (2, 2))))
        for (strategy, how, replaced), (all_ranks, trained, shape) in zip(ways, others, strict=False):
            what = f"{strategy}, {how}, {replaced}, {all_ranks=}, {shape} after {trained} steps"
            everywhere = all_ranks or strategy == ShardingStrategy.NO_SHARD
            inner = wrapped(rank, Two(*shape), sharding_strategy=strategy, use_orig_params=True)
            model = wrapped(rank, nn.Sequential(inner), sharding_strategy=strategy, use_orig_params=True)
            x = torch.ones(1, device=rank.device)
            for _ in range(trained):
                model(x).sum().backward()
                model.zero_grad()
            values = {"a": 1.0, "b": 1.0}
            for value, name in enumerate(replaced, 3):
                # each rank has one of the two parameters
                if everywhere or (name == "a") == (rank.index == 0):
                    replace(inner.module, name, how, value)
                values[name] = value
            right = 4 * (values["a"] + 2 * values["b"])
            for step in range(2):
                sgd = torch.optim.SGD(model.parameters(), lr=1.0)
                sgd.zero_grad()
                y = model(x)
                assert y.item() == right, f"{what}, step {step}"
                y.sum().backward()
                assert own(model) <= {1.0, 2.0}, f"{what}, step {step}"
                sgd.step()
                right -= 4 * (1.0 + 4.0)

    world.run(body)


@requirement(
    "TP-ORIG-51",
    "With use_orig_params=True, FSDP uses what replaced a parameter, its data or its gradient between two steps.",
    source="torch/distributed/fsdp/_flat_param.py: 'Write back any parameters that changed storage'",
)
@pytest.mark.world(2)
def test_replaced_gradient(world: World) -> None:
    """Set a gradient of one or two dimensions to None or to other values between two backwards, which add up."""
    cases = list(itertools.product(STRATEGIES, ("a", "b"), (None, 8.0), ((4,), (2, 2))))

    def body(rank: Rank) -> list[set[float]]:
        found = []
        for strategy, name, value, shape in cases:
            model = wrapped(rank, Two(*shape), sharding_strategy=strategy, use_orig_params=True)
            for step in range(2):
                model(torch.ones(1, device=rank.device)).sum().backward()
                parameter = getattr(model.module, name)
                if step == 0 and parameter.numel():
                    parameter.grad = None if value is None else torch.full_like(parameter.detach(), value)
            gradients = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
            found.append({(n, value) for n, gradient in gradients.items() for value in gradient.flatten().tolist()})
        return found

    for case, *found in zip(cases, *world.run(body), strict=True):
        _, name, value, _ = case
        right = {"a": 2.0, "b": 4.0} | {name: (value or 0.0) + {"a": 1.0, "b": 2.0}[name]}
        assert set().union(*found) == set(right.items()), f"{case}: {found}"


class Several(nn.Module):
    """The sum of three weights, of which the i-th has the gradient ``(i + 1) * x``."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(size) for size in (3, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times the weighted sum."""
        return torch.stack([(i + 1) * weight.sum() for i, weight in enumerate(self.weights)]).sum() * x


@requirement(
    "TP-ORIG-51",
    "With use_orig_params=True, FSDP uses what replaced a parameter, its data or its gradient between two steps.",
    source="torch/distributed/fsdp/_flat_param.py: 'Write back any parameters that changed storage'",
)
@pytest.mark.parametrize("by", ["names", "optimizers", "assignment"])
@pytest.mark.world(1, 2)
def test_some_gradients_reset(world: World, by: str) -> None:
    """Reset gradients of some of three parameters, all in one unit, or replace them, and accumulate one more step."""

    def body(rank: Rank) -> list[str]:
        x, wrong = torch.ones(1, device=rank.device), []
        for strategy in STRATEGIES:
            model = wrapped(rank, Several(), sharding_strategy=strategy, use_orig_params=True)
            parameters = [*model.parameters()]
            for chosen in itertools.product((False, True), repeat=3):
                model(x).sum().backward()
                some = [p for p, each in zip(parameters, chosen, strict=True) if each]
                if by == "optimizers" and some:
                    torch.optim.SGD(some, lr=1.0).zero_grad()
                for p in some if by != "optimizers" else ():
                    p.grad = None if by == "names" or p.grad is None else torch.full_like(p, 8.0)
                model(x).sum().backward()
                for i, (p, each) in enumerate(zip(parameters, chosen, strict=True)):
                    start = (8.0 if by == "assignment" else 0.0) if each else i + 1.0
                    found = set() if p.grad is None else set(p.grad.flatten().tolist())
                    if found != ({start + i + 1} if p.numel() else set()):
                        wrong.append(f"{strategy}, {chosen}: {found} of weight {i}")
                model.zero_grad()
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-ORIG-9342",
    "With use_orig_params=True, a gradient that a script keeps has its values after its parameter gets none or another "
    "one.",
    source=f"{SOURCE}: use_orig_params; torch.Tensor.grad",
)
@pytest.mark.parametrize("value", [None, 8.0], ids=["removed", "replaced"])
@pytest.mark.parametrize("chosen", [[1], [0, 1, 2]], ids=["one", "all"])
@pytest.mark.world(2)
def test_kept_gradients(world: World, chosen: list[int], value: float | None) -> None:
    """Remove or replace the gradients of some of three weights or of all, keep them, and run a forward."""

    def body(rank: Rank) -> dict[str, list[list[float]]]:
        x, found = torch.ones(1, device=rank.device), {}
        for strategy in STRATEGIES:
            model = wrapped(rank, Several(), sharding_strategy=strategy, use_orig_params=True)
            model(x).sum().backward()
            kept = []
            for p in [[*model.parameters()][i] for i in chosen]:
                if p.grad is not None:
                    kept.append((p.grad, p.grad.clone()))
                    p.grad = None if value is None else torch.full_like(p, value)
            model(x)
            changed = [gradient.tolist() for gradient, before in kept if not torch.equal(gradient, before)]
            if changed:
                found[strategy.name] = changed
        return found

    assert_on_ranks([{}] * 2, world.run(body))
