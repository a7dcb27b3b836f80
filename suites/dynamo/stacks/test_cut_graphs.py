"""What a forward may do whose graphs end where DDP's buckets end: modes, data, checkpoints, arguments."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fixtures.layers import WIDE
from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from harness.stacks.tracing import Tracer

SOURCE = "torch/_dynamo/backends/distributed.py: DDPOptimizer"


class Layer(nn.Module):
    """A diagonal weight of 1 MiB, with 1, 2 or 4 on the diagonal."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDE) * 2.0 ** (key % 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, WIDE] to float[rows, WIDE]."""
        return x @ self.weight


class Body(nn.Module):
    """Three layers, with which ``forward`` does something."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.does = nn.ModuleList(Layer(key) for key in range(3)), does

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return what the given function returns."""
        return self.does(*self.layers, *args, **options)


def given(rank: Rank, *key: object) -> torch.Tensor:
    """Return a rank's rows."""
    return dyadic(2, WIDE, key=(rank.index, *key), dtype=torch.float32, span=2).to(rank.device)


def wrapped(does: Callable[..., Any], rank: Rank, **options: Any) -> Any:
    """Return the layers under DDP with a bucket for each."""
    return DistributedDataParallel(Body(does).to(rank.device), bucket_cap_mb=1, **options)


def compiled(model: Any, tracer: Tracer, **options: Any) -> Any:
    """Compile as if for the first time."""
    torch.compiler.reset()
    return torch.compile(model, backend=tracer, **options)


def products(tracer: Tracer) -> list[int]:
    """Return how many products with a weight each graph has."""
    return [sum(o.name == "matmul" for o in graph.operators) for graph in tracer.graphs]


def _cast(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        return c(b(a(x)))


def _cast_within(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = b(a(x))
    return c(y.float()), y


def _cast_except(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = a(x)
        with torch.autocast(x.device.type, enabled=False):
            z = b(y.float())
        return c(z), z


def _without_gradients(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    with torch.no_grad():
        return c(b(a(x)))


def _without_some_gradients(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    y = a(x)
    with torch.no_grad():
        z = b(y)
    return c(z), y


def _with_some_gradients(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = a(x)
        with torch.enable_grad():
            z = b(y)
        return c(z), z


MODES = (_cast, _cast_within, _cast_except, _without_gradients, _without_some_gradients, _with_some_gradients)


@requirement(
    "DYN-DDP-19",
    "autocast, no_grad or enable_grad in a forward holds in each of the graphs that end where DDP's buckets end.",
    source=f"{SOURCE}; torch.autocast; torch.no_grad; test_dynamo_distributed.py: test_graph_split_ctx_manager",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a part without gradients has none")
@pytest.mark.world(1)
def test_modes(world: World) -> None:
    """Enter a mode around all layers, around some, and leave it for one; compare dtypes and gradients, too."""

    def body(rank: Rank) -> None:
        for does in MODES:
            found = []
            tracer = Tracer("aot_eager")
            for compiles in (False, True):
                model = wrapped(does, rank)
                function = compiled(model, tracer) if compiles else model
                results = function(given(rank) + 2.0**-12)
                results = results if isinstance(results, tuple) else (results,)
                facts = [(y.dtype, y.requires_grad) for y in results]
                total = sum(y.double().sum() for y in results)
                if total.requires_grad:
                    total.backward()
                found.append((facts, [y.detach() for y in results], [p.grad for p in model.parameters()]))
            (right, tensors, gradients), (facts, others, grads) = found
            what = does.__name__.strip("_")
            assert facts == right, what
            assert len(tracer.graphs) > 1, what
            for one, other in zip([*tensors, *gradients], [*others, *grads], strict=True):
                assert (one is None) == (other is None), what
                if one is not None and other is not None:
                    assert_same(one, other, what)

    world.run(body)


def _no_block(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    return c(b(a(x))), x


def _block_first(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        told = a.weight.diagonal() * 2
    return c(b(a(x))), told


def _block_between(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    y = a(x)
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        told = y * 2
    return c(b(y)), told


def _block_of_result(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    y = c(b(a(x)))
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        told = y * 2
    return y, told


def _block_of_weight(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    y = c(b(a(x)))
    with torch.set_grad_enabled(not torch.is_grad_enabled()):
        told = c.weight.diagonal() * 2
    return y, told


BLOCKS = {
    "none": _no_block,
    "first": _block_first,
    "between": _block_between,
    "last, of the result": _block_of_result,
    "last, of a weight": _block_of_weight,
}
"""Forwards, by where they have a block in which the gradient mode is the other one."""


@requirement(
    "DYN-DDP-8300",
    "A call of a compiled model under DDP with several buckets leaves the gradient mode as it was.",
    source=f"{SOURCE}; torch.set_grad_enabled; torch.is_grad_enabled",
)
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
@pytest.mark.parametrize("where", BLOCKS)
@pytest.mark.world(1)
def test_mode_afterwards(world: World, where: str, enabled: bool) -> None:
    """Call twice a forward that computes something in the other gradient mode, and ask for the mode after each call."""

    def body(rank: Rank) -> None:
        model, tracer = wrapped(BLOCKS[where], rank), Tracer("eager")
        function = compiled(model, tracer)
        for call in range(2):
            with torch.set_grad_enabled(enabled):
                right = model(given(rank))
                found = function(given(rank))
                mode = torch.is_grad_enabled()
            assert mode == enabled, f"after call {call}, gradients are {'enabled' if mode else 'disabled'}"
            for one, other in zip(right, found, strict=True):
                assert_same(one.detach(), other.detach(), f"call {call}")
                assert one.requires_grad == other.requires_grad, f"call {call}"
        assert len(tracer.graphs) > 1

    world.run(body)


def _read_by_first(a: Layer, b: Layer, c: Layer, x: torch.Tensor, kept: torch.Tensor) -> Any:
    kept.add_(1)
    y = a(x) + kept
    return c(b(y)), kept.sum()


def _read_after_first(a: Layer, b: Layer, c: Layer, x: torch.Tensor, kept: torch.Tensor) -> Any:
    y = a(x)
    kept.add_(1)
    return c(b(y) + kept), kept.sum()


def _read_with_result(a: Layer, b: Layer, c: Layer, x: torch.Tensor, kept: torch.Tensor) -> Any:
    kept.add_(1)
    y = c(b(a(x)))
    return y, y * kept


def _changed_by_last(a: Layer, b: Layer, c: Layer, x: torch.Tensor, kept: torch.Tensor) -> Any:
    told = a.weight.diagonal() * kept
    y = c(b(a(x)))
    kept.add_(y.detach().sum(0))
    return y, told


def _read_with_weight(a: Layer, b: Layer, c: Layer, x: torch.Tensor, kept: torch.Tensor) -> Any:
    kept.detach().add_(1)
    y = c(b(a(x)))
    return y, c.weight.diagonal() * kept


def _changed_with_weight(a: Layer, b: Layer, c: Layer, x: torch.Tensor, kept: torch.Tensor) -> Any:
    y = a(x) * kept.detach()
    y = c(b(y))
    kept.detach().copy_(c.weight.detach().diagonal() * 2)
    return y, c.weight.diagonal() * 2


CHANGES = {
    "read by the first": _read_by_first,
    "read by the second": _read_after_first,
    "read with the result": _read_with_result,
    "changed with the result": _changed_by_last,
    "read with a weight": _read_with_weight,
    "changed with a weight": _changed_with_weight,
}
"""Forwards that change a tensor in place and read it in other parts, by what is done."""


@requirement(
    "DYN-DDP-8301",
    "A compiled model under DDP with several buckets reads what it changes in place before and after as without "
    "compilation.",
    source=f"{SOURCE}; torch.compile",
)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.world(1)
def test_order_of_changes(world: World, change: str) -> None:
    """Call twice, with a tensor that one part changes and another reads, also if it takes nothing from the others."""

    def body(rank: Rank) -> None:
        model, tracer = wrapped(CHANGES[change], rank), Tracer("eager")
        function = compiled(model, tracer)
        ours, theirs = (torch.ones(WIDE, device=rank.device) for _ in range(2))
        for call in range(2):
            right, found = (*model(given(rank), ours), ours), (*function(given(rank), theirs), theirs)
            told = [bool((one == other).all()) for one, other in zip(right, found, strict=True)]
            assert all(told), f"in call {call}, these are right: {told}"
        assert len(tracer.graphs) > 1

    world.run(body)


def _scaled(a: Layer, b: Layer, c: Layer, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    n, m, _ = counts.tolist()
    return c(b(a(x)) * n) + m


def _sized(a: Layer, b: Layer, c: Layer, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    n, *_ = counts.tolist()
    y = b(a(x))
    ones = torch.ones(n, device=x.device)
    return c(y) * ones.sum()


def _found(a: Layer, b: Layer, c: Layer, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    places = (counts > 3).nonzero()
    y = b(a(x))
    return c(y) * (places + 1).sum()


def _joined(a: Layer, b: Layer, c: Layer, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    both = torch.cat([x, x * 2])
    y = b(a(both))
    return c(y) + both * y.shape[0]


FROM_TENSORS = (_scaled, _sized, _found, _joined)


@requirement(
    "DYN-DDP-20",
    "With dynamic=True, graphs under DDP are compiled once for all sizes, also of tensors that depend on data.",
    source=f"{SOURCE}; torch.compile: dynamic; torch/_dynamo/config.py: capture_scalar_outputs; pytorch/pytorch#130534",
)
@pytest.mark.world(2)
def test_data_dependent(world: World) -> None:
    """Read numbers before the first cut and use them after each; call with three sizes and other data."""

    def body(rank: Rank) -> None:
        for does in FROM_TENSORS:
            what = does.__name__.strip("_")
            plain, model, tracer = wrapped(does, rank), wrapped(does, rank), Tracer("aot_eager")
            with dynamo.data_in_graphs():
                function = compiled(model, tracer, dynamic=True, fullgraph=False)
                for call, rows in enumerate((4, 6, 5)):
                    x = dyadic(rows, WIDE, key=(rank.index, call), dtype=torch.float32, span=2).to(rank.device)
                    counts = torch.tensor([3 + call, 5 - call, 7], device=rank.device)
                    right, result = plain(x, counts), function(x, counts)
                    assert_same(right.detach(), result.detach(), f"{what}, call {call}")
                    for y in (right, result):
                        y.sum().backward()
                    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                        assert_same(one.grad, other.grad, f"gradient, {what}, call {call}")
                        one.grad = other.grad = None
                    assert products(tracer) == [1, 1, 1], f"{what}, call {call}"

    world.run(body)


def _twice(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> torch.Tensor:
    y = checkpoint(a, x, use_reentrant=False).square()
    z: torch.Tensor = checkpoint(lambda y: c(b(y).square()), y, use_reentrant=False)
    return z * z


def _once(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> torch.Tensor:
    y = b(a(x)).square()
    z: torch.Tensor = checkpoint(c, y, use_reentrant=False)
    return z.square() + y


def _with_wrappers(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = c(b(a(x)).square())
    return result


@requirement(
    "DYN-DDP-21",
    "A compiled model under DDP with several buckets may have checkpointed regions, also by checkpoint_wrapper.",
    source=f"{SOURCE}: higher-order operators; torch.utils.checkpoint",
)
@pytest.mark.world(2)
def test_checkpointed(world: World) -> None:
    """Checkpoint layers one by one, two together, or by a wrapper; compare outputs and gradients of two steps."""

    def body(rank: Rank) -> None:
        for does in (_twice, _once, _with_wrappers):
            what = does.__name__.strip("_")
            plain, inner = wrapped(does, rank), Body(does)
            if does is _with_wrappers:
                inner.layers = nn.ModuleList(dynamo.checkpointed(layer) for layer in inner.layers)
            model = DistributedDataParallel(inner.to(rank.device), bucket_cap_mb=1)
            tracer = Tracer("aot_eager")
            function = compiled(model, tracer)
            for step in range(2):
                right, result = (run(given(rank, step)) for run in (plain, function))
                assert_same(right.detach(), result.detach(), f"{what}, step {step}")
                for y in (right, result):
                    y.sum().backward()
                for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                    assert_same(one.grad, other.grad, f"gradient, {what}, step {step}")
                    one.grad = other.grad = None
            assert tracer.graphs, what

    world.run(body)


Pair = namedtuple("Pair", "first second")


def _by_keyword(a: Layer, b: Layer, c: Layer, *, x: torch.Tensor, scale: float | None = None) -> Any:
    y = c(b(a(x)))
    return {"scaled": y if scale is None else y * scale, "rows": [y[:1], (y[1:],)]}


def _nested(a: Layer, b: Layer, c: Layer, inputs: dict[str, Any]) -> Any:
    y = a(inputs["x"] + inputs["more"][1])
    return Pair(c(b(y)), y)


def _by_forward(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    return c(b.forward(a.forward(x)))


def _of_nothing(a: Layer, b: Layer, c: Layer) -> Any:
    return c(b(a(torch.ones(2, WIDE, device=a.weight.device))))


def _random(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    y = nn.functional.dropout(a(x))
    return c(nn.functional.dropout(b(y), 0.25)) + torch.rand(WIDE, device=x.device)


def _of_two(a: Layer, b: Layer, c: Layer, x: torch.Tensor, y: torch.Tensor) -> Any:
    return c(b(a((x * 2 + y) / 2)))


def _in_place(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
    y = a(x)
    y.add_(1)
    z = b(y)
    z[:1].mul_(2)
    return c(z)


X = "x"
"""Where a call has the rank's tensor."""
ARGUMENTS: dict[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]] = {
    _by_keyword: ((), {"x": X, "scale": 4.0}),
    _nested: (({"x": X, "more": [1, X]},), {}),
    _by_forward: ((X,), {}),
    _of_nothing: ((), {}),
    _random: ((X,), {}),
    _of_two: ((X, X), {}),
    _in_place: ((X,), {}),
}


def filled(value: Any, x: object) -> Any:
    """Put something in the place of each tensor, or text, of nested containers."""
    if isinstance(value, dict):
        return {key: filled(each, x) for key, each in value.items()}
    if isinstance(value, Pair):
        return Pair(*(filled(each, x) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(filled(each, x) for each in value)
    return x if isinstance(value, str | torch.Tensor) else value


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [y for each in (value.values() if isinstance(value, dict) else value) for y in tensors(each)]


@requirement(
    "DYN-DDP-22",
    "A compiled module under DDP with several buckets takes arguments and returns results in every form that the "
    "uncompiled one does.",
    source=f"{SOURCE}; torch.nn.parallel.DistributedDataParallel.forward: inputs, kwargs; static_graph",
)
@pytest.mark.world(2)
def test_arguments(world: World) -> None:
    """Give no, named or nested arguments, return containers, draw numbers, change tensors, or have a static graph."""

    def body(rank: Rank) -> None:
        for does, static in (*((does, False) for does in ARGUMENTS), (_by_keyword, True)):
            (places, names), what = ARGUMENTS[does], f"{does.__name__.strip('_')}, static graph: {static}"
            plain, model = (wrapped(does, rank, static_graph=static) for _ in range(2))
            tracer = Tracer("eager")
            function = compiled(model, tracer)
            for step in range(2):
                found = []
                for run in (plain, function):
                    torch.manual_seed(step)
                    x = given(rank, step)
                    result = run(*filled(places, x), **filled(names, x))
                    leaves = tensors(result)
                    torch.stack([y.sum() for y in leaves]).sum().backward()
                    found.append((filled(result, "y"), [y.detach() for y in leaves]))
                assert repr(found[0][0]) == repr(found[1][0]), what
                for one, other in zip(found[0][1], found[1][1], strict=True):
                    assert_same(one, other, f"{what}, step {step}")
                for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                    assert_same(one.grad, other.grad, f"gradient, {what}, step {step}")
                    one.grad = other.grad = None
            assert products(tracer) == [1, 1, 1], what
        drawn = []
        for compiles in (False, True):
            model = wrapped(lambda *layers: torch.randn(3) * torch.randn(3), rank)
            function = compiled(model, Tracer("aot_eager")) if compiles else model
            torch.manual_seed(5)
            with torch.no_grad():
                drawn.append([function() for _ in range(2)])
        for one, other in zip(*drawn, strict=True):
            assert_same(one, other, "a forward without inputs that uses no parameter")

    world.run(body)


@requirement(
    "DYN-BREAK-64",
    "torch._dynamo.explain gives a break for each end of a graph where a bucket of a model under DDP ends.",
    source="torch/_dynamo/eval_frame.py: explain; torch/_dynamo/backends/distributed.py: DDPOptimizer",
)
@pytest.mark.world(1)
def test_explained(world: World) -> None:
    """Explain a model of two and of three buckets, and with one graph for all of them."""

    def body(rank: Rank) -> None:
        for size, count in ((1, 3), (100, 2)):
            for mode in (True, False):
                model = DistributedDataParallel(Body(lambda a, b, c, x: c(b(a(x)))).to(rank.device), bucket_cap_mb=size)
                with dynamo.ddp_mode(mode):
                    told = dynamo.explained(model, given(rank))
                right = count if mode else 1
                assert (told.graphs, told.breaks) == (right, right - 1), (size, mode)
                assert (len(told.reasons) >= told.breaks, bool(told.reasons)) == (True, right > 1), (size, mode)
                assert all(told.reasons), (size, mode)

    world.run(body)


class Turned(Layer):
    """A layer whose result has transposed strides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, WIDE] to float[rows, WIDE]."""
        return (self.weight @ x.t()).t()


class Scaling(Layer):
    """A layer for which Inductor makes a kernel that depends on its input's strides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, WIDE] to float[rows, WIDE]."""
        return x * self.weight.diagonal()


@requirement(
    "DYN-DDP-23",
    "With Inductor, each graph under DDP takes what the one before returned, in whatever strides that is.",
    source=f"{SOURCE}: SubmodCompiler; test_dynamo_distributed.py: test_graph_split_inductor_transpose",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(1, timeout=120)
def test_strides(world: World) -> None:
    """Train two layers that transpose and one that scales, and run them without gradients."""

    def body(rank: Rank) -> None:
        def does(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> Any:
            y = b(a(x))
            return c(y), y

        found = []
        for compiles in (False, True):
            inner = Body(does)
            inner.layers = nn.ModuleList((Turned(0), Turned(1), Scaling(2)))
            model: Any = DistributedDataParallel(inner.to(rank.device), bucket_cap_mb=1)
            torch.compiler.reset()
            function = torch.compile(model, backend="inductor") if compiles else model
            results = function(given(rank))
            torch.stack([y.sum() for y in results]).sum().backward()
            with torch.no_grad():
                found.append([*results, *function(given(rank)), *(p.grad for p in model.parameters())])
        for number, (one, other) in enumerate(zip(*found, strict=True)):
            assert_same(one.detach(), other.detach(), f"tensor {number}")
            assert one.stride() == other.stride(), f"tensor {number}"

    world.run(body)


@requirement(
    "DYN-DDP-75",
    "Hooks for saved tensors around a compiled model under DDP with several buckets get the numbers that are saved.",
    source=f"{SOURCE}; torch.autograd.graph: saved_tensors_hooks",
)
@requirement(
    "DYN-DDP-76",
    "A compiled model under DDP with several buckets has the same gradients under hooks for saved tensors that store "
    "copies.",
    source=f"{SOURCE}; torch.autograd.graph: saved_tensors_hooks",
)
@pytest.mark.world(2)
def test_hooks_of_saved_tensors(world: World) -> None:
    """Store copies in a list, from the first call on or only in the second one."""

    def body(rank: Rank) -> None:
        def does(a: Layer, b: Layer, c: Layer, x: torch.Tensor) -> torch.Tensor:
            return c(b(a(x).square()).square())

        for first in (0, 1):
            stored: list[torch.Tensor] = []

            def pack(tensor: torch.Tensor, stored: list[torch.Tensor] = stored) -> int:
                assert type(tensor) in (torch.Tensor, nn.Parameter), type(tensor)
                stored.append(tensor.detach().clone())
                return len(stored) - 1

            plain, model, tracer = wrapped(does, rank), wrapped(does, rank), Tracer("aot_eager")
            function = compiled(model, tracer)
            for step in range(2):
                what, hooked = f"step {step}, hooks from {first} on", step >= first
                x = given(rank, step)
                right = plain(x)
                stored.clear()
                with torch.autograd.graph.saved_tensors_hooks(pack, stored.__getitem__) if hooked else nullcontext():
                    found = function(x)
                assert bool(stored) == hooked, what
                assert_same(right.detach(), found.detach(), what)
                for y in (right, found):
                    y.sum().backward()
                for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                    assert_same(one.grad, other.grad, f"gradient, {what}")
                    one.grad = other.grad = None
            assert len(tracer.graphs) > 1

    world.run(body)
