"""Waiting for devices: show who holds them while a test waits, and exclude the wait from the test's time."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from harness.thorough.live import Live

if TYPE_CHECKING:
    from harness.devices import Inventory
    from harness.leases import Wait
    from harness.leases.records import Holder, Waiter
    from harness.placement import Need

SUMMED_UP = 5.0
"""Seconds of waiting in a session from which the summary mentions it. It always does if the wait was shown before."""
_LOOK = 0.5  # seconds between two checks of who waits
_HAS_WORLD = re.compile(r"[\[-](\d+ranks?|worlds)[\]-]")  # in the name of every test that has one

_INPUT = "concord_session"
_WAITED = pytest.StashKey[tuple[float, list[str]]]()


class LeaseWarning(pytest.PytestWarning):
    """Leases are kept in fewer places than usual."""


class Slots:
    """Leases devices for tests, and reports waits for them, in one pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._is_worker = worker is not None
        self._session = str(worker[_INPUT]) if worker is not None else uuid.uuid4().hex
        self._timer = _Timer(config)
        config.pluginmanager.register(self._timer, "concord-timer")
        self._live = None if self._is_worker else Live(config, self._news, _LOOK, "concord-slots")
        self._told = 0.0
        """When the wait of a test was last shown, in monotonic seconds; 0 if it has not been."""
        self._returns = False
        self._waited = 0.0
        self._waited_for: dict[str, None] = {}
        self.troubles: dict[str, None] = {}
        """Why leases are kept in fewer places than usual, one sentence each."""
        self._said_in_header = False
        if not self._is_worker:
            self._check_variable()

    def _check_variable(self) -> None:
        """Check the folder that the user names for leases. Errors: UsageError if it can't be used."""
        from harness.leases.places import VARIABLE

        if os.environ.get(VARIABLE):
            from harness.devices import DeviceError
            from harness.leases import survey

            try:
                survey()
            except DeviceError as e:
                raise pytest.UsageError(str(e)) from None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_INPUT] = self._session

    # leases

    @contextlib.contextmanager
    def leased(
        self, item: pytest.Item, inventory: Inventory, need: Need, prefer: Collection[str] = ()
    ) -> Iterator[tuple[str, ...]]:
        """Lease the devices of an inventory that a test needs, and yield their names.

        ``prefer``: names of devices to take if they are free.
        The test's timeout stands still while it waits.
        """
        from harness.devices import DeviceError
        from harness.leases import Leases
        from harness.leases.records import introduce

        introduce(self._session, "pytest", str(self.config.rootpath))
        with contextlib.ExitStack() as stack:
            try:
                leases = Leases(inventory)
                with self._waiting(item) as waiting:
                    hold = leases.hold(
                        need.count(inventory),
                        what=item.nodeid,
                        prefer=prefer,
                        choose=functools.partial(need.take, inventory),
                        shares=need.shares,
                        waiting=waiting,
                        returns=lambda: self._returns,
                    )
                    devices = stack.enter_context(hold)
            except DeviceError as e:
                pytest.fail(str(e), pytrace=False)
            self.troubles.update(dict.fromkeys(leases.refused))
            for trouble in leases.broken:
                if trouble not in self.troubles:
                    self.troubles[trouble] = None
                    item.warn(LeaseWarning(f"leases are not kept in {trouble}"))
            yield devices

    @contextlib.contextmanager
    def _waiting(self, item: pytest.Item) -> Iterator[Callable[[Wait], None]]:
        """Stop the test's clock while it waits. Yields the callback to call meanwhile."""
        from harness.leases.messages import names

        began: list[float] = []
        holders: dict[str, None] = {}
        looked = float("-inf")

        def waiting(wait: Wait) -> None:
            nonlocal looked
            if not began:
                began.append(time.monotonic())
                self._timer.pause(item)
            if time.monotonic() - looked >= 1:
                looked = time.monotonic()
                holders.update(dict.fromkeys(names(wait.holders(), self._session)))

        try:
            yield waiting
        finally:
            if began:
                item.stash[_WAITED] = time.monotonic() - began[0], list(holders)
                self._timer.resume(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, nextitem: pytest.Item | None) -> None:
        self._returns = nextitem is not None and _HAS_WORLD.search(nextitem.nodeid) is not None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Subtract the wait from the duration of its phase."""
        report = yield
        waited, holders = item.stash.get(_WAITED, (0.0, []))
        if waited:
            del item.stash[_WAITED]
            report.duration = max(0.0, report.duration - waited)
            report.concord_waited, report.concord_waited_for = waited, holders
        return report

    # what is shown

    def pytest_report_header(self) -> list[str]:
        """Report the places that can't be used, before any lease is made."""
        from harness.devices import DeviceError
        from harness.leases import survey

        self._said_in_header = True
        try:
            return [f"concord: leases on devices are not kept in {trouble}" for trouble in survey().refused]
        except DeviceError as e:
            return [f"concord: {e}"]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if not self.config.option.collectonly:
            self._watch(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._watch(ids)

    def _watch(self, nodeids: Iterable[str]) -> None:
        """Show who waits from now on, if any test can wait."""
        if self._live is not None and any(map(_HAS_WORLD.search, nodeids)):
            self._live.start()

    def _news(self) -> str:
        """Return a line about tests of this session that wait for devices of others; "" if there is nothing new."""
        from harness.leases.messages import AGAIN, SOON, sentence

        if self._told and time.monotonic() - self._told < AGAIN:
            return ""
        now = time.time()
        ours, holders = self._waits(now - SOON)
        if not ours or all(holder is not None and holder.session == self._session for holder in holders):
            return ""
        self._told = time.monotonic()
        return sentence(ours, holders, now) + "\n"

    def _waits(self, before: float) -> tuple[list[Waiter], list[Holder | None]]:
        """Return the waiters of this session that began before a time, and the holders of their devices."""
        from harness.devices import DeviceError
        from harness.leases import records, survey

        try:
            folder = survey().folders[0]
        except DeviceError:
            return [], []  # the test reports it
        ours = [w for w in records.waiters(folder) if w.holder.session == self._session and not w.until]
        ours = [w for w in ours if w.holder.since <= before]
        kind = [w for w in ours if w.kind == ours[0].kind]
        return kind, records.holders(folder, kind[0].keys) if kind else []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        waited = getattr(report, "concord_waited", 0.0)
        if waited:
            self._waited += waited
            self._waited_for.update(dict.fromkeys(report.concord_waited_for))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._said_in_header:
            for trouble in self.troubles:
                terminalreporter.write_line(f"concord: leases on devices are not kept in {trouble}")
        if self._waited >= SUMMED_UP or (self._waited and self._told > 0):
            holders = ", ".join(self._waited_for) or "others"
            terminalreporter.write_line(f"concord: waited {self._waited:.0f} s for devices held by {holders}")

    def pytest_sessionfinish(self) -> None:
        if self._live is not None:
            self._live.stop()

    def pytest_unconfigure(self) -> None:
        if self._live is not None:
            self._live.stop()


class _Timer:
    """pytest-timeout's timer of the running test. It can be stopped, and continues with the time that was left."""

    def __init__(self, config: pytest.Config) -> None:
        self._hook: Any = config.pluginmanager.hook
        self._settings: Any = None
        self._deadline = 0.0
        self._left: float | None = None

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, settings: Any) -> None:
        self._settings, self._deadline = settings, time.monotonic() + settings.timeout

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_cancel_timer(self) -> None:
        self._settings = None

    def pause(self, item: pytest.Item) -> None:
        """Stop the timer, if one is running."""
        settings = self._settings
        if settings is not None:
            self._left = max(0.001, self._deadline - time.monotonic())
            self._hook.pytest_timeout_cancel_timer(item=item)
            self._settings = settings

    def resume(self, item: pytest.Item) -> None:
        """Continue the timer, if it was stopped."""
        left, self._left = self._left, None
        if left is not None:
            rest = _Rest(self._settings, left)
            self._hook.pytest_timeout_set_timer(item=item, settings=rest)
            rest.timeout = rest.whole


class _Rest:
    """Settings of pytest-timeout with the remaining time. Messages show the whole time."""

    def __init__(self, settings: Any, left: float) -> None:
        self.settings = settings
        self.whole: float = settings.timeout
        self.timeout = left

    def __getattr__(self, name: str) -> Any:
        return getattr(self.settings, name)
