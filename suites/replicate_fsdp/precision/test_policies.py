"""Mixed precision policies of modules within each other, of modules in one group, with offloading and with hooks."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import messages, replicate_fsdp
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.fsdp.MixedPrecisionPolicy"
NARROW, SINGLE, WIDE = torch.bfloat16, torch.float32, torch.float64
GIVEN = 512.0, 2.0
"""The inputs of two ranks, whose average needs nine bits; bfloat16 has eight."""


class Part(nn.Module):
    """A weight, and the dtypes of it and of the input in the last forward."""

    seen: tuple[torch.dtype, torch.dtype]

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.weight.dtype, x.dtype
        return self.weight * x


class Parts(Part):
    """A weight of its own and parts, which are called in the given order, and the dtypes of their outputs."""

    returned: list[torch.dtype]

    def __init__(self, *elements: int) -> None:
        super().__init__(12)
        self.parts = nn.ModuleList(Part(count) for count in elements)
        self.order = list(range(len(elements)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [self.parts[i](x) for i in self.order]
        self.returned = [y.dtype for y in outputs]
        return super().forward(x).float().sum() + sum(y.float().sum() for y in outputs)


def mean(policy: MixedPrecisionPolicy) -> float:
    """Return the average of the inputs of the ranks, as it is rounded in the dtype that reduces it."""
    return 256.0 if policy.reduce_dtype is NARROW else 257.0


POLICIES = {
    "none": MixedPrecisionPolicy(),
    "narrow": MixedPrecisionPolicy(NARROW, NARROW),
    "computes-narrow": MixedPrecisionPolicy(NARROW, SINGLE),
    "reduces-narrow": MixedPrecisionPolicy(reduce_dtype=NARROW),
    "reduces-wide": MixedPrecisionPolicy(reduce_dtype=WIDE),
    "returns-wide": MixedPrecisionPolicy(output_dtype=WIDE),
    "takes-all": MixedPrecisionPolicy(WIDE, SINGLE, NARROW, cast_forward_inputs=False),
}


@requirement(
    "RFSDP-MIX-08",
    "Of managed modules inside each other, each computes, reduces and returns in the dtypes of its own policy.",
    source=f"{SOURCE}; torch.distributed.fsdp.fully_shard: mp_policy",
)
@pytest.mark.parametrize("way", ["replicated", "sharded", "hybrid"])
@pytest.mark.world(2)
def test_nested(world: World, way: str) -> None:
    """Three policies at a time, of the root and of two parts, so that each pair of root and part comes."""

    def body(rank: Rank) -> None:
        managed = ways(rank)[way]
        names = list(POLICIES)
        for root, offset in itertools.product(range(7), (1, 2, 3)):
            chosen = names[root], names[(root + offset) % 7], names[root - offset]
            outer, *inner = (POLICIES[name] for name in chosen)
            what = f"root, first and second part: {chosen}"
            model: Any = Parts(4, 8).to(rank.device)
            for part, policy in zip(model.parts, inner, strict=True):
                managed(part, mp_policy=policy)
            managed(model, mp_policy=outer)
            output = model(torch.full((1,), GIVEN[rank.index], device=rank.device))
            into = cast(outer, SINGLE)
            assert model.seen == (outer.param_dtype or SINGLE, into), what
            for part, policy, returned in zip(model.parts, inner, model.returned, strict=True):
                assert part.seen == (policy.param_dtype or SINGLE, cast(policy, into)), what
                assert returned == (policy.output_dtype or torch.promote_types(*part.seen)), what
            assert output.dtype == (outer.output_dtype or SINGLE), what
            before = messages.mark()
            output.sum().backward()
            reduced = [(m.shape[0], m.dtype) for m in messages.since(before) if "gather" not in m.op]
            policies = {12: outer, 4: inner[0], 8: inner[1]}
            if reduced:
                right = [(count, messages.RECORDED[of.reduce_dtype or SINGLE]) for count, of in policies.items()]
                assert sorted(both(way, reduced)) == sorted(right), what
            found = [g.tolist() for g in replicate_fsdp.gradients(model).values()]
            assert found == [[mean(of)] * count for count, of in policies.items()], what
            assert {p.grad.dtype for p in model.parameters()} == {SINGLE}, what

    world.run(body)


def cast(policy: MixedPrecisionPolicy, arrives: torch.dtype) -> torch.dtype:
    """Return the dtype of an input that arrives in a dtype."""
    return policy.param_dtype if policy.param_dtype and policy.cast_forward_inputs else arrives


def both(way: str, reduced: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the messages without those over shards of one rank, which hybrid sharding sends besides."""
    return sorted(set(reduced)) if way == "hybrid" else reduced


@requirement(
    "RFSDP-MIX-09",
    "Each module of a group casts its own inputs and outputs by the group's policy, in any order, at every call.",
    source=f"{SOURCE}: output_dtype, cast_forward_inputs; torch.distributed.fsdp.fully_shard: module",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, some modules of a group do not cast their outputs")
@pytest.mark.world(2)
def test_grouped(world: World) -> None:
    """Two of three and three parts are one group, called once, several times or not at all, in several orders."""
    policies = [MixedPrecisionPolicy(NARROW, SINGLE, WIDE), MixedPrecisionPolicy(output_dtype=NARROW), POLICIES["none"]]
    orders = [[0, 1, 2], [2, 1, 0], [1, 1, 0, 2, 2, 0], [1], [2, 0]]

    def body(rank: Rank) -> None:
        for (way, managed), policy, size in itertools.product(ways(rank).items(), policies, (2, 3)):
            model: Any = Parts(4, 8, 6).to(rank.device)
            managed(list(model.parts)[:size], mp_policy=policy)
            managed(model)
            computed = cast(policy, SINGLE)
            for order, grad in itertools.product(orders, (True, False)):
                what = f"{way}, {policy}, {size} parts, {order}, {grad=}"
                model.order = order
                with torch.set_grad_enabled(grad):
                    output = model(torch.full((1,), 1.0 + rank.index, device=rank.device))
                returned = [(policy.output_dtype or computed) if i < size else SINGLE for i in order]
                assert model.returned == returned, what
                seen = [(policy.param_dtype or SINGLE, computed) if i < size else (SINGLE, SINGLE) for i in order]
                assert [model.parts[i].seen for i in order] == seen, what
                if grad:
                    output.backward()
                    found = {n: g.unique().tolist() for n, g in replicate_fsdp.gradients(model).items()}
                    right = {f"parts.{i}.weight": [1.5 * order.count(i)] for i in sorted(set(order))}
                    assert found == {"weight": [1.5]} | right, what
                    model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-OFFLOAD-02",
    "Offloaded parameters stay on the host, but are cast, reduced and trained as others under every policy.",
    source="torch.distributed.fsdp.CPUOffloadPolicy; torch.distributed.fsdp.MixedPrecisionPolicy",
)
@pytest.mark.parametrize("way", ["replicated", "sharded", "hybrid"])
@pytest.mark.world(2)
def test_offloaded(world: World, way: str) -> None:
    """Two steps of SGD and an evaluation of a model whose root or whose parts are offloaded, or all."""

    def body(rank: Rank) -> None:
        managed = ways(rank)[way]
        for (name, policy), offloaded in itertools.product(POLICIES.items(), ({"root"}, {"part"}, {"root", "part"})):
            what = f"{name}, {offloaded}"
            options = {who: {"offload_policy": CPUOffloadPolicy(pin_memory=False)} for who in offloaded}
            model: Any = Parts(4, 7).to(rank.device)
            for part in model.parts:
                managed(part, mp_policy=policy, **options.get("part", {}))
            managed(model, mp_policy=policy, **options.get("root", {}))
            sgd = torch.optim.SGD(model.parameters(), lr=2.0**-6)
            weight = 1.0
            for step in range(3):
                with torch.set_grad_enabled(step < 2):
                    output = model(torch.full((1,), GIVEN[rank.index], device=rank.device))
                computes = policy.param_dtype or SINGLE
                assert {m.seen for m in (model, *model.parts)} == {(computes, cast(policy, SINGLE))}, what
                right = 23 * GIVEN[rank.index] * torch.tensor(weight).to(computes).item()
                assert output.item() == pytest.approx(right, rel=2.0**-6), what
                if step == 2:
                    break
                output.backward()
                for who, module in {"root": model, "part": model.parts[1]}.items():
                    place = "cpu" if who in offloaded else rank.device.type
                    assert module.weight.to_local().device.type == place, what
                found = {(g.unique().item(), g.dtype) for g in replicate_fsdp.gradients(model).values()}
                assert found == {(mean(policy), SINGLE)}, what
                sgd.step()
                sgd.zero_grad()
                weight -= mean(policy) * 2.0**-6
                assert {p.unique().item() for p in replicate_fsdp.parameters(model).values()} == {weight}, what

    world.run(body)


@requirement(
    "RFSDP-HOOK-07",
    "Under every policy, an all-reduce hook gets the reduced gradients in the dtype of reduction, and changes them.",
    source="torch.distributed.fsdp.FSDPModule.set_all_reduce_hook: reduce_output",
)
@pytest.mark.world(2)
def test_all_reduce_hooks(world: World) -> None:
    """Hooks of the root and of a part change their gradients, in two steps; then others replace them."""

    def body(rank: Rank) -> None:
        for (way, managed), (name, policy) in itertools.product(ways(rank).items(), POLICIES.items()):
            what = f"{way}, {name}"
            model: Any = Parts(4).to(rank.device)
            managed(model.parts[0], mp_policy=policy)
            managed(model, mp_policy=policy)
            share = 2 if way == "sharded" else 1
            for factors in ((2, 4), (3, 2)):
                seen: list[tuple[Any, ...]] = []
                for module, factor in zip((model, model.parts[0]), factors, strict=True):

                    def hook(reduced: torch.Tensor, factor: float = factor, seen: list[Any] = seen) -> None:
                        seen.append((reduced.numel(), reduced.dtype, reduced.unique().tolist()))
                        reduced.mul_(factor)

                    module.set_all_reduce_hook(hook)
                for _ in range(2):
                    model(torch.full((1,), GIVEN[rank.index], device=rank.device)).sum().backward()
                    each = (policy.reduce_dtype or SINGLE, [mean(policy)])
                    assert sorted(seen, key=str) == sorted([(12 // share, *each), (4 // share, *each)], key=str), what
                    seen.clear()
                    found = [g.unique().tolist() for g in replicate_fsdp.gradients(model).values()]
                    assert found == [[factor * mean(policy)] for factor in factors], what
                    model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-HOOK-08",
    "Post-accumulate gradient hooks run in their order, once in each synchronized backward and in no other, also of "
    "offloaded parameters.",
    source="torch.Tensor.register_post_accumulate_grad_hook; torch.distributed.fsdp: fully_shard, CPUOffloadPolicy",
)
@pytest.mark.world(2, keeps="parameters whose hooks refer to them")
def test_post_accumulate_hooks(world: World) -> None:
    """Train in hooks of the root and of a part, over backwards with and without synchronization; then remove a hook."""
    kept: dict[str, OffloadPolicy] = {"kept": OffloadPolicy(), "offloaded": CPUOffloadPolicy(pin_memory=False)}

    def body(rank: Rank) -> None:
        for (way, managed), (place, offload), name in itertools.product(
            ways(rank).items(), kept.items(), ("none", "computes-narrow", "reduces-wide")
        ):
            model: Any = Parts(4).to(rank.device)
            for module in (model.parts[0], model):
                managed(module, mp_policy=POLICIES[name], offload_policy=offload)
            seen: list[tuple[str, str, list[float]]] = []

            def hook(who: str, parameter: Any, order: str, seen: list[Any] = seen) -> Any:
                def run(given: Any) -> None:
                    assert given is parameter
                    seen.append((who, order, given.grad.to_local().unique().tolist()))
                    if order == "second":
                        with torch.no_grad():
                            given.sub_(given.grad)
                        given.grad = None

                return parameter.register_post_accumulate_grad_hook(run)

            handles = [hook(who, p, order) for order in ("first", "second") for who, p in model.named_parameters()]
            weight = 1.0
            for step, (synced, backwards) in enumerate([(True, 1), (False, 0), (True, 2), (True, 1)]):
                what = f"{way}, {place}, {name}, step {step}"
                model.set_requires_gradient_sync(synced)
                if step == 3:
                    for handle in handles[:2]:
                        handle.remove()
                model(torch.full((1,), GIVEN[rank.index], device=rank.device)).sum().backward()
                orders = ("first", "second") if step < 3 else ("second",)
                for who, p in model.named_parameters():
                    mine = [(order, values) for of, order, values in seen if of == who]
                    assert mine == [(order, [257.0 * backwards]) for order in orders if synced], f"{what}: {who}"
                    assert p.grad is None, what
                seen.clear()
                weight -= 257.0 * backwards
                if synced:
                    values = replicate_fsdp.parameters(model).values()
                    assert {x for p in values for x in p.unique().tolist()} == {weight}, what

    world.run(body)


def normed(kind: str) -> nn.Sequential:
    """Create a norm between two layers whose numbers every half precision has."""
    outer: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if kind == "batch-2d":
        outer = [nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)]
    middle = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "batch": nn.BatchNorm1d, "batch-2d": nn.BatchNorm2d}[kind](4)
    model = nn.Sequential(outer[0], middle, outer[1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.arange(parameter.numel()).reshape(parameter.shape) % 5 - 2) / 4)
    return model


def takes(kind: str, narrow: torch.dtype, device: torch.device) -> bool:
    """Return whether a device's norm with parameters in float32 takes an input in a half precision, as hosts do."""
    norm: Any = normed(kind)[1].to(device)
    x = torch.ones((2, 4, 1, 1) if kind == "batch-2d" else (2, 4), dtype=narrow, device=device, requires_grad=True)
    try:
        norm(x).sum().backward()
        norm.weight.grad.cpu()  # which waits for an error of the device
    except RuntimeError:
        return False
    return True


@requirement(
    "RFSDP-MIX-08",
    "Of managed modules inside each other, each computes, reduces and returns in the dtypes of its own policy.",
    source=f"{SOURCE}; torch.distributed.fsdp.fully_shard: mp_policy",
)
@pytest.mark.world(2)
def test_norms(world: World) -> None:
    """Norms with and without buffers have parameters in a half precision, or in float32 between layers of a half.

    If a device's norm does not take two dtypes, the policy casts its input to float32.
    """
    kinds = ("layer", "rms", "batch", "batch-2d")
    cases = itertools.product(kinds, (NARROW, torch.float16), (False, True))

    def body(rank: Rank) -> None:
        for (kind, narrow, wide), (way, managed) in zip(cases, itertools.cycle(ways(rank).items()), strict=False):
            what = f"{kind}, {narrow}, {wide=}, {way}"
            model: Any = normed(kind).to(rank.device)
            policy = MixedPrecisionPolicy(narrow, SINGLE)
            cast_to = None if takes(kind, narrow, rank.device) else SINGLE
            for part in model:
                of_norm = MixedPrecisionPolicy(cast_to, output_dtype=narrow)
                managed(part, mp_policy=of_norm if wide and part is model[1] else policy)
            managed(model, mp_policy=policy)
            plain = normed(kind).to(rank.device)
            for part in plain:
                if not (wide and part is plain[1]):
                    for parameter in part.parameters():
                        parameter.data = parameter.data.to(narrow)
            for norm in (model[1], plain[1]) if "batch" in kind and not wide else ():
                for name in "running_mean", "running_var":  # which the host takes in the dtype of the weight alone
                    setattr(norm, name, getattr(norm, name).to(narrow))
            x = torch.arange(243.0 if kind == "batch-2d" else 12.0).reshape(
                (3, 1, 9, 9) if kind == "batch-2d" else (3, 4)
            )
            x = (x % 7 - 3).to(rank.device)
            between = plain[0](x.to(narrow))
            right = plain[2](plain[1](between.to(cast_to) if wide and cast_to else between).to(narrow))
            output = model(x)
            assert output.dtype == narrow, what
            assert torch.equal(output, right), what
            right.sum().backward()
            output.sum().backward()
            for (name, gradient), of in zip(replicate_fsdp.gradients(model).items(), plain.parameters(), strict=True):
                assert of.grad is not None, what
                assert gradient.dtype == SINGLE, f"{what}: {name}"
                assert torch.equal(gradient.to(of.grad.dtype), of.grad), f"{what}: {name}"  # 2.15 rounds it later
            for (name, buffer), of in zip(model.named_buffers(), plain.buffers(), strict=True):
                assert torch.equal(buffer, of), f"{what}: {name}"

    world.run(body)


@requirement(
    "RFSDP-MIX-900",
    "A mixed precision policy keeps every value that it was made with, whichever of its dtypes are equal.",
    source=f"{SOURCE}: param_dtype, reduce_dtype, output_dtype, cast_forward_inputs",
)
@pytest.mark.world(2)
def test_values(world: World) -> None:
    """Make policies of all dtypes by position and by name, copy them, replace a value, and train with some of them."""
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    dtypes = (None, NARROW, torch.float16, SINGLE, WIDE)
    made = list(itertools.product(dtypes, dtypes, dtypes, (True, False)))

    def read(policy: MixedPrecisionPolicy) -> tuple[Any, ...]:
        return tuple(getattr(policy, name) for name in names)

    def body(rank: Rank) -> None:
        policies = [MixedPrecisionPolicy(*values) for values in made]
        for values, policy in zip(made, policies, strict=True):
            named = MixedPrecisionPolicy(**dict(zip(names, values, strict=True)))
            copies = [policy, named, copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))]
            assert [read(each) for each in copies] == [values] * 4, values
            assert read(dataclasses.replace(policy, param_dtype=WIDE)) == (WIDE, *values[1:]), values
            assert all(each == policy and hash(each) == hash(policy) for each in copies), values
        assert len(set(policies)) == len(made)
        for (way, managed), dtype in zip(ways(rank).items(), (NARROW, SINGLE, WIDE), strict=True):
            policy = MixedPrecisionPolicy(dtype, dtype, dtype)
            managed(part := Part(4).to(rank.device), mp_policy=policy)
            part(torch.ones(4, device=rank.device)).sum().backward()
            assert read(policy) == (dtype, dtype, dtype, True), f"{way}, {dtype}: trained"

    world.run(body)
