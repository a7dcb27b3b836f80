"""The reader of results files, which also reads files that are damaged or unfinished."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from harness.requirements import stack_of
from harness.results import old
from harness.results.records import (
    BAD,
    ENDED_BADLY,
    SCHEMA,
    VERDICTS,
    VERSION,
    Collected,
    ProfileText,
    Record,
    RequirementText,
    RunEnd,
    RunHeader,
    TestResult,
)
from harness.results.tried import CaseOf, Cases
from harness.safe_io.untrusted import Allowance, Refused, said

_SAYS_NOTHING = ("not-run", "unsupported")
"""Verdicts of an attempt that do not count if another attempt has a different one."""


class ResultsError(ValueError):
    """The error for a results file that cannot be read; it says where and why."""


class Run(msgspec.Struct):
    """The content of a results file."""

    header: RunHeader
    tests: dict[str, TestResult]
    """The result of each test, by node id.  Its attempts are :func:`merged`."""
    complete: bool
    exit_status: int | None = None
    torn: bool = False
    """Whether the last line was cut off in the middle."""
    requirements: dict[str, RequirementText] = {}
    profile: ProfileText | None = None
    end: RunEnd | None = None
    collected: frozenset[str] = frozenset()
    damaged: str = ""
    """How the file differs from what the run wrote; empty if it does not, or if the file has no digest."""
    attempts: dict[str, list[TestResult]] = {}
    """Every attempt of the tests that have more than one, in order."""
    cases: list[CaseOf] = []
    """The cases to which tests refer by number (:attr:`TestResult.tried`)."""

    def records(self) -> Iterator[TestResult]:
        """Iterate over each attempt of each test as the file has it; a test without a result is ``not-run``."""
        for nodeid, test in self.tests.items():
            yield from self.attempts.get(nodeid, (test,))

    def counts(self) -> dict[str, int]:
        """Count the tests with each verdict."""
        return {v: sum(t.verdict == v for t in self.tests.values()) for v in VERDICTS}


def read(path: Path) -> Run:
    """Read a results file, even one that was cut off; collected tests without a result are ``not-run``.

    Errors: :class:`ResultsError` for a file that cannot be opened, is not a results file, has a newer version, is
    damaged before its last line, or has records that no run writes: a second header, profile or end, anything after the
    end, two results for one attempt.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ResultsError(f"{path}: {e.strerror}") from e
    return parse(data, str(path))


def parse(data: bytes, name: str, allowance: Allowance | None = None) -> Run:
    """Parse the content of a results file, like :func:`read`.

    ``name``: its name in messages; ``allowance``: how much of it may be read, for a file that comes from others.
    Errors: :class:`ResultsError`, as for :func:`read`, and if the file exceeds the allowance.
    """
    allowance = allowance or Allowance()
    try:
        allowance.take_lines(data)
    except Refused as e:
        raise ResultsError(f"{name}: {e}") from None
    lines = data.split(b"\n")
    decode: Callable[[bytes], Record] = msgspec.json.Decoder(Record).decode
    header: RunHeader | None = None
    records: list[tuple[int, Record]] = []
    torn = False
    damaged = ""
    digest = hashlib.sha256()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            allowance.take_json(line)
            record = decode(line)
            allowance.take_tests(len(record.tests) if isinstance(record, Collected) else isinstance(record, TestResult))
        except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            if number == len(lines) and header is not None:  # without a newline: the writer was cut off here
                torn = True
                continue
            raise ResultsError(f"{name}, line {number}: {said(e)}") from e
        if header is not None:
            records.append((number, record))
        elif not isinstance(record, RunHeader) or record.schema != SCHEMA:
            break
        elif record.version > VERSION:  # before anything is read that this version may not know
            raise ResultsError(f"{name}: version {record.version}, and this Concord reads up to {VERSION}; update it")
        else:
            header = record
            if header.version < old.BEFORE:
                header.environment = old.environment_in(header.environment)
                decode = old.decoder(header.version)
        if isinstance(record, RunEnd) and record.digest and record.digest != digest.hexdigest():
            damaged = f"line {number}: the file is not the one that the run wrote (its digest is another)"
        digest.update(line + b"\n")
    if header is None:
        raise ResultsError(f"{name}: not a results file of Concord (its first line must describe the run)")
    return _run(header, records, name, torn=torn, damaged=damaged)


def _run(header: RunHeader, records: Iterable[tuple[int, Record]], name: str, *, torn: bool, damaged: str) -> Run:
    """Build a run from records, each with its line number.

    Errors: :class:`ResultsError` for a record that no run writes in its place.
    """
    run = Run(header, {}, complete=False, torn=torn, damaged=damaged)
    collected: set[str] = set()
    attempts: dict[str, list[TestResult]] = {}
    for line, record in records:
        if run.end is not None:
            raise ResultsError(f"{name}, line {line}: a record after the one that ends the run")
        if isinstance(record, Collected):
            collected.update(record.tests)
            for nodeid in record.tests:
                run.tests.setdefault(nodeid, TestResult(nodeid=nodeid, verdict="not-run", stack=stack_of(nodeid)))
        elif isinstance(record, TestResult):
            before = attempts.setdefault(record.nodeid, [])
            if record.attempt != len(before) + 1:
                raise ResultsError(f"{name}, line {line}: {_out_of_order(record, len(before))}")
            if wrong := _not_cases(record, len(run.cases)):
                raise ResultsError(f"{name}, line {line}: {record.nodeid}: {wrong}")
            before.append(record)
            run.tests[record.nodeid] = record
        elif isinstance(record, Cases):
            run.cases.extend(record.cases)
        elif isinstance(record, RequirementText):
            if record.id in run.requirements:
                raise ResultsError(f"{name}, line {line}: the requirement {record.id} for the second time")
            run.requirements[record.id] = record
        elif isinstance(record, ProfileText):
            if run.profile is not None:
                raise ResultsError(f"{name}, line {line}: a second profile; a run goes by one")
            run.profile = record
        elif isinstance(record, RunHeader):
            raise ResultsError(f"{name}, line {line}: a second run begins here; a file has one")
        else:
            run.complete, run.exit_status, run.end = True, record.exit_status, record
            header.environment = {**header.environment, **record.environment}
            if not header.profile:
                header.profile, header.profile_hash = record.profile, record.profile_hash
    run.collected = frozenset(collected)
    run.attempts = {nodeid: several for nodeid, several in attempts.items() if len(several) > 1}
    run.tests.update((nodeid, merged(several)) for nodeid, several in run.attempts.items())
    return run


def _not_cases(test: TestResult, known: int) -> str:
    """Return what is wrong with the numbers of a test's cases, of which ``known`` came before it; empty if nothing."""
    for tried in test.tried:
        if len(tried.cases) != len(tried.counts):
            return f"{len(tried.cases)} cases and {len(tried.counts)} counts of them"
        if tried.cases and max(tried.cases) >= known:
            return f"case {max(tried.cases)}, of which there are {known} before it"
    return ""


def _out_of_order(record: TestResult, before: int) -> str:
    if 1 <= record.attempt <= before:
        return f"a second result for attempt {record.attempt} of {record.nodeid}; a run has one for each"
    return f"attempt {record.attempt} of {record.nodeid}, of which there are {before} before it"


def merged(attempts: Sequence[TestResult]) -> TestResult:
    """Merge the attempts at a test, in order, into the worst of them with its evidence.

    If the last attempt did not end badly and an earlier one did, the test is ``flaky``.
    """
    saying = [each for each in attempts if each.verdict not in _SAYS_NOTHING] or list(attempts)
    worst = min(saying, key=lambda each: _WORST_FIRST.index(each.verdict) if each.verdict in VERDICTS else -1)
    flaky = worst.verdict in ENDED_BADLY and saying[-1].verdict not in BAD
    return msgspec.structs.replace(
        worst,
        verdict="flaky" if flaky else worst.verdict,
        requirements=next((each.requirements for each in attempts if each.requirements), []),  # a crash reports none
        property_based=any(each.property_based for each in attempts),
        world=worst.world or attempts[-1].world,
        size=worst.size or attempts[-1].size,
        dtype=worst.dtype or attempts[-1].dtype,
    )


_WORST_FIRST = ("crashed", "hung", "failed", "flaky", "waived", "passed", "not-run", "unsupported")
