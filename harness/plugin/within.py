"""``--within 5m``: of the tests that would run, those that ask the most in that time."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from harness.plugin.facts import requirements_of
from harness.thorough.effort import EffortError, duration, shown
from harness.thorough.within import FILE, Durations, choose, in_order

OPTION = "--within"
NOTICED = Path("fixtures/faults/noticed.json")
STARTING = 25.0
"""Seconds that a process takes before its first test and after its last one."""
_SAID, _STARTED = "concord_within", "concord_started"
_T = TypeVar("_T")


class Within:
    """Chooses tests by ``--within``, and begins none once that time is over."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._given: str = config.getoption("within") or ""
        self._seconds = _seconds(self._given)
        self._started = getattr(config, "workerinput", {}).get(_STARTED, time.time())
        self._said = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """Choose of what every other option and mark leaves."""
        yield
        asking = {item.nodeid: [r.id for r in requirements_of(item)] for item in items} if self._given else {}
        asking = {nodeid: ids for nodeid, ids in asking.items() if ids}
        if not asking:
            return
        durations, notices = _kept(self._config.rootpath)
        workers = int(getattr(self._config, "workerinput", {}).get("workercount", 1))
        budget = max(0.0, self._seconds - STARTING) * workers
        chosen = choose(durations.of(asking), asking, notices, budget)
        if not chosen.nodeids:
            raise pytest.UsageError(
                f"{OPTION} {self._given}: no test ends so soon; Concord takes {STARTING:g} s to start"
            )
        order = {nodeid: i for i, nodeid in enumerate(in_order(list(asking), chosen.nodeids))}
        left = [item for item in items if item.nodeid in asking and item.nodeid not in order]
        if left:
            self._config.hook.pytest_deselected(items=left)
        kept = [item for item in items if item.nodeid in order]
        items[:] = [item for item in items if item.nodeid not in asking]
        items += sorted(kept, key=lambda item: order[item.nodeid])
        every = {name for nodeid in asking for name in notices.get(nodeid, ())}
        ids = {each for of_one in asking.values() for each in of_one}
        self._said = (
            f"{OPTION} {self._given}: {len(order):,} of {len(asking):,} tests, which ask {chosen.asked:,} of "
            f"{len(ids):,} requirements and are known to notice {chosen.noticed:,} of {len(every):,} faults and "
            f"mutants; expected to take {shown(STARTING + chosen.seconds / workers)} with {workers} at a time"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leave a test out whose turn comes when the time is over."""
        if self._given and time.time() - self._started > self._seconds and requirements_of(item):
            pytest.skip(f"{OPTION} {self._given}: the time was over before its turn")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_STARTED] = self._started

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_SAID] = self._said

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._said = self._said or str(getattr(node, "workeroutput", {}).get(_SAID, ""))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._said:
            terminalreporter.write_line(self._said)


def _seconds(given: str) -> float:
    try:
        return duration(given, OPTION) if given else 0.0
    except EffortError as e:
        raise pytest.UsageError(str(e)) from None


class _Defect(msgspec.Struct):
    name: str


class _Result(msgspec.Struct):
    defect: _Defect
    test: str = ""


class _Noticed(msgspec.Struct):
    results: list[_Result]


def _kept(root: Path) -> tuple[Durations, dict[str, list[str]]]:
    """Return how long tests take, and which faults they notice, by the files in ``root`` or else by Concord's own."""
    root = root if (root / FILE).is_file() else Path(__file__).parents[2]
    durations, notices = Durations("", "", {}), dict[str, list[str]]()
    if (root / FILE).is_file():
        durations = _read(root / FILE, Durations)
    if (root / NOTICED).is_file():
        for result in _read(root / NOTICED, _Noticed).results:
            notices.setdefault(result.test, []).append(result.defect.name)
    return durations, notices


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as e:
        raise pytest.UsageError(f"{OPTION}: {path} can't be read: {e}") from None
