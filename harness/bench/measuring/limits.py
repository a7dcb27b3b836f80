"""The physical limit of collectives: how fast all ranks of a world copy memory at the same time.

A sample is the mean of a round and not one iteration, because ranks may be more than cores: then a rank copies fast
while it has a core, and not at all in between.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import torch

from harness.bench.measuring.collectives import hosts_of, merged
from harness.bench.measuring.timing import Call, Effort, Timing, measure, visits
from harness.bench.records import LINK, Measurement, Series, pairs
from harness.bench.scaling import COPY
from harness.worlds.rank import Rank
from harness.worlds.world import World

_MOST = 50_000
"""Iterations of a round at most: small copies are short, and a round must be longer than a core's time slice."""
SIZES = (1 << 16, 1 << 20, 1 << 24)
"""Bytes of a copy: in the caches, at their edge, and in memory."""


def on_rank(rank: Rank, effort: Effort) -> tuple[dict[int, Timing], str]:
    """Time copies on this rank while the others copy, too.  Returns what is wrong with the copies besides."""
    sources = {size: torch.arange(size // 8, dtype=torch.int64, device=rank.device) for size in SIZES}
    targets = {size: torch.empty_like(source) for size, source in sources.items()}
    calls: dict[str, Call] = {str(size): functools.partial(_copy, targets[size], sources[size]) for size in SIZES}
    timings = measure(rank, calls, list(range(rank.size)), replace(effort, most=max(effort.most, _MOST)))
    for timing in timings.values():
        timing.rounds = [[sum(times) / len(times)] for times in timing.rounds]
    wrong = [size for size in SIZES if not torch.equal(sources[size], targets[size])]
    return {int(size): timing for size, timing in timings.items()}, f"copies of {wrong} bytes differ" if wrong else ""


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def timed_on(world: World, effort: Effort, link: float | None = None) -> list[Measurement]:
    """Time copies on the ranks of a world.  ``link``: GB/s of a rank's link, if the profile says it.

    Errors: AssertionError if a copy is wrong; :class:`~harness.RanksFailed` if ranks fail.
    """
    __tracebackhide__ = True
    place = {"backend": world.spec.backend, "device": world.spec.device, "variant": pairs({"hosts": hosts_of(world)})}
    started = time.time()
    found = {
        size: Measurement(
            series=Series(operation=COPY, bytes=size, world=world.size, **place),  # type: ignore[arg-type]
            samples=[],
            started=started,
        )
        for size in SIZES
    }
    for answers in visits(world, effort, lambda: world.run(on_rank, effort)):
        wrong = [f"rank {i}: {problem}" for i, (_, problem) in enumerate(answers) if problem]
        if wrong:
            raise AssertionError("\n".join(["a copy in memory is wrong", *wrong]))
        for size, measurement in found.items():
            measurement.samples += merged([timings[size].rounds for timings, _ in answers])
            measurement.first = measurement.first or max(timings[size].first for timings, _ in answers)
            measurement.clock = answers[0][0][size].clock
    constants = [Series(operation=LINK, metric=LINK, world=world.size, **place)] if link is not None else []  # type: ignore[arg-type]
    return [
        *found.values(),
        *(Measurement(series=one, samples=[[[link or 0.0]]], started=started) for one in constants),
    ]
