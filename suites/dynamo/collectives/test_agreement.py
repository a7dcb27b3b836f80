"""Ranks with different inputs or budgets, which still have to launch the same collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import WIDE
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import flattened, functional
from harness.stacks.tracing import Tracer
from harness.stacks.training import launched, since

Cases = dict[str, tuple[Any, tuple[Any, ...]]]
"""Functions and their arguments, by name."""


@requirement(
    "DYN-AGREE-01",
    "With guard collectives enabled, all ranks recompile if one rank must, and none otherwise.",
    source="torch.compiler: set_enable_guard_collectives",
)
@pytest.mark.world(3)
def test_guards(world: World) -> None:
    """Call five times; the second and third call have a different number of rows on each rank."""

    def body(rank: Rank) -> list[int]:
        def total(x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x.sum(), "sum", dist.group.WORLD) + 1

        with dynamo.agreeing():
            function, counter = dynamo.compiled(total, dynamic=False)
            counts = []
            for rows in ([4] * 3, [4, 5, 6], [4, 5, 6], [6] * 3, [4] * 3):
                result = function(torch.ones(rows[rank.index], device=rank.device))
                assert_same(torch.tensor(1.0 + sum(rows[: rank.size])), result, "sum")
                counts.append(counter.graphs)
        return counts

    assert_on_ranks([[1, 2, 2, 3, 3]] * world.size, world.run(body))


@requirement(
    "DYN-AGREE-06",
    "set_enable_guard_collectives returns the setting that it replaces.",
    source="torch.compiler: set_enable_guard_collectives",
)
@requirement(
    "DYN-AGREE-07",
    "Guard collectives use one group for all calls, and none while they are off.",
    source="torch.compiler: set_enable_guard_collectives",
)
@pytest.mark.world(2)
def test_guard_setting(world: World) -> None:
    """Turn guard collectives off and on, each twice, between calls, and count groups and collectives."""

    def body(rank: Rank) -> None:
        setting = torch.compiler.set_enable_guard_collectives
        assert setting(False) is False
        function, counter = dynamo.compiled(lambda x: x * 2)
        function(torch.ones(3, device=rank.device))
        groups, enabled = dist.get_pg_count(), False
        with dynamo.agreeing():
            assert setting(False) is True
            for call, on in enumerate((False, True, True, False, False, True)):
                assert setting(on) is enabled, f"call {call}"
                enabled, before = on, launched()
                function(torch.ones(3, device=rank.device))
                assert bool(since(before)) == on, f"call {call}"
                assert dist.get_pg_count() == groups + (call > 0), f"call {call}"
        assert setting(False) is False
        before = launched()
        function(torch.ones(3, device=rank.device))
        assert since(before) == {}
        assert dist.get_pg_count() == groups + 1
        assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-AGREE-05",
    "Ranks launch the same collectives even if their inputs differ in size and only one rank recompiles.",
    source="torch.compile: automatic dynamic shapes; pytorch/pytorch#130935",
)
@pytest.mark.world(3)
def test_other_sizes(world: World) -> None:
    """In the second call, only the last rank has another number of rows; in the third, every rank has."""

    def body(rank: Rank) -> list[int]:
        def total(x: torch.Tensor) -> torch.Tensor:
            largest = functional.all_reduce(x.max(), "max", dist.group.WORLD)
            return functional.all_reduce((x + largest).sum(), "sum", dist.group.WORLD) + largest

        function, counter = dynamo.compiled(total)
        counts = []
        for rows in ([2] * 3, [2, 2, 5], [3, 4, 6], [2, 2, 5]):
            before = launched()
            x = torch.full((rows[rank.index],), 1.0 + rank.index, device=rank.device)
            assert_same(torch.tensor(3.0 + sum(r * (1 + i + 3.0) for i, r in enumerate(rows))), function(x) + 0, "sum")
            assert since(before) == {(0, 1, 2): 2}
            counts.append(counter.graphs)
        return counts

    assert_on_ranks([[1, 1, 2, 2], [1, 1, 2, 2], [1, 2, 2, 2]], world.run(body))


@requirement(
    "DYN-AGREE-02",
    "With compiler collectives enabled, ranks with inputs of different sizes compile the same graph, dynamic in "
    "the sizes that differ.",
    source="torch/_dynamo/config.py: enable_compiler_collectives",
)
@pytest.mark.world(2)
def test_sizes(world: World) -> None:
    """Call twice, with 4 + r and 6 + r rows on rank r."""

    def body(rank: Rank) -> list[list[tuple[str, str]]]:
        tracer = Tracer("eager")
        with dynamo.compiler_collectives():
            torch.compiler.reset()
            function = torch.compile(lambda x: x * 2 + 1, backend=tracer)
            for rows in (4, 6):
                x = torch.ones(rows + rank.index, device=rank.device)
                assert_same(torch.full_like(x, 3), function(x), "result")
        return [list(graph.fingerprint()) for graph in tracer.graphs]

    graphs = world.run(body)
    assert_on_ranks([graphs[0]] * world.size, graphs)
    assert len(graphs[0]) == 1


@requirement(
    "DYN-AGREE-03",
    "A compiled forward and backward launch each collective once, in the same order on every rank, whatever each "
    "rank's activation memory budget.",
    source="torch/_functorch/partitioners.py: collectives are never recomputed; activation_memory_budget",
)
@pytest.mark.parametrize("least", [0.5, 0.0], ids=["half", "none"])
@pytest.mark.world(3)
def test_partitions(world: World, least: float) -> None:
    """The backward needs the results of two collectives; the first rank has the least budget, the last the most."""

    def body(rank: Rank) -> list[str]:
        def through(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            whole = functional.all_gather_tensor_autograd(x @ weight, 0, dist.group.WORLD)
            summed = functional.all_reduce(whole.square(), "sum", dist.group.WORLD)
            return (summed.square() * summed).sum()

        tracer = Tracer()
        torch.compiler.reset()
        function = torch.compile(through, backend=tracer, fullgraph=True)
        results = []
        for run in (function, through):
            x, weight = numbers(2, 4) + rank.index, numbers(4, 4)
            x, weight = x.to(rank.device).requires_grad_(), weight.to(rank.device).requires_grad_()
            with dynamo.budget(least + (1 - least) * rank.index / (rank.size - 1)):
                loss = run(x, weight)
            if run is function:
                kept: list[Any] = [None] * rank.size
                dist.all_gather_object(kept, tracer.launched())
                assert kept == [kept[0]] * rank.size
            loss.backward()
            assert x.grad is not None
            assert weight.grad is not None
            results.append((loss.detach(), x.grad, weight.grad))
        for compiled, right in zip(*results, strict=True):
            assert_same(right, compiled, "compiled and uncompiled")
        return tracer.launched()

    for names in world.run(body):
        assert [name.split(".")[1] for name in names] == [
            *("all_gather_into_tensor", "all_reduce"),  # forward
            *("all_reduce", "reduce_scatter_tensor"),
        ]


def _collectives(x: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """Call every collective that can be compiled, each on the result of the one before."""
    dist.all_reduce(x, group=group)
    whole = x.new_empty(size * len(x))
    dist.all_gather_into_tensor(whole, x, group=group)
    mine = torch.empty_like(x)
    dist.reduce_scatter_tensor(mine, whole, group=group)
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine, group=group)
    parts = [torch.empty_like(received) for _ in range(size)]
    dist.all_gather(parts, received, group=group)
    return torch.cat(parts)


@requirement(
    "DYN-AGREE-04",
    "With compile_on_one_rank, a graph is the same on every rank, including its constants, even for groups whose "
    "names differ.",
    source="torch/distributed/config.py: compile_on_one_rank",
)
@pytest.mark.needs(torch=dynamo.ON_ONE_RANK)
@pytest.mark.parametrize("group", ["implicit", "named", "own"])
@pytest.mark.world(2)
def test_made_for_every_rank(world: World, group: str) -> None:
    """Compare five collectives with the uncompiled ones, and the graphs of both ranks; one group is the rank alone."""

    def body(rank: Rank) -> list[Any]:
        own = rank.mesh(rank.size, 1).get_group(1)
        chosen = {"implicit": None, "named": dist.group.WORLD, "own": own}[group]
        size = 1 if group == "own" else rank.size

        def call(x: torch.Tensor) -> torch.Tensor:
            return _collectives(x * 2, size, chosen)

        tracer = Tracer()
        torch.compiler.reset()
        with dynamo.on_one_rank():
            function = torch.compile(call, backend=tracer, fullgraph=True)
            x = torch.arange(4.0, device=rank.device) + rank.index
            assert_same(call(x), function(x) + 0, "result")
        return [tracer.graphs, tracer.forwards]

    graphs = world.run(body)
    assert graphs[0] == graphs[1]
    assert [len(made) for made in graphs[0]] == [1, 1]


MESHES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "first": lambda x, m: functional.all_reduce(x, "sum", (m, 0)),
    "second": lambda x, m: functional.all_reduce(x, "sum", (m, 1)),
    "second gathered": lambda x, m: functional.all_gather_tensor(x, 0, (m, 1)),
    "second scattered": lambda x, m: functional.reduce_scatter_tensor(x, "sum", 0, (m, 1)),
    "second exchanged": lambda x, m: functional.all_to_all_single(x, None, None, (m, 1)),
    "first sliced": lambda x, m: functional.all_reduce(x, "sum", m["a"]),
    "second sliced": lambda x, m: functional.all_reduce(x, "sum", m["b"]),
    "flattened": lambda x, m: functional.all_reduce(x, "sum", flattened(m, "c")),
    "DTensor": lambda x, m: (
        DTensor.from_local(x, m, [Shard(0), Partial()], run_check=False)
        .redistribute(placements=[Replicate(), Replicate()])
        .to_local()
    ),
}
"""Collectives over a mesh of two dimensions, ``a`` and ``b``."""


@requirement(
    "DYN-AGREE-08",
    "With compile_on_one_rank, a collective over a dimension of a mesh goes over that dimension.",
    source="torch/distributed/config.py: compile_on_one_rank; torch.distributed.device_mesh",
)
@pytest.mark.needs(torch=dynamo.ON_ONE_RANK)
@pytest.mark.world(4)
def test_meshes_for_every_rank(world: World) -> None:
    """Compare collectives over each dimension of one mesh, its slices and its flattened form with uncompiled ones."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("a", "b"))
        for name, call in MESHES.items():
            x = torch.arange(4.0, device=rank.device) + 10.0**rank.index
            with dynamo.on_one_rank():
                function, counter = dynamo.compiled(lambda x, call=call: call(x, mesh) * 2)
                result = function(x)
            assert_same(call(x, mesh) * 2, result, name)
            assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-AGREE-09",
    "With compile_on_one_rank, a graph with an argument that is a group, an embedding sharded by rows or random shards "
    "is the same on every rank.",
    source="torch/distributed/config.py: compile_on_one_rank; test_compile_on_one_rank.py",
)
@pytest.mark.needs(torch=dynamo.ON_ONE_RANK)
@pytest.mark.world(2)
def test_more_made_for_every_rank(world: World) -> None:
    """Compare the graphs of both ranks, and what they compute with uncompiled code."""

    def cases(rank: Rank) -> Cases:
        layer = parallelize_module(nn.Embedding(8, 4), rank.mesh(2), RowwiseParallel(input_layouts=Replicate()))
        tokens = (torch.arange(6, device=rank.device) * 3) % 8
        x = torch.arange(4.0, device=rank.device) + rank.index

        def summed(x: torch.Tensor, group: Any) -> torch.Tensor:
            y = x * 2
            dist.all_reduce(y, group=group)
            return y + 1

        return {"group": (summed, (x, dist.group.WORLD)), "embedding": (layer, (tokens,))}

    check_made_for_every_rank(world, cases)


@requirement(
    "DYN-AGREE-09",
    "With compile_on_one_rank, a graph with an argument that is a group, an embedding sharded by rows or random shards "
    "is the same on every rank.",
    source="torch/distributed/config.py: compile_on_one_rank; test_compile_on_one_rank.py",
)
@pytest.mark.needs(torch=dynamo.ON_ONE_RANK)
@pytest.mark.world(2)
def test_drawn_for_every_rank(world: World) -> None:
    """Draw shards, and drop out elements of shards."""

    def cases(rank: Rank) -> Cases:
        x = torch.arange(4.0, device=rank.device) + rank.index
        shards = DTensor.from_local(x.view(2, 2), rank.mesh(2), [Shard(0)], run_check=False)
        return {
            "random": (lambda d: torch.rand_like(d).to_local(), (shards,)),
            "dropped": (lambda d: nn.functional.dropout(d).to_local(), (shards,)),
        }

    check_made_for_every_rank(world, cases)


def check_made_for_every_rank(world: World, cases: Callable[[Rank], Cases]) -> None:
    """Compare graphs that are compiled for every rank, and their results with those of uncompiled code."""

    def body(rank: Rank) -> list[Any]:
        found = []
        for name, (function, arguments) in cases(rank).items():
            tracer = Tracer()
            torch.compiler.reset()
            torch.manual_seed(1)
            right = function(*arguments)
            torch.manual_seed(1)
            with dynamo.on_one_rank():
                result = torch.compile(function, backend=tracer, fullgraph=True)(*arguments)
            assert_same((right + 0).detach(), (result + 0).detach(), name)
            found.append((name, tracer.graphs, tracer.forwards))
        return found

    one, other = world.run(body)
    assert one == other


class Scaled(nn.Module):
    """Two layers without biases, of 1 MiB each, with the block's own number between and after them."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number
        self.first, self.second = nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, WIDE, bias=False)
        for key, layer in enumerate((self.first, self.second)):
            nn.init.zeros_(layer.weight)
            with torch.no_grad():
                layer.weight.diagonal().copy_(dyadic(WIDE, key=key, dtype=torch.float32, span=2, denominator=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.number / 2
        result: torch.Tensor = x + self.second(self.first(x) * half) * half
        return result


class Blocks(nn.Module):
    """Blocks that are compiled one by one and differ by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled(number) for number in (1.0, 2.0, 4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            dynamo.graph_break()
        return x


@requirement(
    "DYN-DDP-04",
    "A compiled model under DDP whose blocks have several buckets and differ by a number has the gradients of one "
    "device.",
    source="torch/_dynamo/backends/distributed.py: DDPOptimizer",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.world(1)
def test_numbers(world: World, backend: str) -> None:
    """In two steps, the second block of a kind is compiled for any number."""

    def body(rank: Rank) -> None:
        alone = Blocks().to(rank.device)
        wrapped = DistributedDataParallel(Blocks().to(rank.device), bucket_cap_mb=1)
        function, counter = dynamo.compiled(wrapped, backend=backend, fullgraph=False)
        for step in range(2):
            x = dyadic(2, WIDE, key=step, dtype=torch.float32, span=2).to(rank.device)
            for model in (alone, function):
                model(x).sum().backward()
            for one, other in zip(alone.parameters(), wrapped.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                assert_same(one.grad, other.grad, f"gradient of step {step}")
                one.grad = other.grad = None
        assert counter.graphs > 2

    world.run(body)
