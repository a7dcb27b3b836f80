"""Mixed precision: which tensors are cast, and in which dtype gradients accumulate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fixtures.containers import CONTAINERS, OWN_SEQUENCES
from fixtures.managed import ways
from fixtures.tensors import chunk, numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.fsdp.MixedPrecisionPolicy"


class Looking(nn.Module):
    """A layer that records the dtypes of its parameter, its buffer and its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.full((2,), 1.0 + 2.0**-12))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, nested: Any = None, *, named: Any = None, rows: Any = None) -> Any:
        self.seen = {"weight": self.weight.dtype, "scale": self.get_buffer("scale").dtype, "x": x.dtype}
        if nested is not None:
            self.seen |= {"nested": nested[0]["x"].dtype, "named": named.dtype, "rows": rows.dtype}
        y = self.weight * x
        return {"y": y, "rows": rows}


@requirement(
    "RFSDP-MIX-01",
    "param_dtype casts floating-point parameters and inputs, wherever the inputs are passed, but no integers, "
    "bools or buffers.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: param_dtype, cast_forward_inputs",
)
@pytest.mark.parametrize("inputs", [True, False], ids=["inputs", "not-inputs"])
@pytest.mark.parametrize("output", ["", "float64"])
@pytest.mark.world(2)
def test_what_is_cast(world: World, inputs: bool, output: str) -> None:
    """Pass inputs by position, by keyword and in containers; run two steps and an evaluation."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        output_dtype=getattr(torch, output) if output else None,
        cast_forward_inputs=inputs,
    )

    def body(rank: Rank) -> None:
        model = replicate_fsdp.apply(Looking(), rank, mp_policy=policy)
        for grad in (True, False, True):
            x, rows = torch.ones(2, device=rank.device), torch.arange(2, device=rank.device)
            with torch.set_grad_enabled(grad):
                result = model(x, [{"x": x}], named=x, rows=rows)
            given = torch.bfloat16 if inputs else torch.float32
            assert model.seen == {
                "weight": torch.bfloat16,
                "scale": torch.float32,
                "x": given,
                "nested": given,
                "named": given,
                "rows": torch.int64,
            }
            assert result["y"].dtype == (getattr(torch, output) if output else given)
            assert result["rows"].dtype == torch.int64
            if grad:
                result["y"].sum().backward()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {g.dtype for g in replicate_fsdp.gradients(model).values()} == {torch.float32}

    world.run(body)


@requirement(
    "RFSDP-MIX-02",
    "Gradients are reduced in reduce_dtype and returned in the dtype of the parameters.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: reduce_dtype",
)
@pytest.mark.parametrize(("param", "reduce", "right"), [("", "bfloat16", 256.0), ("bfloat16", "float32", 257.0)])
@pytest.mark.world(2)
def test_reduce_dtype(world: World, param: str, reduce: str, right: float) -> None:
    """Ranks have 512 and 2: the average needs nine bits, bfloat16 has eight."""
    policy = MixedPrecisionPolicy(getattr(torch, param) if param else None, getattr(torch, reduce))

    def body(rank: Rank) -> float:
        model = replicate_fsdp.apply(nn.Linear(1, 1, bias=False), rank, mp_policy=policy)
        model(torch.full((1, 1), [512.0, 2.0][rank.index], device=rank.device)).sum().backward()
        gradient = replicate_fsdp.gradients(model)["weight"]
        assert gradient.dtype == torch.float32
        return float(gradient)

    assert_on_ranks([right] * 2, world.run(body))


@requirement(
    "RFSDP-MIX-06",
    "Gradients are averaged with all digits of the dtype that they are reduced in, which is their own by default.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: reduce_dtype",
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.world(2)
def test_every_digit(world: World, dtype: str) -> None:
    """The last binary digits of the average count, whether replicated or sharded, and over two micro-batches."""
    own = getattr(torch, dtype)
    eps = torch.finfo(own).eps
    wider = [torch.float64] if own is torch.float32 else [torch.float32] * (own.itemsize == 2)

    def body(rank: Rank) -> None:
        for reduce in (None, own, *wider):
            policy = MixedPrecisionPolicy(reduce_dtype=reduce)
            models: dict[str, Any] = {
                "replicated": replicate_fsdp.apply(nn.Linear(2, 3, bias=False, dtype=own), rank, mp_policy=policy),
                "sharded": fully_shard(
                    nn.Linear(2, 3, bias=False, dtype=own, device=rank.device), mesh=rank.mesh(), mp_policy=policy
                ),
            }
            x = torch.full((1, 2), 1 + (2 + 4 * rank.index) * eps, dtype=own, device=rank.device)
            for name, model in models.items():
                for synced in ([True], [False, True]):
                    for on in synced:
                        model.set_requires_gradient_sync(on)
                        model(x).sum().backward()
                    gradient = replicate_fsdp.gradients(model)["weight"]
                    right = torch.full((3, 2), (1 + 4 * eps) * len(synced), dtype=own)
                    assert_same(right, gradient, f"{name}, reduced in {reduce}, {len(synced)} micro-batches")
                    model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-ZERO-01",
    "After gradients are cleared, those of the next step are of that step alone, under every policy.",
    source="torch.nn.Module.zero_grad; torch.distributed.fsdp: replicate, fully_shard",
)
@pytest.mark.parametrize("to_none", [True, False], ids=["to-none", "to-zero"])
@pytest.mark.world(2)
def test_next_step(world: World, to_none: bool) -> None:
    """Four steps of one or two micro-batches of different values, with parameters that are kept unsharded or not."""
    narrow = torch.bfloat16
    policies = [(None, None), (narrow, None), (narrow, narrow), (narrow, torch.float32), (None, torch.float64)]

    def body(rank: Rank) -> None:
        for param, reduce in policies:
            policy = MixedPrecisionPolicy(param, reduce)
            for kept in (False, True):
                models: dict[str, Any] = {
                    "replicated": replicate_fsdp.apply(nn.Linear(2, 2, bias=False), rank, mp_policy=policy),
                    "sharded": fully_shard(
                        nn.Linear(2, 2, bias=False, device=rank.device), mesh=rank.mesh(), mp_policy=policy
                    ),
                }
                for name, model in models.items():
                    model.set_reshard_after_backward(not kept)
                    for number, synced in enumerate([[True], [True], [False, True], [True]]):
                        for on in synced:
                            model.set_requires_gradient_sync(on)
                            x = torch.full((1, 2), (1.0 + rank.index) * 2**number, device=rank.device)
                            model(x).sum().backward()
                        right = torch.full((2, 2), 1.5 * 2**number * len(synced))
                        model.reshard()
                        gradient = replicate_fsdp.gradients(model)["weight"]
                        assert_same(right, gradient, f"{name}, {param}, {reduce}, {kept=}, step {number}")
                        model.zero_grad(set_to_none=to_none)

    world.run(body)


@requirement(
    "RFSDP-MIX-03",
    "Without synchronization, gradients accumulate in reduce_dtype.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: reduce_dtype",
)
@pytest.mark.world(1, 2)
def test_accumulated_in_reduce_dtype(world: World) -> None:
    """Run two steps with micro-batches of 256, 1 and 1 in bfloat16, reduced in float32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def body(rank: Rank) -> list[float]:
        model = replicate_fsdp.apply(nn.Linear(1, 1, bias=False), rank, mp_policy=policy)
        gradients = []
        for _ in range(2):
            for value, synced in ((256.0, False), (1.0, False), (1.0, True)):
                model.set_requires_gradient_sync(synced)
                model(torch.full((1, 1), value, device=rank.device)).sum().backward()
            gradients.append(float(replicate_fsdp.gradients(model)["weight"]))
            model.zero_grad()
        return gradients

    assert_on_ranks([[258.0, 258.0]] * world.size, world.run(body))


@requirement(
    "RFSDP-MIX-04",
    "Checkpointed layers are recomputed with cast inputs and parameters.",
    source=SOURCE,
)
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.world(2)
def test_checkpointed(world: World, reentrant: bool) -> None:
    """A layer that is its own group, with float32 outputs, is checkpointed twice."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.first.weight)
            nn.init.ones_(self.second.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (self.first, self.second):
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    def body(rank: Rank) -> list[list[float]]:
        model = replicate_fsdp.apply(Model(), rank, mp_policy=policy)
        gradients = []
        for _ in range(2):
            x = torch.full((1, 1), 1.0 + rank.index, device=rank.device, requires_grad=True)
            model(x).sum().backward()
            gradients.append([float(g) for g in replicate_fsdp.gradients(model).values()])
            model.zero_grad()
        return gradients

    assert_on_ranks([[[1.5, 1.5]] * 2] * 2, world.run(body))


@requirement(
    "RFSDP-MIX-05",
    "output_dtype casts the outputs of the module that has the policy, whether or not it is the root.",
    source=SOURCE + ": output_dtype",
)
@pytest.mark.parametrize("where", ["inner", "root"])
@pytest.mark.world(2)
def test_whose_output(world: World, where: str) -> None:
    """Two layers, of which one or the whole model casts its output to float64."""

    def body(rank: Rank) -> list[str]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Identity()).to(rank.device)
        seen: list[str] = []
        model[1].register_forward_pre_hook(lambda module, inputs: seen.append(str(inputs[0].dtype)[6:]))
        policies = {where: MixedPrecisionPolicy(output_dtype=torch.float64)}
        plain = MixedPrecisionPolicy()
        options = {replicate_fsdp.MESH: rank.mesh()}
        replicate_fsdp.replicate(model[0], mp_policy=policies.get("inner", plain), **options)
        replicate_fsdp.replicate(model, mp_policy=policies.get("root", plain), **options)
        output = model(torch.ones(1, 2, device=rank.device))
        return [*seen, str(output.dtype)[6:]]

    expected = ["float64", "float64"] if where == "inner" else ["float32", "float64"]
    assert_on_ranks([expected] * 2, world.run(body))


class Returning(nn.Module):
    """A weight, and a forward that keeps its inputs and returns the first."""

    given: tuple[Any, Any]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, first: Any, *, named: Any) -> tuple[Any, torch.Tensor]:
        """Return the first input, and the weight's double."""
        self.given = first, named
        return first, self.weight * 2


@requirement(
    "RFSDP-MIX-07",
    "Floating-point tensors are cast in every kind of container of inputs or outputs, which keeps its class.",
    source=f"{SOURCE}: param_dtype, cast_forward_inputs, output_dtype",
)
@pytest.mark.parametrize("stack", ["sharded", "replicated"])
@pytest.mark.world(2, keeps="modules that store their inputs, in whose graphs they are")
def test_containers(world: World, stack: str) -> None:
    """Pass each by position and by keyword, and return it, with a policy that casts inputs, outputs, both or none."""
    check_containers(world, stack, [name for name in CONTAINERS if name not in OWN_SEQUENCES])


@requirement(
    "RFSDP-MIX-07",
    "Floating-point tensors are cast in every kind of container of inputs or outputs, which keeps its class.",
    source=f"{SOURCE}: param_dtype, cast_forward_inputs, output_dtype",
)
@pytest.mark.parametrize("stack", ["sharded", "replicated"])
@pytest.mark.world(2, keeps="modules that store their inputs, in whose graphs they are")
def test_own_sequences(world: World, stack: str) -> None:
    """Pass and return a list and a tuple of classes of their own, as the other containers."""
    check_containers(world, stack, OWN_SEQUENCES)


def check_containers(world: World, stack: str, names: Sequence[str]) -> None:
    """Pass containers by position and by keyword, and return them, with policies that cast inputs, outputs or none."""
    narrow, wide = torch.bfloat16, torch.float64
    policies = [
        (MixedPrecisionPolicy(narrow), narrow, narrow),
        (MixedPrecisionPolicy(narrow, output_dtype=wide), narrow, wide),
        (MixedPrecisionPolicy(narrow, output_dtype=wide, cast_forward_inputs=False), torch.float32, wide),
        (MixedPrecisionPolicy(output_dtype=narrow), torch.float32, narrow),
        (MixedPrecisionPolicy(), torch.float32, torch.float32),
    ]

    def body(rank: Rank) -> None:
        for policy, given, returned in policies:
            model: Any = Returning().to(rank.device)
            model = (
                replicate_fsdp.apply(model, rank, mp_policy=policy)
                if stack == "replicated"
                else fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
            )
            for name in names:
                make, opened = CONTAINERS[name]
                what = f"{name}, {policy}"
                x = torch.full((2,), 1.0 + rank.index, device=rank.device, requires_grad=True)
                rows = torch.arange(2, device=rank.device)
                container = make(x, rows)
                result, doubled = model(container, named=make(x, rows))
                for found, dtype in ((model.given[0], given), (model.given[1], given), (result, returned)):
                    assert type(found) is type(container), what
                    for before, after in zip(opened(container), opened(found), strict=True):
                        if not isinstance(before, torch.Tensor):
                            assert after is before, what
                            continue
                        assert after.dtype == (dtype if before.is_floating_point() else torch.int64), what
                        assert torch.equal(after.detach().float(), before.detach().float()), what
                (doubled * (1 + rank.index)).sum().backward()
                own = next(v for v in opened(result) if isinstance(v, torch.Tensor) and v.is_floating_point())
                own.sum().backward()
                assert x.grad is not None, what
                assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [1.0, 1.0]), what
            gradient = replicate_fsdp.gradients(model)["weight"]
            assert gradient.tolist() == [3.0 * len(names)] * 2, policy

    world.run(body)


class Adapted(nn.Module):
    """A weight that trains, among frozen ones of several dtypes, and the dtypes of all in the last forward."""

    seen: dict[str, torch.dtype]

    def __init__(self, dtype: torch.dtype, frozen: Sequence[torch.dtype], first: bool) -> None:
        super().__init__()
        bases = {f"base{i}": nn.Parameter(numbers(4).to(other), requires_grad=False) for i, other in enumerate(frozen)}
        adapter = {"adapter": nn.Parameter(torch.ones(3, 2, dtype=dtype))}
        for name, parameter in {**adapter, **bases}.items() if first else {**bases, **adapter}.items():
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the weight times the input and the sum of all frozen weights."""
        self.seen = {name: parameter.dtype for name, parameter in self.named_parameters()}
        factor = sum(float(p.detach().double().sum()) for name, p in self.named_parameters() if name != "adapter")
        return (self.adapter * x).sum() * factor


@requirement(
    "RFSDP-FROZEN-02",
    "Frozen parameters may have other dtypes than the trainable ones beside them, and are cast to param_dtype unless "
    "they are integers.",
    source=f"{SOURCE}: param_dtype; torch.distributed.fsdp.fully_shard",
)
@pytest.mark.world(2)
def test_frozen_dtypes(world: World) -> None:
    """Train a weight among frozen ones of one or two dtypes, registered first or last, under several policies."""
    half, narrow, single, wide = torch.float16, torch.bfloat16, torch.float32, torch.float64
    dtypes = [(single, [other]) for other in (half, narrow, wide)]
    dtypes += [(narrow, [single]), (single, [wide, narrow]), (single, [narrow, single])]
    check_frozen(world, dtypes)


@requirement(
    "RFSDP-FROZEN-3654",
    "Frozen parameters of eight bits, beside trainable ones, keep their dtype, also where a wider param_dtype has "
    "their elements.",
    source=f"{SOURCE}: param_dtype; torch.distributed.fsdp.fully_shard",
)
@pytest.mark.world(2)
def test_frozen_bytes(world: World) -> None:
    """Train a weight beside frozen ones of a dtype of eight bits, alone or with others, first or last."""
    half, narrow, single = torch.float16, torch.bfloat16, torch.float32
    check_frozen(
        world,
        [(single, [torch.float8_e4m3fn]), (narrow, [torch.float8_e5m2, narrow]), (single, [half, torch.float8_e4m3fn])],
    )


@requirement(
    "RFSDP-FROZEN-02",
    "Frozen parameters may have other dtypes than the trainable ones beside them, and are cast to param_dtype unless "
    "they are integers.",
    source=f"{SOURCE}: param_dtype; torch.distributed.fsdp.fully_shard",
)
@pytest.mark.world(2)
def test_frozen_integers(world: World) -> None:
    """Train a weight beside frozen integers, alone and among others, registered first or last."""
    half, narrow, single, whole = torch.float16, torch.bfloat16, torch.float32, torch.int8
    check_frozen(world, [(single, [whole]), (narrow, [narrow, half, whole])])


def check_frozen(world: World, dtypes: Sequence[tuple[torch.dtype, Sequence[torch.dtype]]]) -> None:
    """Train a weight among frozen ones of given dtypes, registered first or last, under several policies."""
    narrow, single, wide, whole = torch.bfloat16, torch.float32, torch.float64, torch.int8
    policies = [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(narrow),
        MixedPrecisionPolicy(narrow, single),
        MixedPrecisionPolicy(reduce_dtype=wide),
    ]

    def body(rank: Rank) -> None:
        every = itertools.cycle(itertools.product((True, False), ways(rank).items()))
        for ((own, frozen), policy), (first, (way, managed)) in zip(
            itertools.product(dtypes, policies), every, strict=False
        ):
            what = f"{way}, {own}, {frozen}, {policy}, {first=}"
            model: Any = managed(Adapted(own, frozen, first).to(rank.device), mp_policy=policy)
            for grad in (True, False, True):
                with torch.set_grad_enabled(grad):
                    output = model(torch.full((2,), 1.0 + rank.index, device=rank.device, dtype=own))
                seen = {f"base{i}": other for i, other in enumerate(frozen)} | {"adapter": own}
                right = {n: policy.param_dtype if policy.param_dtype and d is not whole else d for n, d in seen.items()}
                assert model.seen == right, what
                assert output.item() == 60.0 * (1 + rank.index) * len(frozen), what
                if grad:
                    output.backward()
                    assert {n: p.dtype for n, p in model.named_parameters()} == seen, what
                    gradients = replicate_fsdp.gradients(model)
                    assert {n: (g.dtype, g.unique().tolist()) for n, g in gradients.items()} == {
                        "adapter": (own, [15.0 * len(frozen)])
                    }, what
                    model.zero_grad()
            shards = 2 if way == "sharded" else 1
            for name, parameter in model.named_parameters():
                own = parameter.to_local().tolist()
                assert name == "adapter" or own == chunk(numbers(4), shards, rank.index % shards).tolist(), what

    world.run(body)


def extremes(dtype: torch.dtype) -> torch.Tensor:
    """Return five elements of a dtype, which another dtype of the same size or a wider one does not all have."""
    if dtype == torch.bool:
        return torch.tensor([True, False, False, True, True])
    if dtype.is_complex:
        parts = extremes(torch.float64 if dtype == torch.complex128 else torch.float32)
        return torch.complex(parts, parts.flip(0))
    if not dtype.is_floating_point:
        whole = torch.iinfo(dtype)
        return torch.tensor([whole.max, whole.min, whole.max // 3, 1, whole.max - 1], dtype=dtype)
    real = torch.finfo(dtype)
    return torch.tensor([real.max, real.smallest_normal, -1 / 3, -0.0, torch.nan], dtype=torch.float64).to(dtype)


FROZEN: list[tuple[torch.dtype, ...]] = [
    (torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.int16, torch.float16, torch.bfloat16),
    (torch.int32, torch.float32),
    (torch.int64, torch.float64, torch.complex64),
    (torch.complex128,),
]
"""Dtypes of frozen parameters, by the size of their elements."""
if runs_with("<2.12"):  # docs/findings/fsdp_frozen_integers.py
    FROZEN = [tuple(d for d in size if d.is_floating_point or d.is_complex) for size in FROZEN]


class Frozen(nn.Module):
    """A weight that trains among frozen tensors, of which it keeps copies in the forward."""

    seen: list[torch.Tensor]

    def __init__(self, dtype: torch.dtype, frozen: Sequence[torch.dtype], first: bool) -> None:
        super().__init__()
        others = [nn.Parameter(extremes(other), requires_grad=False) for other in frozen]
        weight = nn.Parameter(torch.ones(3, 2, dtype=dtype))
        self.all = nn.ParameterList([weight, *others] if first else [*others, weight])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [p.detach().clone() for p in self.all if not p.requires_grad]
        weight = next(p for p in self.all if p.requires_grad)
        return (weight * x).sum()


@requirement(
    "RFSDP-FROZEN-9172",
    "A forward has every element of frozen parameters as it is, whichever dtypes of one or of several sizes the "
    "parameters of its group have.",
    source="torch.distributed.fsdp.fully_shard; torch.distributed.fsdp.MixedPrecisionPolicy: param_dtype",
)
@pytest.mark.parametrize("own", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=lambda d: str(d)[6:])
@pytest.mark.world(2)
def test_frozen_of_any_dtypes(world: World, own: torch.dtype) -> None:
    """Train a weight beside frozen tensors of one dtype, or of two of one size, registered first or last."""

    def body(rank: Rank) -> None:
        groups = [(other,) for size in FROZEN for other in size for _ in range(1 + (own in size))]
        groups += [two for size in FROZEN for two in itertools.combinations(size, 2)]
        managers = ways(rank)
        for number, frozen in enumerate(groups):
            manage = managers["hybrid" if number % 4 == 3 else "sharded"]
            model: Any = manage(Frozen(own, frozen, number % 2 == 0).to(rank.device))
            model(torch.full((2,), 1.0 + rank.index, device=rank.device, dtype=own)).backward()
            for dtype, found in zip(frozen, model.seen, strict=True):
                assert_same(extremes(dtype), found.cpu(), f"{frozen}, {number}")
            gradients = replicate_fsdp.gradients(model)
            assert [(g.dtype, g.unique().tolist()) for g in gradients.values()] == [(own, [1.5])], frozen

    world.run(body)
