"""A pytest plug-in: a process of an audit, which collects suites once and runs tests of them as it is told.

Loaded by ``-p harness.audit.worker``; it is told what to do over the connection whose address is in ``CONCORD_AUDIT``.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.audit import reach
from harness.plugin import worlds
from harness.plugin.summary import Told
from harness.results import BAD

ADDRESS = "CONCORD_AUDIT"
"""Environment variable: where the audit listens."""


class Job(msgspec.Struct, tag_field="job", tag="run", kw_only=True):
    """Run tests until one fails."""

    tests: list[str]
    first: list[tuple[str, str]] = []
    """What ranks call before anything else."""
    trace: list[str] = []
    """Files whose lines are traced in ranks; all tests are run then, whatever comes of them."""
    seconds: float = 0.0
    """No test is begun after so many; 0 for no limit."""


class Outcome(msgspec.Struct, tag_field="job", tag="outcome", kw_only=True, omit_defaults=True):
    """What came of one test."""

    test: str
    verdict: str
    seconds: float
    headline: str = ""
    requirements: list[str] = []
    about: str = ""
    """What the test requires and does, in words."""
    ranks: list[int] = []
    """Those that failed first."""
    steps: dict[str, list[tuple[int, int]]] = {}


class Collected(msgspec.Struct, tag_field="job", tag="collected"):
    """What a process has collected, when it is ready."""

    tests: list[str]


class Finished(msgspec.Struct, tag_field="job", tag="finished"):
    """A job is over.  ``complete``: all its tests were run, or one failed."""

    complete: bool


Message = Collected | Outcome | Finished

encoder = msgspec.msgpack.Encoder()
_jobs = msgspec.msgpack.Decoder(Job)
messages = msgspec.msgpack.Decoder(Message)


def pytest_configure(config: pytest.Config) -> None:
    """Properties draw the same examples whatever is in the ranks, and stop at the first failure."""
    from hypothesis import Phase, settings

    settings.register_profile(
        "audit",
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.explicit, Phase.generate],
    )
    settings.load_profile("audit")
    config.pluginmanager.register(_Worker(config), "concord-audit")


class _Worker:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worlds = worlds.plugin_of(config)
        self.folder = Path(tempfile.mkdtemp(prefix="concord-audit-"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of running what was collected."""
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        self.session = session
        items = {item.nodeid: item for item in session.items}
        with Client(os.environ[ADDRESS]) as connection:
            connection.send_bytes(encoder.encode(Collected(list(items))))
            while True:
                try:
                    job = _jobs.decode(connection.recv_bytes())
                except EOFError:
                    return True
                done = self.do(job, items, connection)
                connection.send_bytes(encoder.encode(Finished(done)))

    def do(self, job: Job, items: dict[str, Any], connection: Connection) -> bool:
        started = time.monotonic()
        first = [(where, argument) for where, argument in job.first]
        if job.trace:
            first.append(("harness.audit.reach:start", reach.argument(self.folder, job.trace)))
        self.worlds.specs.first = tuple(first)
        try:
            return self.each(job, items, connection, started)
        finally:
            self.session._setupstate.teardown_exact(None)  # or the next job would begin with what this one left
            self.worlds.pool.forget_begun()

    def each(self, job: Job, items: dict[str, Any], connection: Connection, started: float) -> bool:
        """Run the tests of a job, until one fails; whether there is nothing left to run."""
        for number, name in enumerate(job.tests):
            if job.seconds and time.monotonic() - started > job.seconds:
                return False
            following = items[job.tests[number + 1]] if number + 1 < len(job.tests) else None
            outcome = self.once(items[name], following)
            if job.trace:
                found = reach.collect(self.folder, job.trace)
                outcome.steps = {file: sorted(steps) for file, steps in found.items()}
            connection.send_bytes(encoder.encode(outcome))
            if outcome.verdict in BAD and not job.trace:
                break
        return True

    def once(self, item: Any, following: Any) -> Outcome:
        """Run a test, as if for the first time."""
        from _pytest.runner import runtestprotocol

        item._initrequest()
        item.user_properties.clear()
        item._report_sections.clear()
        self.config.pluginmanager.get_plugin("concord-attempts").forget(item.nodeid)  # type: ignore[union-attr]
        started = time.monotonic()
        try:
            reports = runtestprotocol(item, log=False, nextitem=following if following is not item else item.parent)
        except Exception:
            return Outcome(
                test=item.nodeid,
                verdict="crashed",
                seconds=time.monotonic() - started,
                headline=traceback.format_exc(limit=-3),
            )
        return _outcome(item, reports, time.monotonic() - started)


def _outcome(item: Any, reports: Sequence[Any], seconds: float) -> Outcome:
    told = Told()
    for report in reports:
        told.add(report)
    required = [mark.args[0] for mark in item.iter_markers("requirement")]
    culprit = told.properties.get("first_rank", "")
    return Outcome(
        test=item.nodeid,
        verdict=told.verdict,
        seconds=round(seconds, 3),
        headline=_lines(told.headline),
        requirements=[r.id for r in required],
        about=" ".join([*(r.sentence for r in required), inspect.getdoc(item.obj) or ""]),
        ranks=[int(culprit)] if culprit.isdigit() else [],
    )


def _lines(text: str, most: int = 400) -> str:
    return " ".join(text.split())[:most]


__all__ = ["Collected", "Finished", "Job", "Message", "Outcome", "encoder", "messages"]
