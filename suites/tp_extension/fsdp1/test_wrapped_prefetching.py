"""When FSDP1 gathers its modules: before or after what is computed, as its options of prefetching say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from fixtures.wrapped import STRATEGIES, inputs, own, wrapped
from harness import Rank, World, requirement
from harness.stacks import messages

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
NAMES = {1: "root", 2: "a", 3: "b", 4: "c"}
"""Layers by the number of elements of their shards on two ranks."""


class Events:
    """What happens on this rank in the order in which it does: computations, gathers and reductions."""

    def __init__(self) -> None:
        self.seen, self.at = list[tuple[int, str]](), messages.mark()

    def add(self, event: str) -> None:
        """Add an event after the collectives that have been launched."""
        self.seen.append((messages.launched(), event))

    def parts(self) -> list[list[str]]:
        """Return all events in parts, each of which an empty event ended."""
        launched, parts = messages.since(self.at), list[list[str]]([[]])
        first = self.seen[-1][0] - len(launched)
        for number, event in self.seen:
            while launched and first < number:
                message, first = launched.pop(0), first + 1
                gathers = "gather" in message.op  # which are given shards, and reductions whole gradients
                size = message.shape[0] if gathers else message.shape[0] // 2
                parts[-1].append(f"{'gather' if gathers else 'reduce'} {NAMES[size]}")
            parts += [[]] if not event else []
            parts[-1] += [event] if event else []
        return parts[:-1]


class Layer(nn.Module):
    """Multiply by the sum of a weight, and note when this is computed and when its gradient is."""

    def __init__(self, name: str, size: int, events: Events) -> None:
        super().__init__()
        self.weight, self.name, self.events = nn.Parameter(torch.ones(size) / size), name, events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times the sum, by an operation whose backward is before that of the product."""
        self.events.add(f"forward {self.name}")
        y = self.weight.sum() * x
        y.register_hook(lambda gradient: self.events.add(f"backward {self.name}"))
        return y + 0


class Layers(Layer):
    """Three layers, then a weight of its own."""

    def __init__(self, events: Events, layers: list[nn.Module]) -> None:
        super().__init__("root", 2, events)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layers' result times the weight."""
        return super().forward(self.layers(x))


def forward(strategy: ShardingStrategy, ahead: bool) -> list[str]:
    """Return what happens in a forward: with prefetching, a layer is gathered before the one before it computes."""
    gathers = ["gather root", "gather a", "gather b", "gather c"] if strategy != ShardingStrategy.NO_SHARD else []
    if not gathers:
        return ["forward a", "forward b", "forward c", "forward root"]
    if ahead:
        return [*gathers[:3], "forward a", gathers[3], "forward b", "forward c", "forward root"]
    return [*gathers[:2], "forward a", gathers[2], "forward b", gathers[3], "forward c", "forward root"]


def backward(strategy: ShardingStrategy, ahead: BackwardPrefetch | None) -> list[str]:
    """Return what happens in a backward; the root and, without resharding, the others have been gathered before."""
    ends = ["reduce a", "reduce root"]
    if strategy != ShardingStrategy.FULL_SHARD:
        return ["backward root", "backward c", "reduce c", "backward b", "reduce b", "backward a", *ends]
    if ahead == PRE:  # the next layer is gathered before the current one computes
        first = [
            "gather c",
            "backward root",
            "gather b",
            "backward c",
            "reduce c",
            "gather a",
            "backward b",
            "reduce b",
        ]
    elif ahead == POST:  # after that, but before its gradients are reduced
        first = [
            "backward root",
            "gather c",
            "backward c",
            "gather b",
            "reduce c",
            "backward b",
            "gather a",
            "reduce b",
        ]
    else:  # once it is needed
        first = [
            "backward root",
            "gather c",
            "backward c",
            "reduce c",
            "gather b",
            "backward b",
            "reduce b",
            "gather a",
        ]
    return [*first, "backward a", *ends]


@requirement(
    "TP-AHEAD-4301",
    "FSDP gathers the next module before it computes the current one, after it or only when it is needed, as "
    "forward_prefetch and backward_prefetch say.",
    source=f"{SOURCE}: forward_prefetch, backward_prefetch; torch.distributed.fsdp.BackwardPrefetch",
)
@pytest.mark.world(2)
def test_gathered_before(world: World) -> None:
    """Note gathers, computations and reductions of two steps with each setting and with none."""
    settings: list[dict[str, Any]] = [{}, {"forward_prefetch": True}, {"forward_prefetch": False}]
    settings += [{"backward_prefetch": value} for value in (PRE, POST, None)]

    def body(rank: Rank) -> None:
        ways = [(setting, ShardingStrategy.FULL_SHARD) for setting in settings]
        ways += [(setting, strategy) for setting in settings[:2] for strategy in STRATEGIES[1:]]
        for (setting, strategy), original in zip(ways, itertools.cycle((True, False)), strict=False):
            what = f"{strategy}, {original=}, {setting}"
            events = Events()
            options = {"sharding_strategy": strategy, "use_orig_params": original, **setting}
            layers = [wrapped(rank, Layer(NAMES[i], 2 * i, events), **options) for i in (2, 3, 4)]
            model = wrapped(rank, Layers(events, layers), **options)
            for step in range(2):
                loss = model(inputs(rank)).sum()
                events.add("")
                loss.backward()
                events.add("")
                assert own(model) == {1.5}, f"{what}, {step}: {own(model)}"
                model.zero_grad()
            for number, found in enumerate(events.parts()):
                step, ahead = number // 2, setting.get("forward_prefetch", False)
                early = step > 0 and ahead  # the first forward shows what comes next
                if number % 2:
                    right = backward(strategy, setting.get("backward_prefetch", PRE))
                else:
                    right = forward(strategy, early)
                if number % 2 and early:  # what was gathered earlier may be reduced later
                    right, found = sorted(right), sorted(found)
                assert found == right, f"{what}, {'backward' if number % 2 else 'forward'} {step}: {found}"

    world.run(body)
