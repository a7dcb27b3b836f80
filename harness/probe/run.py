"""The run of a probe: one world is used until something fails in it, and every failure is an outcome."""

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
"""Hangs of one collective after which the rest of it is given up."""
_TRAINING = 6
"""The time limit of a training run, in multiples of one trial's, because it may compile."""
_LARGEST_TRIED = 3
"""Ranks of the world in which everything but sizes is tried: more ranks find little more, and take longer."""

Say = Callable[[str, str], None]
"""Called with what was tried, and how it ended."""


@dataclass(frozen=True)
class End:
    """The end of a trial: one of :data:`harness.probe.found.ENDS`, and what was wrong."""

    end: str
    detail: str = ""


class Prober:
    """Tries things on ranks of one backend.

    ``spec``: for worlds of any size; its timeout is for one trial; ``devices``: of the ranks, enough for the largest
    size; ``seconds``: the time for everything, after which the rest is not tried; ``say``: reports progress.
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
        """Try worlds of these sizes, and everything that can be tried of these stacks."""
        began = self._clock()
        tried = [self._size(size) for size in sizes]
        good = [size.size for size in tried if size.end == RIGHT]
        outcomes: list[Trial] = []
        abilities: list[Ability] = []
        if good:
            ranks = max((size for size in good if size <= _LARGEST_TRIED), default=min(good))
            if "collectives" in stacks:
                outcomes = list(self._collectives(ranks))
                abilities += self._features(ranks)
            abilities += self._stacks([s for s in STACKS if s in stacks], ranks)
        return Found(
            self._spec.backend,
            self._spec.device,
            self._spec.imports,
            described(platform),
            tuple(tried),
            tuple(outcomes),
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
        """Run some cases, all in one run, and return how each ended.

        If that run has a dead or hung rank, wrong values, or ranks that disagree, it does not show which case is to
        blame, and the cases are run one by one.
        """
        together = self._cases(ranks, cases, hangs) if len(cases) > 1 else []
        if together and all(end.end in (RIGHT, "refused", "not-tried") for end in together):
            return together
        return [self._cases(ranks, [case], hangs)[0] for case in cases]

    def _cases(self, ranks: int, cases: Sequence[Case], hangs: dict[str, int]) -> list[End]:
        collective = cases[0].collective
        if hangs.get(collective, 0) >= _MOST_HANGS:
            return [End("not-tried", f"after {_MOST_HANGS} hangs of {collective}")] * len(cases)
        results, failure = self._run(ranks, refusals, list(cases))
        if failure is not None:
            if failure.end == "hung" and len(cases) == 1:
                hangs[collective] = hangs.get(collective, 0) + 1
            return [failure] * len(cases)
        ends = [_agreed([rank[i] for rank in results]) for i in range(len(cases))]
        if any(end.end == "wrong" for end in ends):
            self._leave()  # ranks may be out of step
        return ends

    def _features(self, ranks: int) -> Iterator[Ability]:
        for name, work in trials.FEATURES.items():
            if FEATURES["collectives"][name].of_accelerators and self._spec.device == "cpu":
                continue
            end = self._attempt(ranks, work)
            if name in ("restarts", "timeouts"):
                self._leave()  # ranks can't be used after them
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
        ability = Ability(stack, feature, end.end, end.detail)
        self._say(ability.name, end.end)
        return ability

    def _program(self, ranks: int, program: Any) -> End:
        results, failure = self._run(ranks, execute.on_rank, program, times=_TRAINING)
        if failure is not None:
            return failure
        wrong = problems(program, truth_of(program), results)
        return End("wrong", _line(str(wrong[0]))) if wrong else End(RIGHT)

    # one run

    def _attempt(self, ranks: int, work: trials.Work) -> End:
        """Try something that returns what is wrong on each rank; returns how it ended."""
        results, failure = self._run(ranks, attempted, work, times=_TRAINING if work in trials.WORK.values() else 1)
        end = failure or _agreed(results)
        if end.end != RIGHT:
            self._leave()
        return end

    def _run(
        self, ranks: int, function: Callable[..., Any], *args: Any, times: int = 1
    ) -> tuple[list[Any], End | None]:
        """Run a function on ranks; returns their results, or how they failed.

        ``times``: its time limit, in multiples of one trial's.
        """
        if self._clock() > self._deadline:
            return [], End("not-tried", "the time was up")
        try:
            return self._in(ranks).run(function, *args, timeout=times * self._spec.timeout), None
        except RanksFailed as e:
            self._leave()
            end = "crashed" if e.verdict == "failed" else e.verdict
            return [], End(end, _line(e.headline))

    def _in(self, ranks: int) -> World:
        """Return the current world if it is live and has so many ranks, or a fresh one."""
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
    """Do some work on this rank; returns how it ended, in the words of :func:`harness.stacks.collectives.refusals`."""
    try:
        problem = work(rank)
    except Exception as e:
        return "refused", f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    return ("wrong" if problem else "right", problem)


def _agreed(ranks: Sequence[tuple[str, str]]) -> End:
    """Combine how it ended on each rank into one end."""
    kinds = {kind for kind, _ in ranks}
    detail = next((what for kind, what in ranks if kind != "right" and what), "")
    if len(kinds) > 1 and kinds != {"right", "wrong"}:
        which = ", ".join(f"rank {i}: {kind}" for i, (kind, _) in enumerate(ranks))
        return End("wrong", _line(f"ranks differ: {which}: {detail}"))
    return End("wrong" if "wrong" in kinds else kinds.pop(), _line(detail))


def _line(text: str) -> str:
    return text.strip().split("\n")[0][:300]
