"""Side-by-side benchmarks: each takes our figure and another's in turns, and the summary shows their ratio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest


@dataclass(frozen=True)
class Comparison:
    """Two things that were measured in turns, in seconds."""

    what: str
    ours: float
    theirs: float
    against: str
    wanted: str

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


_found = pytest.StashKey[list[Comparison]]()
_said = pytest.StashKey[list[tuple[str, list[str]]]]()
_fidelity = pytest.StashKey[list[tuple[Any, ...]]]()
_duets = pytest.StashKey[list[tuple[float, dict[str, bool], str, float]]]()
_shares = pytest.StashKey[list[dict[str, Any]]]()
_figures = pytest.StashKey[list[tuple[str, str]]]()
_reproducers = pytest.StashKey[list[dict[str, Any]]]()


@pytest.fixture(scope="session")
def asked_for(request: pytest.FixtureRequest) -> None:
    """Skips what measures, before anything is set up for it, unless somebody asks for figures."""
    if not request.config.getoption("benchmark_enable") and not request.config.getoption("benchmark_only"):
        pytest.skip("a benchmark: runs with --benchmark-enable")


@pytest.fixture
def shares(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Rows of the table of what a program costs."""
    return request.config.stash.setdefault(_shares, [])


@pytest.fixture
def compare(request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., Comparison]:
    """Measure our ``run`` with pytest-benchmark, and ``other`` (returns seconds) before each of its rounds."""

    def measure(
        what: str,
        run: Callable[[], Any],
        other: Callable[[], float],
        *,
        against: str,
        wanted: str,
        rounds: int,
        after: Callable[[], None] = lambda: None,
        ours: Callable[[], float] | None = None,
    ) -> Comparison:
        theirs: list[float] = []

        def setup() -> None:
            after()
            theirs.append(other())

        benchmark.pedantic(run, setup=setup, rounds=rounds, warmup_rounds=min(3, rounds - 1))
        after()
        found = Comparison(what, ours() if ours else benchmark.stats.stats.median, median(theirs), against, wanted)
        benchmark.extra_info.update(ratio=found.ratio, against=against, theirs=found.theirs)
        request.config.stash.setdefault(_found, []).append(found)
        return found

    return measure


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Takes a figure that has no other beside it: what it is of, and the figure with its unit."""
    return lambda *row: request.config.stash.setdefault(_figures, []).append(row)


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Takes what the gate said of a night."""
    return lambda *row: request.config.stash.setdefault(_said, []).append(row)


@pytest.fixture
def duets(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Takes a series of a duet: the true ratio, which methods call it slower, its result in words, and seconds."""
    return lambda *row: request.config.stash.setdefault(_duets, []).append(row)


@pytest.fixture
def fidelity(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Takes a row of the table of figures beside those of bare loops."""
    return lambda *row: request.config.stash.setdefault(_fidelity, []).append(row)


@pytest.fixture
def reproducers(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Rows of the table of how long it takes from a failure to its reproducer."""
    return request.config.stash.setdefault(_reproducers, [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(_found, [])
    if rows:
        terminalreporter.section("side by side", sep="-")
        width = max(len(r.what) for r in rows)
        for r in rows:
            figures = f"{r.ours * 1000:9.1f} ms  {r.theirs * 1000:9.1f} ms  {r.ratio:7.3f}"
            terminalreporter.write_line(f"{r.what:<{width}}  {figures}  of {r.against} (wanted: {r.wanted})")
    alone = config.stash.get(_figures, [])
    if alone:
        terminalreporter.section("figures", sep="-")
    for what, figure in alone:
        terminalreporter.write_line(f"{what:<24}  {figure}")
    _show_fidelity(terminalreporter, config.stash.get(_fidelity, []))
    nights = config.stash.get(_said, [])
    if nights:
        terminalreporter.section("what the gate said", sep="-")
    for night, texts in nights:
        terminalreporter.write_line(f"{night}: {'; '.join(texts) or 'nothing'}")
    _show_duets(terminalreporter, config.stash.get(_duets, []))
    shares = config.stash.get(_shares, [])
    if shares:
        terminalreporter.section("milliseconds a program", sep="-")
        width = max(len(r["what"]) for r in shares)
        columns = [f"{c:>7}" for c in shares[0]["seconds"]]
        terminalreporter.write_line("  ".join([f"{'':<{width}}", "a second", *columns, *shares[0]["shares"]]))
        for r in shares:
            figures = [f"{s * 1000:>{max(7, len(c))}.1f}" for c, s in r["seconds"].items()]
            figures += [f"{share * 100:>{len(c) - 2}.0f} %" for c, share in r["shares"].items()]
            terminalreporter.write_line("  ".join([f"{r['what']:<{width}}", f"{r['a second']:8.2f}", *figures]))
    reproducers = config.stash.get(_reproducers, [])
    if reproducers:
        terminalreporter.section("from the first failure to the shrunk reproducer", sep="-")
        for r in reproducers:
            runs = f"{r['failing runs']} failing runs"
            terminalreporter.write_line(f"{r['what']:<26}  {r['seconds']:6.1f} s  {runs}; {r['left']} left")


def _show_duets(terminalreporter: Any, rows: list[tuple[float, dict[str, bool], str, float]]) -> None:
    if not rows:
        return
    terminalreporter.section("duets: each series", sep="-")
    for step, _, text, seconds in rows:
        terminalreporter.write_line(f"step {step - 1:+.0%}, {seconds / 60:.1f} min: {text}")
    terminalreporter.section("series called slower, by the step that they have", sep="-")
    steps = sorted({step for step, *_ in rows})
    for method in rows[0][1]:
        found = {step: [said[method] for one, said, *_ in rows if one == step] for step in steps}
        shares = "  ".join(f"{step - 1:+.0%}: {sum(of)} of {len(of)}" for step, of in found.items())
        terminalreporter.write_line(f"{method:<26}  {shares}")


def _show_fidelity(terminalreporter: Any, rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        return
    terminalreporter.section("an all_reduce's median: the suite's, and bare loops'", sep="-")
    kinds = ("same ranks", "ratio (95 %)", "by hand", "same / by hand")
    head = "  ".join(f"{kind:>{width}}" for kind, width in zip(kinds, (10, 20, 10, 20), strict=True))
    terminalreporter.write_line(f"{'size':>8}  ranks  {'suite':>10}  {head}  wanted")
    for size, ranks, (ours, beside, alone), suite, machine, within in rows:
        first, second = (f"{found:6.3f} ({low:.3f}-{high:.3f})" for found, low, high in (suite, machine))
        figures = f"{ours * 1e6:>7.1f} us  {beside * 1e6:>7.1f} us  {first:>20}  {alone * 1e6:>7.1f} us  {second:>20}"
        terminalreporter.write_line(f"{size:>8}  {ranks:>5}  {figures}  within {within:.0%}")
