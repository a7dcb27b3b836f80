"""``CONCORD_EXAMPLES=thorough``: run properties for hours, in rounds that continue after an interruption.

A property that states its number of examples (``harness.programs.share.examples``) runs in rounds of :data:`ROUND`
examples, each from a seed of its own, until its share of the budget is spent or its examples are done. Progress is kept
in a journal. Failing examples are kept in Hypothesis's database beside it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import SkipTest  # raised by Hypothesis if there is nothing to replay

import pytest

from harness.safe_io.writing import own_folder
from harness.thorough.effort import EXAMPLES, STATE, Effort, EffortError, effort, shown
from harness.thorough.journal import (
    Anew,
    Begun,
    Done,
    Example,
    Journal,
    JournalError,
    Plan,
    Progress,
    Round,
    Session,
    key_of,
)
from harness.thorough.progress import Ticker, table

ROUND = 100
"""The number of examples from one seed."""

PASSED_OVER = pytest.StashKey[bool]()
"""Set on an item that has nothing left to do in this run."""

_INPUT = "concord_thorough"


class _Stop(KeyboardInterrupt):
    """Ends a round. A KeyboardInterrupt, because Hypothesis keeps nothing of an example that Ctrl-C interrupts."""


def asked(config: pytest.Config) -> Effort:
    """Return the effort that the environment requests. Errors: UsageError."""
    try:
        return effort()
    except EffortError as e:
        raise pytest.UsageError(str(e)) from None


def register(config: pytest.Config) -> None:
    """Register the plug-in if a thorough run is requested.

    Errors: UsageError for invalid variables, for ``--start-over`` in a run that is not thorough, and for an invalid
    journal.
    """
    requested = asked(config)
    option = config.option
    if not requested.thorough:
        if config.getoption("start_over") and not option.collectonly:
            raise pytest.UsageError(f"--start-over begins a thorough run anew: set {EXAMPLES}=thorough as well")
        return
    if not (option.collectonly or option.help or option.version):
        config.pluginmanager.register(Thorough(config, requested), "concord-thorough")


class Thorough:
    """A thorough run, in the process that runs tests and in the one that reports them, which may be the same."""

    def __init__(self, config: pytest.Config, asked: Effort) -> None:
        self.config = config
        self.effort = asked
        self.share = 0.0
        """Seconds for each property; 0 without a budget."""
        self._keys: dict[str, str] = {}
        self._failed: set[str] = set()
        """Properties that failed in this session. They don't pass by being run again."""
        self._repeated = config.getoption("hypothesis_seed", None)
        self._lock: Any = None
        self._news = ""
        worker: Mapping[str, Any] | None = getattr(config, "workerinput", None)
        self._workers = int(worker["workercount"]) if worker is not None else 1
        if worker is not None:
            self._folder, self._session = Path(worker[_INPUT][0]), str(worker[_INPUT][1])
        else:
            self._folder = config.rootpath / (os.environ.get(STATE) or Path("reports") / "out" / "thorough")
            self._session = secrets.token_hex(8)
        self._journal = self._opened()
        self._ticker: Ticker | None = None
        if worker is None:
            self._begin()
            self._ticker = Ticker(self._opened(), self.effort, config)

    def _opened(self) -> Journal:
        path = self._folder / "progress.jsonl"
        try:
            name = str(path.relative_to(self.config.rootpath))
        except ValueError:
            name = str(path)
        return Journal(path, name)

    def _begin(self) -> None:
        """Continue the interrupted run, or begin a new one. Errors: UsageError."""
        from filelock import FileLock, Timeout

        try:
            own_folder(self._folder)
            self._lock = FileLock(self._folder / "lock")
            self._lock.acquire(timeout=0)
        except Timeout:
            why = f"another thorough run is at work in {self._folder}; let it end, or name another folder in {STATE}"
            raise pytest.UsageError(why) from None
        except OSError as e:
            raise pytest.UsageError(f"{self._folder}: {e.strerror}; name another folder in {STATE}") from None
        about = {"torch": _version("torch"), "concord": _version("concord-harness")}
        about["subject"] = self.config.getoption("subject")
        try:
            why = self._why_anew(about)
            if why:
                self._journal.begin(Begun(time.time(), about))
                self._news = why
            self._journal.write(Session(self._session))
        except JournalError as e:
            raise pytest.UsageError(f"{e}; --start-over begins a new one, and keeps this file beside it") from None

    def _why_anew(self, about: Mapping[str, str]) -> str:
        """Return why a new run begins, or "" if the one in the journal continues. Errors: JournalError."""
        if not self._journal.path.exists():
            return "a new run"
        if self.config.getoption("start_over"):
            return "a new run (--start-over)"
        self._journal.mend()
        tally = self._journal.read()
        if tally.begun is None:
            return "a new run"
        if tally.begun.about != about:
            other = ", ".join(f"{k} {v}" for k, v in tally.begun.about.items() if about.get(k) != v)
            return f"a new run: the one before was of {other or 'other versions'}"
        if tally.done == len(tally.properties):
            return "a new run: the one before was done"
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(tally.begun.time))
        self._news = f"goes on with the run of {since}: {tally.done} of {len(tally.properties)} properties were done"
        return ""

    # hooks

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_INPUT] = (str(self._folder), self._session)

    def pytest_report_header(self) -> str:
        budget = f"{shown(self.effort.budget)} for all properties" if self.effort.budget else "no budget"
        return f"concord: thorough, {budget}; {self._news}; state: {self._journal.shown}"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items if self.config.pluginmanager.hasplugin("timeout") else ():
            if count_of(item):
                # Its budget ends it, and ranks have a timeout of their own.
                item.add_marker(pytest.mark.timeout(0), append=False)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the properties to run. If all of them were done before, they begin anew."""
        mine = {key_of(item.nodeid): item.nodeid for item in session.items if count_of(item)}
        self._keys = {nodeid: key for key, nodeid in mine.items()}
        self.share = self.effort.budget / -(-len(mine) // self._workers) if mine else 0.0
        if not mine:
            return
        try:
            before = self._opened().read(until=self._session).properties
            now = self._journal.read()
            if set(mine) - set(now.properties):
                self._journal.write(Plan(mine))
            if self._session not in now.anew and all(k in before and before[k].outcome for k in mine):
                self._journal.write(Anew(self._session, list(mine)))
        except JournalError as e:
            pytest.exit(str(e), returncode=pytest.ExitCode.USAGE_ERROR)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        count = count_of(pyfuncitem)
        if not count or pyfuncitem.nodeid not in self._keys:
            return None
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        self._run(pyfuncitem, functools.partial(pyfuncitem.obj, **arguments), count)
        return True

    # one property

    def _run(self, item: pytest.Function, call: Callable[[], None], count: int) -> None:
        __tracebackhide__ = True
        function = getattr(item.obj, "__func__", item.obj)
        before = function._hypothesis_internal_use_settings
        inner = function.hypothesis.inner_test
        own_seed = function._hypothesis_internal_use_seed
        goal = self.share or float(self.effort.examples(count))
        key = self._keys[item.nodeid]
        try:
            progress = self._journal.read().properties[key]
            if progress.outcome == "passed":
                item.stash[PASSED_OVER] = True
                return
            watch = _Watch(self._journal, key, progress, inner, item, goal, timed=bool(self.share))
            function.hypothesis.inner_test = watch.wrapped
            self._rounds(item, call, function, watch)
        except JournalError as e:
            pytest.exit(str(e), returncode=pytest.ExitCode.INTERNAL_ERROR)
        finally:
            function._hypothesis_internal_use_settings = before
            function.hypothesis.inner_test = inner
            function._hypothesis_internal_use_seed = own_seed

    def _rounds(self, item: pytest.Function, call: Callable[[], None], function: Any, watch: _Watch) -> None:
        """Replay earlier failures, then draw. Errors: what the property raises, with the seed in a note."""
        __tracebackhide__ = True
        from hypothesis import Phase, settings
        from hypothesis.database import DirectoryBasedExampleDatabase
        from hypothesis.errors import Unsatisfiable

        before = function._hypothesis_internal_use_settings
        database = DirectoryBasedExampleDatabase(self._folder / "examples")
        again = [p for p in (Phase.explicit, Phase.reuse, Phase.shrink) if p in before.phases]
        drawing = [p for p in (Phase.generate, Phase.target, Phase.shrink) if p in before.phases]

        def under(phases: list[Phase]) -> None:
            __tracebackhide__ = True
            function._hypothesis_internal_use_settings = settings(
                parent=before, derandomize=False, database=database, max_examples=ROUND, phases=phases
            )
            try:
                call()
            except (KeyboardInterrupt, JournalError):
                raise
            except Exception as e:
                if watch.failed:
                    self._failed.add(watch.key)
                    self._journal.write(Done(watch.key, "failed"))
                    e.add_note(watch.where)
                raise

        if self._repeated is not None:  # one round, to reproduce a failure: it does not count
            watch.counting = False
            return under(drawing)
        try:
            try:
                under(again)
            except Unsatisfiable:
                pass  # the examples that failed before are given up now
            except SkipTest:
                if watch.called:
                    raise
            while not watch.over():
                watch.begin(secrets.randbits(32))
                function._hypothesis_internal_use_seed = watch.seed
                under(drawing)
                self._journal.sync()
                if not watch.new:
                    break  # there are no new examples
        except _Stop:
            watch.raise_broken()
        self._journal.write(Done(watch.key, "failed" if watch.key in self._failed else "passed"))
        self._journal.sync()
        return None

    # what is shown

    @pytest.hookimpl(tryfirst=True)  # pytest's own implementation, which runs the tests, is called last
    def pytest_runtestloop(self) -> None:
        if self._ticker is not None:
            self._ticker.start()

    def pytest_sessionfinish(self) -> None:
        self._end()

    def pytest_unconfigure(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._ticker is not None:
            self._ticker.stop()
        if self._lock is not None:
            self._lock.release()
        self._journal.close()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        try:
            tally = self._opened().read()
        except JournalError as e:
            terminalreporter.write_line(f"concord: {e}")
            return
        if not tally.properties:
            return
        if self._repeated is not None:
            line = f"concord: drawn once more, from seed {self._repeated}; this counts for nothing in the thorough run"
            terminalreporter.write_line(line)
            return
        terminalreporter.section("thorough", sep="-")
        for line in table(tally.properties.values()):
            terminalreporter.write_line(line)
        if tally.done < len(tally.properties):
            left = len(tally.properties) - tally.done
            terminalreporter.write_line(
                f"{left} of {len(tally.properties)} not done: the same command goes on from here"
            )


class _Watch:
    """Counts the examples of one property, and ends a round when there is nothing left to do."""

    def __init__(
        self,
        kept: Journal,
        key: str,
        progress: Progress,
        inner: Callable[..., None],
        item: pytest.Function,
        goal: float,
        *,
        timed: bool,
    ) -> None:
        self.key = key
        self.seed: int | None = None
        self.failed = self.called = False
        self.counting = True
        self.new = 0
        """The number of examples of this round that no round before had."""
        self._journal, self._goal, self._timed, self._test = kept, goal, timed, item.nodeid
        self._passed, self._seconds, self._contents = progress.passed, progress.seconds, set(progress.contents)
        self._since = time.monotonic()
        self._broken: JournalError | None = None

        @functools.wraps(inner)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            from hypothesis.errors import UnsatisfiedAssumption

            if self._broken or (self.over() and self.seed is not None):
                raise _Stop
            self.called = True
            drawn = repr((args, sorted((k, v) for k, v in kwargs.items() if k not in item.funcargs)))
            try:
                inner(*args, **kwargs)
            except UnsatisfiedAssumption:
                self._ended("given up", drawn)
                raise
            except Exception:
                self._ended("failed", drawn)
                self.failed = True
                raise
            self._ended("passed", drawn)

        self.wrapped = wrapped

    @property
    def where(self) -> str:
        """Where a failure comes from, and how to reproduce it."""
        if self.seed is None:
            return "this failed before, and was drawn again from the database of examples"
        command = f"{EXAMPLES}=thorough pytest '{self._test}' --hypothesis-seed={self.seed}"
        return f"drawn from seed {self.seed}; to draw the same again: {command}"

    def over(self) -> bool:
        """Return whether the property has done its share. A failed one has not: shrinking takes as long as it takes."""
        if self.failed or not self.counting:
            return False
        return (self._seconds + time.monotonic() - self._since if self._timed else self._passed) >= self._goal

    def begin(self, seed: int) -> None:
        """Begin a round."""
        self.seed, self.new = seed, 0
        self._journal.write(Round(self.key, seed, self._goal))

    def raise_broken(self) -> None:
        """Raise the JournalError of an earlier write, if there was one."""
        if self._broken is not None:
            raise self._broken

    def _ended(self, outcome: str, drawn: str) -> None:
        if self.failed or not self.counting:
            return
        now = time.monotonic()
        content = (
            "" if outcome == "given up" else hashlib.blake2b(drawn.encode(errors="replace"), digest_size=6).hexdigest()
        )
        took, self._since = now - self._since, now
        self._seconds += took
        self._passed += outcome == "passed"
        self.new += outcome != "given up" and content not in self._contents
        self._contents.add(content)
        try:
            self._journal.write(Example(self.key, outcome, round(took, 4), content))
        except JournalError as e:  # not the property's failure: the round ends with the next example
            self._broken = e


def count_of(item: pytest.Item) -> int:
    """Return the number of examples that a property has by default; 0 for other tests."""
    function: Any = getattr(item, "obj", None)
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", None)
    return int(getattr(inner, "concord_examples", 0) or getattr(function, "concord_examples", 0)) if inner else 0


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


__all__ = ["PASSED_OVER", "ROUND", "Thorough", "count_of", "register"]
