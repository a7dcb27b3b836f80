"""Modules distributed by each stack, compiled by torch.compile or module.compile(), and split where buckets end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fixtures.layers import WIDE
from fixtures.models import HIDDEN, INPUTS, OUTPUTS, TwoLayers
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import replicate, replicate_fsdp
from harness.stacks.tracing import Tracer


def by_function(module: nn.Module, tracer: Tracer) -> Callable[..., Any]:
    return torch.compile(module, backend=tracer)


def by_itself(module: nn.Module, tracer: Tracer) -> Callable[..., Any]:
    module.compile(backend=tracer)
    return module


HOW = pytest.mark.parametrize("how", [by_function, by_itself], ids=["torch.compile", "module.compile"])


def _ddp(module: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    return DistributedDataParallel(module.to(rank.device), **options)


def _replicated(module: nn.Module, rank: Rank, **options: Any) -> nn.Module:
    return replicate.apply(module, rank, **options)


def _replicated_fsdp(module: nn.Module, rank: Rank) -> nn.Module:
    return replicate_fsdp.apply(module, rank)


def _sharded(module: nn.Module, rank: Rank) -> nn.Module:
    return FullyShardedDataParallel(module.to(rank.device), device_id=rank.device, use_orig_params=True)


def _sharded_by_policy(module: nn.Module, rank: Rank) -> nn.Module:
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(
        module.to(rank.device), device_id=rank.device, use_orig_params=True, auto_wrap_policy=policy
    )


def _tensor_parallel(module: nn.Module, rank: Rank) -> nn.Module:
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return parallelize_module(module.to(rank.device), rank.mesh(), plan)


@requirement(
    "DYN-STACK-01",
    "A module distributed by any stack gives the same outputs and gradients compiled, by torch.compile or "
    "module.compile(), as uncompiled.",
    source="torch.compile; torch.nn.Module.compile",
)
@requirement(
    "DYN-STACK-02",
    "A module distributed by any stack is compiled into the same graphs on every rank.",
    source="torch.compile; torch.nn.Module.compile",
)
@requirement(
    "DYN-STACK-03",
    "A compiled module distributed by any stack recompiles only for another batch size.",
    source="torch.compile; torch.nn.Module.compile",
)
@HOW
@pytest.mark.parametrize(
    "stack",
    [_ddp, _replicated, _replicated_fsdp, _sharded, _tensor_parallel, _sharded_by_policy],
    ids=lambda f: f.__name__.strip("_"),
)
@pytest.mark.world(2)
@pytest.mark.each_choice
def test_as_uncompiled(
    world: World, stack: Callable[..., nn.Module], how: Callable[[nn.Module, Tracer], Callable[..., Any]]
) -> None:
    """Run three steps of four rows and two of three; ranks have different data if the stack is data-parallel."""

    def body(rank: Rank) -> list[Any]:
        tracer, counts = Tracer("eager"), []
        torch.compiler.reset()
        own = 0 if stack is _tensor_parallel else rank.index
        plain, model = (stack(TwoLayers(), rank) for _ in range(2))
        compiled = how(model, tracer)
        for step, rows in enumerate((4, 4, 4, 3, 3)):
            x = numbers(rows, INPUTS).double().to(rank.device) + own + step
            outputs = []
            for module, call in ((plain, plain), (model, compiled)):
                output = call(x)
                (output * numbers(rows, OUTPUTS).to(rank.device)).sum().backward()
                outputs.append(output + 0)
                trained = [parameter for parameter in module.parameters() if parameter.grad is not None]
                assert trained
                for parameter in trained:
                    with torch.no_grad():
                        parameter.sub_(parameter.grad / 1024)  # type: ignore[operator]
                    parameter.grad = None
            assert_same(*(o.detach() for o in outputs), f"output of step {step}")
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                pair = [p.to_local() if isinstance(p, DTensor) else p for p in (one, other)]
                assert_same(*(p.detach() for p in pair), f"parameters after step {step}")
            counts.append(len(tracer.graphs))
        assert counts[0] > 0
        assert counts[1:] == [counts[0], counts[0], counts[4], counts[4]]
        assert counts[4] > counts[0]
        return [graph.fingerprint() for graph in tracer.graphs]

    one, other = world.run(body)
    assert one == other


class Own(nn.Linear):
    """A layer whose forward is not torch's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class OwnLayers(nn.Module):
    """Two such layers, with the numbers of TwoLayers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Own(INPUTS, HIDDEN).double(), Own(HIDDEN, OUTPUTS).double()
        self.load_state_dict(TwoLayers().state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


def _fully_sharded(module: nn.Module, rank: Rank) -> nn.Module:
    for layer in module.children():
        fully_shard(layer.to(rank.device), mesh=rank.mesh())
    return fully_shard(module.to(rank.device), mesh=rank.mesh())


def local(tensor: Any) -> torch.Tensor:
    """Return the local part of a DTensor, and any other tensor as it is."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@requirement(
    "DYN-STACK-04",
    "Layers that were compiled before a stack is applied to their model compute under it as uncompiled layers do.",
    source="torch.compile; torch.nn.Module.compile; test_fully_shard_compile.py: test_dynamo_recompiles_on_fsdp_layers",
)
@HOW
@pytest.mark.world(2)
def test_compiled_before(world: World, how: Callable[[nn.Module, Tracer], Callable[..., Any]]) -> None:
    """Compile both layers or the model, apply each stack to the model, and train it for three steps."""

    def body(rank: Rank) -> None:
        stacks = [_ddp, _replicated, _replicated_fsdp, _sharded, _fully_sharded]
        more = [_tensor_parallel] if how is by_itself else []
        for stack, whole in [*((stack, False) for stack in [*stacks, *more]), (_ddp, True)]:
            torch.compiler.reset()
            name, tracer, counts = stack.__name__, Tracer("eager"), []
            plain, inner = OwnLayers(), OwnLayers()
            if whole:
                inner = how(inner, tracer)  # type: ignore[assignment]
            for key, layer in [] if whole else inner.named_children():
                setattr(inner, key, how(layer, tracer))
            plain, model = stack(plain, rank), stack(inner, rank)
            own = 0 if stack is _tensor_parallel else rank.index
            for step in range(3):
                x = numbers(4, INPUTS).double().to(rank.device) + own + step
                outputs = []
                for module in (plain, model):
                    output = module(x)
                    (output * numbers(4, OUTPUTS).to(rank.device)).sum().backward()
                    outputs.append((output + 0).detach())
                assert_same(*outputs, f"{name}: output of step {step}")
                for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                    assert (one.grad is None) == (other.grad is None), name
                    if one.grad is None or other.grad is None:
                        continue
                    assert_same(local(one.grad), local(other.grad), f"{name}: gradient of step {step}")
                    for parameter in (one, other):
                        with torch.no_grad():
                            parameter.sub_(parameter.grad / 1024)  # type: ignore[operator]
                        parameter.grad = None
                counts.append(len(tracer.graphs))
            assert counts[0] > 0, name
            assert counts[1:] == counts[:1] * 2, f"{name}: {counts}"

    world.run(body)


class Stacked(nn.Module):
    """Five layers of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + 1


@requirement(
    "DYN-DDP-05",
    "The graphs of a model under DDP or composable DDP end where its buckets end, however it is compiled.",
    source="torch/_dynamo/backends/distributed.py: DDPOptimizer; replicate.py: _active_ddp_module",
)
@HOW
@pytest.mark.parametrize("stack", [_ddp, _replicated], ids=["ddp", "replicate"])
@pytest.mark.world(1)
@pytest.mark.each_choice
def test_cuts(
    world: World, stack: Callable[..., nn.Module], how: Callable[[nn.Module, Tracer], Callable[..., Any]]
) -> None:
    """Use a first bucket of 1 MiB and others of 1 or 2 MiB; last, compile the model without DDP."""

    def body(rank: Rank) -> None:
        for megabytes, layers in ((1, [1, 1, 1, 1, 1]), (2, [2, 2, 1]), (0, [5])):
            torch.compiler.reset()
            tracer = Tracer("eager")
            model = stack(Stacked(), rank, bucket_cap_mb=megabytes) if megabytes else Stacked().to(rank.device)
            compiled = how(model, tracer)
            for _ in range(2):
                compiled(torch.ones(1, WIDE, device=rank.device)).sum().backward()
            assert [sum(o.name == "linear" for o in graph.operators) for graph in tracer.graphs] == layers

    world.run(body)


class Refusing(nn.Module):
    """A layer that refuses NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("NaN is refused")
        output: torch.Tensor = self.layer(x)
        return output


@requirement(
    "DYN-DDP-5602",
    "A forward under DDP or composable DDP that raised an error does not change where graphs of other models end.",
    source="torch/_dynamo/backends/distributed.py: DDPOptimizer; replicate.py: _active_ddp_module",
)
@pytest.mark.parametrize("stack", [_ddp, _replicated], ids=["ddp", "replicate"])
@pytest.mark.world(1)
def test_cuts_after_an_error(world: World, stack: Callable[..., nn.Module]) -> None:
    """Train one step, let the next forward fail, and compile a model of five layers that is under nothing."""

    def body(rank: Rank) -> list[int]:
        x = torch.ones(1, WIDE, device=rank.device)
        failing = stack(Refusing(), rank, bucket_cap_mb=1)
        failing(x).sum().backward()
        with pytest.raises(ValueError, match="NaN is refused"):
            failing(x * torch.nan)
        tracer = Tracer("eager")
        torch.compile(Stacked().to(rank.device), backend=tracer)(x)
        return [sum(o.name == "linear" for o in graph.operators) for graph in tracer.graphs]

    assert_on_ranks([[5]], world.run(body))


class TwoNames(OwnLayers):
    """Such layers, one of which is checkpointed or not; two modules have one buffer, and methods are no functions."""

    level: torch.Tensor

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed

    @staticmethod
    def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
        return x * by

    @classmethod
    def shifted(cls, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return cls.scaled(x, 2.0) + by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level.add_(1)
        first: Any = self.first
        h = checkpoint(first, x, use_reentrant=False) if self.checkpointed else first(x)
        result: torch.Tensor = (
            self.second(torch.relu(self.shifted(self.scaled(h, 3.0), first.level))) + self.level.sum()
        )
        return result


@requirement(
    "DYN-STACK-3668",
    "A compiled module on ranks has the results and gradients of an uncompiled one if two names have one tensor, also "
    "once they do not.",
    source="torch.compile: side effects; test_dynamo_distributed.py: test_fsdp_dup_tensors_diff_source",
)
@requirement(
    "DYN-STACK-3669",
    "A compiled module on ranks calls its static methods, methods of its class, or checkpointed layers as an "
    "uncompiled one.",
    source="test_dynamo_distributed.py: test_fsdp_staticmethod, test_fsdp_activation_checkpointing",
)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.world(2)
def test_two_names(world: World, checkpointed: bool) -> None:
    """Take two steps, give one of the names another tensor, and take two more, on each stack."""
    every: list[Callable[..., nn.Module]] = [_ddp, _replicated, _replicated_fsdp, _sharded, _fully_sharded]
    stacks, backend = ([_sharded_by_policy], "aot_eager") if checkpointed else (every, "eager")

    def body(rank: Rank) -> None:
        for stack in stacks:
            torch.compiler.reset()
            modules = [TwoNames(checkpointed).to(rank.device) for _ in range(2)]
            for module in modules:
                module.register_buffer("level", torch.ones(1, dtype=torch.float64, device=rank.device))
                module.first.register_buffer("level", module.level)
            plain, model = (stack(module, rank) for module in modules)
            compiled = torch.compile(model, backend=backend)
            for step in range(4):
                what = f"{stack.__name__}, step {step}"
                x = numbers(4, INPUTS).double().to(rank.device) + rank.index + step
                found = []
                for module, call in zip(modules, (plain, compiled), strict=True):
                    if step == 2:
                        module.level = module.level.clone() + 5
                    output = call(x)
                    output.sum().backward()
                    gradients = [local(p.grad) for p in module.parameters() if p.grad is not None]
                    found.append([output.detach(), *gradients, *(b.clone() for b in module.buffers())])
                    for parameter in module.parameters():
                        parameter.grad = None
                for number, (one, other) in enumerate(zip(*found, strict=True)):
                    assert_same(one + 0, other + 0, f"{what}, tensor {number}")

    world.run(body)
