"""Trying: one world lives until something fails in it, and whatever fails is an outcome."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.oracles.collectives import Case
from harness.probe import trials
from harness.probe.found import RIGHT, Ability, Found, Size, Trial, described
from harness.profiles import Platform
from harness.profiles.vocabulary import FEATURES, STACKS
from harness.programs import execute
from harness.programs.check import problems, truth_of
from harness.stacks.collectives import refusals
from harness.worlds.pool import Pool
from harness.worlds.postmortem import RanksFailed
from harness.worlds.rank import Rank
from harness.worlds.world import World, WorldSpec

_MOST_HANGS = 3
"""Of one collective, after which the rest of it is given up."""
_TRAINING = 6
"""Times the seconds of one trial that a training run may take: it may compile."""
_LARGEST_TRIED = 3
"""Ranks of the world in which everything but sizes is tried: more find little more, and take longer."""

Say = Callable[[str, str], None]
"""Told what is tried, and how it ended."""


@dataclass(frozen=True)
class End:
    """How something ended: one of :data:`harness.probe.found.ENDS`."""

    end: str
    detail: str = ""


class Prober:
    """Tries things on ranks of one backend.

    ``spec``: of its worlds, whatever the size, with the seconds for one trial; ``devices``: of ranks, enough for the
    largest size; ``seconds``: for everything, after which the rest is not tried.
    """

    def __init__(
        self,
        spec: WorldSpec,
        devices: Sequence[str],
        *,
        seconds: float,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._devices, self._say, self._clock = spec, tuple(devices), say, clock
        self._deadline = clock() + seconds
        self._pool = Pool()
        self._world: World | None = None

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *exc: object) -> None:
        self._leave()
        self._pool.close()

    # everything

    def probe(self, sizes: Sequence[int], stacks: Sequence[str], platform: Platform) -> Found:
        """Try worlds of the sizes, and of the stacks what there is to try."""
        began = self._clock()
        tried = [self._size(size) for size in sizes]
        good = [size.size for size in tried if size.end == RIGHT]
        found: list[Trial] = []
        abilities: list[Ability] = []
        if good:
            ranks = max((size for size in good if size <= _LARGEST_TRIED), default=min(good))
            if "collectives" in stacks:
                found = list(self._collectives(ranks))
                abilities += self._features(ranks)
            abilities += self._stacks([s for s in STACKS if s in stacks], ranks)
        return Found(
            self._spec.backend,
            self._spec.device,
            self._spec.imports,
            described(platform),
            tuple(tried),
            tuple(found),
            tuple(abilities),
            round(self._clock() - began, 1),
        )

    def _size(self, size: int) -> Size:
        end = self._attempt(size, trials.smoke)
        self._say(f"worlds of {size}", end.end)
        return Size(size, end.end, end.detail)

    def _collectives(self, ranks: int) -> Iterator[Trial]:
        hangs: dict[str, int] = {}
        for cases in trials.portions():
            collective = cases[0].collective
            for case, end in zip(cases, self._portion(ranks, cases, hangs), strict=True):
                trial = Trial(collective, trials.dtype_of(case), trials.op_of(case), end.end, end.detail)
                self._say(trial.name, end.end)
                yield trial

    def _portion(self, ranks: int, cases: Sequence[Case], hangs: dict[str, int]) -> list[End]:
        """How each of some cases ended: all of them in one run; one by one, where that run has a dead or hung rank, or
        ranks that disagree, since who is to blame is not known then."""
        together = self._cases(ranks, cases, hangs) if len(cases) > 1 else []
        if together and all(end.end in (RIGHT, "refused", "not-tried") for end in together):
            return together
        return [self._cases(ranks, [case], hangs)[0] for case in cases]

    def _cases(self, ranks: int, cases: Sequence[Case], hangs: dict[str, int]) -> list[End]:
        collective = cases[0].collective
        if hangs.get(collective, 0) >= _MOST_HANGS:
            return [End("not-tried", f"after {_MOST_HANGS} hangs of {collective}")] * len(cases)
        found, failure = self._run(ranks, refusals, list(cases))
        if failure is not None:
            if failure.end == "hung" and len(cases) == 1:
                hangs[collective] = hangs.get(collective, 0) + 1
            return [failure] * len(cases)
        ends = [_agreed([rank[i] for rank in found]) for i in range(len(cases))]
        if any(end.end == "wrong" for end in ends):
            self._leave()  # ranks may be out of step
        return ends

    def _features(self, ranks: int) -> Iterator[Ability]:
        for name, work in trials.FEATURES.items():
            if FEATURES["collectives"][name].of_accelerators and self._spec.device == "cpu":
                continue
            end = self._attempt(ranks, work)
            if name in ("restarts", "timeouts"):
                self._leave()  # what is left of them is no place to go on in
            self._say(f"{name} of collectives", end.end)
            yield Ability("collectives", name, end.end, end.detail)

    def _stacks(self, stacks: Sequence[str], ranks: int) -> Iterator[Ability]:
        for (stack, feature), program in trials.programs(ranks).items():
            if stack in stacks:
                yield self._ability(stack, feature, self._program(ranks, program))
        for (stack, feature), work in trials.WORK.items():
            if stack in stacks:
                yield self._ability(stack, feature, self._attempt(ranks, work))

    def _ability(self, stack: str, feature: str, end: End) -> Ability:
        found = Ability(stack, feature, end.end, end.detail)
        self._say(found.name, end.end)
        return found

    def _program(self, ranks: int, program: Any) -> End:
        found, failure = self._run(ranks, execute.on_rank, program, times=_TRAINING)
        if failure is not None:
            return failure
        wrong = problems(program, truth_of(program), found)
        return End("wrong", _line(str(wrong[0]))) if wrong else End(RIGHT)

    # one run

    def _attempt(self, ranks: int, work: trials.Work) -> End:
        """How something ended that returns what is wrong on each rank."""
        found, failure = self._run(ranks, attempted, work, times=_TRAINING if work in trials.WORK.values() else 1)
        end = failure or _agreed(found)
        if end.end != RIGHT:
            self._leave()
        return end

    def _run(
        self, ranks: int, function: Callable[..., Any], *args: Any, times: int = 1
    ) -> tuple[list[Any], End | None]:
        """What ranks returned, or how they failed.  ``times``: of how many trials it has the time."""
        if self._clock() > self._deadline:
            return [], End("not-tried", "the time was up")
        try:
            return self._in(ranks).run(function, *args, timeout=times * self._spec.timeout), None
        except RanksFailed as e:
            self._leave()
            end = "crashed" if e.verdict == "failed" else e.verdict
            return [], End(end, _line(e.headline))

    def _in(self, ranks: int) -> World:
        """The world of some ranks that lives now, or a fresh one."""
        if self._world is None or self._world.size != ranks or not self._world.live:
            self._leave()
            spec = dataclasses.replace(self._spec, size=ranks)
            self._world = self._pool.acquire(spec, self._devices[:ranks])
        return self._world

    def _leave(self) -> None:
        if self._world is not None:
            self._world.kill()
            self._world = None


def attempted(rank: Rank, work: trials.Work) -> tuple[str, str]:
    """Do something on this rank; how it ended, as :func:`harness.stacks.collectives.refusals` says it."""
    try:
        problem = work(rank)
    except Exception as e:
        return "refused", f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    return ("wrong" if problem else "right", problem)


def _agreed(ranks: Sequence[tuple[str, str]]) -> End:
    """What the ranks together make of how each ended."""
    kinds = {kind for kind, _ in ranks}
    detail = next((what for kind, what in ranks if kind != "right" and what), "")
    if len(kinds) > 1 and kinds != {"right", "wrong"}:
        which = ", ".join(f"rank {i}: {kind}" for i, (kind, _) in enumerate(ranks))
        return End("wrong", _line(f"ranks differ: {which}: {detail}"))
    return End("wrong" if "wrong" in kinds else kinds.pop(), _line(detail))


def _line(text: str) -> str:
    return text.strip().split("\n")[0][:300]
