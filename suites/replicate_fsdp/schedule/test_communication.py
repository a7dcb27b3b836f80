"""With what a fully sharded module communicates: collectives of one's own, groups, memory, and shared streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, share_comm_ctx

from fixtures.layers import alone, layers, row, train
from harness import Rank, World, requirement
from harness.stacks import messages, replicate_fsdp
from suites.replicate_fsdp.modules.test_sharded_parameters import sharded

SOURCE = "torch.distributed.fsdp.FSDPModule"
BUFFERS = pytest.mark.needs(torch=f"{SOURCE}.set_reduce_scatter_max_input_buffers")
SEPARATE = pytest.mark.needs(torch=f"{SOURCE}.set_separate_reduce_scatter_group")
STEP = 4, 2
"""The numbers of all-gathers and of reduce-scatters in a step of two layers."""


def step(rank: Rank, model: Any) -> list[list[float]]:
    """Run a step, and return and clear the gradients."""
    gradients = train(model, rank.index)
    model.zero_grad()
    return gradients


class Own:
    """A collective that a module is given: it keeps what it is asked for, and multiplies its result."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.allocated: list[tuple[int, torch.dtype]] = []
        self.calls: list[tuple[int, int, torch.dtype, list[int]]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = torch.empty(tuple(size), dtype=dtype, device=device)
        self.allocated.append((tensor.numel(), dtype))
        return tensor

    def note(self, output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.calls.append((output.numel(), given.numel(), given.dtype, dist.get_process_group_ranks(group)))


class Gather(Own):
    """An all-gather."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.note(output_tensor, input_tensor, group)
        dist.all_gather_into_tensor(output_tensor, input_tensor * self.factor, group=group)


class Scatter(Own):
    """A reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.note(output_tensor, input_tensor, group)
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
        output_tensor.mul_(self.factor)


@requirement(
    "RFSDP-COMM-01",
    "A module gathers its parameters, or scatters its gradients, with the collective that it is given, and no other "
    "module does.",
    source=f"{SOURCE}: set_custom_all_gather, set_custom_reduce_scatter",
)
@requirement(
    "RFSDP-COMM-02",
    "A collective of one's own allocates the memory of its inputs and outputs, in the dtype that is communicated.",
    source=f"{SOURCE}: set_custom_all_gather, set_custom_reduce_scatter; Comm.allocate",
)
@pytest.mark.parametrize("started", [False, True], ids=["before-the-first-forward", "after-it"])
@pytest.mark.world(2)
def test_own_collectives(world: World, started: bool) -> None:
    """One layer is gathered and scattered with factors that gradients show, and then with other collectives."""

    def body(rank: Rank) -> None:
        for dtype in (torch.float32, torch.float64):
            policy = MixedPrecisionPolicy(dtype, dtype, cast_forward_inputs=True, output_dtype=torch.float32)
            model = sharded(rank, mp_policy=policy)
            right = alone(2)
            if started:
                assert step(rank, model) == right
            gather, scatter, late = Gather(), Scatter(3.0), Scatter()
            model[0].set_custom_all_gather(gather)
            model[0].set_custom_reduce_scatter(scatter)
            everyone = [0, 1]
            for number in (1, 2):
                first, second = step(rank, model)
                assert (first, second) == ([3 * x for x in right[0]], right[1])
                assert gather.calls == [(16, 8, dtype, everyone)] * 2 * number
                assert gather.allocated == [(16, dtype)] * 2 * number
                assert scatter.calls == [(8, 16, dtype, everyone)] * number
                assert sorted(scatter.allocated, key=str) == sorted([(16, dtype), (8, dtype)] * number, key=str)
            with torch.no_grad():
                model(row(rank.index).to(rank.device))
            model[0].unshard()
            model[0].reshard()
            assert (len(gather.calls), len(scatter.calls)) == (6, 2)
            model[0].set_custom_reduce_scatter(late)
            model[0].set_custom_all_gather(Gather(2.0))
            doubled = step(rank, model)
            assert doubled == [right[0], [2 * x for x in right[1]]]
            assert (len(gather.calls), len(scatter.calls), len(late.calls)) == (6, 2, 1)
            with pytest.raises(AssertionError, match="custom"):
                model[0].set_allocate_memory_from_process_group_for_comm(True)

    world.run(body)


def each(model: Any, name: str, *values: Any) -> None:
    """Call a setting of every layer with each value in turn."""
    for layer in model:
        for value in values:
            getattr(layer, name)(value)


SETTINGS: dict[str, Callable[[Any], None]] = {
    "allocating": lambda model: each(model, "set_allocate_memory_from_process_group_for_comm", True),
    "not-allocating": lambda model: each(model, "set_allocate_memory_from_process_group_for_comm", True, False),
    "one-buffer": lambda model: model.set_reduce_scatter_max_input_buffers(1),
    "two-buffers": lambda model: model.set_reduce_scatter_max_input_buffers(2),
    "many-buffers": lambda model: model.set_reduce_scatter_max_input_buffers(7, recurse=True),
    "buffers-of-one-layer": lambda model: model[1].set_reduce_scatter_max_input_buffers(3, recurse=False),
    "shared-by-one": lambda model: share_comm_ctx([model]),
    "shared-by-none": lambda model: share_comm_ctx([]),
    "shared-by-layers": lambda model: share_comm_ctx([model, model[0], model[1]]),
}


@requirement(
    "RFSDP-COMM-03",
    "Training gives the numbers of one device wherever the memory of collectives comes from, and however many buffers "
    "are in flight.",
    source=f"{SOURCE}: set_allocate_memory_from_process_group_for_comm, set_reduce_scatter_max_input_buffers",
)
@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=BUFFERS) if "buffer" in name else name for name in SETTINGS]
)
@pytest.mark.world(2)
def test_memory_of_collectives(world: World, setting: str) -> None:
    """Set it before the first of two steps, or between them, then accumulate without synchronization."""

    def body(rank: Rank) -> None:
        for when in (0, 1):
            model = sharded(rank)
            for number in range(3):
                if number == when:
                    SETTINGS[setting](model)
                assert step(rank, model) == alone(2), (when, number)
            model.set_requires_gradient_sync(False)
            model(row(rank.index).to(rank.device)).sum().backward()
            model.set_requires_gradient_sync(True)
            assert step(rank, model) == [[2 * x for x in gradient] for gradient in alone(2)]

    world.run(body)


@requirement(
    "RFSDP-COMM-04",
    "A number of buffers that is not a positive integer raises an error, as does sharing streams with a plain module.",
    source=f"{SOURCE}.set_reduce_scatter_max_input_buffers; torch.distributed.fsdp.share_comm_ctx",
)
@BUFFERS
@pytest.mark.world(2)
def test_refused_settings(world: World) -> None:
    """Training goes on after each error."""

    def body(rank: Rank) -> None:
        model = sharded(rank)
        for wrong in (0, -1, True, 1.5, "1", None):
            with pytest.raises((TypeError, ValueError), match="max_input_buffers"):
                model.set_reduce_scatter_max_input_buffers(wrong)
        for modules in ([model, nn.Linear(1, 1)], [nn.Linear(1, 1)]):
            with pytest.raises(ValueError, match="FSDPModule"):
                share_comm_ctx(modules)  # type: ignore[arg-type]
        assert step(rank, model) == alone(2)

    world.run(body)


@requirement(
    "RFSDP-COMM-05",
    "With set_separate_reduce_scatter_group, gradients are scattered in a group of their own, made once.",
    source=f"{SOURCE}.set_separate_reduce_scatter_group",
)
@SEPARATE
@pytest.mark.world(2)
def test_separate_group(world: World) -> None:
    """Count the collectives of each group, for one layer, for all of them, and after switching it off."""

    def body(rank: Rank) -> None:
        model = sharded(rank)
        right = alone(2)

        def counted() -> list[int]:
            before = messages.mark()
            model(row(rank.index).to(rank.device)).sum().backward()
            after = messages.mark()
            assert [g.flatten().tolist() for g in replicate_fsdp.gradients(model).values()] == right
            model.zero_grad()
            return sorted(n for n in (last - before.get(group, 0) for group, last in after.items()) if n)

        gathers, scatters = STEP
        together = counted()
        if not together:
            return  # nothing records them
        assert together == [gathers + scatters]
        groups = len(messages.mark())
        model.set_separate_reduce_scatter_group(recurse=False)  # the root has no parameters
        assert (counted(), len(messages.mark())) == (together, groups)
        model[1].set_separate_reduce_scatter_group()
        assert (counted(), len(messages.mark())) == ([1, gathers + scatters - 1], groups + 1)
        model[1].set_separate_reduce_scatter_group(False)
        assert counted() == together
        groups = len(messages.mark())
        for _ in range(2):
            model.set_separate_reduce_scatter_group()
            assert (counted(), len(messages.mark())) == ([scatters, gathers], groups + 1)
        model.set_separate_reduce_scatter_group(False)
        assert counted() == together

    world.run(body)


@requirement(
    "RFSDP-COMM-06",
    "Models that share their streams train as models that do not, if only the last backward of all is said to be it.",
    source="torch.distributed.fsdp: share_comm_ctx, FSDPModule.set_is_last_backward",
)
@pytest.mark.parametrize("stack", ["sharded", "replicated"])
@pytest.mark.world(2)
def test_shared_streams(world: World, stack: str) -> None:
    """Two models run one after the other, then their forwards before their backwards, in both orders."""

    def body(rank: Rank) -> None:
        x = row(rank.index).to(rank.device)
        for started in (False, True):
            models: list[Any] = [
                sharded(rank) if stack == "sharded" else replicate_fsdp.apply(layers(rank.device), rank)
                for _ in range(2)
            ]
            if started:
                assert [step(rank, model) for model in models] == [alone(2)] * 2
            share_comm_ctx(models)
            assert [step(rank, model) for model in models] == [alone(2)] * 2
            for order in ((0, 1), (1, 0)):
                losses = [model(x).sum() for model in models]
                for number, i in enumerate(order):
                    models[i].set_is_last_backward(number == 1)
                    losses[i].backward()
                for model in models:
                    gradients = [gradient.flatten().tolist() for gradient in replicate_fsdp.gradients(model).values()]
                    assert gradients == alone(2), f"{started=}, {order}"
                    model.zero_grad()
                    model.set_is_last_backward(True)
                    model.reshard()

    world.run(body)


@requirement(
    "RFSDP-HOOK-05",
    "With full sharding, an all-reduce hook gets its own module's scattered gradients in each synchronized backward.",
    source=f"{SOURCE}.set_all_reduce_hook: 'the reduce-scatter output if only using FSDP'",
)
@requirement(
    "RFSDP-HOOK-06",
    "With full sharding, an all-reduce hook may change the gradients of its module, as by summing them over replicas.",
    source=f"{SOURCE}.set_all_reduce_hook",
)
@pytest.mark.world(2, 4)
def test_all_reduce_hook(world: World) -> None:
    """A hook of the first layer, and then one of each, sums over the other pairs of ranks and triples the result."""

    def body(rank: Rank) -> None:
        replicas = rank.size // 2
        mesh = rank.mesh(replicas, 2, names=("replicas", "shards"))
        pair = alone(range(rank.index // 2 * 2, rank.index // 2 * 2 + 2))
        everyone = [[3 * replicas * x for x in gradient] for gradient in alone(rank.size)]
        for started in False, True:
            model: Any = layers(rank.device)
            for layer in model:
                fully_shard(layer, mesh=mesh["shards"])
            fully_shard(model, mesh=mesh["shards"])
            if started:
                assert step(rank, model) == pair
            calls: list[int] = []

            def hook(reduced: torch.Tensor, calls: list[int] = calls) -> None:
                calls.append(reduced.numel())
                dist.all_reduce(reduced, group=mesh.get_group("replicas"))
                reduced.mul_(3)

            for hooked, right, sizes in (([0], [everyone[0], pair[1]], [8]), ([0, 1], everyone, [4, 8])):
                for index in hooked:
                    model[index].set_all_reduce_hook(hook)
                for synced, times in ((True, 1), (False, 0), (True, 2), (True, 1)):
                    what = f"{started=}, {hooked=}, {synced=}, {times=}"
                    model.set_requires_gradient_sync(synced)
                    model(row(rank.index).to(rank.device)).sum().backward()
                    assert calls == (sizes if synced else []), what
                    calls.clear()
                    if synced:
                        found = [g.flatten().tolist() for g in replicate_fsdp.gradients(model).values()]
                        assert found == [[times * x for x in gradient] for gradient in right], what
                        model.zero_grad()

    world.run(body)
