"""What a step of a managed module sends under each option: how many collectives, of which size and dtype."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from fixtures.layers import alone, layers, row, train
from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import messages, replicate_fsdp

SOURCE = "torch/distributed/_composable/replicate_with_fsdp.py: replicate"
UNUSED = "torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params"


class Part(nn.Module):
    """Parameters of several sizes, whose gradients are the input, and an inner module."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(size)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(((p * x).sum() for p in self.parameters(recurse=False)), torch.zeros((), device=x.device))


class Model(Part):
    """Two elements of its own, after parts of seven and of five."""

    def __init__(self) -> None:
        super().__init__({"own": 2})
        self.first, self.second, self.skips = Part({"a": 3, "b": 4}), Part({"c": 5}), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x) + self.first(x)
        return y if self.skips else y + self.second(x)


def every(model: nn.Module, name: str, *values: Any) -> None:
    """Call a setting of each replicated module."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            getattr(module, name)(*values)


@dataclass(frozen=True, kw_only=True)
class Says:
    """Options of replicate() and settings, and what is sent with them in a backward."""

    options: dict[str, Any] = field(default_factory=dict)
    before: Callable[[Any], None] = lambda model: None
    """What is done to the module before it is replicated."""
    after: Callable[[Any], None] = lambda model: None
    """What is done to it after that."""
    sent: tuple[int, ...] = (2, 5, 7)
    """Numbers of elements of the all-reduces, in ascending order."""
    dtype: str = "Float"


def policy(param: torch.dtype | None, reduce: torch.dtype | None) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(param, reduce)}


SAYS: dict[str, Says] = {
    "plain": Says(),
    "together": Says(options={"groups": False}, sent=(14,)),
    "narrow": Says(options=policy(torch.bfloat16, torch.bfloat16), dtype="BFloat16"),
    "wide-reduce": Says(options=policy(torch.bfloat16, torch.float32)),
    "wider-reduce": Says(options={"groups": False, **policy(None, torch.float64)}, sent=(14,), dtype="Double"),
    "offloaded": Says(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "one-frozen": Says(before=lambda model: model.first.b.requires_grad_(False), sent=(2, 3, 5)),
    "part-frozen": Says(before=lambda model: model.second.requires_grad_(False), sent=(2, 7)),
    "skipped": Says(after=lambda model: setattr(model, "skips", True), sent=(2, 7)),
    "sums": Says(after=lambda model: every(model, "set_force_sum_reduction_for_comms", True)),
    "divided": Says(after=lambda model: every(model, "set_gradient_divide_factor", 2.0)),
    "kept": Says(after=lambda model: every(model, "set_reshard_after_backward", False)),
    "not-the-last": Says(after=lambda model: model.set_is_last_backward(False)),
    "prefetched": Says(after=lambda model: model.second.set_modules_to_backward_prefetch([model.first])),
    "hooked": Says(after=lambda model: every(model, "set_all_reduce_hook", lambda gradient: None)),
    "no-sync": Says(after=lambda model: model.set_requires_gradient_sync(False), sent=()),
    "root-alone": Says(
        after=lambda model: [m.set_requires_gradient_sync(False) for m in (model.first, model.second)], sent=(2,)
    ),
    "no-all-reduce": Says(after=lambda model: model.set_requires_all_reduce(False), sent=()),
    "no-all-reduce-of-a-part": Says(after=lambda model: model.first.set_requires_all_reduce(False), sent=(2, 5)),
}
NEWER: dict[str, Says] = {
    "unused": Says(
        options={"groups": False},
        after=lambda model: [model.set_reduce_scatter_unused_params(True), setattr(model, "skips", True)],
        sent=(14,),
    ),
}


@requirement(
    "RFSDP-SENT-01",
    "A backward reduces the gradients of each group in one all-reduce, which has no other elements.",
    source=f"{SOURCE}; torch.distributed.fsdp.FSDPModule: set_requires_gradient_sync, set_requires_all_reduce",
)
@requirement(
    "RFSDP-SENT-02",
    "A backward reduces gradients in reduce_dtype.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: reduce_dtype",
)
@requirement(
    "RFSDP-SENT-03",
    "A replicated module's forward sends nothing.",
    source=SOURCE,
)
@pytest.mark.parametrize("newer", [False, pytest.param(True, marks=pytest.mark.needs(torch=UNUSED))])
@pytest.mark.world(2)
def test_messages(world: World, newer: bool) -> None:
    """Run a step and an evaluation with each set of options in turn."""

    def body(rank: Rank) -> None:
        before = messages.mark()
        dist.all_reduce(torch.ones(1, device=rank.device))
        if not messages.since(before):
            return  # nothing records them
        for name, says in (NEWER if newer else SAYS).items():
            before = messages.mark()
            model: Any = Model()
            says.before(model)
            replicate_fsdp.apply(model, rank, **says.options)
            says.after(model)
            loss = model(torch.full((1,), 1.0 + rank.index, device=rank.device, requires_grad=True))
            assert messages.since(before) == [], f"{name}: forward"
            loss.backward()
            with torch.no_grad():
                model(torch.ones(1, device=rank.device))
            sent = messages.since(before)
            assert tuple(sorted(math.prod(m.shape) for m in sent)) == says.sent, name
            assert {(m.dtype, m.members) for m in sent} <= {(says.dtype, (0, 1))}, name

    world.run(body)


@requirement(
    "RFSDP-SENT-3652",
    "A backward reduces the gradients of the trainable parameters of a group, and no elements for its frozen ones.",
    source="torch.distributed.fsdp.fully_shard; torch.nn.Parameter.requires_grad",
)
@pytest.mark.world(2)
def test_frozen_of_a_group(world: World) -> None:
    """Freeze some of three parameters of a group before it is managed, first or last; take two steps."""
    sizes = {"a": 4, "b": 6, "c": 2}

    def body(rank: Rank) -> None:
        for (way, managed), count in itertools.product(ways(rank).items(), range(3)):
            for frozen in itertools.combinations(sizes, count):
                model: Any = Part(sizes).to(rank.device)
                for name in frozen:
                    model.get_parameter(name).requires_grad_(False)
                managed(model)
                for step in range(1, 3):
                    before = messages.mark()
                    model(torch.full((1,), 1.0 + rank.index, device=rank.device)).backward()
                    sent = [m for m in messages.since(before) if "gather" not in m.op and len(m.members) > 1]
                    what = f"{way}, {frozen} frozen, step {step}"
                    trained = sum(size for name, size in sizes.items() if name not in frozen)
                    assert [math.prod(m.shape) for m in sent] in ([], [trained]), what
                    found = {n: g.unique().tolist() for n, g in replicate_fsdp.gradients(model).items()}
                    assert found == {name: [1.5 * step] for name in sizes if name not in frozen}, what

    world.run(body)


@requirement(
    "RFSDP-ALONE-01",
    "One rank may run forwards of a replicated model without the others, before and between the steps of all ranks.",
    source=f"{SOURCE}: parameters are whole on each rank",
)
@pytest.mark.parametrize("mode", ["no_grad", "evaluation", "given-up"])
@pytest.mark.world(2)
def test_one_rank_alone(world: World, mode: str) -> None:
    """Rank 1 waits until rank 0 has run three forwards, whose backward it may not run; then both run a step."""

    def body(rank: Rank) -> None:
        model = replicate_fsdp.apply(layers(rank.device), rank)
        plain = layers(rank.device)
        for number in range(3):
            if rank.index == number % 2:
                model.train(mode != "evaluation")
                for part in range(3):
                    x = row(part).to(rank.device)
                    with torch.set_grad_enabled(mode != "no_grad"):
                        assert torch.equal(model(x), plain(x))
                model.train()
                rank.store.set(f"run {number}", "")
            rank.store.wait([f"run {number}"])
            assert train(model, rank.index) == alone(2), f"step {number}"
            model.zero_grad()

    world.run(body)
