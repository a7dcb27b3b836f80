"""Modules under DDP in each mode of optimize_ddp: gradients, synchronization, hooks and buckets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import WIDE
from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import dynamo, replicate
from harness.stacks.collectives import functional
from harness.stacks.tracing import Tracer

SOURCE = "torch/_dynamo/config.py: optimize_ddp; torch/nn/parallel/distributed.py: _register_accum_grad_hook"
HOOKS = "hooks of the reducer in Python, which refer to their parameters"
"""What remains of a module that was made with this reducer and was not compiled."""


class Layers(nn.Module):
    """Linear layers without biases whose weights are diagonal; some may be frozen, and one may be used again."""

    def __init__(
        self, *, width: int = 4, count: int = 4, frozen: tuple[int, ...] = (), again: int | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        self.again = again
        for i, weight in enumerate(self.parameters()):
            with torch.no_grad():
                weight.zero_().diagonal().fill_(1 + i % 2)
            weight.requires_grad_(i not in frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.again is None else self.layers[self.again](x)


def given(rank: Rank, step: int, width: int = 4) -> torch.Tensor:
    """Return a rank's input of a step."""
    return dyadic(2, width, key=(rank.index, step), dtype=torch.float32, span=2).to(rank.device)


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Return copies of the gradients."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same_gradients(right: list[torch.Tensor | None], found: list[torch.Tensor | None], what: str) -> None:
    """Compare the gradients of each parameter, which may have none."""
    for number, (one, other) in enumerate(zip(right, found, strict=True)):
        assert (one is None) == (other is None), f"{what}: parameter {number}"
        if one is not None and other is not None:
            assert_same(one, other, f"{what}: parameter {number}")


def named(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return cases for a test with their names, where a compiled forward, the last value, goes without saying."""
    return [
        pytest.param(*case, id="-".join(map(str, case[: -1 if case[-1] == "compiled" else None]))) for case in cases
    ]


SYNCHRONIZED: list[tuple[bool | str, str, str]] = [
    (False, "eager", "compiled"),
    (True, "eager", "compiled"),
    ("python_reducer_without_compiled_forward", "eager", "compiled"),
    ("python_reducer_without_compiled_forward", "eager", "eager"),
    ("python_reducer", "eager", "compiled"),
    ("python_reducer", "compiled", "compiled"),
    ("python_reducer", "eager", "eager"),
    ("python_reducer", "compiled", "eager"),
]
"""Modes of optimize_ddp, with a backward and a forward that are compiled or not."""


@requirement(
    "DYN-DDP-09",
    "In each mode of optimize_ddp, frozen and shared parameters have the gradients of the uncompiled module.",
    source=SOURCE,
)
@requirement(
    "DYN-DDP-10",
    "In each mode of optimize_ddp, no_sync leaves each rank its own gradients until the next synchronized backward.",
    source=f"{SOURCE}; torch.nn.parallel.DistributedDataParallel.no_sync",
)
@pytest.mark.parametrize(("mode", "backward", "forward"), named(SYNCHRONIZED))
@pytest.mark.world(2, keeps=HOOKS)
def test_synchronization(world: World, mode: bool | str, backward: str, forward: str) -> None:
    """Accumulate gradients of a step without synchronization and two with it, and then take one of each again."""

    def body(rank: Rank) -> None:
        def trained(compiles: bool) -> list[list[torch.Tensor | None]]:
            torch.compiler.reset()
            model = DistributedDataParallel(Layers(frozen=(1,), again=2).to(rank.device))
            traced = compiles and forward == "compiled"
            function: Any = torch.compile(model, backend="aot_eager") if traced else model
            found = []
            for step, synced in enumerate((False, True, True, False, True)):
                if step == 3:
                    model.zero_grad()
                with nullcontext() if synced else model.no_sync():
                    loss = function(given(rank, step)).sum()
                    with (
                        dynamo.compiled_backward("aot_eager") if compiles and backward == "compiled" else nullcontext()
                    ):
                        loss.backward()
                found.append(gradients(model))
            return found

        right = trained(compiles=False)
        with dynamo.ddp_mode(mode):
            found = trained(compiles=True)
        for step, (one, other) in enumerate(zip(right, found, strict=True)):
            assert_same_gradients(one, other, f"step {step}")

    world.run(body)


@requirement(
    "DYN-DDP-24",
    "In modes of optimize_ddp, composable DDP and static graphs have the gradients of the uncompiled module.",
    source=f"{SOURCE}; torch/distributed/_composable/replicate.py; static_graph",
)
@pytest.mark.parametrize(("mode", "backward"), [(True, "eager"), ("python_reducer", "compiled")])
@pytest.mark.world(2)
def test_composable(world: World, mode: bool | str, backward: str) -> None:
    """Run a synchronized step, then accumulate an unsynchronized and a synchronized one; only eager ones are static."""

    def body(rank: Rank) -> None:
        def trained(stack: str, static: bool, compiles: bool) -> list[list[torch.Tensor | None]]:
            torch.compiler.reset()
            module, found = Layers(count=2, frozen=(1,)).to(rank.device), []
            model: Any = (
                DistributedDataParallel(module, static_graph=static)
                if stack == "DDP"
                else replicate.replicate(module, static_graph=static)
            )
            function: Any = torch.compile(model, backend="eager") if compiles else model
            for step, synced in enumerate((True, False, True) if static else (False, True)):
                if step < 2 and static:
                    model.zero_grad()
                if stack != "DDP":
                    model.set_requires_gradient_sync(synced)
                with nullcontext() if synced or stack != "DDP" else model.no_sync():
                    loss = function(given(rank, step)).sum()
                    compiled = compiles and backward == "compiled"
                    with dynamo.compiled_backward("eager") if compiled else nullcontext():
                        loss.backward()
                found.append(gradients(module))
            return found

        for stack, static in (("DDP", True), ("replicate", True)) if mode is True else (("replicate", False),):
            right = trained(stack, static, compiles=False)
            with dynamo.ddp_mode(mode):
                found = trained(stack, static, compiles=True)
            for step, (one, other) in enumerate(zip(right, found, strict=True)):
                assert_same_gradients(one, other, f"{stack}, {static=}, step {step}")

    world.run(body)


@requirement(
    "DYN-DDP-96",
    "A DDP module that is made in one mode of optimize_ddp changes nothing for modules that are compiled in another.",
    source=f"{SOURCE}; static_graph",
)
@pytest.mark.parametrize("mode", [False, True, "python_reducer"])
@pytest.mark.world(2)
def test_another_mode_before(world: World, mode: bool | str) -> None:
    """Make one, and train one of the next mode, whose graph is static, as an uncompiled one."""

    def body(rank: Rank) -> None:
        def trained(compiles: bool) -> list[list[torch.Tensor | None]]:
            torch.compiler.reset()
            model = DistributedDataParallel(Layers(count=2).to(rank.device), static_graph=True)
            function: Any = torch.compile(model, backend="eager") if compiles else model
            found = []
            for step in range(2):
                model.zero_grad()
                function(given(rank, step)).sum().backward()
                found.append(gradients(model))
            return found

        right = trained(compiles=False)
        with dynamo.ddp_mode(mode):  # which undoes at its end what the first module did
            DistributedDataParallel(Layers(count=1).to(rank.device))
            with dynamo.ddp_mode(True):
                found = trained(compiles=True)
        for step, (one, other) in enumerate(zip(right, found, strict=True)):
            assert_same_gradients(one, other, f"step {step}")

    world.run(body)


def doubled(state: Any, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Multiply a gradient by the state, without a collective."""
    pair[0].mul_(state)


def largest(state: Any, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Replace a gradient by the largest one of all ranks."""
    pair[0].copy_(functional.all_reduce(pair[0], "max", state))


@requirement(
    "DYN-DDP-11",
    "With DDP's reducer in Python, communication hooks get each gradient with their state, in the order of "
    "registration, in place of the average.",
    source=f"{SOURCE}; torch.nn.parallel.DistributedDataParallel.register_comm_hook",
)
@pytest.mark.parametrize(
    ("backward", "forward"), named((b, f) for f in ("compiled", "eager") for b in ("eager", "compiled"))
)
@pytest.mark.world(2, keeps=HOOKS)
def test_hooks_of_the_python_reducer(world: World, backward: str, forward: str) -> None:
    """Register no hook, then one that does not communicate and one that does; the ranks' gradients differ."""

    def body(rank: Rank) -> None:
        for hooks in ((), (doubled, largest)):
            states = {doubled: 2.0, largest: dist.group.WORLD}
            everyone = []
            for index in range(rank.size):
                alone = Layers(frozen=(1,))
                alone(dyadic(2, 4, key=(index, 0), dtype=torch.float32, span=2)).sum().backward()
                everyone.append([p.grad for p in alone.parameters()])
            right = []
            for parts in zip(*everyone, strict=True):
                if parts[0] is None:
                    right.append(None)
                    continue
                gradient = parts[rank.index] * (2 if doubled in hooks else 1)
                if largest in hooks:
                    gradient = torch.stack(parts).amax(0) * (2 if doubled in hooks else 1)
                right.append(gradient if hooks else torch.stack(parts).mean(0))
            torch.compiler.reset()
            with dynamo.python_reducer():
                model = DistributedDataParallel(Layers(frozen=(1,)).to(rank.device))
                for hook in hooks:
                    model._comm_hooks.append((hook, states[hook]))
                function: Any = torch.compile(model, backend="aot_eager") if forward == "compiled" else model
                loss = function(given(rank, 0)).sum()
                with dynamo.compiled_backward("aot_eager") if backward == "compiled" else nullcontext():
                    loss.backward()
            assert_same_gradients(right, gradients(model), f"hooks {[h.__name__ for h in hooks]}")

    world.run(body)


@requirement(
    "DYN-DDP-16",
    "With DDP's reducer in Python, a compiled backward with fp16_compress_hook averages gradients in float16.",
    source=f"{SOURCE}; torch.distributed.algorithms.ddp_comm_hooks.default_hooks: fp16_compress_hook",
)
@pytest.mark.world(3)
def test_compressing_hooks(world: World) -> None:
    """Average 1 + 2**-12, which the dtype does not have, and other numbers over two of three ranks, in two steps."""

    def body(rank: Rank) -> None:
        for members in ((0, 1), (1, 2)):
            group = dist.new_group(list(members))
            if rank.index not in members:
                continue
            given = [torch.tensor([[1 + 2.0**-12, 3.0 * i, 8.0, -i]], device=rank.device) for i in members]
            torch.compiler.reset()
            with dynamo.python_reducer():
                model = DistributedDataParallel(Layers(count=1).to(rank.device), process_group=group)
                model.register_comm_hook(group, fp16_compress_hook)
                function: Any = torch.compile(model, backend="aot_eager")
                right = torch.zeros(4, 4, device=rank.device)
                for step in range(2):
                    with dynamo.compiled_backward("aot_eager"):
                        function(given[members.index(rank.index)]).sum().backward()
                    parts = [(right + x.expand(4, 4)).half() / len(members) for x in given]
                    right = torch.stack(parts).sum(0).float()
                    (found,) = gradients(model)
                    assert found is not None
                    assert_same(right, found, f"among {members}, step {step}")

    world.run(body)


@requirement(
    "DYN-DDP-8803",
    "With DDP's reducer in Python and fp16_compress_hook, gradients are averages once any backward ends.",
    source=f"{SOURCE}; torch.distributed.algorithms.ddp_comm_hooks.default_hooks: fp16_compress_hook",
)
@pytest.mark.parametrize("forward", ["compiled", "eager"])
@pytest.mark.parametrize("backward", ["compiled", "eager"])
@pytest.mark.world(2, keeps=HOOKS)
def test_compressed_before_the_end(world: World, backward: str, forward: str) -> None:
    """Read the gradients at once, where the other rank is late with its backward."""

    def body(rank: Rank) -> list[float]:
        torch.compiler.reset()
        with dynamo.python_reducer():
            model = DistributedDataParallel(Layers(count=1).to(rank.device))
            model.register_comm_hook(None, fp16_compress_hook)
            function: Any = torch.compile(model, backend="aot_eager") if forward == "compiled" else model
            output = function(torch.full((1, 4), 1.0 + rank.index, device=rank.device)).sum()
            dist.barrier()
            if rank.index == 1:
                time.sleep(0.3)
            with dynamo.compiled_backward("aot_eager") if backward == "compiled" else nullcontext():
                output.backward()
        (found,) = gradients(model)
        assert found is not None
        dist.barrier()
        return found[0].tolist()

    assert_on_ranks([[1.5] * 4] * 2, world.run(body))


@requirement(
    "DYN-DDP-12",
    "Inductor joins the all-reduces of DDP's reducer in Python up to DDP's bucket size, by each of its passes.",
    source="torch/_inductor/config.py: _fuse_ddp_communication, _fuse_ddp_bucket_size, _fuse_ddp_communication_passes",
)
@requirement(
    "DYN-DDP-13",
    "Joined all-reduces of DDP's reducer in Python average gradients as those of the uncompiled module are.",
    source="torch/_inductor/fx_passes/ddp_fusion.py; torch/nn/parallel/distributed.py",
)
@pytest.mark.world(2)
def test_joined_gradients(world: World) -> None:
    """Train five layers of 1 MiB, with buckets of 2 and 25 MiB; the first has 1 MiB, and once there are gradients."""

    def body(rank: Rank) -> None:
        def trained(megabytes: int, begun: bool, tracer: Tracer | None) -> list[torch.Tensor | None]:
            torch.compiler.reset()
            model = DistributedDataParallel(Layers(width=WIDE, count=5).to(rank.device), bucket_cap_mb=megabytes)
            for weight in model.parameters():
                weight.grad = torch.ones_like(weight) if begun else None
            function: Any = torch.compile(model, backend="eager") if tracer else model
            loss = function(given(rank, 0, WIDE)).sum()
            with dynamo.compiled_backward(tracer) if tracer else nullcontext():
                loss.backward()
            return gradients(model)

        right = [trained(1, begun, None) for begun in (False, True)]
        for passes, megabytes, count, begun in (
            (["fuse_ddp_with_concat_op"], 25, 2, False),
            (["fuse_ddp_with_coalesced_op", "schedule_comm_wait"], 2, 3, False),
            (["fuse_ddp_with_concat_op"], 25, 2, True),
        ):
            with dynamo.python_reducer(), dynamo.inductor_options({"_fuse_ddp_communication_passes": passes}):
                tracer = Tracer("inductor passes")
                found = trained(megabytes, begun, tracer)
            what = f"{passes} with {megabytes} MiB, {begun=}"
            assert_same_gradients(right[begun], found, what)
            assert len(tracer.launched()) == count, what

    world.run(body)


@requirement(
    "DYN-DDP-14",
    "The graphs of a compiled module under DDP end by the sizes of the gradients that DDP averages.",
    source="torch/_dynamo/backends/distributed.py: DDPOptimizer",
)
@pytest.mark.world(2)
def test_cuts_by_gradients(world: World) -> None:
    """Freeze the layers between, the last one, and two others; layers and buckets have 1 MiB."""

    def body(rank: Rank) -> None:
        for frozen, layers in (((1, 2, 3), [4, 1]), ((4,), [1, 1, 1, 2]), ((0, 2), [3, 1, 1])):
            plain, compiled = (Layers(width=WIDE, count=5, frozen=frozen).to(rank.device) for _ in range(2))
            torch.compiler.reset()
            tracer, found = Tracer("eager"), []
            for module in (plain, compiled):
                ddp = DistributedDataParallel(module, bucket_cap_mb=1)
                function: Any = torch.compile(ddp, backend=tracer) if module is compiled else ddp
                function(given(rank, 0, WIDE)).sum().backward()
                found.append(gradients(module))
            what = f"frozen {frozen}"
            assert_same_gradients(found[0], found[1], what)
            assert [sum(o.name == "linear" for o in graph.operators) for graph in tracer.graphs] == layers, what

    world.run(body)


@requirement(
    "DYN-DDP-17",
    "The graphs of a compiled module under DDP end where its buckets end, also after a forward under no_sync.",
    source="torch/_dynamo/backends/distributed.py: DDPOptimizer; torch.nn.parallel.DistributedDataParallel.no_sync",
)
@pytest.mark.world(2)
def test_cuts_without_synchronization(world: World) -> None:
    """Put none, the first, the first two or all of three steps under no_sync; layers and buckets have 1 MiB."""

    def body(rank: Rank) -> None:
        for synced in ((True,) * 3, (False, True, True), (False, False, True), (False,) * 3):
            torch.compiler.reset()
            tracer = Tracer("eager")
            ddp = DistributedDataParallel(Layers(width=WIDE, count=3).to(rank.device), bucket_cap_mb=1)
            function: Any = torch.compile(ddp, backend=tracer)
            for step, sync in enumerate(synced):
                with nullcontext() if sync else ddp.no_sync():
                    function(given(rank, step, WIDE)).sum().backward()
                linear = [sum(o.name == "linear" for o in graph.operators) for graph in tracer.graphs]
                assert len(linear) >= 3, f"{synced}, step {step}: {linear}"
                assert linear == [1] * len(linear), f"{synced}, step {step}: {linear}"

    world.run(body)


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "function": lambda x, w: nn.functional.linear(x, w),
    "method of the weight": lambda x, w: w.matmul(x.t()).t(),
    "transposed by a method": lambda x, w: x @ w.t(),
    "transposed by an attribute": lambda x, w: x @ w.T,
    "viewed by a function": lambda x, w: torch.matmul(x, torch.transpose(w, 0, 1)),
    "methods in a row": lambda x, w: torch.matmul(x, w.unsqueeze(0).squeeze(0).transpose(0, 1)),
}
"""How a layer uses its weight. DDPOptimizer does not see one that is given by keyword or to a result's method."""


class Using(nn.Module):
    """Three weights of 1 MiB without layers, used in one way."""

    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use, self.weights = use, nn.ParameterList(torch.eye(WIDE) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = self.use(x, weight) + 1
        return x


@requirement(
    "DYN-DDP-18",
    "The graphs of a compiled module under DDP end where buckets end, whether functions or methods use parameters.",
    source="torch/_dynamo/backends/distributed.py: DDPOptimizer",
)
@pytest.mark.world(1)
def test_cuts_by_use(world: World) -> None:
    """Use parameters by functions, methods, operators and attributes; each has a bucket of its own."""

    def body(rank: Rank) -> None:
        for how, use in USES.items():
            torch.compiler.reset()
            tracer = Tracer("eager")
            ddp = DistributedDataParallel(Using(use).to(rank.device), bucket_cap_mb=1)
            torch.compile(ddp, backend=tracer)(given(rank, 0, WIDE)).sum().backward()
            products = [sum(o.name in ("linear", "matmul") for o in graph.operators) for graph in tracer.graphs]
            assert products == [1, 1, 1], f"{how}: {products}"

    world.run(body)
