"""MixedPrecision of FSDP1: dtypes of parameters, buffers, inputs, gradients and reductions, and norms of gradients."""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, lambda_auto_wrap_policy

from fixtures.wrapped import STRATEGIES, Outer, Two, Weight, inputs, nested, own, wrapped
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages

SOURCE = "torch.distributed.fsdp.MixedPrecision"
LOW, HALF, FULL, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Noting(nn.Module):
    """It notes the dtypes of what it computes with, and its inner modules do so after it."""

    numbers: torch.Tensor
    scale: torch.Tensor

    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(2, dtype=DOUBLE))
        self.register_buffer("numbers", torch.ones(2, dtype=torch.int32))
        self.others = nn.ModuleList(others)

    def forward(self, x: torch.Tensor, *, extra: dict[str, Any]) -> torch.Tensor:
        """Return a tensor in the dtype of the weight."""
        self.seen = {
            "weight": self.weight.dtype,
            "buffer": self.scale.dtype,
            "input": x.dtype,
            "extra": extra["extra"][0].dtype,
        }
        assert (extra["index"].dtype, self.numbers.dtype) == (torch.int64, torch.int32)
        y: torch.Tensor = self.weight.sum() * x.to(self.weight.dtype)
        for other in self.others:
            y = y + other(x, extra=extra).to(y.dtype)
        return y


def call(model: Any, rank: Rank, dtype: torch.dtype) -> torch.Tensor:
    """Call a module with an input, and with another in a container by name, beside whole numbers."""
    x = torch.full((1,), 1.0 + rank.index, dtype=dtype, device=rank.device)
    output: torch.Tensor = model(x, extra={"extra": [x * 2], "index": torch.ones(1, dtype=torch.long)})
    return output


def between(rank: Rank, graph: bool, **options: Any) -> None:
    """Run two backwards with a forward between them, which makes a graph or none, and look at what has accumulated."""
    model = nested(rank, **options)
    model(inputs(rank)).sum().backward()
    with torch.set_grad_enabled(graph):
        model(inputs(rank))
    model(inputs(rank)).sum().backward()
    assert own(model) == {9.0, 15.0}, f"{options}: {sorted(own(model))}"
    assert {value.dtype for value in model.state_dict().values()} == {FULL}, f"{options}"


@requirement(
    "TP-CAST-91",
    "Under MixedPrecision a module computes with param_dtype, has buffers in buffer_dtype, and outside of a forward "
    "or backward has its parameters in their own dtype.",
    source=SOURCE,
)
@requirement(
    "TP-CAST-92",
    "cast_root_forward_inputs casts the root's floating-point inputs, and cast_forward_inputs those of a module "
    "inside.",
    source=f"{SOURCE}: cast_forward_inputs, cast_root_forward_inputs",
)
@pytest.mark.world(2)
def test_computed(world: World) -> None:
    """Give each dtype or none, and each cast or neither, to the root and to a module inside; evaluate and train."""

    def body(rank: Rank) -> None:
        casts = itertools.product((None, LOW, HALF, DOUBLE), (None, LOW), (True, False), (True, False))
        others = itertools.cycle(itertools.product(STRATEGIES, (True, False), (FULL, DOUBLE)))
        for (param, buffer, root, inner), (strategy, original, given) in zip(casts, others, strict=False):
            what = f"{param}, {buffer}, {root=}, {inner=}, {strategy}, {original=}, input in {given}"
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            modules = [Noting() for _ in range(2)]
            outer = Noting(*modules)
            half = MixedPrecision(param, buffer_dtype=buffer, cast_forward_inputs=inner)
            outer.others[1] = wrapped(rank, modules[1], mixed_precision=half, **options)
            whole = MixedPrecision(param, buffer_dtype=buffer, cast_root_forward_inputs=root)
            model = wrapped(rank, outer, mixed_precision=whole, **options)
            for training in (True, False, True):
                model.train(training)
                model.zero_grad()  # a forward without a backward beside gradients loses them, a known defect
                output = call(model, rank, given)
                assert output.dtype == (param or FULL), what
                if training:
                    output.sum().backward()
                cast = param is not None
                for module, casted in ((outer, root), (modules[0], root), (modules[1], root or inner)):
                    right = param if cast and casted else given
                    assert module.seen == {
                        "weight": param or FULL,
                        "buffer": buffer or DOUBLE,
                        "input": right,
                        "extra": right,
                    }, f"{what}: {module.seen}"
            assert {p.dtype for p in model.parameters()} == {FULL}, what
            assert {b.dtype for b in model.buffers()} == {buffer or DOUBLE, torch.int32}, what
            state = model.state_dict()
            assert {value.dtype for name, value in state.items() if "weight" in name} == {FULL}, what
            assert {value.dtype for name, value in state.items() if "scale" in name} == {DOUBLE}, what
            assert {b.dtype for b in model.buffers()} == {buffer or DOUBLE, torch.int32}, what

    world.run(body)


class Bare(nn.Module):
    """A buffer and other modules, without a parameter."""

    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2, dtype=DOUBLE))
        self.others = nn.ModuleList(others)

    def forward(self, x: torch.Tensor, *, extra: dict[str, Any]) -> torch.Tensor:
        """Return the sum of the others' results."""
        self.seen = self.scale.dtype
        return sum((other(x, extra=extra) for other in self.others), torch.zeros((), device=x.device))


@requirement(
    "TP-CAST-91",
    "Under MixedPrecision a module computes with param_dtype, has buffers in buffer_dtype, and outside of a forward "
    "or backward has its parameters in their own dtype.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_without_parameters(world: World) -> None:
    """The root has buffers and no parameters of its own, and a module inside has some, or has none either."""

    def body(rank: Rank) -> None:
        cases = itertools.product((True, False), (None, LOW), (LOW, HALF))
        for (original, param, buffer), strategy in zip(cases, itertools.cycle(STRATEGIES), strict=False):
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            precision = MixedPrecision(param, buffer_dtype=buffer)
            bare = Bare(wrapped(rank, Noting(), mixed_precision=precision, **options))
            root = Bare(wrapped(rank, bare, mixed_precision=precision, **options))
            model = wrapped(rank, root, mixed_precision=precision, **options)
            for training in (True, False, True):
                model.train(training)
                model.zero_grad()
                output = call(model, rank, FULL)
                if training:
                    output.sum().backward()
                found = [root.seen, bare.seen, bare.others[0].module.seen["buffer"]]
                assert found == [buffer] * 3, f"{strategy}, {original=}, {param}, {training=}: {found}"

    world.run(body)


@requirement(
    "TP-CAST-93",
    "Gradients are reduced in reduce_dtype or else param_dtype, and afterwards have the parameters' dtype, or with "
    "keep_low_precision_grads or in no_sync param_dtype.",
    source=f"{SOURCE}: reduce_dtype, keep_low_precision_grads",
)
@pytest.mark.world(2)
def test_reduced(world: World) -> None:
    """Use each dtype or none; accumulate over two backwards, one in no_sync, of shards or of whole parameters."""

    def body(rank: Rank) -> None:
        ways = itertools.product(STRATEGIES, (None, LOW, HALF), (None, LOW, FULL), (False, True))
        for (strategy, param, reduce, keep), original in zip(ways, itertools.cycle((True, False, True)), strict=False):
            if keep and reduce not in (None, param):
                continue
            what = f"{strategy}, {param}, {reduce}, {keep=}, {original=}"
            mixed = MixedPrecision(param, reduce, keep_low_precision_grads=keep)
            options = {"sharding_strategy": strategy, "use_orig_params": original, "mixed_precision": mixed}
            shards = nested(rank, **options), {9.0, 15.0}
            # with original parameters, each rank has one of these two, and that one whole
            values = {3.0, 6.0} if strategy == STRATEGIES[2] else {(3.0, 6.0)[rank.index]}
            parts = wrapped(rank, Two(), **options), values
            for model, right in (shards, parts) if original and not (reduce or keep) else (shards,):
                with model.no_sync():
                    model(inputs(rank)).sum().backward()
                dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None}
                assert not original or dtypes == {param or FULL}, f"{what}: {dtypes} in no_sync"
                at = messages.mark()
                model(inputs(rank)).sum().backward()
                sent = {m.dtype for m in messages.since(at) if "gather" not in m.op}
                assert sent == {messages.RECORDED[reduce or param or FULL]}, f"{what}: {sent}"
                dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None}
                assert dtypes == {(param or reduce or FULL) if keep else FULL}, f"{what}: {dtypes}"
                assert own(model) == right, f"{what}: {own(model)}"

    world.run(body)


@requirement(
    "TP-CAST-455",
    "A forward without a backward changes no gradients, to which the next backward adds, whatever dtype FSDP computes "
    "with.",
    source=f"{SOURCE}; torch.Tensor.backward: 'accumulates gradients in the leaves'",
)
@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=[strategy.name for strategy in STRATEGIES])
def test_forward_between(world: World, strategy: ShardingStrategy) -> None:
    """The forward makes a graph that nobody uses, and parameters have low precision in it."""

    def body(rank: Rank) -> None:
        for original, reduce in itertools.product((True, False), (None, FULL)):
            mixed = MixedPrecision(LOW, reduce)
            between(rank, True, sharding_strategy=strategy, use_orig_params=original, mixed_precision=mixed)

    world.run(body)


@requirement(
    "TP-CAST-455",
    "A forward without a backward changes no gradients, to which the next backward adds, whatever dtype FSDP computes "
    "with.",
    source=f"{SOURCE}; torch.Tensor.backward: 'accumulates gradients in the leaves'",
)
@pytest.mark.world(2)
def test_evaluated_between(world: World) -> None:
    """The forward is one without gradients, or no dtype of parameters is given."""

    def body(rank: Rank) -> None:
        ways = itertools.product(STRATEGIES, (True, False))
        for (strategy, low), original in zip(ways, itertools.cycle((True, False, False, True)), strict=False):
            mixed = MixedPrecision(LOW if low else None, FULL)
            between(rank, not low, sharding_strategy=strategy, use_orig_params=original, mixed_precision=mixed)

    world.run(body)


@requirement(
    "TP-CAST-301",
    "With FSDP_USE_FULL_PREC_IN_EVAL=1, a module computes in full precision in evaluation, inputs included, and "
    "otherwise with its param_dtype.",
    source="torch/distributed/fsdp/_flat_param.py: FSDP_USE_FULL_PREC_IN_EVAL",
)
@pytest.mark.world(2)
def test_evaluated(world: World) -> None:
    """Evaluate first, after a step, after a forward without a backward, and again; roots have parameters or none."""

    def body(rank: Rank) -> None:
        # a forward with gradients in evaluation, or one after it, leaves the next backward without, a known defect
        long = [(False, False), (True, True), (False, False), (True, True), (True, False), *[(False, False)] * 2]
        sequences = ("weight", long), ("none", long), ("alone", [(True, False), (False, True)]), ("alone", long)
        for strategy, original, (root, modes) in itertools.product(STRATEGIES, (True, False), sequences):
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            options["mixed_precision"] = MixedPrecision(LOW)
            part = Weight(4, 3.0)
            seen: list[tuple[torch.dtype, torch.dtype]] = []
            part.register_forward_pre_hook(lambda module, x, seen=seen: seen.append((x[0].dtype, module.weight.dtype)))
            inner = wrapped(rank, part, **options)
            of_root = {"weight": lambda inner=inner: Outer(8, 5.0, inner), "none": lambda i=inner: nn.Sequential(i)}
            model = wrapped(rank, of_root[root](), **options) if root in of_root else inner
            for step, (training, backward) in enumerate(modes):
                what = f"{strategy}, {original=}, {root}, step {step}"
                model.train(training)
                model.zero_grad()
                with torch.set_grad_enabled(training or backward):
                    output = model(inputs(rank))
                right = LOW if training else FULL
                assert seen.pop() == (right, right), what
                assert output.dtype == right, what
                if training and backward:
                    output.sum().backward()
                    assert own(model) == ({7.5, 4.5} if root == "weight" else {4.5}), f"{what}: {own(model)}"
            assert {p.dtype for p in model.parameters()} == {FULL}

    def with_variable(rank: Rank) -> None:
        with mock.patch.dict(os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1"):
            body(rank)

    world.run(with_variable)


def refuse(**_: Any) -> bool:
    """Choose no module, and none inside of one: a policy."""
    return False


@requirement(
    "TP-CAST-94",
    "With a policy, batch norms compute in full precision under MixedPrecision, as modules of their own, and without "
    "one as the module around them.",
    source=f"{SOURCE}: 'the batch norm modules will have FSDP applied to them separately'",
)
@pytest.mark.world(2)
def test_batch_norms(world: World) -> None:
    """The policy, an object or a function, chooses the linear layers, or nothing; statistics are of low precision."""

    def body(rank: Rank) -> None:
        forms = itertools.cycle(("object", "function", "asked by a function", "object"))
        ways = itertools.product(STRATEGIES, (True, False), (True, False, None))
        for (strategy, original, chosen), form in zip(ways, forms, strict=False):
            what = f"{strategy}, {original=}, {chosen}, {form}"
            norm = nn.BatchNorm1d(2)
            layers = nn.Sequential(nn.Linear(2, 2, bias=False), norm, nn.Linear(2, 1, bias=False))
            seen: list[torch.dtype] = []
            norm.register_forward_pre_hook(lambda module, x, seen=seen: seen.append(module.weight.dtype))

            def choose(module: nn.Module, chosen: bool | None = chosen) -> bool:
                return bool(chosen) and isinstance(module, nn.Linear)

            classes = ModuleWrapPolicy({nn.Linear} if chosen else {nn.Embedding})
            policies: dict[str, Any] = {
                "object": CustomPolicy(choose),
                "function": functools.partial(lambda_auto_wrap_policy, lambda_fn=choose) if chosen else refuse,
                "asked by a function": lambda classes=classes, **asked: classes(**asked),
            }
            policy = None if chosen is None else policies[form]
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            mixed = MixedPrecision(LOW, LOW, LOW)
            model = wrapped(rank, layers, mixed_precision=mixed, auto_wrap_policy=policy, **options)
            y = model(torch.eye(2, device=rank.device))
            y.sum().backward()
            assert (seen, y.dtype) == ([LOW if policy is None else FULL], LOW), what
            found = isinstance(layers[1], FullyShardedDataParallel)
            assert found == (policy is not None), what
            assert [isinstance(layers[i], FullyShardedDataParallel) for i in (0, 2)] == [bool(chosen)] * 2, what
            assert norm.running_mean is not None
            assert norm.running_mean.dtype == (LOW if policy is None else FULL), what

    world.run(body)


@requirement(
    "TP-CAST-95",
    "A module that is converted to another dtype, before FSDP or between it and the first forward, trains in that "
    "dtype, or in MixedPrecision's.",
    source=f"{SOURCE}; test_fsdp_pure_fp16.py: test_fp16_dtypes",
)
@pytest.mark.world(2)
def test_converted(world: World) -> None:
    """Convert to each dtype, with a param_dtype or none."""

    def body(rank: Rank) -> None:
        ways = itertools.product(STRATEGIES, (LOW, HALF, DOUBLE), (None, FULL, LOW), (True, False))
        for (strategy, dtype, param, before), original in zip(ways, itertools.cycle((True, False, True)), strict=False):
            what = f"{strategy}, {dtype}, {param}, {before=}, {original=}"
            mixed = MixedPrecision(param) if param else None
            options = {"sharding_strategy": strategy, "use_orig_params": original, "mixed_precision": mixed}
            module = Weight(4, 3.0).to(dtype) if before else Weight(4, 3.0)
            seen: set[torch.dtype] = set()
            module.register_forward_pre_hook(lambda module, x, seen=seen: seen.add(module.weight.dtype))
            model = wrapped(rank, module, **options)
            if not before:
                model.to(dtype)
            for _ in range(2):
                output = model(inputs(rank).to(dtype))
                assert output.dtype == (param or dtype), what
                output.sum().backward()
            assert seen == {param or dtype}, f"{what}: {seen}"
            assert {p.dtype for p in model.parameters()} == {dtype}, what
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}, what
            assert own(model) == {9.0}, what
            assert {value.dtype for value in model.state_dict().values()} == {dtype}, what

    world.run(body)


@requirement(
    "TP-CAST-3712",
    "A module under FSDP that is converted to another dtype between two steps trains in that dtype from then on.",
    source="torch.nn.Module.to; torch.distributed.fsdp.FullyShardedDataParallel",
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: str(strategy.name))
@pytest.mark.world(2)
def test_converted_between_steps(world: World, strategy: ShardingStrategy) -> None:
    """Convert to a narrower and to a wider dtype, with flat or original parameters."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for dtype, original in itertools.product((LOW, DOUBLE), (True, False)):
            what = f"{dtype}, {original=}"
            model = wrapped(rank, Weight(4, 3.0), sharding_strategy=strategy, use_orig_params=original)
            model(inputs(rank)).sum().backward()
            model.zero_grad()
            model.to(dtype)
            try:
                output = model(inputs(rank).to(dtype))
                output.sum().backward()
            except (AssertionError, RuntimeError, ValueError) as e:
                wrong.append(f"{what} raises {type(e).__name__}: {str(e).splitlines()[0]}")
                continue
            if output.dtype != dtype or own(model) != {4.5}:
                wrong.append(f"{what}: {output.dtype}, {own(model)}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-CAST-3713",
    "A buffer whose name one FSDP module ignores has buffer_dtype in another one that has that name.",
    source=f"{SOURCE}: buffer_dtype; torch.distributed.fsdp.FullyShardedDataParallel: ignored_modules",
)
@pytest.mark.parametrize("name", ["norm", "own"])
@pytest.mark.world(2)
def test_names_of_ignored_buffers(world: World, name: str) -> None:
    """The inner module ignores one that has the name of a module of the outer one, or another name."""

    def body(rank: Rank) -> dict[str, torch.dtype]:
        options = {"mixed_precision": MixedPrecision(buffer_dtype=DOUBLE)}
        inner = nn.Module()
        inner.norm = nn.BatchNorm1d(3, device=rank.device)
        inner.layer = nn.Linear(3, 3)
        inner.forward = lambda x: inner.layer(x)  # type: ignore[method-assign]
        outer = nn.Module()
        outer.inner = wrapped(rank, inner, ignored_modules=[inner.norm], **options)
        outer.add_module(name, nn.BatchNorm1d(3, affine=False, device=rank.device))
        outer.layer = nn.Linear(3, 3)
        outer.forward = lambda x: outer.inner(outer.layer(x))  # type: ignore[method-assign]
        model = wrapped(rank, outer, **options)
        model(torch.ones(2, 3, device=rank.device)).sum().backward()
        ignored: Any = inner.norm.running_mean
        given: Any = outer.get_submodule(name).running_mean
        return {"ignored": ignored.dtype, "other": given.dtype}

    assert_on_ranks([{"ignored": FULL, "other": DOUBLE}] * world.size, world.run(body))


@requirement(
    "TP-CLIP-141",
    "clip_grad_norm_ returns the norm in the one dtype of all gradients or else the widest, zero if there are none, "
    "and raises an error inside of a root.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
)
@pytest.mark.world(2)
def test_norms(world: World) -> None:
    """Keep gradients in low precision in one module, in all or in none; with and without a backward before."""

    def body(rank: Rank) -> None:
        ways = itertools.product(STRATEGIES, (True, False), (None, LOW), (None, LOW))
        for strategy, original, outer, inner in ways:
            what = f"{strategy}, {original=}, {outer}, {inner}"
            low = {each: MixedPrecision(each, keep_low_precision_grads=True) for each in (outer, inner) if each}
            options = {"sharding_strategy": strategy, "use_orig_params": original}
            part = wrapped(rank, Weight(4, 3.0), mixed_precision=low.get(inner), **options)
            model = wrapped(rank, nn.Sequential(part, Two()), mixed_precision=low.get(outer), **options)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                none = model.clip_grad_norm_(1.0)
            assert any("no gradients" in str(each.message) for each in seen) == (strategy != STRATEGIES[2]), what
            assert (none.item(), none.dtype) == (0.0, FULL), what
            model(inputs(rank)).sum().backward()
            with pytest.raises(RuntimeError, match="root"):
                model.module[0].clip_grad_norm_(1.0)
            norm = model.clip_grad_norm_(1e6, 1)
            assert norm.dtype == (LOW if outer and inner else FULL), what
            # the output is (4 * a + 8 * b) * 12 * x
            right = 4 * 3 * 12 * 1.5 + 4 * 12 * 1.5 * 3
            assert norm.item() == right, f"{what}: {norm}, {right}"
            # of one element, one of two ranks has no part
            model = wrapped(rank, Weight(1, 3.0), mixed_precision=low.get(outer), **options)
            model(inputs(rank)).sum().backward()
            norm = model.clip_grad_norm_(2.25)
            assert norm.item() == 4.5, f"{what}: {norm}"
            mine = rank.index == 0 or strategy == STRATEGIES[2]
            found = {round(value, 4) for value in own(model)}
            assert found == ({2.25} if mine else set()), f"{what}: {found}"

    world.run(body)
