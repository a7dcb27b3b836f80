"""One side of a duet, in a Python of its own: ``python -m harness.bench.duet.runner``.

It reads requests from its standard input and answers on its standard output, one JSON object on each line.  It holds
the server and the ranks of its environment, and ends with its input.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch

from harness import faults
from harness.bench.counting import on_ranks as counting
from harness.bench.duet import messages, on_ranks
from harness.bench.duet.messages import (
    Answer,
    Begin,
    Count,
    Counted,
    Described,
    Done,
    End,
    Finish,
    Measured,
    Prepare,
    Prepared,
    Ranks,
    Request,
    Round,
    Servers,
    Wrong,
)
from harness.bench.figures import largest_message, usual_largest
from harness.bench.fingerprint import available, fingerprint, memory_of
from harness.bench.measuring.asked import RANKS
from harness.bench.measuring.ready import Timeable
from harness.bench.measuring.steps import eager
from harness.bench.measuring.sweeps import every
from harness.bench.measuring.timing import Effort
from harness.devices import DeviceError, backend_for, inventory
from harness.entry_points import BACKENDS, DEVICES, modules_for
from harness.placement import Need
from harness.profiles.shelf import profile_named
from harness.profiles.vocabulary import FORK
from harness.safe_io.shown import one_line
from harness.worlds.launch import LaunchError
from harness.worlds.pool import Pool
from harness.worlds.postmortem import RanksFailed
from harness.worlds.preloading import PRELOAD_VARIABLE
from harness.worlds.world import World, WorldSpec

_WARM = 0.1
"""Time limit of a warm-up, in seconds."""
_PRELOAD = "torch,torch.distributed,harness.bench.duet.on_ranks"
"""What servers import, so that ranks need not: no more than collectives need, because servers are started often."""
_FOR_STEPS = "harness.bench.measuring.stepping"
"""What they import besides if ranks run training steps."""


@dataclass
class Runner:
    """The state of a side."""

    spec: WorldSpec = field(default_factory=lambda: WorldSpec(2, record=False))
    offers: list[tuple[Timeable, int]] = field(default_factory=list)
    devices: dict[int, tuple[str, ...]] = field(default_factory=dict)
    pool: Pool | None = None
    world: World | None = None
    preload: str = field(default_factory=lambda: os.environ.get(PRELOAD_VARIABLE, _PRELOAD))

    def begin(self, asked: Begin) -> Described:
        """Find out what there is to measure, and with which ranks.  Errors: ValueError, DeviceError."""
        profile = profile_named(asked.profile) if asked.profile else None
        kind = profile.device if profile is not None else "cpu"
        brought = modules_for(DEVICES, kind)
        imports = (*(profile.imports if profile is not None else ()), *brought)
        there = inventory(kind, imports=imports, mask=profile.visible_devices if profile is not None else "")
        backend = (profile.backend if profile is not None else "") or backend_for(kind)
        unknown = [name for name in asked.faults if name not in faults.catalog()]
        if unknown:
            raise ValueError(f"no fault is called {', '.join(unknown)}; `concord faults` lists them")
        self.spec = WorldSpec(
            2,
            backend,
            kind,
            imports=tuple(dict.fromkeys((*imports, *modules_for(BACKENDS, backend)))),
            env=profile.env if profile is not None else (),
            start=(profile.start if profile is not None else "") or FORK,
            first=tuple(("harness.faults:put", name) for name in asked.faults),
            record=False,
        )
        shared = profile.ranks_per_device if profile is not None else 1
        asked_ranks = asked.ranks or (profile.benchmark_world_sizes if profile is not None else ())
        needs = {size: Need(size, shared) for size in sorted({*(asked_ranks or RANKS)})}
        sizes = [size for size, need in needs.items() if there.on_host or need.fits(there)]
        self.devices = {
            size: () if there.on_host else needs[size].deal(there, there.keys[: needs[size].count(there)])
            for size in sizes
        }
        usual = usual_largest(there.on_host)
        largest = asked.largest or (profile.largest_message if profile is not None else None) or usual
        memory = available() if there.on_host else memory_of(kind)

        def room(ranks: int) -> int:
            return largest if memory is None else largest_message(memory, ranks if there.on_host else shared)

        largest = min(largest, room(max(needs))) if there.on_host else largest
        offered: list[tuple[Timeable, int]] = [*every(largest, asked_ranks, asked.more, room)]
        offered += eager(asked_ranks, asked.more)
        self.offers = [(timed, ranks) for timed, ranks in offered if ranks in sizes]
        series = [timed.series(World(self.spec.sized(ranks), _nothing)) for timed, ranks in self.offers]
        commit = str(getattr(torch.version, "git_version", "") or "")
        return Described(fingerprint(kind), commit, os.path.dirname(faults.__file__), tuple(series))

    def servers(self, *, steps: bool = False) -> None:
        """Replace the server, and the ranks with it.  ``steps``: ranks run training steps.  Errors: LaunchError."""
        self.end()
        if self.pool is not None:
            self.pool.close()
        os.environ[PRELOAD_VARIABLE] = ",".join((self.preload, _FOR_STEPS) if steps else (self.preload,))
        self.pool = Pool()
        self.pool.prepare(start=self.spec.start)

    def ranks(self, size: int) -> None:
        """Replace the ranks.  Errors: RanksFailed, LaunchError."""
        self.end()
        if self.pool is None:
            self.servers()
        assert self.pool is not None
        self.world = self.pool.acquire(self.spec.sized(size), self.devices.get(size, ()))

    def end(self) -> None:
        """End the ranks at once."""
        world, self.world = self.world, None
        if world is not None:
            world.kill()

    def prepare(self, number: int) -> Answer:
        """Prepare a series on the ranks."""
        timed, _ = self.offers[number]
        found = [one for one in self._run(on_ranks.prepare, number, timed, Effort(warm=_WARM)) if one is not None]
        return Prepared(max(r.first for r in found), max(r.typical for r in found), min(r.copy for r in found))

    def round(self, asked: Round) -> Answer:
        """Measure a round on the ranks."""
        answers = self._run(on_ranks.iterate, asked.series, asked.count, asked.lead)
        ranks = [one for one in answers if one is not None]
        return Measured(tuple(max(times) for times in zip(*ranks, strict=True)))

    def count(self, asked: Count) -> Answer:
        """Count what a call needs on the ranks."""
        answers = self._run(counting.on_rank, self.offers[asked.series][0], asked.times)
        found = [one for one in answers if one is not None]
        wrong = [f"rank {rank}: {one.problem}" for rank, one in enumerate(found) if one.problem]
        if wrong:
            return Wrong("values", "; ".join(wrong))
        names = [name for name in found[0].counts if all(name in one.counts for one in found)]
        missing = {name: why for one in found for name, why in one.missing.items()}
        return Counted({name: sum(one.counts[name] for one in found) for name in names}, len(found), missing)

    def finish(self, number: int) -> Answer:
        """Check the values of a series again."""
        answers = self._run(on_ranks.finish, number)
        wrong = [f"rank {rank}: {problem}" for rank, problem in enumerate(answers) if problem]
        return Wrong("values", "; ".join(wrong)) if wrong else Done()

    def _run(self, function: Any, *arguments: Any) -> list[Any]:
        if self.world is None:
            raise ValueError("there are no ranks")
        return self.world.run(function, *arguments)

    def answer(self, asked: Request) -> Answer:
        """Do what is asked, and return the answer."""
        try:
            match asked:
                case Begin():
                    return self.begin(asked)
                case Prepare(series=number):
                    return self.prepare(number)
                case Round():
                    return self.round(asked)
                case Count():
                    return self.count(asked)
                case Finish(series=number):
                    return self.finish(number)
                case Servers(steps=steps):
                    self.servers(steps=steps)
                case Ranks(size=size):
                    self.ranks(size)
                case End():
                    self.end()
        except (RanksFailed, LaunchError) as e:
            return Wrong("ranks", one_line(str(e)))
        except (ValueError, DeviceError, IndexError, ImportError, OSError) as e:
            return Wrong("input", one_line(str(e)))
        return Done()

    def close(self) -> None:
        """End everything that was started."""
        self.end()
        if self.pool is not None:
            self.pool.close()


def _nothing() -> Any:
    raise AssertionError("no ranks start for a description")


def main() -> None:
    """Answer requests until the input ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # what libraries print is no answer
    runner = Runner()
    try:
        serve(runner, requests, answers)
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # the controller has gone or was interrupted
    finally:
        runner.close()


def serve(runner: Runner, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer each line of requests with a line."""
    while line := requests.readline(messages.LONGEST):
        try:
            answer: Answer = runner.answer(messages.request(line))
        except messages.Protocol as e:
            answer = Wrong("input", one_line(f"no request: {e}"))
        answers.write(messages.encoded(answer))
        answers.flush()


if __name__ == "__main__":
    main()
