"""Benchmarks of cold starts: the first collective of fresh ranks, a new group, and the default group made again.

Each ends with the first all_reduce of the group, because that is when backends open their connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from harness.bench.measuring.collectives import hosts_of, merged
from harness.bench.measuring.timing import Agreement, Effort
from harness.bench.records import Measurement, Series, pairs
from harness.worlds.rank import Rank
from harness.worlds.world import World

FIRST, GROUP, AGAIN = "start.first", "start.group", "start.again"
"""The first collective of fresh ranks; ``new_group`` and its first collective; ``destroy_process_group``,
``init_process_group`` on the same store, and the first collective."""
STARTS = (FIRST, GROUP, AGAIN)
_ELEMENTS = 256


@dataclass
class Found:
    """The seconds of each kind of start on one rank, and what was wrong with the values."""

    seconds: dict[str, list[float]]
    problem: str


def on_rank(rank: Rank, repeats: int) -> Found:
    """Time starts on a fresh rank."""
    agreement = Agreement(rank, list(range(rank.size)))
    seconds: dict[str, list[float]] = {name: [] for name in STARTS}
    problems: list[str] = []
    right = rank.size * (rank.size + 1) / 2

    def timed(name: str, make: Callable[[], Any]) -> Any:
        tensor = torch.full((_ELEMENTS,), float(rank.index + 1), device=rank.device)
        if rank.device.type != "cpu":
            torch.accelerator.synchronize(rank.device)
        agreement.most(0.0)
        began = time.perf_counter()
        group = make()
        dist.all_reduce(tensor, group=group)
        if rank.device.type != "cpu":
            torch.accelerator.synchronize(rank.device)
        seconds[name].append(time.perf_counter() - began)
        if not bool((tensor == right).all()):
            problems.append(f"{name}: a sum of {tensor.flatten()[0].item():g} and not {right:g}")
        return group

    timed(FIRST, lambda: None)
    for number in range(repeats):
        dist.destroy_process_group(timed(GROUP, dist.new_group))

        def again(number: int = number) -> None:
            dist.destroy_process_group()
            store = PrefixStore(f"concord/again/{number}", rank.store)
            dist.init_process_group(rank.backend, store=store, rank=rank.index, world_size=rank.size)

        timed(AGAIN, again)
    return Found(seconds, "; ".join(problems))


def timed_on(world: World, effort: Effort) -> list[Measurement]:
    """Time starts in a world, on as many sets of fresh ranks as the effort has visits.

    Errors: AssertionError if a first collective gives wrong values; :class:`~harness.RanksFailed` if ranks fail.
    """
    __tracebackhide__ = True
    found = {
        name: Measurement(
            series=Series(
                operation=name,
                world=world.size,
                backend=world.spec.backend,
                device=world.spec.device,
                variant=pairs({"hosts": hosts_of(world)}),
            ),
            samples=[],
            started=time.time(),
        )
        for name in STARTS
    }
    for visit in range(effort.visits):
        if visit or world.runs:
            world.kill()
        answers: list[Found] = world.run(on_rank, effort.rounds)
        wrong = [f"rank {i}: {answer.problem}" for i, answer in enumerate(answers) if answer.problem]
        if wrong:
            raise AssertionError("the first collective of a group gives wrong values\n" + "\n".join(wrong))
        for name, measurement in found.items():
            measurement.samples += merged([[answer.seconds[name]] for answer in answers])
    return list(found.values())
