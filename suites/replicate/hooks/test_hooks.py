"""Communication hooks: what they are called with, how their results are used, and how long they live."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import replicate

SOURCE = "torch.nn.parallel.DistributedDataParallel.register_comm_hook"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
]


def given(values: list[float], dtype: torch.dtype) -> nn.Module:
    """Create a module whose gradient is ``values`` times its input."""

    class Values(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(len(values), dtype=dtype))
            self.values = torch.tensor(values, dtype=dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * self.values.to(x.device) * x).sum()

    return Values()


def gradient(rank: Rank, model: nn.Module, factor: float, dtype: torch.dtype) -> torch.Tensor:
    """Run one backward in which this rank's values are multiplied by a factor, and return the gradient."""
    model(torch.tensor(factor, dtype=dtype, device=rank.device)).backward()
    return next(iter(replicate.gradients(model).values())).cpu()


@requirement(
    "REPL-HOOK-02",
    "A communication hook receives the state it was registered with.",
    source=SOURCE,
)
@requirement(
    "REPL-HOOK-09",
    "The gradients after backward are the tensors that the communication hook returns.",
    source=SOURCE,
)
@pytest.mark.parametrize("how", ["positions", "keywords", "DDP"])
@pytest.mark.world(2)
def test_state_and_result(world: World, how: str) -> None:
    """The hook writes to its state and returns a new tensor, in three steps under each option."""

    def fourfold(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state["calls"] += 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 4)
        return future

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
        return fourfold(state, bucket)

    def body(rank: Rank) -> None:
        for options in OPTIONS:
            state = {"calls": 0}
            module = given([1.0, 2.0], torch.float32).to(rank.device)
            model: Any = DistributedDataParallel(module, **options) if how == "DDP" else None
            model = model or replicate.apply(module, rank, **options)
            if how == "keywords":
                model.register_comm_hook(state=state, hook=hook)
            else:
                model.register_comm_hook(state, hook)
            for step in range(3):
                found = gradient(rank, model, 1.0 + rank.index, torch.float32).tolist()
                assert found == [4.0 + 4 * rank.index, 8.0 + 8 * rank.index], (options, step)
                model.zero_grad()
            assert state["calls"] == 3, options

    world.run(body)


@requirement(
    "REPL-HOOK-03",
    "DDP, also with the allreduce or fp16 hook, averages without overflow if the average itself does not overflow.",
    source="torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py: allreduce_hook, fp16_compress_hook",
)
@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "none"])
@pytest.mark.world(2, 3, 4)
def test_large_half_precision(world: World, name: str) -> None:
    """Use float16 gradients near the largest finite number, of which sizes have exact parts, as views or not."""
    values = [49152.0, -65472.0, 3.0]

    def body(rank: Rank) -> list[torch.Tensor]:
        averages = []
        for views in (False, True):
            model: Any = replicate.apply(given(values, torch.float16), rank, gradient_as_bucket_view=views)
            if name != "none":
                model.register_comm_hook(None, getattr(default_hooks, name))
            averages.append(gradient(rank, model, 1.0, torch.float16).clone())
        return averages

    for rank, averages in enumerate(world.run(body)):
        for averaged in averages:
            assert_same(torch.tensor(values, dtype=torch.float16), averaged, f"rank {rank}")


@requirement(
    "REPL-HOOK-04",
    "A compression hook reduces gradients rounded to its dtype and returns them in their own dtype.",
    source="torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py: fp16_compress_hook",
)
@pytest.mark.world(1, 2, 4)
def test_compression(world: World) -> None:
    """Use gradients that float16 can represent but bfloat16 cannot, or neither can; equal on all ranks."""
    values = [1.0, 257.0, 2049.0, 1.0 + 2.0**-9, 1.0 + 2.0**-12, 2.0**-20 * 1.5]

    def body(rank: Rank) -> torch.Tensor:
        model: Any = replicate.apply(given(values, torch.float32), rank)
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return gradient(rank, model, 1.0, torch.float32)

    right = (torch.tensor(values).half() / world.size * world.size).float()
    for rank, averaged in enumerate(world.run(body)):
        assert_same(right, averaged, f"rank {rank}")


@requirement(
    "REPL-HOOK-07",
    "The bfloat16 hook averages in bfloat16, or raises an error that names it.",
    source="torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py: bf16_compress_hook",
)
@pytest.mark.world(2)
def test_bfloat16(world: World) -> None:
    """Use gradients that bfloat16 can represent, and one that it rounds; equal on all ranks."""
    values = [1.0, 257.0, -0.375]

    def body(rank: Rank) -> list[float] | str:
        model: Any = replicate.apply(given(values, torch.float32), rank)
        try:
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
            return [float(x) for x in gradient(rank, model, 1.0, torch.float32)]
        except (RuntimeError, TypeError) as e:
            return "refused" if "bf16" in str(e).lower() else str(e)

    assert_on_ranks([torch.tensor(values).bfloat16().tolist()] * 2, world.run(body), or_all=["refused"] * 2)


@requirement(
    "REPL-HOOK-08",
    "The PowerSGD hook averages gradients until it begins to compress.",
    source="torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py",
)
@requirement(
    "REPL-HOOK-10",
    "The compressing PowerSGD hook gives all ranks the same gradient, which is the average if the average has "
    "rank one.",
    source="torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py",
)
@pytest.mark.world(2, 3)
def test_power_sgd(world: World) -> None:
    """Run six steps, the last three compressed; ranks' gradients are multiples of one outer product."""
    rows, columns = torch.arange(1.0, 9), torch.arange(1.0, 17)

    def body(rank: Rank) -> list[torch.Tensor]:
        model: Any = replicate.apply(nn.Linear(16, 8, bias=False), rank)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        gradients = []
        for _ in range(6):
            output = model(columns[None].to(rank.device))
            (output * rows.to(rank.device) * rank.size * (1 + rank.index)).sum().backward()
            gradients.append(replicate.gradients(model)["weight"].cpu())
            model.zero_grad()
        return gradients

    average = torch.outer(rows, columns) * world.size * (1 + world.size) / 2
    first, *others = world.run(body)
    for step, gradients in enumerate(first):
        if step < 3:
            assert_same(average, gradients, f"step {step}")
        assert torch.allclose(gradients, average, rtol=1e-4)
        for other in others:
            assert_same(gradients, other[step], f"step {step}")


@requirement(
    "REPL-HOOK-06",
    "A bucket lists the parameters whose gradients it holds, each gradient being a view of the buffer in the "
    "parameter's shape.",
    source="torch.distributed.GradBucket: parameters, gradients, buffer",
)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.world(1, 2)
def test_bucket(world: World, views: bool) -> None:
    """Train a layer with a bias for three steps; writing to a view changes the buffer."""

    def body(rank: Rank) -> list[list[list[float]]]:
        shapes: list[bool] = []

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
            pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
            shapes.append(all(p.shape == gradient.shape for p, gradient in pairs))
            for p, gradient in pairs:
                gradient.fill_(float(p.dim()))
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model: Any = replicate.apply(nn.Linear(2, 3), rank, gradient_as_bucket_view=views)
        model.register_comm_hook(None, hook)
        gradients = []
        for _ in range(3):
            model(torch.ones(1, 2, device=rank.device)).sum().backward()
            gradients.append([p.grad.flatten().tolist() for p in model.parameters()])
            model.zero_grad()
        assert shapes == [True] * 3
        return gradients

    assert_on_ranks([[[[2.0] * 6, [1.0] * 3]] * 3] * world.size, world.run(body))


@requirement(
    "REPL-HOOK-05",
    "A communication hook registered between two steps is called in the second step, or its registration raises "
    "an error.",
    source="torch/distributed/_composable/replicate.py: DDP.register_comm_hook",
)
@pytest.mark.world(2)
def test_between_steps(world: World) -> None:
    """The hook returns four times the rank's own gradient."""

    def hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer() * 4)
        return future

    def body(rank: Rank) -> str | list[list[float]]:
        model: Any = replicate.apply(given([1.0], torch.float32), rank)
        gradients = [gradient(rank, model, 1.0 + rank.index, torch.float32).tolist()]
        try:
            model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        except RuntimeError:
            return "refused"
        model.zero_grad()
        return [*gradients, gradient(rank, model, 1.0 + rank.index, torch.float32).tolist()]

    assert_on_ranks([[[1.5], [4.0]], [[1.5], [8.0]]], world.run(body), or_all=["refused"] * 2)


def fourfold(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 4)
    return future


def function(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    state.calls += 1
    return fourfold(bucket)


class Hooks:
    """Hooks that are methods, and the state that they count their calls in."""

    def __init__(self) -> None:
        self.calls = 0

    def method(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
        assert type(self) is Hooks
        return function(state, bucket)

    @classmethod
    def of_class(cls, state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
        assert cls is Hooks
        return function(state, bucket)

    @staticmethod
    def static(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
        return function(state, bucket)


def forms() -> dict[str, Any]:
    """Return hooks of every form of a function with the parameters state and bucket."""

    def inner(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
        return function(state, bucket)

    owner = Hooks()
    return {
        "function": function,
        "inner": inner,
        "lambda": lambda state, bucket: function(state, bucket),
        "method": owner.method,
        "class method": Hooks.of_class,
        "class method of an object": owner.of_class,
        "static method": Hooks.static,
    }


@requirement(
    "REPL-HOOK-26",
    "A communication hook may be a function of any form: a lambda, an inner function, or a method of an object or "
    "class.",
    source=f"{SOURCE}: hook (Callable)",
)
@requirement(
    "REPL-LIFE-02",
    "A communication hook's state, and the object whose method it is, are freed with the module that it is for.",
    source=f"{SOURCE}: state",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(1, 2)
def test_forms(world: World, how: str) -> None:
    """Each hook counts its calls and returns four times the gradient, in no step or two; then its module goes."""

    def body(rank: Rank) -> None:
        alive = []
        for name in forms():
            for steps in (0, 2):
                hook, state = forms()[name], Hooks()
                module = given([1.0, 2.0], torch.float32).to(rank.device)
                model: Any = DistributedDataParallel(module) if how == "DDP" else replicate.replicate(module)
                model.register_comm_hook(state, hook)
                for _ in range(steps):
                    found = gradient(rank, model, 1.0 + rank.index, torch.float32).tolist()
                    assert found == [4.0 + 4 * rank.index, 8.0 + 8 * rank.index], name
                    model.zero_grad()
                assert state.calls == steps, name
                owner = getattr(hook, "__self__", None)
                kept = [state, module, *([owner] if isinstance(owner, Hooks) else [])]
                alive += [(name, steps, weakref.ref(each)) for each in kept]
                del hook, state, module, model, owner, kept
        gc.collect()
        assert [(name, steps) for name, steps, found in alive if found() is not None] == []

    world.run(body)


def of_number(state, bucket):  # type: ignore[no-untyped-def]
    return fourfold(bucket)


def to_number(state, bucket):  # type: ignore[no-untyped-def]
    return fourfold(bucket)


def annotated(state, bucket):  # type: ignore[no-untyped-def]
    return fourfold(bucket)


of_number.__annotations__ = {"bucket": int}
to_number.__annotations__ = {"return": int}
annotated.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


def future_of_list(state, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([bucket.buffer()])
    return future


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "number": (1, TypeError, "must be callable"),
    "none": (None, TypeError, "must be callable"),
    "dict": ({}, TypeError, "must be callable"),
    "of a number": (of_number, ValueError, "bucket annotation"),
    "to a number": (to_number, ValueError, "return annotation"),
}
"""Hooks that cannot be registered."""
FAILING: dict[str, tuple[Any, type[Exception], str]] = {
    "gives a number": (lambda state, bucket: 1, RuntimeError, "(?i)cast|callback must return"),
    "gives a tensor": (lambda state, bucket: bucket.buffer(), RuntimeError, "(?i)cast|callback must return"),
    "gives a list": (future_of_list, RuntimeError, "(?i)cast|Tensor"),
    "raises": (lambda state, bucket: 1 / 0, ZeroDivisionError, "division"),
    "raises later": (lambda state, bucket: fourfold(bucket).then(lambda _: 1 / 0), RuntimeError, "ZeroDivisionError"),
}
"""Hooks that fail in a backward. Where a hook gives None, PyTorch 2.13 ends the process."""


def replicated_with(hook: Any, rank: Rank) -> None:
    """Register a hook with a replicated module and call it, as PyTorch gives the hook to DDP in the first forward."""
    module: Any = replicate.replicate(given([1.0], torch.float32).to(rank.device))
    module.register_comm_hook(None, hook)
    module(torch.tensor(1.0, device=rank.device))


@requirement(
    "REPL-HOOK-27",
    "A communication hook of another form is refused, and one that raises, or gives no future, fails the backward.",
    source=f"{SOURCE}: 'must return a Future'",
)
@pytest.mark.world(2)
def test_wrong_hooks(world: World) -> None:
    """A refused hook leaves the module as it was: it averages, or takes a hook with the right annotations."""

    def body(rank: Rank) -> None:
        for name, (hook, kind, says) in WRONG.items():
            for after in (None, annotated):
                model: Any = DistributedDataParallel(given([1.0, 2.0], torch.float32).to(rank.device))
                with pytest.raises(kind, match=says):
                    model.register_comm_hook(None, hook)
                if after is not None:
                    model.register_comm_hook(None, after)
                found = gradient(rank, model, 1.0 + rank.index, torch.float32).tolist()
                assert found == ([4.0 + 4 * rank.index, 8.0 + 8 * rank.index] if after else [1.5, 3.0]), name
            with pytest.raises(kind, match=says):
                replicated_with(hook, rank)
        for name, (hook, kind, says) in FAILING.items():
            model = DistributedDataParallel(given([1.0, 2.0], torch.float32).to(rank.device))
            model.register_comm_hook(None, hook)
            loss = model(torch.tensor(1.0, device=rank.device))
            with pytest.raises(kind, match=says):
                loss.backward()
            del loss, model
            assert name

    world.run(body)


@requirement(
    "REPL-HOOK-28",
    "The built-in communication hooks average, one of them in float16, and stand in the place of any other hook.",
    source="torch.nn.parallel.DistributedDataParallel: _register_builtin_comm_hook; BuiltinCommHookType",
)
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.world(2)
def test_built_in_hooks(world: World) -> None:
    """Both kinds under each option, with numbers that float16 does not have; then a second hook of either sort."""
    kinds = {"ALLREDUCE": 1.5 * (1 + 2.0**-12), "FP16_COMPRESS": 1.5}

    def body(rank: Rank) -> None:
        for kind, mean in kinds.items():
            for options in OPTIONS:
                model: Any = DistributedDataParallel(given([1.0, 2.0], torch.float32).to(rank.device), **options)
                replicate.register_builtin_hook(model, kind)
                for step in range(3):
                    x = (1.0 + rank.index) * (1 + 2.0**-12)
                    found = gradient(rank, model, x, torch.float32)
                    assert found.dtype == torch.float32
                    assert found.tolist() == [mean, 2 * mean], (kind, options, step)
                    model.zero_grad()
            assert replicate.logged(model)["comm_hook"] == f"BuiltinCommHookType.{kind}"
            model = DistributedDataParallel(given([1.0], torch.float32).to(rank.device))
            replicate.register_builtin_hook(model, kind)
            with pytest.raises(RuntimeError, match="called once"):
                model.register_comm_hook(None, default_hooks.allreduce_hook)
            model = DistributedDataParallel(given([1.0], torch.float32).to(rank.device))
            model.register_comm_hook(None, default_hooks.allreduce_hook)
            with pytest.raises(RuntimeError, match="called once"):
                replicate.register_builtin_hook(model, kind)

    world.run(body)


@requirement(
    "REPL-HOOK-29",
    "A communication hook receives the sparse gradient of an embedding, and what it returns is the gradient.",
    source=f"{SOURCE}; torch.nn.Embedding, torch.nn.EmbeddingBag: sparse",
)
@pytest.mark.world(2)
def test_sparse_gradients(world: World) -> None:
    """Look up rows of an embedding or a bag, of which ranks share one, under each option, for two steps."""

    def body(rank: Rank) -> None:
        for kind in (nn.Embedding, nn.EmbeddingBag):
            for options in OPTIONS:
                for hooked in (False, True):
                    layer = kind(4, 2, sparse=True, **({"mode": "sum"} if kind is nn.EmbeddingBag else {}))
                    nn.init.ones_(layer.weight)
                    model: Any = DistributedDataParallel(layer.to(rank.device), **options)
                    sparse: list[bool] = []
                    if hooked:
                        model.register_comm_hook(sparse, summed)
                    for step in range(2):
                        model(torch.tensor([[rank.index + step, 3]], device=rank.device)).sum().backward()
                        gradient: Any = layer.weight.grad
                        factor = 3.0 if hooked else 0.5
                        right = torch.zeros(4, 2)
                        for row in (0 + step, 1 + step, 3, 3):
                            right[row] += factor
                        assert gradient.is_sparse, (kind, options, hooked, step)
                        assert torch.equal(gradient.to_dense().cpu(), right), (kind, options, hooked, step)
                        model.zero_grad()
                    assert sparse == [True] * (2 if hooked else 0), (kind, options)

    def summed(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
        state.append(bucket.buffer().is_sparse)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: 3 * future.value()[0])

    world.run(body)
