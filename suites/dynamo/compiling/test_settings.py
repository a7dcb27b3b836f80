"""Settings that change what is compiled, and which must not stick: of DDP, of FSDP2 and of pending collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import WIDE
from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo, replicate, replicate_fsdp
from harness.stacks.collectives import functional, unwaited
from harness.stacks.tracing import Tracer


class Diagonal(nn.Linear):
    """A layer without a bias that multiplies its input by a diagonal matrix. Its forward is not torch's own."""

    def __init__(self, width: int, factor: int) -> None:
        super().__init__(width, width, bias=False)
        with torch.no_grad():
            self.weight.zero_().diagonal().fill_(factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Block(nn.Module):
    """Two layers, one of them in a container."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.rest = Diagonal(width, 2), nn.ModuleList([Diagonal(width, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.rest[0](self.first(x).relu())
        return result


class Blocks(nn.Module):
    """Two blocks of two layers, and a layer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.one, self.two, self.last = Block(width), Block(width), Diagonal(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.two(self.one(x))) + 1
        return result


LAYERS = 5


def linears(tracer: Tracer) -> list[int]:
    """Return how many linear layers each graph has."""
    return [sum(o.name == "linear" for o in graph.operators) for graph in tracer.graphs]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the local gradients, and delete them."""
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradient = parameter.grad
        found.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        parameter.grad = None
    return found


@requirement(
    "DYN-DDP-07",
    "torch._dynamo.config.optimize_ddp says whether the graphs of a model under DDP end where its buckets end.",
    source="torch/_dynamo/config.py: optimize_ddp",
)
@requirement(
    "DYN-DDP-08",
    "A compiled model under DDP has the gradients of the uncompiled one with every value of optimize_ddp.",
    source="torch/_dynamo/config.py: optimize_ddp",
)
@pytest.mark.parametrize("stack", ["ddp", "replicate"])
@pytest.mark.world(2)
def test_modes_of_ddp(world: World, stack: str) -> None:
    """Use each value, the first one again, and the default at last; there are as many buckets as layers."""

    def body(rank: Rank) -> None:
        x = dyadic(2, WIDE, key=rank.index, dtype=torch.float32).to(rank.device)

        def trained(compiles: bool) -> tuple[list[int], list[torch.Tensor]]:
            torch.compiler.reset()
            model, tracer = Blocks(WIDE).to(rank.device), Tracer("eager")
            if stack == "ddp":
                model = DistributedDataParallel(model, bucket_cap_mb=1)  # type: ignore[assignment]
            else:
                replicate.apply(model, rank, bucket_cap_mb=1)
            function: Any = torch.compile(model, backend=tracer) if compiles else model
            function(x).sum().backward()
            return linears(tracer), gradients(model)

        _, right = trained(compiles=False)
        cut, whole = [1] * LAYERS, [LAYERS]
        modes: list[tuple[bool | str, list[int]]] = [
            (False, whole),
            ("no_optimization", whole),
            ("python_reducer_without_compiled_forward", whole),
            ("ddp_optimizer", cut),
            (True, cut),
        ]
        for mode, layers in [*modes, modes[0]]:
            with dynamo.ddp_mode(mode):
                graphs, found = trained(compiles=True)
            assert graphs == layers, f"optimize_ddp={mode}"
            for one, other in zip(right, found, strict=True):
                assert_same(one, other, f"gradient with optimize_ddp={mode}")
        assert trained(compiles=True)[0] == cut, "the default, afterwards"
        with dynamo.ddp_mode("nothing"), pytest.raises(Exception, match="optimize_ddp"):
            trained(compiles=True)

    world.run(body)


def _root(model: Blocks, rank: Rank) -> None:
    fully_shard(model, mesh=rank.mesh())


def _blocks(model: Blocks, rank: Rank) -> None:
    for block in (model.one, model.two):
        fully_shard(block, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())


def _lists(model: Blocks, rank: Rank) -> None:
    fully_shard([model.two, model.last], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())


def _replicated(model: Blocks, rank: Rank) -> None:
    replicate_fsdp.apply(model, rank, groups=False)


@requirement(
    "DYN-FSDP-02",
    "torch.compile compiles all layers of a model under fully_shard, whichever of its modules are wrapped.",
    source="torch.distributed.fsdp.fully_shard; torch/_dynamo/variables/builder.py: FSDP modules",
)
@requirement(
    "DYN-FSDP-03",
    "A compiled model under fully_shard has the outputs and the gradients of the uncompiled one.",
    source="torch.distributed.fsdp.fully_shard; torch.compile",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("wrap", [_root, _blocks, _lists, _replicated], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.world(2)
@pytest.mark.each_choice
def test_layers_of_fsdp(world: World, wrap: Callable[[Blocks, Rank], None], backend: str) -> None:
    """Run two steps, and count the layers in the graphs."""

    def body(rank: Rank) -> None:
        torch.compiler.reset()
        tracer, plain, model = Tracer(backend), Blocks().to(rank.device), Blocks().to(rank.device)
        for each in (plain, model):
            wrap(each, rank)
        compiled = torch.compile(model, backend=tracer)
        for step in range(2):
            x = dyadic(2, 4, key=(rank.index, step), dtype=torch.float32).to(rank.device)
            right, output = plain(x), compiled(x)
            assert_same(right.detach(), output.detach(), f"output of step {step}")
            for result in (right, output):
                (result * x).sum().backward()
            for one, other in zip(gradients(plain), gradients(model), strict=True):
                assert_same(one, other, f"gradient of step {step}")
        assert sum(linears(tracer)) == LAYERS

    world.run(body)


def launched(rank: Rank, name: str, given: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Launch an asynchronous collective; return its output and the work that nothing has waited for."""
    if name == "all_reduce":
        into = given.clone()
        return into, dist.all_reduce(into, async_op=True)
    if name == "all_gather_into_tensor":
        into = given.new_zeros(2 * rank.size)
        return into, dist.all_gather_into_tensor(into, given, async_op=True)
    if name == "reduce_scatter_tensor":
        into = given.new_zeros(2 // rank.size)
        return into, dist.reduce_scatter_tensor(into, given, async_op=True)
    into = given.new_zeros(2)
    return into, dist.all_to_all_single(into, given, async_op=True)


@requirement(
    "DYN-COLL-16",
    "Within allow_inflight_collective_as_graph_input_ctx, compiled code waits for asynchronous collectives that were "
    "launched before it.",
    source="torch/distributed/_functional_collectives.py: allow_inflight_collective_as_graph_input_ctx",
)
@requirement(
    "DYN-COLL-17",
    "allow_inflight_collective_as_graph_input_ctx puts the setting back that it found, after errors too.",
    source="torch/distributed/_functional_collectives.py: allow_inflight_collective_as_graph_input_ctx",
)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"])
@pytest.mark.world(2)
def test_inflight(world: World, name: str) -> None:
    """Enter the context with each value, nest it and leave it with an error; count the works that are kept."""

    def body(rank: Rank) -> None:
        function, counter = dynamo.compiled(lambda y: functional.wait_tensor(y) * 2)
        given = torch.tensor([1.0, 3.0], device=rank.device) + 10 * rank.index
        right, work = launched(rank, name, given)
        work.wait()

        def check(kept: bool, where: str) -> None:
            into, work = launched(rank, name, given)
            assert unwaited() == kept, where
            if not kept:
                work.wait()
            assert_same(right * 2, function(into) + 0, where)
            assert unwaited() == 0, where

        check(False, "before")
        for values in ((), (True,)):
            with dynamo.inflight_inputs(*values):
                check(True, f"within {values}")
                with dynamo.inflight_inputs(False):
                    check(False, "within False, within True")
                check(True, "after False, within True")
                with dynamo.inflight_inputs(True):
                    check(True, "within True, within True")
                check(True, "after True, within True")
            check(False, f"after {values}")
        with dynamo.inflight_inputs(False):
            check(False, "within False")
            with dynamo.inflight_inputs():
                check(True, "within True, within False")
            check(False, "after True, within False")
        with pytest.raises(KeyError), dynamo.inflight_inputs():
            raise KeyError
        check(False, "after an error")
        assert counter.graphs == 1

    world.run(body)
