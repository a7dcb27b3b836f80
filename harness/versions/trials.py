"""Trials of one test in candidates: their outcome, kept in a file so that a bisection can be continued."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.redaction import redacted
from harness.results import BAD as BAD_VERDICTS
from harness.safe_io.shown import one_line
from harness.safe_io.writing import append_or_nothing, write_whole
from harness.versions.candidates import Candidate, NotMade
from harness.versions.environments import Environment, variables
from harness.versions.scripts import command_of, is_script
from harness.versions.searching import BAD, GOOD, SKIPPED
from harness.versions.sessions import Say, Session, run

FILE = "trials.jsonl"
_DEFECT_IS_THERE = 1
"""Exit status of a finding's script if the defect is present."""
_LAUNCHER = "torchrun"
_LONGEST = 600.0  # seconds for a script


class Try(msgspec.Struct, frozen=True, omit_defaults=True):
    """One execution of the test."""

    state: str
    headline: str = ""
    """The failure of a bad try, or the reason why nothing could be tested."""


class Trial(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of a candidate."""

    candidate: str
    state: str
    headline: str = ""
    tries: list[Try] = []
    torch: str = ""
    commit: str = ""
    python: str = ""
    seconds: float = 0.0
    finished: float = 0.0
    """Seconds since the epoch."""
    key: str = ""
    """What identifies the candidate (:class:`harness.versions.candidates.Given`)."""

    @property
    def flaky(self) -> bool:
        """Whether its tries differ. Such a candidate is bad, because a good one never fails."""
        return {each.state for each in self.tries} >= {GOOD, BAD}


class Trials:
    """Tries candidates, and keeps their outcomes in a folder.

    ``test``: a pytest node id, or a script of ``docs/findings``; ``count``: how often each candidate is tried.
    """

    def __init__(self, root: Path, folder: Path, test: str, count: int, say: Say, *, discard: bool = False) -> None:
        self._root, self._folder, self._test, self._count, self._say = root, folder, test, count, say
        self._discard = discard
        self._kept = _read(folder / FILE)

    def of(self, candidate: Candidate) -> Trial:
        """Return the outcome of a candidate: the one that is kept, or that of new tries.

        A candidate that was skipped is tried again, and so is one with fewer tries than are asked for. Errors: OSError.
        """
        key = _short(*candidate.identity)
        kept = self._kept.get(key)
        if kept is not None and kept.state != SKIPPED and len(kept.tries) >= self._count:
            return kept
        began = time.time()
        environment: Environment | None = None
        tries: list[Try] = []
        try:
            environment = candidate.make(self._say)
            for number in range(1, self._count + 1):
                tries.append(self._try(environment, self._folder / key / f"try-{number}"))
                if tries[-1].state == SKIPPED:
                    break
        except NotMade as e:
            tries.append(Try(SKIPPED, str(e)))
        finally:
            if self._discard:
                candidate.discard()
        now = time.time()
        decisive = _decisive(tries)
        trial = Trial(
            candidate=candidate.name,
            state=decisive.state,
            headline=decisive.headline,
            tries=tries,
            torch=environment.torch if environment else "",
            commit=environment.commit if environment else "",
            python=environment.python_version if environment else "",
            seconds=now - began,
            finished=now,
            key=key,
        )
        self._keep(trial)
        return trial

    def _try(self, environment: Environment, folder: Path) -> Try:
        if is_script(self._test):
            return of_script(environment, self._root, self._root / self._test, folder / "log.txt", self._say)
        return of_session(run(environment, self._root, [self._test, "-q"], folder, self._say))

    def _keep(self, trial: Trial) -> None:
        self._kept[trial.key] = trial
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / FILE, "ab", buffering=0) as file:
            append_or_nothing(file.fileno(), msgspec.json.encode(trial) + b"\n")


def of_script(environment: Environment, root: Path, script: Path, log: Path, say: Say) -> Try:
    """Run a finding's script in an environment. It exits with 1 if the defect is present, and with 0 otherwise.

    Errors: OSError.
    """
    launcher, *options = command_of(script)[:-1]
    module = ["-m", "torch.distributed.run"] if launcher == _LAUNCHER else []
    with subprocess.Popen(
        [str(environment.python), *module, *options, str(script)],
        cwd=root,
        env=variables(environment.python, root),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        late = False
        try:
            out, err = process.communicate(timeout=_LONGEST)
        except subprocess.TimeoutExpired:
            late = True
            process.terminate()  # torchrun ends its ranks
            out, err = process.communicate()
    output = redacted(out + err)
    say(output)
    write_whole(log, output)
    if late:
        return Try(SKIPPED, f"the script ran for more than {_LONGEST:g} s; see {log}")
    if process.returncode == 0:
        return Try(GOOD)
    if process.returncode != _DEFECT_IS_THERE:
        return Try(SKIPPED, f"the script exited with {process.returncode}; see {log}")
    said = next((one_line(line.strip()) for line in redacted(out).splitlines() if line.strip()), "")
    return Try(BAD, said or f"the script exited with 1; see {log}")


def of_session(session: Session) -> Try:
    """Return what a session says about a candidate. A test that is waived shows its defect, so it counts as bad."""
    if not session.whole:
        return Try(SKIPPED, session.problem)
    tests = list(session.tests.values())
    bad = next((test for test in tests if test.verdict in BAD_VERDICTS or test.verdict == "waived"), None)
    if bad is not None:
        return Try(BAD, bad.headline or bad.reason or bad.verdict)
    if any(test.verdict == "passed" for test in tests):
        return Try(GOOD)
    return Try(SKIPPED, next((f"{test.verdict}: {test.reason}" for test in tests), "no test was chosen"))


def _decisive(tries: Sequence[Try]) -> Try:
    """Return the try that decides: a bad one, or else one that could not be tested, or else a good one."""
    order = (BAD, SKIPPED, GOOD)
    return min(tries, key=lambda each: order.index(each.state))


def _read(file: Path) -> dict[str, Trial]:
    """Return the last trial of each candidate. A line that was cut off does not count."""
    found: dict[str, Trial] = {}
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return found
    for line in lines:
        try:
            trial = msgspec.json.decode(line, type=Trial)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        found[trial.key] = trial
    return found


def _short(*words: str) -> str:
    return hashlib.sha256(json.dumps(words).encode(errors="replace")).hexdigest()[:12]
