"""A pytest plug-in for the processes of an audit: collect the suites once, then run the tests of each job.

``-p harness.audit.worker`` loads it.  Jobs arrive on the connection whose address is in ``CONCORD_AUDIT``.
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
from harness.audit.records import digest
from harness.plugin import worlds
from harness.plugin.summary import Told
from harness.results import BAD

ADDRESS = "CONCORD_AUDIT"
"""Environment variable with the address where the audit listens."""


class Job(msgspec.Struct, tag_field="job", tag="run", kw_only=True):
    """A job: run tests until one fails."""

    tests: list[str]
    first: list[tuple[str, str]] = []
    """Functions and their arguments, which ranks call before anything else."""
    trace: list[str] = []
    """Files whose lines are traced in ranks.  If there are any, failures do not end the job."""
    seconds: float = 0.0
    """No test starts after this many seconds; 0: no limit."""


class Outcome(msgspec.Struct, tag_field="job", tag="outcome", kw_only=True, omit_defaults=True):
    """The outcome of one test."""

    test: str
    verdict: str
    seconds: float
    headline: str = ""
    requirements: list[str] = []
    about: str = ""
    """The test's requirements and docstring."""
    ranks: list[int] = []
    """The ranks that failed first."""
    steps: dict[str, list[tuple[int, int]]] = {}


class Collected(msgspec.Struct, tag_field="job", tag="collected"):
    """The tests that a process has collected; sent when it is ready."""

    tests: list[str]
    digest: str
    """Of the files that the outcome depends on, where the process runs."""


class Finished(msgspec.Struct, tag_field="job", tag="finished"):
    """The end of a job.  ``complete``: all tests were run, or one failed."""

    complete: bool


Message = Collected | Outcome | Finished

encoder = msgspec.msgpack.Encoder()
_jobs = msgspec.msgpack.Decoder(Job)
messages = msgspec.msgpack.Decoder(Message)


def pytest_configure(config: pytest.Config) -> None:
    """Register the worker; properties use the same examples every time and are not shrunk."""
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
        """Run jobs instead of the collected tests."""
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        self.session = session
        items = {item.nodeid: item for item in session.items}
        with Client(os.environ[ADDRESS]) as connection:
            connection.send_bytes(encoder.encode(Collected(list(items), digest(Path.cwd()))))
            while True:
                try:
                    job = _jobs.decode(connection.recv_bytes())
                except EOFError:
                    return True
                done = self.do(job, items, connection)
                connection.send_bytes(encoder.encode(Finished(done)))

    def do(self, job: Job, items: dict[str, Any], connection: Connection) -> bool:
        """Run a job and clean up after it.  Returns whether it is complete."""
        started = time.monotonic()
        first = [(where, argument) for where, argument in job.first]
        if job.trace:
            first.append(("harness.audit.reach:start", reach.argument(self.folder, job.trace)))
        self.worlds.specs.first = tuple(first)
        try:
            return self.each(job, items, connection, started)
        finally:
            self.session._setupstate.teardown_exact(None)  # so that the next job does not inherit fixtures of this one
            self.worlds.pool.forget_begun()

    def each(self, job: Job, items: dict[str, Any], connection: Connection, started: float) -> bool:
        """Run the tests of a job until one fails.  Returns False if time ran out before."""
        for number, name in enumerate(job.tests):
            if job.seconds and time.monotonic() - started > job.seconds:
                return False
            following = items[job.tests[number + 1]] if number + 1 < len(job.tests) else None
            outcome = self.once(items[name], following)
            if job.trace:
                steps_by_file = reach.collect(self.folder, job.trace)
                outcome.steps = {file: sorted(steps) for file, steps in steps_by_file.items()}
            connection.send_bytes(encoder.encode(outcome))
            if outcome.verdict in BAD and not job.trace:
                break
        return True

    def once(self, item: Any, following: Any) -> Outcome:
        """Run a test as if for the first time."""
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
