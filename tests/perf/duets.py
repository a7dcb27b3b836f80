"""Duets of sides that are made up: times drawn from a model of a noisy machine, on a clock that only they move."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from harness.bench.duet import messages
from harness.bench.duet.journal import Journal
from harness.bench.duet.messages import Begin, Described, Prepared, Ranks, Servers
from harness.bench.duet.records import About, Begun
from harness.bench.duet.run import Duet
from harness.bench.duet.sides import SideFailed
from harness.bench.duet.state import replayed
from harness.bench.measuring.steps import STACKS, Step
from harness.bench.records import Fingerprint, Series
from harness.worlds.world import World, WorldSpec

SIZES = (8, 512, 8 << 10, 128 << 10, 1 << 20, 2 << 20)
OFFERS = tuple(
    Series(operation="all_reduce", op="sum", dtype="float32", bytes=size, world=2, backend="gloo", device="cpu")
    for size in SIZES
)
STEPS = tuple(Step(stack).series(World(WorldSpec(2), lambda: None)) for stack in STACKS)  # type: ignore[arg-type, return-value]
ABOUT = About(label="/env", python="/env/bin/python", harness="/concord/harness")


class Machine:
    """A noisy machine: everything takes longer for a while, and a round is disturbed now and then."""

    def __init__(self, seed: int = 0, *, server: float = 0.03, ranks: float = 0.1, noise: float = 0.05) -> None:
        self.random = np.random.default_rng(seed)
        self.server, self.ranks, self.noise = server, ranks, noise
        self.now = 1.7e9
        self.started = 0
        self._level, self._changes = 0.0, 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def level(self) -> float:
        """What all that runs now has in common: bursts of some seconds, and a drift of 20 % an hour."""
        if self.now >= self._changes:
            self._level = float(self.random.exponential(0.5)) if self.random.random() < 0.2 else 0.0
            self._changes = self.now + float(self.random.exponential(3.0))
        return self._level + 0.2 * (self.now - 1.7e9) / 3600


class FakeSide:
    """A side on a machine.  ``steps``: by size in bytes, how many times as long B takes as it should."""

    def __init__(self, name: str, machine: Machine, steps: Mapping[int, float] | None = None) -> None:
        self.name = name
        self.machine = machine
        self.steps = dict(steps or {})
        self.begun: Begin | None = None
        self.asked: list[messages.Request] = []
        self.offers: tuple[Series, ...] = OFFERS
        self.fails: dict[type, SideFailed | type[BaseException]] = {}
        self.setting = type("Setting", (), {"python": Path("/env/bin/python")})()
        self._server = self._ranks = 0.0
        self.server_seconds = 1.5
        self.needs: Mapping[int, Mapping[str, float]] = {}
        """By size in bytes, what a collective needs besides one operator."""
        self.firsts = 0
        """How often its ranks were the first of a pair to start."""

    def send(self, request: messages.Request) -> None:
        self.asked.append(request)
        if isinstance(request, Begin):
            self.begun = request
        machine = self.machine
        if isinstance(request, Servers):
            self._server = machine.server * float(machine.random.standard_normal())
            machine.spend(self.server_seconds * (2 if request.steps else 1))
        if isinstance(request, Ranks):
            machine.started += 1
            self.firsts += machine.started % 2
            self._ranks = machine.ranks * float(machine.random.standard_normal())
            machine.spend(0.1)
        found = self.fails.get(type(request))
        if found is not None:
            raise found

    def receive(self) -> messages.Answer:
        return messages.Done()

    def described(self) -> Described:
        return Described(Fingerprint(software=(("torch", "2.13.0"),)), "", "/concord/harness", self.offers)

    def do(self, request: messages.Request) -> None:
        self.send(request)

    def prepare(self, series: int) -> Prepared:
        self.send(messages.Prepare(series))
        self.machine.spend(0.02)
        return Prepared(first=1e-3, typical=1e-4, copy=1e-9)

    def round(self, series: int, count: int, lead: int) -> tuple[float, ...]:
        self.send(messages.Round(series, count, lead))
        machine = self.machine
        own = self._server + self._ranks + machine.noise * float(machine.random.standard_normal())
        burst = np.exp(np.minimum(machine.level() * machine.random.exponential(1.0, count), 3.0))
        times = 1e-4 * np.exp(own) * burst * self.steps.get(self.offers[series].bytes, 1.0)
        machine.spend(float(times.sum()))
        return tuple(times.tolist())

    def counted(self) -> messages.Counted:
        request = self.asked[-1]
        assert isinstance(request, messages.Count)
        return messages.Counted({"operators": 1.0, **self.needs.get(self.offers[request.series].bytes, {})}, 2)

    def close(self) -> None:
        pass


def begun(series: tuple[Series, ...] = OFFERS, **fields: object) -> Begun:
    given = {"time": 1.7e9, "a": ABOUT, "b": ABOUT, "series": series, "rate": 0.01, "margin": 0.05, **fields}
    return Begun(**given)  # type: ignore[arg-type]


def duet(
    folder: Path,
    machine: Machine,
    steps: Mapping[int, float] | None = None,
    offers: tuple[Series, ...] = OFFERS,
    **fields: object,
) -> Duet:
    """A duet of two such sides, of which B may be slower, with a journal in a folder."""
    first = begun(**fields)  # type: ignore[arg-type]
    journal = Journal(folder / "duet.jsonl")
    journal.begin(first)
    sides = {"A": FakeSide("A", machine), "B": FakeSide("B", machine, steps)}
    for side in sides.values():
        side.offers = offers
    now = {"clock": lambda: machine.now, "now": lambda: machine.now}
    return Duet(sides, journal, replayed([first]), dict.fromkeys("AB", offers), **now)  # type: ignore[arg-type]
