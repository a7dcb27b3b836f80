"""The ``perf`` fixture: figures that ranks measured, shown by pytest-benchmark and kept as a night.

If pytest-benchmark is off, each benchmark runs once, for its values. If it is on, it gets the ranks' own samples,
through a clock that only they move.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.plugin.folder import LOST, folder_of, lose
from harness.plugin.profiles import Profiles
from harness.redaction import recorded, redacted_arguments
from harness.safe_io.writing import append_or_nothing, open_new

if TYPE_CHECKING:
    from harness.bench.measuring.timing import Effort
    from harness.bench.records import Measurement
    from harness.worlds.world import World

ALL, DEVICE = "all", "device"
"""Words for as many ranks as there are devices, and as large a message as a device holds."""


def add_options(group: Any) -> None:
    """Register the options."""
    group.addoption(
        "--perf-rounds",
        type=int,
        metavar="N",
        help="Number of consecutive rounds in which a benchmark is measured on each set of ranks. Default: 3.",
    )
    group.addoption(
        "--perf-visits",
        type=int,
        metavar="N",
        help="Number of sets of fresh ranks on which a benchmark is measured, where ranks are cheap. Default: 4.",
    )
    group.addoption(
        "--perf-seconds",
        type=float,
        metavar="S",
        help="Approximate seconds for a round. Default: 0.02.",
    )
    group.addoption(
        "--perf-largest",
        metavar="SIZE",
        help="Largest message, such as 64MiB, or device: as much as the memory allows. Default: the profile's "
        "largest_message, or 16 MiB on the host and 1 GiB on accelerators. On the host, never more than its memory "
        "allows.",
    )

    group.addoption(
        "--perf-ranks",
        metavar="N,N",
        help="Numbers of ranks on which benchmarks are measured, such as 2,4,8, or all: those that the profile claims, "
        "up to as many as there are devices. Default: the profile's benchmark_world_sizes, or 2 and 4.",
    )
    group.addoption(
        "--perf-more",
        metavar="WHAT",
        help="Measure more: dtypes, models, overlap, groups, levels, several of them with commas, or all.",
    )


def add_ini(parser: pytest.Parser) -> None:
    """Register the ini settings."""
    parser.addini(
        "concord_benchmarks",
        "asked: measure only with --benchmark-only or --benchmark-enable. Default: as pytest-benchmark decides.",
        default="",
    )


def asked_for(config: pytest.Config) -> bool:
    """Return whether benchmarks are measured in this run. pytest-benchmark measures nothing under xdist."""
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        return False
    if not config.pluginmanager.hasplugin("benchmark"):
        return False
    return bool(config.getoption("benchmark_enable") or not config.getoption("benchmark_disable"))


def check(config: pytest.Config) -> None:
    """Reject invalid options and settings. Errors: UsageError."""
    option, how = config.getoption, config.getini("concord_benchmarks")
    if how not in ("", "asked"):
        raise pytest.UsageError(f"concord_benchmarks = {how}: asked, or nothing")
    seconds, largest = option("perf_seconds"), option("perf_largest")
    for name in ("rounds", "visits"):
        count = option(f"perf_{name}")
        if count is not None and count < 1:
            raise pytest.UsageError(f"--perf-{name} {count}: at least 1")
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise pytest.UsageError(f"--perf-seconds {seconds:g}: a number of seconds, 0 or more")
    checks: list[tuple[str, Callable[[], object]]] = [
        ("largest", lambda: largest in (None, DEVICE) or size_in_bytes(largest)),
        ("ranks", lambda: _ranks_said(config)),
        ("more", lambda: more_of(config)),
    ]
    for name, read in checks:
        try:
            read()
        except ValueError as e:
            raise pytest.UsageError(f"--perf-{name}: {e}") from None


def settle(config: pytest.Config) -> None:
    """Turn benchmarks off if nobody asked for them. pytest-benchmark reads its options after all other plug-ins."""
    asked = any(config.getoption(name, True) for name in ("benchmark_enable", "benchmark_only"))
    if config.getini("concord_benchmarks") == "asked" and not asked:
        config.option.benchmark_disable = True


def size_in_bytes(text: str) -> int:
    """Return the bytes of a size such as ``8``, ``64KiB`` or ``1.5 MiB``. Errors: ValueError."""
    import re

    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is no size: write for example 64KiB or 1MiB")
    return int(float(match[1]) * 1024 ** (" KMGT".index(match[2][0].upper()) if match[2] else 0))


class RanksClock:
    """A clock of the time that ranks measured. It stands still until it is told how long something took."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Perf:
    """How much a benchmark measures, and where its figures go."""

    def __init__(self, nights: Nights, benchmark: Any, clock: RanksClock) -> None:
        self._nights = nights
        self._benchmark = benchmark
        self._clock = clock

    @property
    def enabled(self) -> bool:
        """Whether time is measured. If not, benchmarks run once for their values."""
        return bool(self._benchmark.enabled)

    @property
    def effort(self) -> Effort:
        """How much to measure."""
        from harness.bench.measuring.timing import ONCE

        return self._nights.effort if self.enabled else ONCE

    def keep(self, *measurements: Measurement) -> None:
        """Keep measurements; pytest-benchmark shows the first.

        Fails the test if a figure is an artifact.
        """
        __tracebackhide__ = True
        from harness.bench.figures import algbw, busbw
        from harness.bench.records import percentile

        first = measurements[0]
        samples = iter(first.iterations())

        def one() -> None:
            self._clock.now += next(samples)

        series = first.series
        self._benchmark.group = " ".join(filter(None, (series.operation, series.op, series.dtype)))
        self._benchmark.pedantic(one, rounds=len(first.iterations()) if self.enabled else 1)
        if not self.enabled:
            return
        self._benchmark.extra_info.update(
            {
                "series": series.name,
                "bytes": series.bytes,
                "ranks": series.world,
                "first": first.first,
                **{f"p{p}": percentile(first.iterations(), p) for p in (50, 95, 99)},
                **{m.series.metric: m.value for m in measurements},
            }
        )
        if series.bytes:
            self._benchmark.extra_info.update(
                algbw=algbw(series.bytes, first.value),
                busbw=busbw(series.operation, series.bytes, first.value, series.world),
            )
        for measurement in measurements:
            self._nights.add(measurement)
        refused = [f"{m.series.name}: {m.refused}" for m in measurements if m.refused]
        if refused:
            pytest.fail("an artefact, not a figure: " + "\n".join(refused), pytrace=False)


class Nights:
    """The night of this run. It is written as figures come, so that a crash loses none."""

    def __init__(self, config: pytest.Config, profiles: Profiles) -> None:
        self._config = config
        self._profiles = profiles
        self.clock = RanksClock()
        self._fd: int | None = None
        self._lost = False
        self.path: Path | None = None
        self.measurements: list[Measurement] = []

    @property
    def effort(self) -> Effort:
        """The effort that the options request."""
        from harness.bench.measuring.timing import Effort

        option, usual = self._config.getoption, Effort()
        return Effort(
            rounds=option("perf_rounds") or usual.rounds,
            visits=option("perf_visits") or usual.visits,
            seconds=option("perf_seconds") if option("perf_seconds") is not None else usual.seconds,
        )

    def add(self, measurement: Measurement) -> None:
        """Record a measurement."""
        from harness.bench.history import nights

        self.measurements.append(measurement)
        if self._fd is None and self.path is None:
            self._keep(lambda: nights.first_line(self._night(measurement.series.device)))
        self._keep(lambda: nights.line(measurement))

    def _keep(self, line: Callable[[], bytes]) -> None:
        """Append a line to the file. If that fails, the run continues without the file."""
        if self._lost:
            return
        try:
            if self._fd is None:
                folder = folder_of(self._config)
                if folder is None:
                    return
                self.path = folder / "perf.jsonl"
                self._fd = open_new(self.path)
            append_or_nothing(self._fd, line())
        except OSError as e:
            self._lost = True
            lose(self._config, str(self.path or "perf.jsonl"), e)

    def _night(self, kind: str) -> Any:
        import torch

        from harness.bench.fingerprint import fingerprint
        from harness.bench.records import Night

        return Night(
            id=uuid.uuid4().hex,
            started=time.time(),
            fingerprint=fingerprint(kind),
            commit=recorded("CONCORD_COMMIT", os.environ.get("CONCORD_COMMIT", ""))
            or str(torch.version.git_version or ""),
            profile=self._profiles.described()[0],
            profile_hash=self._profiles.described()[1],
            subject=self._config.getoption("subject"),
            arguments=redacted_arguments([str(a) for a in self._config.invocation_params.args]),
        )

    # hooks

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Have pytest-benchmark tell time by the ranks' clock in tests that use ``perf``."""
        for item in items:
            if "perf" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.benchmark(timer=self.clock))

    @pytest.hookimpl(tryfirst=True)  # before the results record how the session ended: lost files make it fail
    def pytest_sessionfinish(self) -> None:
        if self._fd is not None:
            from harness.bench.history import nights

            self._keep(lambda: nights.last_line(time.time()))
            os.close(self._fd)
            self._fd = None
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["concord_lost"] = self._config.stash.get(LOST, [])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.measurements:
            from harness.bench.terminal import shown

            terminalreporter.section("figures", sep="-")
            width = terminalreporter._tw.fullwidth
            for text in shown(self.measurements, width, color=terminalreporter.hasmarkup):
                terminalreporter.write_line(text)
            if self.path is not None and not self._lost:
                terminalreporter.write_line(f"figures: {os.path.relpath(self.path, self._config.rootpath)}")


@pytest.fixture(name="perf")
def perf_of(request: pytest.FixtureRequest, benchmark: Any) -> Iterator[Perf]:
    """How much to measure in a benchmark on ranks (``perf.effort``), and where results go (``perf.keep``)."""
    nights = request.config.pluginmanager.get_plugin("concord-nights")
    assert isinstance(nights, Nights)
    yield Perf(nights, benchmark, nights.clock)


def _ranks_said(config: pytest.Config) -> tuple[int, ...]:
    """Return the numbers of ranks in ``--perf-ranks``; empty for none and for ``all``. Errors: ValueError."""
    words = config.getoption("perf_ranks")
    if words is None or words.strip() == ALL:
        return ()
    from harness.bench.measuring.asked import ranks_asked

    return ranks_asked(words)


def ranks_of(config: pytest.Config) -> tuple[int, ...]:
    """Return the numbers of ranks on which to measure, ascending; empty for the usual ones."""
    profile = _profiles(config).chosen()
    words = config.getoption("perf_ranks")
    if words is None:
        return tuple(sorted(profile.benchmark_world_sizes)) if profile is not None else ()
    if words.strip() != ALL:
        return _ranks_said(config)
    claimed = profile.world_sizes if profile is not None else ()
    worlds: Any = config.pluginmanager.get_plugin("concord-worlds")
    there = worlds.specs.inventory(profile.device if profile is not None else None)
    room = len(there.devices) * (1 if there.on_host or profile is None else profile.ranks_per_device)
    return tuple(size for size in claimed or range(1, room + 1) if there.on_host or size <= room)


def more_of(config: pytest.Config) -> tuple[str, ...]:
    """Return what else is to be measured (:data:`harness.bench.measuring.asked.MORE`). Errors: ValueError."""
    words = config.getoption("perf_more")
    if words is None:
        return ()
    from harness.bench.measuring.asked import asked_of

    return asked_of(words)


def _profiles(config: pytest.Config) -> Profiles:
    profiles = config.pluginmanager.get_plugin("concord-profiles")
    assert isinstance(profiles, Profiles)
    return profiles


def largest_of(config: pytest.Config, ranks: int) -> int:
    """Return the largest message of a sweep on so many ranks, in bytes.

    Errors: UsageError if it is as much as the device holds, and torch does not say how much that is.
    """
    from harness.bench.figures import usual_largest

    asked = config.getoption("perf_largest")
    profile = _profiles(config).chosen()
    on_host = profile is None or profile.device == "cpu"
    limit = (profile.largest_message if profile is not None else None) or usual_largest(on_host)
    if asked == DEVICE:
        return _room(config, ranks)
    if asked:
        limit = size_in_bytes(asked)
    return min(limit, _room(config, ranks)) if on_host else limit


def link_of(config: pytest.Config) -> float | None:
    """Return the GB/s of a rank's link as the profile says it; None if it does not."""
    profile = _profiles(config).chosen()
    return profile.link_bandwidth if profile is not None else None


def room_for(config: pytest.Config, world: World) -> int:
    """Return the bytes of the largest message for which the ranks of a world have memory."""
    return _room(config, world.size)


def _room(config: pytest.Config, ranks: int) -> int:
    from harness.bench.figures import largest_message
    from harness.bench.fingerprint import available, memory_of

    profile = _profiles(config).chosen()
    if profile is None or profile.device == "cpu":
        return largest_message(available(), ranks)
    memory = memory_of(profile.device)
    if memory is None:
        raise pytest.UsageError(f"torch does not say how much memory a {profile.device} device has: give a size")
    return largest_message(memory, profile.ranks_per_device)
