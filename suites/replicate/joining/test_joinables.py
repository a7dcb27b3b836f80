"""Join for what a user makes joinable: the hooks that it runs, how often, in which order and with which arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from harness import Rank, World, requirement

SOURCE = "torch.distributed.algorithms.join"
HOOKS = f"{SOURCE}.Join: joinables, kwargs; Joinable.join_hook; JoinHook.main_hook"


class Shadow(JoinHook):
    """Notes its calls, and takes part in the sums of the ranks that have not joined."""

    def __init__(self, owner: Summing, kwargs: dict[str, Any]) -> None:
        self.owner, self.kwargs = owner, kwargs

    def main_hook(self) -> None:
        self.owner.notes.append((self.owner.name, "main"))
        for _ in range(self.kwargs.get("sums", 1)):
            self.owner.sum_of(0.0)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.owner.notes.append((self.owner.name, "post", is_last_joiner))


class Summing(Joinable):
    """Sums numbers over the ranks that have not joined."""

    def __init__(self, name: str, rank: Rank, group: Any, notes: list[Any]) -> None:
        super().__init__()
        self.name, self.device, self.group, self.notes = name, rank.device, group, notes
        self.given: list[dict[str, Any]] = []

    def sum_of(self, number: float) -> float:
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, group=self.group)
        return tensor.item()

    def __call__(self, number: float, sums: int = 1) -> float:
        Join.notify_join_context(self)
        return sum(self.sum_of(number) for _ in range(sums))

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.given.append(kwargs)
        return Shadow(self, kwargs)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.group


BATCHES: list[list[int]] = [[1, 2, 4], [4, 2, 1], [0, 3, 3], [2, 0, 0], [2, 2, 2], [0, 0, 0]]


@requirement(
    "DDP-JOIN-11",
    "Join passes its arguments to every joinable, whose main hooks run in order for each iteration of other ranks.",
    source=HOOKS,
)
@requirement(
    "DDP-JOIN-12",
    "After all ranks have joined, Join runs every post hook once, which is told whether its rank joined last.",
    source=f"{SOURCE}.JoinHook.post_hook: is_last_joiner",
)
@pytest.mark.world(3)
def test_hooks(world: World) -> None:
    """Ranks have different numbers of batches, the same, or none, with one to three joinables of one or two sums."""

    def body(rank: Rank) -> None:
        pair = dist.new_group([1, 2])
        for number, batches in enumerate(BATCHES):
            for count in (1, 2, 3):
                for kwargs in ({}, {"sums": 2, "text": "text"}):
                    group = pair if number == 2 and rank.index > 0 else None
                    if number == 2 and rank.index == 0:
                        continue
                    check(rank, batches, count, kwargs, group)

    def check(rank: Rank, batches: list[int], count: int, kwargs: dict[str, Any], group: Any) -> None:
        notes: list[Any] = []
        names = "cab"[:count]
        joinables = [Summing(name, rank, group, notes) for name in names]
        members = [0, 1, 2] if group is None else [1, 2]
        where = (batches, count, kwargs)
        with Join(joinables, **kwargs):  # type: ignore[arg-type]
            for step in range(batches[rank.index]):
                active = [r for r in members if step < batches[r]]
                for joinable in joinables:
                    found = joinable(1.0 + rank.index, kwargs.get("sums", 1))
                    assert found == kwargs.get("sums", 1) * sum(r + 1.0 for r in active), (where, step)
            assert notes == [], where
        most = max(batches[r] for r in members)
        right: list[Any] = [(name, "main") for name in names] * (most - batches[rank.index])
        assert notes == right + [(name, "post", batches[rank.index] == most) for name in names], where
        assert [joinable.given for joinable in joinables] == [[kwargs]] * count, where

    world.run(body)


@requirement(
    "DDP-JOIN-11",
    "Join passes its arguments to every joinable, whose main hooks run in order for each iteration of other ranks.",
    source=HOOKS,
)
@requirement(
    "DDP-JOIN-12",
    "After all ranks have joined, Join runs every post hook once, which is told whether its rank joined last.",
    source=f"{SOURCE}.JoinHook.post_hook: is_last_joiner",
)
@pytest.mark.world(3)
def test_options(world: World) -> None:
    """One rank ends first in a Join that throws; then a disabled one with even batches calls no hook."""

    def body(rank: Rank) -> None:
        for count in (1, 3):
            for first in range(3):
                notes: list[Any] = []
                joinables = [Summing(name, rank, None, notes) for name in "cab"[:count]]
                done: list[int] = []
                words = "exhausted all inputs" if rank.index == first else "at least one rank that exhausted inputs"
                with pytest.raises(RuntimeError, match=words):
                    throwing(joinables, 2 if rank.index == first else 4, done)
                assert done == [0, 1], (count, first)
                assert notes == [], (count, first)
            with Join(joinables, enable=False):  # type: ignore[arg-type]
                for _ in range(2):
                    assert [joinable(1.0 + rank.index) for joinable in joinables] == [6.0] * count
            assert notes == [], count

    def throwing(joinables: list[Summing], batches: int, done: list[int]) -> None:
        with Join(joinables, throw_on_early_termination=True):  # type: ignore[arg-type]
            for number in range(batches):
                for joinable in joinables:
                    joinable(1.0)
                done.append(number)

    world.run(body)
