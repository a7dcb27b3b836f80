"""Checkpointed modules, whose forwards run again in the backward, under every kind of sharding."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointError, checkpoint

from fixtures.managed import ways
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.dynamo import checkpointed, checkpointed_in_place
from harness.stacks.limit import runs_with

SOURCE = "torch.utils.checkpoint.checkpoint; torch.distributed.fsdp.fully_shard"
Call = Callable[..., Any]


class Inner(nn.Module):
    """Multiply by a weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(Inner):
    """Multiply by the weights of two inner modules and by one's own."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.first, self.second = Inner(value), Inner(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.second(self.first(x)))


class Model(nn.Module):
    """Two blocks, which may be called through a function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(1.0), Block(2.0))
        self.through: Callable[[Any, torch.Tensor], torch.Tensor] = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return x * 1


PLAIN: Call = functools.partial(checkpoint, use_reentrant=False)
REENTRANT: Call = functools.partial(checkpoint, use_reentrant=True)
KINDS: dict[str, tuple[Call | None, Call | None, Call | None]] = {
    "called": (PLAIN, None, None),
    "reentrant": (REENTRANT, None, None),
    "around": (None, checkpointed, None),
    "within": (None, None, checkpointed),
    "in-place": (None, None, checkpointed_in_place),
}
"""What calls the blocks, what wraps them after they are managed, and what wraps the inner modules before."""


@requirement(
    "RFSDP-CKPT-01",
    "Checkpointed modules train as on one device, whichever of them are sharded, and whether they run one forward or "
    "several before a backward.",
    source=f"{SOURCE}; torch.distributed.fsdp.FSDPModule.set_modules_to_backward_prefetch",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, several forwards of checkpointed modules fail")
@pytest.mark.world(2)
def test_checkpointed(world: World) -> None:
    """Manage inner modules and blocks, or blocks alone; run one forward or two before each of two backwards."""

    def body(rank: Rank) -> None:
        every = ways(rank)
        cases = itertools.product(KINDS.items(), (True, False), range(2))
        settings = [("replicated", False), *itertools.product(("sharded", "hybrid"), (False, True))]
        for ((name, (through, around, within)), nested, _), (way, kept) in zip(
            cases, itertools.cycle(settings), strict=False
        ):
            options = {} if way == "replicated" else {"reshard_after_forward": not kept}
            what = f"{name}, {way}, {nested=}, {kept=}"
            model: Any = Model().to(rank.device)
            blocks = list(model.blocks)
            for block in blocks:
                inner = [block.first, block.second]
                if within:
                    block.first, block.second = (within(part) for part in inner)
                for part in inner if nested else ():
                    every[way](part, **options)
                every[way](block, **options)
            if around:
                model.blocks = nn.Sequential(*map(around, blocks))
            if through:
                model.through = through
            every[way](model, **options)
            for forwards, prefetches in ((1, False), (2, False), (1, True)):
                if name == "reentrant" and forwards > 1:
                    continue
                if prefetches:
                    blocks[1].set_modules_to_backward_prefetch([blocks[0], *([inner[0]] if nested else [])])
                x = torch.full((4,), 1.0 + rank.index, device=rank.device, requires_grad=True)
                losses = [model(x * (number + 1)).sum() for number in range(forwards)]
                torch.stack(losses).sum().backward()
                total = 1.5 * (1 if forwards == 1 else 3)
                found = [g.unique().tolist() for g in replicate_fsdp.gradients(model).values()]
                right = [[4 * total]] * 3 + [[8 * total]] * 3
                assert sorted(found) == right, f"{what}, {forwards} forwards, {prefetches=}"
                model.zero_grad()

    world.run(body)


class Keyed(Inner):
    """Multiply by a weight and other arguments, and note those."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, by: Any = None) -> torch.Tensor:
        self.seen.append((x.shape, scale, {name: value.tolist() for name, value in (by or {}).items()}))
        for factor in (by or {}).values():
            scale = scale * factor
        return (self.weight * x * scale).square()


@requirement(
    "RFSDP-CKPT-301",
    "A managed module that is recomputed in the backward is called with the arguments of its forward, by position or "
    "by keyword, and keeps its names.",
    source="torch.utils.checkpoint.checkpoint; torch/distributed/_composable/checkpoint_activation.py: checkpoint",
)
@pytest.mark.world(2)
def test_arguments(world: World) -> None:
    """Checkpoint by hooks, before or after the module is managed, by a wrapper or around it, and pass each kind."""

    def body(rank: Rank) -> None:
        every = ways(rank)
        two = torch.full((1,), 2.0, device=rank.device)
        calls: list[tuple[tuple[Any, ...], dict[str, Any], float]] = [
            ((), {}, 1.0),
            ((3.0,), {}, 3.0),
            ((), {"scale": 3.0}, 3.0),
            ((), {"by": {"two": two}}, 2.0),
            ((3.0,), {"by": {"two": two, "four": two * 2}}, 24.0),
        ]
        for way, how in itertools.product(every, ("hooks", "managed first", "wrapper", "reentrant", "around")):
            module = Keyed().to(rank.device)
            names = [name for name, _ in module.named_parameters()]
            model: Any = module
            if how == "hooks":
                assert checkpointed_in_place(module) is module
            every[way](module)
            if how == "managed first":
                checkpointed_in_place(module)
            elif how in ("wrapper", "reentrant"):
                model = checkpointed(module, reentrant=how == "reentrant")
            elif how == "around":
                model = functools.partial(PLAIN, module)
            assert [name for name, _ in module.named_parameters()] == names, f"{way}, {how}"
            assert [type(part) for part in module.modules()] == [type(module)], f"{way}, {how}"
            for args, named, scale in calls:
                what = f"{way}, {how}, {args}, {named}"
                module.seen.clear()
                x = torch.full((4,), 1.0 + rank.index, device=rank.device, requires_grad=True)
                model(x, *args, **named).sum().backward()
                assert len(module.seen) == 2, what
                assert module.seen[0] == module.seen[1], f"{what}: {module.seen}"
                assert x.grad is not None, what
                assert x.grad.tolist() == [2 * scale**2 * (1.0 + rank.index)] * 4, what
                (gradient,) = replicate_fsdp.gradients(module).values()
                assert gradient.tolist() == [2 * scale**2 * 2.5] * 4, f"{what}: {gradient}"  # of 1 and of 4
                module.zero_grad()
        for bad, error in (({"use_reentrant": True}, NotImplementedError), ({"other": 1}, ValueError)):
            with pytest.raises(error):
                checkpointed_in_place(Keyed(), **bad)

    world.run(body)


class Named(Inner):
    """Multiply by a weight and by whatever is passed by keyword."""

    def forward(self, x: torch.Tensor, **factors: float) -> torch.Tensor:
        for factor in factors.values():
            x = x * factor
        return self.weight * x


NAMES = {
    "others": ("function", "args", "kwargs", "use_reentrant", "inputs"),
    "of options": ("debug", "early_stop", "determinism_check", "context_fn", "preserve_rng_state", "fn"),
}
"""Names of keyword arguments, some of which are those of the options that a checkpoint has."""


@requirement(
    "RFSDP-CKPT-421",
    "A module that hooks recompute in the backward may be called with a keyword of any name, as without hooks.",
    source="torch/distributed/_composable/checkpoint_activation.py: 'does not require changing model source code'",
)
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.world(2)
def test_names_of_arguments(world: World, names: str) -> None:
    """Call a sharded module, a replicated one, and one that nothing manages, with one argument at a time or all."""

    def body(rank: Rank) -> list[str]:
        wrong, every = [], ways(rank)
        for way, factors in itertools.product(
            ("alone", "replicated", "sharded"),
            ({}, *({name: 4.0} for name in NAMES[names]), dict.fromkeys(NAMES[names], 2.0)),
        ):
            module = Named(1.0).to(rank.device)
            if way != "alone":
                every[way](module)
            checkpointed_in_place(module)
            x = torch.full((4,), 3.0, device=rank.device, requires_grad=True)
            module(x, **factors).sum().backward()
            scale = functools.reduce(lambda a, b: a * b, factors.values(), 1.0)
            (gradient,) = replicate_fsdp.gradients(module).values()
            if (gradient.tolist(), x.grad.tolist()) != ([3.0 * scale] * 4, [scale] * 4):
                wrong.append(f"{way}, {factors}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


class Noted(Inner):
    """Multiply by a weight; note the default device, autocast's dtype and a random number of each call."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.seen: list[tuple[str, torch.dtype | None, float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.seen.append((torch.empty(0).device.type, dtype, torch.rand(1, device=x.device).item()))
        return (x * self.weight).square()


@requirement(
    "RFSDP-CKPT-3200",
    "A checkpointed module is recomputed under the default device, autocast and random numbers of its forward, "
    "whatever those of the backward are.",
    source="torch.utils.checkpoint.checkpoint: preserve_rng_state; torch.device, torch.autocast",
)
@pytest.mark.world(2)
def test_surroundings(world: World) -> None:
    """Checkpoint by a function, a wrapper or hooks; forwards and backwards have no context, or one of two others."""

    def body(rank: Rank) -> None:
        contexts: dict[str, Callable[[], Any]] = {
            "plain": nullcontext,
            "meta": lambda: torch.device("meta"),
            "autocast": lambda: torch.autocast(rank.device.type, torch.bfloat16),
        }
        for (way, manage), how in zip(ways(rank).items(), ("wrapper", "hooks", "around"), strict=True):
            module = Noted(2.0).to(rank.device)
            if how == "hooks":
                checkpointed_in_place(module)
            manage(module)
            model: Any = functools.partial(PLAIN, module) if how == "around" else module
            model = checkpointed(module) if how == "wrapper" else model
            for forward, backward in itertools.product(contexts, repeat=2):
                what = f"{way}, {how}, {forward} and {backward}"
                x = torch.full((4,), 1.0 + rank.index, device=rank.device)
                module.seen.clear()
                with contexts[forward]():
                    y = model(x)
                torch.rand(3, device=rank.device)
                with contexts[backward]():
                    y.sum().backward()
                assert len(module.seen) == 2, what
                assert module.seen[0] == module.seen[1], f"{what}: {module.seen}"
                (gradient,) = replicate_fsdp.gradients(module).values()
                assert gradient.tolist() == [4 * 2.5] * 4, f"{what}: {gradient}"  # of 1 and of 4
                module.zero_grad()

    world.run(body)


class Changing(Inner):
    """Multiply by a weight; note random numbers and calls that end, and have another shape within the second call."""

    def __init__(self, changes: bool) -> None:
        super().__init__(1.0)
        self.changes, self.ends, self.drawn = changes, 0, list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn.append(torch.rand(1, device=x.device).item())
        shape = (1, 4) if self.changes and len(self.drawn) > 1 else (4,)
        y = (x * self.weight).view(shape).square().view(4)
        self.ends += 1
        return y


@requirement(
    "RFSDP-CKPT-3201",
    "The options of a checkpoint have their effect, whether it is a function, a wrapper or hooks.",
    source="torch.utils.checkpoint.checkpoint: context_fn, determinism_check, early_stop, preserve_rng_state; "
    "torch/distributed/_composable/checkpoint_activation.py: checkpoint",
)
@pytest.mark.world(2)
def test_options(world: World) -> None:
    """Give each option alone, to a managed module that is computed again in the same way or in another one."""

    def body(rank: Rank) -> None:
        entered: list[int] = []

        @contextmanager
        def enter(number: int) -> Iterator[None]:
            entered.append(number)
            yield

        every: list[dict[str, Any]] = [
            {},
            {"context_fn": lambda: (enter(1), enter(2))},
            {"preserve_rng_state": False},
            {"preserve_rng_state": True},
            {"early_stop": False},
            {"determinism_check": "none"},
        ]
        hows = ("around", "wrapper", "hooks", "reentrant")
        for (how, options), (way, manage) in zip(
            itertools.product(hows, every), itertools.cycle(ways(rank).items()), strict=False
        ):
            if how == "reentrant" and not set(options) <= {"preserve_rng_state"}:
                continue
            for changes in (False, True):
                what = f"{way}, {how}, {options}, {changes=}"
                module = Changing(changes).to(rank.device)
                if how == "hooks":
                    checkpointed_in_place(module, **options)
                manage(module)
                model: Any = functools.partial(PLAIN, module, **options) if how == "around" else module
                if how in ("wrapper", "reentrant"):
                    model = checkpointed(module, reentrant=how == "reentrant", **options)
                entered.clear()
                loss = model(torch.ones(4, device=rank.device, requires_grad=True)).sum()
                torch.rand(3, device=rank.device)
                refused = changes and how != "reentrant" and "determinism_check" not in options
                with pytest.raises(CheckpointError) if refused else nullcontext():
                    loss.backward()
                assert entered == ([1, 2] if "context_fn" in options else []), what
                assert (module.drawn[0] == module.drawn[1]) == options.get("preserve_rng_state", True), what
                stops = how != "reentrant" and options.get("early_stop", True)
                assert refused or module.ends == (1 if stops else 2), what

    world.run(body)


@requirement(
    "RFSDP-CKPT-3003",
    "A module that is recomputed in the backward may be recomputed in a second backward, if the first keeps the graph.",
    source="torch.utils.checkpoint.checkpoint: use_reentrant; torch.Tensor.backward: retain_graph",
)
@pytest.mark.parametrize("how", ["hooks", "wrapper", "around"])
@pytest.mark.world(2)
def test_backward_twice(world: World, how: str) -> None:
    """Checkpoint a layer by hooks, by a wrapper or around it, and go backward two or three times."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for times in (2, 3):
            module = Inner(1.0).to(rank.device)
            if how == "hooks":
                checkpointed_in_place(module)
            model: Any = {"hooks": module, "around": functools.partial(PLAIN, module)}.get(how)
            model = model or checkpointed(module)
            loss = model(torch.ones(4, device=rank.device)).sum()
            once = torch.autograd.grad(loss, module.weight, retain_graph=True)[0]
            try:
                for left in reversed(range(times - 1)):
                    loss.backward(retain_graph=left > 0)
            except AttributeError as e:
                wrong.append(f"{times} times: {e}")
                continue
            if not torch.equal(module.weight.grad, once * (times - 1)):
                wrong.append(f"{times} times: {module.weight.grad.tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "RFSDP-CKPT-02",
    "When a checkpointed module is computed again, its inputs and outputs have the dtypes that they had before.",
    source=f"{SOURCE}; torch.distributed.fsdp.MixedPrecisionPolicy",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, what a checkpoint computes again has another dtype")
@pytest.mark.world(2)
def test_dtypes(world: World) -> None:
    """Compare the dtypes in the forward and in the whole recomputation, under policies that cast either or both."""
    narrow, wide = torch.bfloat16, torch.float64
    policies = {
        MixedPrecisionPolicy(narrow): (torch.float32, narrow, narrow),
        MixedPrecisionPolicy(narrow, output_dtype=wide): (torch.float32, narrow, wide),
        MixedPrecisionPolicy(narrow, output_dtype=wide, cast_forward_inputs=False): (narrow, narrow, wide),
        MixedPrecisionPolicy(output_dtype=narrow): (torch.float32, torch.float32, narrow),
    }

    def body(rank: Rank) -> None:
        for (way, managed), (policy, (given, inside, returned)) in itertools.product(
            ways(rank).items(), policies.items()
        ):
            seen: list[tuple[torch.dtype, ...]] = []
            inner: Any = Inner(1.0).to(rank.device)
            inner.register_forward_pre_hook(lambda module, args, seen=seen: seen.append((args[0].dtype,)))
            model: Any = nn.Sequential(inner)

            def through(x: torch.Tensor, inner: Any = inner, seen: Any = seen) -> torch.Tensor:
                y: torch.Tensor = inner(x)
                seen[-1] += (y.dtype,)
                return y

            managed(inner, mp_policy=policy)
            model.forward = lambda x, through=through: checkpoint(through, x, use_reentrant=False, early_stop=False)
            managed(model)
            model(torch.ones(4, device=rank.device, dtype=given)).float().sum().backward()
            assert seen == [(inside, returned)] * 2, f"{way}, {policy}"

    world.run(body)


@requirement(
    "RFSDP-CKPT-01",
    "Checkpointed modules train as on one device, whichever of them are sharded, and whether they run one forward or "
    "several before a backward.",
    source=f"{SOURCE}; torch.distributed.fsdp.FSDPModule.set_modules_to_backward_prefetch",
)
@pytest.mark.world(2)
def test_reentrant(world: World) -> None:
    """Run two forwards of a block in a reentrant checkpoint, and one backward; look at what an optimizer would hold."""

    def body(rank: Rank) -> list[Any]:
        ends = []
        for way in ("replicated", "sharded"):
            managed = ways(rank)[way]
            model: Any = Model().to(rank.device)
            model.blocks, model.through = nn.Sequential(Inner(1.0).to(rank.device)), REENTRANT
            managed(model.blocks[0])
            managed(model)
            (held,) = model.parameters()
            x = torch.full((4,), 1.0 + rank.index, device=rank.device, requires_grad=True)
            (model(x).sum() + model(2 * x).sum()).backward()
            ends.append((way, replicate_fsdp.whole(held.grad).tolist(), model.blocks[0].weight is held))
        return ends

    right = [4.5] * 4
    assert_on_ranks([[("replicated", right, True), ("sharded", right, True)]] * 2, world.run(body))


def parallel_layers() -> nn.Sequential:
    """Create two linear layers from five features to six and to three, whose weights are small whole numbers."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape) % 5 - 2 + i)
            parameter.mul_(2)  # DTensor gives each rank a half of the second bias
    return model


@requirement(
    "RFSDP-CKPT-3651",
    "Checkpointed tensor-parallel layers train as on one device whatever data parallelism they are under, also where "
    "ranks do not divide their features.",
    source=f"{SOURCE}; torch.distributed.tensor.parallel",
)
@pytest.mark.world(4, 8, keeps="results of reentrantly checkpointed layers: the finding tp_reentrant_works")
def test_tensor_parallel(world: World) -> None:
    """Checkpoint the layers together, each or none; replicate or shard over two ranks, or on eight over both."""

    def body(rank: Rank) -> None:
        line = rank.mesh(rank.size // 2, 2, names=("data", "tensor"))
        plane = rank.mesh(2, rank.size // 4, 2, names=("replicas", "shards", "tensor"))
        managed: dict[str, Callable[..., Any]] = {
            "replicated": lambda module: replicate_fsdp.replicate(module, **{replicate_fsdp.MESH: line["data"]}),
            "sharded": lambda module: fully_shard(module, mesh=line["data"]),
            "hybrid": lambda module: fully_shard(module, mesh=plane["replicas", "shards"]),
            "kept": lambda module: fully_shard(module, mesh=line["data"], reshard_after_forward=False),
        }
        x = (torch.arange(10.0 * (rank.size // 2)).reshape(-1, 2, 5) % 7 - 3).to(rank.device)
        for (way, manage), (name, through) in itertools.product(managed.items(), CHECKPOINTED.items()):
            plain = parallel_layers().to(rank.device)
            model: Any = parallel_layers().to(rank.device)
            parallelize_module(model, line["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            for module in (*model, model):
                manage(module)
            for step in range(2):
                own, whole = x[rank.index // 2].clone().requires_grad_(), x.clone().requires_grad_()
                through(model, own).sum().backward()
                (plain(whole).sum() / len(x)).backward()
                found = replicate_fsdp.gradients(model)
                assert own.grad is not None
                assert whole.grad is not None
                assert torch.equal(own.grad, whole.grad[rank.index // 2] * len(x)), f"{way}, {name}, step {step}"
                for part, parameter in plain.named_parameters():
                    assert parameter.grad is not None
                    assert torch.equal(found[part], parameter.grad.cpu()), f"{way}, {name}, step {step}: {part}"

    world.run(body)


CHECKPOINTED: dict[str, Call] = {
    "together": PLAIN,
    "each": lambda model, x: PLAIN(model[1], PLAIN(model[0], x)),
    "reentrant": lambda model, x: REENTRANT(model[1], REENTRANT(model[0], x)),
    "none": lambda model, x: model(x),
}
"""How layers are checkpointed."""
