"""The processes of an audit: they collect the suites once, and then run jobs, here or on the hosts of agents."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from harness.audit import worker
from harness.audit.records import AuditError
from harness.cluster.elsewhere import Place, started_there
from harness.cluster.errands import FOLDER, HOST_LOST, REFUSED, SOCKET
from harness.results import FREE_SEED
from harness.safe_io.shown import printable

_ENDING = 20.0


@dataclass
class _Process:
    place: Place
    popen: subprocess.Popen[bytes]
    connection: Connection
    job: worker.Job | None = None
    since: float = 0.0
    outcomes: list[worker.Outcome] = field(default_factory=list)


class Workers:
    """Pytest processes that have collected suites and run jobs, one for each of some places.

    ``digest``: of the files that outcomes depend on, which must be the same in all places.
    """

    def __init__(self, root: Path, digest: str, suites: Sequence[str], subject: str, places: Sequence[Place]) -> None:
        self._root = root
        self._digest = digest
        self._suites = suites
        self._subject = subject
        self._places = places
        self.tests: list[str] = []
        self._processes: list[_Process] = []
        self._again: deque[worker.Job] = deque()
        """Jobs of hosts that have gone, to be run on others."""

    def __enter__(self) -> Workers:
        self._folder = tempfile.TemporaryDirectory(prefix="concord-audit-")
        self._listener = Listener(f"{self._folder.name}/{SOCKET}", "AF_UNIX")
        self._log = Path(self._folder.name, "log")
        try:
            self._processes = [self._start(place) for place in self._places]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.connection.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(_ENDING)
            process.popen.kill()
            process.popen.wait()
        self._listener.close()
        self._folder.cleanup()

    def _start(self, place: Place) -> _Process:
        """Start a process and wait until it has collected the suites."""
        with self._log.open("ab") as log:
            popen = self._started(place, log)
        connection = self._accepted(popen, place)
        process = _Process(place, popen, connection)
        try:
            collected = worker.messages.decode(connection.recv_bytes())
        except EOFError:
            raise AuditError(self._said(place)) from None
        assert isinstance(collected, worker.Collected)
        if collected.digest != self._digest:
            popen.kill()
            popen.wait()
            raise AuditError(f"harness, suites or fixtures differ on {place}: {self._root} must be the same tree there")
        self.tests = collected.tests
        return process

    def _started(self, place: Place, log: Any) -> subprocess.Popen[bytes]:
        folder = self._folder.name if place.agent is None else FOLDER
        environment = {k: v for k, v in os.environ.items() if k != "CONCORD_EXAMPLES"}
        own = {worker.ADDRESS: f"{folder}/{SOCKET}", "CONCORD_REPRODUCERS": f"{folder}/reproducers"}
        arguments = [
            *("-m", "pytest", "-p", "harness.audit.worker", "-q", "-p", "no:cacheprovider"),
            f"--concord-seed={FREE_SEED}",  # leave properties to the audit's Hypothesis profile
            *("--subject", self._subject, "--world-timeout", "20", "--concord-results", f"{folder}/results"),
            *self._suites,
        ]
        if place.agent is None:
            command = [sys.executable, *arguments]
            return subprocess.Popen(command, cwd=self._root, env={**environment, **own}, stdout=log, stderr=log)
        stream = str(self._listener.address)
        how = {"env": environment, "stdout": log, "stderr": log}
        return started_there(place, arguments, cwd=self._root, variables=own, stream=stream, **how)

    def _accepted(self, popen: subprocess.Popen[bytes], place: Place) -> Connection:
        listening: Any = self._listener
        while not wait([listening._listener._socket], timeout=0.2):
            if popen.poll() is not None:
                raise AuditError(self._said(place))
        return self._listener.accept()

    def _said(self, place: Place) -> str:
        on = f" on {place}" if place.agent else ""
        return f"the suites can't be collected{on}:\n{self._log.read_text(errors='replace')[-3000:]}"

    def do(
        self, jobs: Iterator[worker.Job], *, limit: float
    ) -> Iterator[tuple[worker.Job, list[worker.Outcome], bool]]:
        """Run jobs and yield each with its outcomes and whether it is complete.

        A process that dies, or takes longer than ``limit`` seconds, is replaced.  The job of a host that has gone runs
        again on another.  Errors: AuditError if no host is left.
        """
        for process in self._processes:
            self._give(process, jobs)
        while any(p.job for p in self._processes):
            busy = {p.connection: p for p in self._processes if p.job}
            for connection in wait(list(busy), timeout=1.0):
                process = busy[connection]  # type: ignore[index]
                try:
                    message = worker.messages.decode(process.connection.recv_bytes())
                except (EOFError, ConnectionError):
                    if not self._host_lost(process, jobs):
                        yield self._lost(process, jobs)
                    continue
                if isinstance(message, worker.Outcome):
                    process.outcomes.append(message)
                elif isinstance(message, worker.Finished):
                    assert process.job is not None
                    done = process.job, process.outcomes, message.complete
                    self._give(process, jobs)
                    yield done
            for process in [p for p in self._processes if p.job and time.monotonic() - p.since > limit]:
                yield self._lost(process, jobs)

    def _give(self, process: _Process, jobs: Iterator[worker.Job]) -> None:
        job = self._again.popleft() if self._again else next(jobs, None)
        process.job, process.outcomes, process.since = job, [], time.monotonic()
        if process.job is not None:
            with contextlib.suppress(ConnectionError):  # it has gone, and is noticed where its answer is awaited
                process.connection.send_bytes(worker.encoder.encode(process.job))

    def _lost(self, process: _Process, jobs: Iterator[worker.Job]) -> tuple[worker.Job, list[worker.Outcome], bool]:
        job, outcomes = process.job, process.outcomes
        assert job is not None
        process.popen.kill()
        process.popen.wait()
        process.connection.close()
        fresh = self._start(process.place)
        process.popen, process.connection = fresh.popen, fresh.connection
        self._give(process, jobs)
        return job, outcomes, False

    def _host_lost(self, process: _Process, jobs: Iterator[worker.Job]) -> bool:
        """If the process has ended because its host has gone, leave its job to the others, and return True."""
        if process.place.agent is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(_ENDING)
        if process.popen.poll() not in (HOST_LOST, REFUSED):
            return False
        assert process.job is not None
        self._again.append(process.job)
        process.connection.close()
        self._processes.remove(process)
        if not self._processes:
            raise AuditError(f"no host is left; what was done is kept, and the same command continues: {self._last()}")
        print(f"concord audit: {process.place} has gone: {self._last()}", file=sys.stderr, flush=True)
        for idle in [p for p in self._processes if p.job is None]:
            self._give(idle, jobs)
        return True

    def _last(self) -> str:
        """Return the last line that a process has printed."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return printable(lines[-1])[:300] if lines else ""
