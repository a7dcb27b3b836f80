"""What FSDP1 wraps and over which ranks: policies, ignored parameters, groups of modules, modules without values."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from fixtures.wrapped import HYBRIDS, STRATEGIES, Outer, Two, Weight, inputs, nested, own, wrapped
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"


def paths(model: Any, names: dict[nn.Module, str]) -> set[str]:
    """Return where the FSDP modules of a model are, by the names that their modules had before."""
    return {names[module.module] for module in FullyShardedDataParallel.fsdp_modules(model)} - {""}


def named(model: nn.Module) -> dict[nn.Module, str]:
    return {module: path for path, module in model.named_modules()}


@requirement(
    "TP-WRAP-51",
    "A wrapping policy wraps the modules that it chooses and no others, without those that are ignored.",
    source="torch/distributed/fsdp/wrap.py: CustomPolicy, ModuleWrapPolicy, lambda_auto_wrap_policy, "
    "transformer_auto_wrap_policy, size_based_auto_wrap_policy",
)
@pytest.mark.world(1)
def test_containers_and_leaves(world: World) -> None:
    """Wrap everything, or by size: containers are never wrapped, leaves not entered, and given ones besides."""

    def body(rank: Rank) -> None:
        big = functools.partial(size_based_auto_wrap_policy, min_num_params=6)
        leaves = size_based_auto_wrap_policy.FORCE_LEAF_MODULES | {Outer}  # type: ignore[attr-defined]
        excluded = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES | {Outer}  # type: ignore[attr-defined]
        cases: list[tuple[Any, set[str]]] = [
            (always_wrap_policy, {"0", "1", "1.0", "2", "2.others", "2.others.0", "3", "3.out_proj"}),
            (big, {"0", "1.0", "2.others.0", "2"}),
            (functools.partial(big, force_leaf_modules=leaves), {"0", "1.0"}),
            (functools.partial(big, exclude_wrap_modules=excluded), {"0", "1.0", "2.others.0"}),
            (functools.partial(big, min_num_params=1000), set()),
        ]
        for policy, right in cases:
            attention = nn.MultiheadAttention(2, 1)
            parts = [Weight(8, 3.0), nn.ModuleList([Weight(8, 1.0)]), Outer(7, 1.0, Weight(8, 5.0)), attention]
            model = nn.Sequential(*parts)
            names = named(model)
            assert paths(wrapped(rank, model, auto_wrap_policy=policy), names) == right, policy

    world.run(body)


@requirement(
    "TP-WRAP-141",
    "wrap wraps a module with the settings of the enable_wrap block that it is in, or with those of the call instead, "
    "and outside of a block returns the module.",
    source="torch/distributed/fsdp/wrap.py: enable_wrap, wrap",
)
@pytest.mark.world(2)
def test_enabled(world: World) -> None:
    """Wrap in a block, after a block inside it was refused, in a block that ends with an error, and outside."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        full, grads, none = STRATEGIES
        options = {"wrapper_cls": FullyShardedDataParallel, "device_id": rank.device}
        with enable_wrap(**options, sharding_strategy=grads, use_orig_params=True):
            first = wrap(Weight(4, 1.0))
            second = wrap(Weight(4, 1.0), sharding_strategy=full)
            with pytest.raises(NotImplementedError, match="nested"), enable_wrap(**options):
                pass
            fourth = wrap(Weight(4, 1.0))
            module = Outer(2, 1.0, Weight(4, 1.0))
            names = named(module)
            chosen = paths(wrap(module, auto_wrap_policy=ModuleWrapPolicy({Weight}), ignored_modules=[]), names)
        with contextlib.suppress(ArithmeticError), enable_wrap(**options, sharding_strategy=none):
            third = wrap(Weight(4, 1.0))
            raise ArithmeticError
        found: list[Any] = [first, second, third, fourth]
        assert [each.sharding_strategy for each in found] == [grads, full, none, grads]
        assert [next(each.parameters()).numel() for each in found] == [2, 2, 4, 2]
        assert chosen == {"others.0"}
        plain = Weight(4, 1.0)
        assert wrap(plain) is plain

    world.run(body)


@requirement(
    "TP-WRAP-142",
    "FSDP with a policy refuses a module that has FSDP inside, or whose parameters it would flatten together although "
    "only some are frozen.",
    source="torch/distributed/fsdp/wrap.py: ModuleWrapPolicy; test_wrap.py: test_error_already_wrapped, "
    "test_validate_frozen_params",
)
@pytest.mark.world(2)
def test_policies_refused(world: World) -> None:
    """Use each kind of policy; the inner module has FSDP, or one of its two parameters is frozen."""

    def body(rank: Rank) -> None:
        policies = [ModuleWrapPolicy({Two}), CustomPolicy(lambda module: isinstance(module, Two)), always_wrap_policy]
        for policy, original in itertools.product(policies, (True, False)):
            model = nn.Sequential(Weight(2, 1.0), nn.Sequential(wrapped(rank, Two())))
            with pytest.raises(ValueError, match=r"already have FSDP applied but found 1\.0"):
                wrapped(rank, model, auto_wrap_policy=policy, use_orig_params=original)
            for frozen in (("a",), ("a", "b"), ()):
                two = Two()
                for name in frozen:
                    getattr(two, name).requires_grad_(False)
                options = {"auto_wrap_policy": policy, "use_orig_params": original}
                if len(frozen) == 1 and not original:
                    with pytest.raises(ValueError, match="requires_grad"):
                        wrapped(rank, nn.Sequential(two), **options)
                else:
                    model = wrapped(rank, nn.Sequential(two), **options)
                    assert sum(p.requires_grad for p in model.parameters()) == (
                        2 - len(frozen) if original else not frozen
                    ), f"{policy}, {original=}, {frozen}"

    world.run(body)


class Around(Weight):
    """A weight, and one inside."""

    def __init__(self, size: int, factor: float, part: nn.Module) -> None:
        super().__init__(size, factor)
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both results."""
        result: torch.Tensor = super().forward(x) + self.part(x)
        return result


def chosen(module: nn.Module) -> bool:
    return isinstance(module, Weight)


POLICIES: dict[str, Callable[[], Any]] = {
    "classes": lambda: ModuleWrapPolicy({Around, Weight}),
    "own": lambda: CustomPolicy(chosen),
    "always": lambda: always_wrap_policy,
    "size": lambda: functools.partial(size_based_auto_wrap_policy, min_num_params=1),
    "function": lambda: functools.partial(lambda_auto_wrap_policy, lambda_fn=chosen),
    "transformer": lambda: functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Around, Weight}),
}


@requirement(
    "TP-WRAP-4309",
    "A wrapping policy that chooses the root, too, wraps it once, and the model trains.",
    source="torch/distributed/fsdp/wrap.py: CustomPolicy, ModuleWrapPolicy, lambda_auto_wrap_policy, "
    "transformer_auto_wrap_policy, size_based_auto_wrap_policy",
)
@pytest.mark.world(2)
def test_root_chosen(world: World) -> None:
    """Choose a root with a weight of its own and the module in it by each kind of policy."""

    def body(rank: Rank) -> None:
        for (name, policy), original, mixed in itertools.product(POLICIES.items(), (True, False), (True, False)):
            what = f"{name}, {original=}, {mixed=}"
            module = Around(8, 5.0, Weight(4, 3.0))
            precision = MixedPrecision(torch.float32) if mixed else None
            options = {"use_orig_params": original, "mixed_precision": precision}
            model = wrapped(rank, module, auto_wrap_policy=policy(), **options)
            found = [type(each.module) for each in FullyShardedDataParallel.fsdp_modules(model)]
            assert found == [Around, Weight], f"{what}: {found}"
            model(inputs(rank)).sum().backward()
            assert own(model) == {4.5, 7.5}, f"{what}: {own(model)}"

    world.run(body)


@requirement(
    "TP-WRAP-4310",
    "A policy refuses a module that mixes frozen parameters with others in modules inside before it wraps any, or "
    "warns of it with use_orig_params=True.",
    source="torch/distributed/fsdp/wrap.py: ModuleWrapPolicy, CustomPolicy; test_wrap.py: test_validate_frozen_params",
)
@pytest.mark.world(2)
def test_frozen_inside(world: World) -> None:
    """Freeze the module inside or the one around it, of the last module that is chosen."""

    def body(rank: Rank) -> None:
        policies = [ModuleWrapPolicy({Around, Two}), CustomPolicy(lambda module: isinstance(module, Around | Two))]
        for policy, inside, original in itertools.product(policies, (True, False), (True, False)):
            last = Around(2, 1.0, Weight(2, 1.0))
            (last.part.weight if inside else last.weight).requires_grad_(False)  # type: ignore[union-attr, operator]
            model = nn.Sequential(Two(), last).to(rank.device)
            options: Any = {"auto_wrap_policy": policy, "use_orig_params": original, "device_id": rank.device}
            if original:
                with pytest.warns(UserWarning, match="requires_grad=True and False"):
                    FullyShardedDataParallel(model, **options)
            else:
                with pytest.raises(ValueError, match="requires_grad"):
                    FullyShardedDataParallel(model, **options)
                assert FullyShardedDataParallel.fsdp_modules(model) == []

    world.run(body)


@requirement(
    "TP-IGNORE-91",
    "Parameters that FSDP ignores, by themselves or with their modules, stay the whole parameters that they were, and "
    "keep this rank's gradients.",
    source=f"{SOURCE}: ignored_modules, ignored_states",
)
@pytest.mark.world(2)
def test_ignored(world: World) -> None:
    """Ignore one of two parameters or a module, in each way of saying so, on both ranks or other ones on each."""

    def body(rank: Rank) -> None:
        def give(how: str, module: Two, names: tuple[str, ...]) -> dict[str, Any]:
            if how == "parameters":
                return {"ignored_states": (getattr(module, name) for name in names)}
            return {"ignored_modules" if how == "modules" else "ignored_states": [module]}

        ways = [("modules", ("a", "b")), ("states", ("a", "b")), ("parameters", ("b",)), ("parameters", ("a", "b"))]
        cases = itertools.product(STRATEGIES, (True, False), ways, ("root", "policy", "inner"))
        for strategy, original, (how, names), where in cases:
            what = f"{strategy}, {original=}, {how} {names}, {where}"
            two = Two()
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            kept = {name: getattr(two, name) for name in names}
            model: Any = Outer(8, 5.0, Outer(4, 3.0, two))
            if where == "inner":
                model.others[0] = wrapped(rank, model.others[0], **give(how, two, names), **options)
            if where == "policy":
                options["auto_wrap_policy"] = ModuleWrapPolicy({Outer})
            given = give(how, two, names) if where in ("root", "policy") else {}
            model = wrapped(rank, model, **given, **options)
            model(inputs(rank)).sum().backward()
            for name, parameter in kept.items():
                assert getattr(two, name) is parameter, what
                gradient = (1.0 if name == "a" else 2.0) * (1 + rank.index)
                assert parameter.grad is not None, what
                assert parameter.grad.tolist() == [gradient] * 4, what
            others = [p for p in model.parameters() if all(p is not each for each in kept.values())]
            found = {v for p in others if p.grad is not None for v in p.grad.flatten().tolist() if v}
            assert found <= {7.5, 4.5} | ({1.5, 3.0} if len(names) == 1 else set()), what
            sharded = sum(p.numel() for p in others)
            assert strategy == ShardingStrategy.NO_SHARD or sharded <= (8 + 4 + 4 * (2 - len(names))) // 2 + 8, what
        # what is ignored may be outside, and each rank may ignore another number of modules
        outside, inside = Two(), Weight(4, 3.0)
        model = wrapped(rank, inside, ignored_states=[*outside.parameters()])
        model(inputs(rank)).sum().backward()
        assert own(model) == {4.5}
        parts = [Weight(4, 2.0) for _ in range(1 + rank.index)]
        model = wrapped(rank, Outer(8, 5.0, Weight(4, 3.0), *parts), ignored_states=parts, use_orig_params=True)
        model(inputs(rank)).sum().backward()
        for part in parts:
            assert part.weight.grad is not None
            assert part.weight.grad.tolist() == [2.0 * (1 + rank.index)] * 4
        assert own(model) <= {7.5, 4.5, 2.0 * (1 + rank.index)}

    world.run(body)


@requirement(
    "TP-IGNORE-92",
    "FSDP refuses what cannot be ignored: modules with FSDP, parameters among modules, and both arguments at once.",
    source=f"{SOURCE}: ignored_modules, ignored_states",
)
@pytest.mark.world(1)
def test_ignoring_refused(world: World) -> None:
    """Give each for one of the arguments; a module that ignores itself is only warned about."""

    def body(rank: Rank) -> None:
        two, other = Two(), Weight(2, 1.0)
        model = nn.Sequential(two, other)
        bad: list[dict[str, Any]] = [
            {"ignored_modules": [two.a]},
            {"ignored_modules": [two, two.a]},
            {"ignored_states": [two.a, other]},
            {"ignored_states": [other, 1]},
            {"ignored_states": [two.a], "ignored_modules": [other]},
        ]
        for options in bad:
            with pytest.raises(ValueError, match="ignored"):
                wrapped(rank, model, **options)
        model[0] = wrapped(rank, two)
        with pytest.raises(ValueError, match="FSDP modules"):
            wrapped(rank, model, ignored_modules=[model[0]])
        alone = Two()
        with pytest.warns(UserWarning, match="ignore the top-level module"):
            found = FullyShardedDataParallel(alone, device_id=rank.device, ignored_modules=[alone])
        assert found.module.a is alone.a

    world.run(body)


@requirement(
    "TP-HYB-91",
    "A hybrid strategy over two groups shards over the first, reduces once over each for each module, and in no_sync "
    "over neither.",
    source="torch.distributed.fsdp.ShardingStrategy: HYBRID_SHARD; FullyShardedDataParallel: process_group",
)
@pytest.mark.needs(features=["hybrid"])
@pytest.mark.world(4)
def test_hybrid_groups(world: World) -> None:
    """Shard over ranks 0 and 2, and 1 and 3; accumulate over two backwards of which the first is not synchronized."""

    def body(rank: Rank) -> list[float]:
        groups = [[dist.new_group(ranks) for ranks in of] for of in (([0, 2], [1, 3]), ([0, 1], [2, 3]))]
        shards, replicas = groups[0][rank.index % 2], groups[1][rank.index // 2]
        found = []
        for strategy, original in itertools.product(HYBRIDS, (True, False)):
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            model = nested(rank, process_group=(shards, replicas), **options)
            assert sum(p.numel() for p in model.parameters()) == 6
            for synced in (False, True, True):
                at = messages.mark()
                y = model(inputs(rank)).sum()
                forward = messages.since(at)
                at = messages.mark()
                with contextlib.nullcontext() if synced else model.no_sync():
                    y.backward()
                backward = messages.since(at)
                what = f"{strategy}, {original=}, {synced=}: {forward}, {backward}"
                of_shards = tuple(dist.get_process_group_ranks(shards))
                assert {m.members for m in forward} <= {of_shards}, what
                assert len(forward) <= 2, what
                reduced = [m for m in backward if "gather" not in m.op]
                assert len([m for m in reduced if m.members == of_shards]) == (2 if synced else 0), what
                assert len(reduced) == (4 if synced else 0), what
                assert len(backward) - len(reduced) == (strategy == HYBRIDS[0]), what
            found += [sorted(own(model))]
        return found

    # the average of 1 to 4 three times
    assert_on_ranks([[[22.5, 37.5]] * 4] * 4, world.run(body))


@requirement(
    "TP-HYB-4404",
    "A hybrid strategy with a policy but without groups shards over the devices of each host, and reduces gradients "
    "over all of them.",
    source="torch.distributed.fsdp.ShardingStrategy: HYBRID_SHARD: 'shards parameters within a node and replicates "
    "parameters across nodes'; FullyShardedDataParallel: process_group",
)
@pytest.mark.needs(features=["hybrid"])
@pytest.mark.world(4)
def test_hosts_without_groups(world: World) -> None:
    """Each host is said to have two devices; two backwards of two weights, where the ranks have inputs of 1 to 4."""

    def body(rank: Rank) -> None:
        first = rank.index // 2 * 2
        replicas = (rank.index % 2, rank.index % 2 + 2)
        for strategy in HYBRIDS:
            options = {"sharding_strategy": strategy, "use_orig_params": True, "auto_wrap_policy": always_wrap_policy}
            with mock.patch.object(torch.get_device_module(rank.device), "device_count", return_value=2):
                model = wrapped(rank, Outer(8, 5.0, Weight(4, 3.0)), **options)
                at = messages.mark()
                for _ in range(2):
                    model(inputs(rank)).sum().backward()
                seen = messages.since(at)
            assert {m.members for m in seen if "gather" in m.op} == {(first, first + 1)}, f"{strategy}: {seen}"
            assert {m.members for m in seen if "gather" not in m.op} == {(first, first + 1), replicas}, f"{seen}"
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                found = [p.grad.tolist() for p in model.parameters()]
            assert found == [[25.0] * 8, [15.0] * 4], f"{strategy}: {found}"

    world.run(body)


@requirement(
    "TP-HYB-92",
    "FSDP refuses a hybrid strategy without two groups, a mesh of two dimensions or a policy, and with groups beside a "
    "mesh.",
    source="torch.distributed.fsdp.ShardingStrategy: HYBRID_SHARD; test_fsdp_hybrid_shard.py: "
    "test_invalid_pg_specification_raises",
)
@pytest.mark.world(2)
def test_hybrid_refused(world: World) -> None:
    """Give one group, none or other things for two; a communication hook is refused, too."""

    def body(rank: Rank) -> None:
        pairs = [dist.new_group([0, 1])]
        alone = [dist.new_group([i]) for i in range(2)][rank.index]
        for strategy, original in itertools.product(HYBRIDS, (True, False)):
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            bad: list[dict[str, Any]] = [
                {},
                {"process_group": pairs[0]},
                {"process_group": (pairs[0],)},
                {"process_group": (pairs[0], None)},
                {"device_mesh": rank.mesh(2)},
                {"process_group": (pairs[0], alone), "device_mesh": rank.mesh(1, 2)},
            ]
            for given in bad:
                with pytest.raises(ValueError, match=r"group|mesh"):
                    wrapped(rank, Weight(2, 1.0), **given, **options)
            with pytest.raises(ValueError, match="process_group"):
                wrapped(rank, Weight(2, 1.0), process_group=pairs[0], auto_wrap_policy=always_wrap_policy, **options)
            hook = nested(rank, process_group=(pairs[0], alone), **options)
            with pytest.raises(AssertionError, match="hybrid"):
                hook.register_comm_hook(None, lambda *_: None)

    world.run(body)


@requirement(
    "TP-WRAP-143",
    "Each FSDP module shards and averages over its own process group, whatever the group of the module around it.",
    source=f"{SOURCE}: process_group; test_fsdp_core.py: test_mixture_of_experts",
)
@pytest.mark.world(2)
def test_groups(world: World) -> None:
    """The inner module, the outer one or both have a group of this rank, or another group of both."""

    def body(rank: Rank) -> None:
        alone = [dist.new_group([i]) for i in range(2)][rank.index]
        groups = {"all": None, "again": dist.new_group([0, 1]), "alone": alone}
        names = list(itertools.product(groups, groups))
        for (outside, inside), strategy, original in itertools.product(names, STRATEGIES, (True, False)):
            what = f"{outside}, {inside}, {strategy}, {original=}"
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            model = nested(rank, {"process_group": groups[inside]}, process_group=groups[outside], **options)
            for step in range(2):
                model(inputs(rank)).sum().backward()
                here, average = (1 + step) * (1.0 + rank.index), (1 + step) * 1.5
                right = {3 * (here if inside == "alone" else average), 5 * (here if outside == "alone" else average)}
                assert own(model) == right, f"{what}: {own(model)}"

    world.run(body)


@requirement(
    "TP-WRAP-144",
    "All FSDP modules of a model need one value of use_orig_params and of limit_all_gathers, or the first forward "
    "raises an error.",
    source="torch/distributed/fsdp/_runtime_utils.py: 'Expects one homogeneous value'",
)
@pytest.mark.world(2)
def test_one_value(world: World) -> None:
    """Set another value outside, inside or for one of two modules inside."""

    def body(rank: Rank) -> None:
        for name, value, who in itertools.product(
            ("use_orig_params", "limit_all_gathers"), (True, False), ("first", "second", "root", "none")
        ):
            values = {key: {name: value is not (key == who)} for key in ("first", "second", "root")}
            parts = [wrapped(rank, Weight(2, 1.0), **values[key]) for key in ("first", "second")]
            model = wrapped(rank, Outer(2, 1.0, *parts), **values["root"])
            if who == "none":
                model(inputs(rank))
                continue
            with pytest.raises(ValueError, match=f"homogeneous value for _?{name}"):
                model(inputs(rank))

    world.run(body)


@requirement(
    "TP-WRAP-145",
    "A trained FSDP module can be wrapped again with the module around it, and fsdp_modules finds it, or with "
    "root_only=True only the outermost.",
    source=f"{SOURCE}: fsdp_modules, check_is_root; test_fsdp_multiple_wrapping.py: test_multiple_wrapping",
)
@pytest.mark.world(2)
def test_wrapped_again(world: World) -> None:
    """Train a module, wrap what is in it again, and compare outputs and gradients."""

    def body(rank: Rank) -> None:
        for strategy, original in itertools.product(STRATEGIES, (True, False)):
            what = f"{strategy}, {original=}"
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            inner = nn.Sequential(wrapped(rank, Weight(4, 3.0), **options), nn.Identity())
            first = wrapped(rank, inner, **options)
            for _ in range(2):
                y = first(inputs(rank))
                y.sum().backward()
            assert own(first) == {9.0}, what
            first.zero_grad()
            # without .to(): it brings back the gradients that zero_grad has set to None, a known defect
            again = FullyShardedDataParallel(inner, device_id=rank.device, **options)
            assert again(inputs(rank)).tolist() == y.tolist(), what
            again(inputs(rank)).sum().backward()
            assert own(again) == {4.5}, what
            two = nn.Sequential(nested(rank, **options), nn.ModuleList([wrapped(rank, Weight(2, 1.0), **options)]))
            modules = FullyShardedDataParallel.fsdp_modules(two)
            roots = FullyShardedDataParallel.fsdp_modules(two, root_only=True)
            assert modules == [two[0], two[0].module.others[0], two[1][0]], what
            assert roots == [two[0], two[1][0]], what
            assert [module.check_is_root() for module in modules] == [True, False, True], what

    world.run(body)


class Given(Weight):
    """A module that has values as soon as it is told to."""

    def reset_parameters(self) -> None:
        """Set the weight to 2, 3, ..., once more for each call."""
        self.calls = getattr(self, "calls", 0) + 1
        with torch.no_grad():
            self.weight.copy_(torch.arange(self.weight.numel()) + 1.0 + self.calls)


@requirement(
    "TP-META-91",
    "FSDP gives a module on the meta device its values, by param_init_fn or else reset_parameters, once for each "
    "module, and trains it as another.",
    source=f"{SOURCE}: param_init_fn",
)
@pytest.mark.world(2)
def test_without_values(world: World) -> None:
    """Wrap modules on the meta device by a policy, by hand or together; some of them have values already."""

    def body(rank: Rank) -> None:
        def fill(module: nn.Module) -> None:
            filled.append(module)
            if isinstance(module, Given):
                module.to_empty(device=rank.device, recurse=False)
                module.reset_parameters()

        ways = itertools.product(STRATEGIES, (True, False), (None, fill), ("policy", "by hand", "together"))
        for strategy, original, given, how in ways:
            what = f"{strategy}, {original=}, {given}, {how}"
            filled: list[nn.Module] = []
            with torch.device("meta"):
                parts = [Given(3, 3.0), Given(2, 7.0)]
            model: Any = nn.Sequential(*parts)
            options = {"sharding_strategy": strategy, "use_orig_params": original, "param_init_fn": given}
            options["device_id"] = rank.device
            if how == "policy":
                options["auto_wrap_policy"] = ModuleWrapPolicy({Given})
            if how == "together":
                options["mixed_precision"] = MixedPrecision(torch.float32, torch.float16)
            if how == "by hand":
                model[1] = FullyShardedDataParallel(model[1], **options)
            model = FullyShardedDataParallel(model, **options)
            assert [part.calls for part in parts] == [1, 1], what
            assert bool(filled) == (given is not None), what
            assert len(filled) == len(set(filled)), what
            assert all(p.device == rank.device for p in model.parameters()), what
            model(inputs(rank)).sum().backward()
            with FullyShardedDataParallel.summon_full_params(model):
                assert [part.weight.tolist() for part in parts] == [[2.0, 3.0, 4.0], [2.0, 3.0]], what
            # the output is 7 * 5 * (3 * 9 * x)
            assert own(model) <= {35 * 3 * 1.5, 7 * 27 * 1.5}, f"{what}: {own(model)}"
        with pytest.raises(ValueError, match="callable"), torch.device("meta"):
            FullyShardedDataParallel(Given(2, 1.0), device_id=rank.device, param_init_fn=1)
        with torch.device("meta"):
            lacking = Weight(2, 1.0)
        with pytest.raises(AttributeError, match="reset_parameters"):
            FullyShardedDataParallel(lacking, device_id=rank.device)

    world.run(body)
