"""Behavior of compiled models that generated programs avoid because PyTorch has defects there."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, requirement
from harness.programs import assert_same_as_alone
from harness.specs.program import Activation, Compile, Layout, Linear, Model, Program, Step
from harness.stacks import dynamo, replicate, tp_extension


class OneLayer(nn.Module):
    """A model of a user's class, whose forward torch.compile traces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) + 1
        return result


@requirement(
    "DYN-DDP-01",
    "A model with replicated layers given to torch.compile has a compiled graph after its first step.",
    source="torch.compile: optimizes the given model",
)
@pytest.mark.parametrize("kind", ["torch", "own"])
@pytest.mark.world(2)
def test_replicated_layers(world: World, kind: str) -> None:
    """Replicate two layers one by one: of torch.nn, or of a user's class."""

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = Own if kind == "own" else nn.Linear
            self.first, self.second = layer(4, 4), layer(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.second(self.first(x))
            return result

    def body(rank: Rank) -> int:
        model, counter = Model(), dynamo.GraphCounter("eager")
        replicate.apply(model.first, rank)
        replicate.apply(model.second, rank)
        torch.compile(model, backend=counter)(torch.ones(1, 4, device=rank.device)).sum().backward()
        return counter.graphs

    assert min(world.run(body)) > 0


@requirement(
    "DYN-DDP-02",
    "torch.compile accepts a model under DDP with any bucket size that DDP accepts.",
    source="torch.nn.parallel.DistributedDataParallel: bucket_cap_mb; torch/_dynamo/backends/distributed.py",
)
@pytest.mark.parametrize("megabytes", [0.5, 1, 25])
@pytest.mark.world(2)
def test_bucket_sizes(world: World, megabytes: float) -> None:
    """Use sizes below, at and above DDP's first bucket."""

    def body(rank: Rank) -> bool:
        model = DistributedDataParallel(OneLayer().to(rank.device), bucket_cap_mb=megabytes)
        counter = dynamo.GraphCounter("eager")
        torch.compile(model, backend=counter)(torch.ones(1, 4, device=rank.device)).sum().backward()
        return counter.graphs > 0

    assert_on_ranks([True, True], world.run(body))


@requirement(
    "DYN-FSDP-01",
    "A compiled model under FSDP1 recompiles for other input shapes, whether or not it already has gradients.",
    source="torch/distributed/fsdp: ShardingStrategy; torch.compile",
)
@pytest.mark.parametrize("cleared", [False, True], ids=["accumulated", "cleared"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.world(2)
@pytest.mark.each_choice
def test_compiled_again(world: World, strategy: str, cleared: bool) -> None:
    """Run two backwards, one of four rows and one of one row, and clear the gradients between them or not."""

    def body(rank: Rank) -> bool:
        model = FullyShardedDataParallel(
            OneLayer().to(rank.device),
            device_id=rank.device,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=True,
        )
        counter = dynamo.GraphCounter("eager")
        compiled = torch.compile(model, backend=counter)
        for rows in (4, 1):
            compiled(torch.ones(rows, 4, device=rank.device)).sum().backward()
            if cleared:
                model.zero_grad()
        return counter.graphs > 0

    assert_on_ranks([True, True], world.run(body))


@requirement(
    "DYN-FSDP-303",
    "If compiled autograd runs the backward of FSDP1, each step has its own averaged gradients, or the backward raises "
    "an error.",
    source="torch._dynamo.config: compiled_autograd; torch.distributed.fsdp.FullyShardedDataParallel: use_orig_params",
)
@pytest.mark.parametrize(
    ("strategy", "original", "steps"),
    [("NO_SHARD", True, 2), ("FULL_SHARD", True, 2), ("FULL_SHARD", False, 1)],
    ids=["replicated", "original", "flat"],
)
@pytest.mark.world(2)
def test_compiled_backward_of_fsdp1(world: World, strategy: str, original: bool, steps: int) -> None:
    """Run a step, and another one after the gradients were taken away, with original parameters or with flat ones."""

    def body(rank: Rank) -> None:
        torch.compiler.reset()
        model = FullyShardedDataParallel(
            nn.Linear(2, 2, bias=False).to(rank.device),
            device_id=rank.device,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=original,
        )
        found = []
        for step in range(steps):
            try:
                with dynamo.compiled_backward("eager"):
                    model(torch.full((1, 2), 1.0 + rank.index + step, device=rank.device)).sum().backward()
            except (AssertionError, RuntimeError):
                return
            gradients = [p.grad for p in model.parameters() if p.numel()]
            found.append([None if g is None else sorted(set(g.flatten().tolist())) for g in gradients])
            for parameter in model.parameters():
                parameter.grad = None
        assert found == [[[1.5]], [[2.5]]][:steps], f"elements of the gradients of each step: {found}"

    world.run(body)


@requirement(
    "DYN-HOOK-01",
    "torch.compile compiles the parts of a model that have no backward hook, whatever hooks the other parts have.",
    source="torch/_dynamo/variables: module backward hooks",
)
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.world(1)
def test_backward_hooks(world: World, hooked: bool) -> None:
    """The first of three layers has a full backward hook that changes nothing."""

    def body(rank: Rank) -> bool:
        model, counter = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), dynamo.GraphCounter("eager")
        model.to(rank.device)
        if hooked:
            model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
        x = torch.ones(1, 2, device=rank.device, requires_grad=True)
        torch.compile(model, backend=counter)(x).sum().backward()
        return counter.graphs > 0

    assert_on_ranks([True], world.run(body))


@requirement(
    "DYN-GRAD-04",
    "A replicated model compiled with Inductor has the gradients of one device.",
    source="torch.compile: backend='inductor', PyTorch's default",
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.world(2, timeout=280)
@pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")),
    reason="Inductor needs a C++ compiler on this machine",
)
def test_inductor(worlds: Callable[[int], World], dynamic: bool) -> None:
    """Two layers have small integers, so that any order of additions gives the same bits."""
    program = Program(
        Model(inputs=(3,), layers=(Linear(4), Activation("relu"), Linear(2))),
        Layout("dynamo", world=2, compiled=Compile("inductor", dynamic=dynamic)),
        steps=(Step(rows=(4, 3)), Step(rows=(4,), evaluate=True)),
        dtype="float32",
    )
    assert_same_as_alone(worlds, program)


@requirement(
    "DYN-TP-01",
    "A tensor-parallel layer under FSDP1 can be compiled with dynamic or static shapes.",
    source="torch.compile: dynamic",
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.world(2)
def test_dynamic(world: World, dynamic: bool) -> None:
    """Run a forward and a backward through AOTAutograd."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x).relu()
            return result

    def body(rank: Rank) -> list[int]:
        model = tp_extension.apply(Model(), rank, plan={"layer": "replicated_columns"}, use_orig_params=True)
        compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
        output = compiled(torch.ones(2, 4, device=rank.device))
        output.sum().backward()
        return list(output.shape)

    assert_on_ranks([[2, 4]] * 2, world.run(body))
