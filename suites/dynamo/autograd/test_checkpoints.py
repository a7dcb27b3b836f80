"""Collectives in regions of compiled code whose activations are checkpointed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with
from harness.stacks.tracing import Tracer

CHOICES: dict[str, tuple[CheckpointPolicy | None, int]] = {
    "must save": (CheckpointPolicy.MUST_SAVE, 0),
    "prefer to save": (CheckpointPolicy.PREFER_SAVE, 0),
    "must recompute": (CheckpointPolicy.MUST_RECOMPUTE, 1),
    "prefer to recompute": (CheckpointPolicy.PREFER_RECOMPUTE, 1),
    "no policy": (None, 1),
}
"""What a policy says about collectives, and how many of one collective the backward launches."""

COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD),
    "all_gather": lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD)[:4],
}


def is_collective(op: Any) -> bool:
    """Return whether an operator is a functional collective or the wait for one."""
    return str(op).startswith(("_c10d_functional.", "c10d_functional."))


def choose(policy: CheckpointPolicy, context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Apply a policy to collectives; compute everything else again."""
    return policy if is_collective(op) else CheckpointPolicy.PREFER_RECOMPUTE


@requirement(
    "DYN-CKPT-01",
    "The backward of a compiled checkpointed region computes a collective again exactly if its policy says so.",
    source="torch.utils.checkpoint: create_selective_checkpoint_contexts; torch/_functorch/partitioners.py",
)
@requirement(
    "DYN-CKPT-02",
    "A compiled checkpointed region with collectives has the gradients of the same code without checkpoints, "
    "with every policy.",
    source="torch.utils.checkpoint: create_selective_checkpoint_contexts; torch/_functorch/partitioners.py",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(2)
def test_policies(world: World, collective: str) -> None:
    """Use each policy for the collective in a region whose backward needs its result."""

    def body(rank: Rank) -> None:
        def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = COLLECTIVES[collective]((x * w).detach())
            return y * w * y

        def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return region(x, w).sum()

        def gradient(function: Any) -> torch.Tensor:
            x = dyadic(4, key=rank.index, dtype=torch.float32).to(rank.device)
            w = dyadic(4, key=("w", rank.index), dtype=torch.float32).to(rank.device).requires_grad_()
            function(x, w).backward()
            assert w.grad is not None
            return w.grad

        right = gradient(plain)
        for name, (policy, count) in CHOICES.items():
            options: dict[str, Any] = {}
            if policy is not None:
                options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(choose, policy))

            def checkpointed(x: torch.Tensor, w: torch.Tensor, options: dict[str, Any] = options) -> torch.Tensor:
                result: torch.Tensor = checkpoint(region, x, w, use_reentrant=False, **options)
                return result.sum()

            torch.compiler.reset()
            tracer = Tracer("aot_eager")
            found = gradient(torch.compile(checkpointed, backend=tracer, fullgraph=True))
            assert_same(right, found, name)
            assert [len(g.collectives()) for g in (*tracer.forwards, *tracer.backwards)] == [1, count], name

    world.run(body)


def saved(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Save what collectives return."""
    return choose(CheckpointPolicy.MUST_SAVE, context, op, *arguments, **options)


def contexts() -> Any:
    """Make contexts that save what collectives return."""
    return create_selective_checkpoint_contexts(saved)


class Contexts:
    """An object that makes such contexts when it is called, and by a method."""

    def __call__(self) -> Any:
        return contexts()

    def made(self) -> Any:
        """Make such contexts."""
        return contexts()


MAKERS: dict[str, Callable[[], Any]] = {
    "function": contexts,
    "partial": partial(create_selective_checkpoint_contexts, saved),
    "default": noop_context_fn,
    "method": Contexts().made,
    "object": Contexts(),
}
"""The kinds of functions that checkpoint may be told to make contexts by."""


@requirement(
    "DYN-CKPT-1304",
    "Compiled code has the gradients of uncompiled code with any callable that makes the contexts of a checkpoint, "
    "also with the default one.",
    source="torch.utils.checkpoint.checkpoint: context_fn (Callable)",
)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.world(2)
def test_makers_of_contexts(world: World, maker: str) -> None:
    """Checkpoint a region with a sum over the ranks; breaks are allowed."""

    def body(rank: Rank) -> list[list[float]]:
        def region(w: torch.Tensor) -> torch.Tensor:
            return COLLECTIVES["all_reduce"](w.detach() * (rank.index + 1)) * w * w

        def checkpointed(w: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(region, w, use_reentrant=False, context_fn=MAKERS[maker])
            return result.sum()

        found = []
        for function in checkpointed, dynamo.compiled(checkpointed, backend="aot_eager", fullgraph=False)[0]:
            w = torch.arange(3.0, device=rank.device).requires_grad_()
            function(w).backward()
            assert w.grad is not None
            found.append(w.grad.tolist())
        return found

    assert_on_ranks([[[0.0, 6.0, 24.0]] * 2] * 2, world.run(body))


def save_sines(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Save sines, and compute everything else again."""
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.sin.default else CheckpointPolicy.PREFER_RECOMPUTE


class Regions(nn.Module):
    """Wide linear layers, each with a checkpoint around it whose backward needs a sine."""

    def __init__(self, count: int, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(count))
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 512] to float[rows, 512]."""
        for layer in self.layers:
            x = checkpoint(self.region, layer, x, use_reentrant=False, **self.options)
        return x

    @staticmethod
    def region(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Square the sines of a layer's output."""
        return layer(x).sin().square()


@requirement(
    "DYN-CKPT-1305",
    "Checkpoints in a module under DDP that is compiled in several buckets compute again what their policy says.",
    source="torch.utils.checkpoint: create_selective_checkpoint_contexts; torch/_dynamo/backends/distributed.py",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, buckets lose what a checkpoint's contexts are made by")
@pytest.mark.world(2)
def test_policies_in_buckets(world: World) -> None:
    """Save the sines of three layers of 1 MiB, in three buckets and in two, or nothing; the first bucket has 1 MiB."""

    def body(rank: Rank) -> None:
        saving = {"context_fn": partial(create_selective_checkpoint_contexts, save_sines)}
        for megabytes, graphs in (1, 3), (25, 2):
            for options, again in (saving, 0), ({}, 3):
                torch.compiler.reset()
                tracer = Tracer("aot_eager")
                module = DistributedDataParallel(Regions(3, **options).to(rank.device), bucket_cap_mb=megabytes)
                compiled: Any = torch.compile(module, backend=tracer)
                compiled(torch.ones(2, 512, device=rank.device, requires_grad=True)).sum().backward()
                what = f"{sorted(options)} with {megabytes} MiB"
                assert len(tracer.graphs) == graphs, what
                sines = [sum(o.name == "aten.sin.default" for o in graph.operators) for graph in tracer.backwards]
                assert sum(sines) == again, f"{what}: {sines}"

    world.run(body)


class Summed(nn.Module):
    """A linear layer whose output is summed over the ranks and squared."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)
        for name, parameter in self.layer.named_parameters():
            with torch.no_grad():
                parameter.copy_(dyadic(*parameter.shape, key=(name, key), span=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 3] to float[rows, 3]."""
        return functional.all_reduce(self.layer(x), "sum", dist.group.WORLD).square() / 4


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [
    dynamo.checkpointed,
    partial(dynamo.checkpointed, reentrant=True),
    partial(dynamo.checkpointed, checkpoint_fn=partial(checkpoint, use_reentrant=False)),
]
"""The ways to wrap a layer: by default, by a reentrant checkpoint, and by a function of its own."""


@requirement(
    "DYN-CKPT-03",
    "A compiled model whose layers are wrapped by checkpoint_wrapper is one graph.",
    source="torch.distributed.algorithms: checkpoint_wrapper; torch.compile: fullgraph",
)
@requirement(
    "DYN-CKPT-04",
    "A compiled model whose layers are wrapped by checkpoint_wrapper has the outputs and gradients of the plain one.",
    source="torch.distributed.algorithms: checkpoint_wrapper",
)
@pytest.mark.world(2)
def test_wrapped_layers(world: World) -> None:
    """Wrap three of four layers, each in another way; run two steps."""

    def body(rank: Rank) -> None:
        plain = nn.Sequential(*(Summed(key) for key in range(4))).to(rank.device)
        wrapped = [wrap(Summed(key)) for key, wrap in enumerate(WRAPPERS)]
        model = nn.Sequential(*wrapped, Summed(3)).to(rank.device)
        function, counter = dynamo.compiled(model)
        for step in range(2):
            results = []
            for module, run in ((plain, plain), (model, function)):
                x = dyadic(2, 3, key=(rank.index, step)).to(rank.device).requires_grad_()
                y = run(x)
                y.sum().backward()
                results.append([(y + 0).detach(), x.grad, *(p.grad for p in module.parameters())])
                module.zero_grad()
            for number, (right, found) in enumerate(zip(*results, strict=True)):
                assert right is not None
                assert found is not None
                assert_same(right, found, f"tensor {number} of step {step}")
        assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-CKPT-236",
    "get_model_state_dict gives parameters the names that they have in the plain model, whatever was compiled or "
    "checkpointed.",
    source="torch.distributed.checkpoint.state_dict: get_model_state_dict: canonical names; torch.compile; "
    "pytorch/torchtitan#2622",
)
@pytest.mark.parametrize("inner", ["others", "compiled"])
@pytest.mark.world(2)
def test_names(world: World, inner: str) -> None:
    """Compile a layer, wrap it by checkpoint_wrapper, do both, or compile it within such a wrapper."""

    def body(rank: Rank) -> list[list[str]]:
        ways: list[Callable[[nn.Module], Any]] = [lambda layer: dynamo.checkpointed(torch.compile(layer))]  # type: ignore[arg-type]
        if inner == "others":
            ways = [torch.compile, dynamo.checkpointed, lambda layer: torch.compile(dynamo.checkpointed(layer))]
        models = [nn.Sequential(way(nn.Linear(2, 2)), nn.Linear(2, 2)).to(rank.device) for way in ways]
        return [sorted(get_model_state_dict(model)) for model in models]

    names = ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert_on_ranks([[names] * (3 if inner == "others" else 1)] * world.size, world.run(body))


@requirement(
    "DYN-CKPT-55",
    "The backward of a compiled checkpointed region that others follow does not launch the collective that it ends "
    "with.",
    source="torch.utils.checkpoint: checkpoint; torch/_functorch/partitioners.py",
)
@requirement(
    "DYN-CKPT-56",
    "Compiled code with several checkpointed regions has the gradients of the same code without checkpoints.",
    source="torch.utils.checkpoint: checkpoint",
)
@pytest.mark.world(2)
def test_regions_in_a_row(world: World) -> None:
    """Follow regions that end with a collective by others, which end or begin with one or have none."""

    def body(rank: Rank) -> None:
        def ends(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce((x * w).square(), "sum", dist.group.WORLD)

        def begins(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x * w, "sum", dist.group.WORLD).square() * w

        def has_none(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (x * w).square()

        rows: dict[str, tuple[tuple[Callable[..., torch.Tensor], ...], int]] = {
            "three that end": ((ends, ends, ends), 0),
            "an end, nothing, an end": ((ends, has_none, ends), 0),
            "an end and a beginning": ((ends, begins), 1),
            "two beginnings": ((begins, begins), 2),
        }
        counts = {}
        for name, (regions, _) in rows.items():

            def run(x: torch.Tensor, w: torch.Tensor, apply: Any, regions: Any = regions) -> torch.Tensor:
                for region in regions:
                    x = apply(region, x, w)
                return x.sum()

            def checkpointed(x: torch.Tensor, w: torch.Tensor, run: Any = run) -> torch.Tensor:
                result: torch.Tensor = run(x, w, partial(checkpoint, use_reentrant=False))
                return result

            def plain(x: torch.Tensor, w: torch.Tensor, run: Any = run) -> torch.Tensor:
                result: torch.Tensor = run(x, w, lambda region, x, w: region(x, w))
                return result

            def gradients(function: Any) -> list[torch.Tensor]:
                x = torch.tensor([0.5, 1.0 + rank.index], device=rank.device, requires_grad=True)
                w = torch.tensor([1.0, 0.5], device=rank.device, requires_grad=True)
                function(x, w).backward()
                assert x.grad is not None
                assert w.grad is not None
                return [x.grad + 0, w.grad + 0]

            torch.compiler.reset()
            tracer = Tracer("aot_eager")
            found = gradients(torch.compile(checkpointed, backend=tracer, fullgraph=True))
            for one, other in zip(gradients(plain), found, strict=True):
                assert_same(one, other, name)
            (backward,) = tracer.backwards
            of_gradients = len(regions) - regions.count(has_none)
            counts[name] = len(backward.collectives()) - of_gradients
        assert counts == {name: count for name, (_, count) in rows.items()}

    world.run(body)


@requirement(
    "DYN-CKPT-2500",
    "A compiled checkpointed region with collectives may draw random numbers on which no gradient depends.",
    source="torch.utils.checkpoint: preserve_rng_state; torch.compile",
)
@requirement(
    "DYN-CKPT-2501",
    "A compiled checkpointed region saves what its policy says to save, whatever the activation memory budget is.",
    source="torch.utils.checkpoint: CheckpointPolicy.MUST_SAVE; torch/_functorch/config.py: activation_memory_budget",
)
@pytest.mark.world(2)
def test_random_numbers_and_budgets(world: World) -> None:
    """Add random numbers in a region, and save products within a small budget."""

    def body(rank: Rank) -> None:
        w = torch.eye(8, device=rank.device).mul_(2).requires_grad_()
        x = torch.ones(8, 8, device=rank.device)

        def noisy(x: torch.Tensor) -> torch.Tensor:
            return torch.sin(COLLECTIVES["all_reduce"](x @ w)) + torch.rand_like(x)

        def multiplied(x: torch.Tensor) -> torch.Tensor:
            return torch.sin(torch.sin(COLLECTIVES["all_reduce"](x) @ w) @ w)

        def policy(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
            saves = op == torch.ops.aten.mm.default or is_collective(op)
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

        def gradient(function: Any) -> torch.Tensor:
            w.grad = None
            function(x).sum().backward()
            assert w.grad is not None
            return w.grad

        right = gradient(noisy)
        for backend in "aot_eager", "aot_eager_decomp_partition":
            function, _ = dynamo.compiled(lambda x: checkpoint(noisy, x, use_reentrant=False), backend=backend)
            torch.testing.assert_close(gradient(function), right)
        options = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
        right = gradient(multiplied)
        for share in 0.1, 0.5, 1.0:
            torch.compiler.reset()
            tracer = Tracer("aot_eager")
            function = torch.compile(
                lambda x: checkpoint(multiplied, x, use_reentrant=False, **options), backend=tracer, fullgraph=True
            )
            with dynamo.budget(share):
                torch.testing.assert_close(gradient(function), right)
            (graph,) = tracer.backwards
            assert sum(o.name == "aten.mm.default" for o in graph.operators) == 3, (share, graph.operators)

    world.run(body)


@requirement(
    "DYN-CKPT-2502",
    "A compiled region that is called several times has the gradients of uncompiled code, whichever of them are equal.",
    source="torch.compiler.nested_compile_region",
)
@pytest.mark.world(2)
def test_regions(world: World) -> None:
    """Call a region of two outputs with one gradient for both, and with another for each, in both orders."""

    def body(rank: Rank) -> None:
        @torch.compiler.nested_compile_region
        def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x * 3

        y, z = (torch.full((4,), k, device=rank.device) for k in (5.0, 7.0))

        def called(x: torch.Tensor, *, equal_first: bool) -> torch.Tensor:
            one, other = (region(x + k) for k in range(2))
            equal, apart = (one, other) if equal_first else (other, one)
            return COLLECTIVES["all_reduce"](sum(equal) * y).sum() + (apart[0] * y).sum() + (apart[1] * z).sum()

        for equal_first in True, False:
            found = []
            for function in called, dynamo.compiled(called)[0]:
                x = torch.arange(4.0, device=rank.device, requires_grad=True)
                function(x, equal_first=equal_first).backward()
                found.append(x.grad)
            assert_same(found[0], found[1], f"equal gradients first: {equal_first}")

    world.run(body)


OPTIONS: dict[str, dict[str, Any]] = {
    "determinism_check": {"determinism_check": "none"},
    "default check": {"determinism_check": "default"},
    "preserve_rng_state": {"preserve_rng_state": False},
    "early_stop": {"early_stop": False},
    "debug": {"debug": False},
    "several": {"preserve_rng_state": True, "determinism_check": "none", "debug": False},
}
"""Options of checkpoint, beside a keyword argument of the region."""


@requirement(
    "DYN-CKPT-5000",
    "Compiled code takes each option of checkpoint beside keyword arguments of the region, and has its gradients.",
    source="torch.utils.checkpoint.checkpoint: preserve_rng_state, determinism_check, debug, early_stop, kwargs",
)
@pytest.mark.world(2)
def test_options(world: World) -> None:
    """Give each option to checkpoint and to checkpoint_wrapper, around a collective."""

    def region(x: torch.Tensor, w: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return COLLECTIVES["all_reduce"](x * w) * w * scale

    class Part(nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return region(x, w, scale)

    def body(rank: Rank) -> None:
        known = {*inspect.signature(checkpoint).parameters, "preserve_rng_state"}
        options = [each for each in OPTIONS.values() if each.keys() <= known]
        wrapped = [dynamo.checkpointed(Part(), **each) for each in options]

        def called(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x
            for each, part in zip(options, wrapped, strict=True):
                y = y + checkpoint(region, x, w, use_reentrant=False, scale=4.0, **each) + part(x, w, scale=2.0)
            return y

        x = dyadic(4, key=rank.index, dtype=torch.float32).to(rank.device)
        found = []
        for function in lambda x, w: x + len(options) * region(x, w, 6.0), dynamo.compiled(called)[0]:
            w = dyadic(4, key="w", dtype=torch.float32).to(rank.device).requires_grad_()
            y = function(x, w)
            y.sum().backward()
            found.append((y.detach(), w.grad))
        for what, one, other in zip(("results", "gradients"), *found, strict=True):
            assert_same(one, other, what)

    world.run(body)
