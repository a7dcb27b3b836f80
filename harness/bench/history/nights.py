"""Files that hold a night: Concord's own, those that pytest-benchmark saves, and output of nccl-tests."""

from __future__ import annotations

import hashlib
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from harness.bench.history import nccl_tests
from harness.bench.records import SCHEMA, VERSION, Fingerprint, Measurement, Night, Series
from harness.safe_io.files import FileError, contents
from harness.safe_io.untrusted import LATEST, Allowance, Refused, json_checked, said

LARGEST = 256 << 20
"""Maximum size of a file in bytes; a night of all benchmarks takes a few megabytes."""
MOST_VALUES = 20_000_000
_LARGEST_FIGURE = 1e18
_MOST_RANKS = 1_000_000


class BadNight(ValueError):
    """A file that is not a valid night.  The message names the file, what is wrong, and what to do."""


class _Header(msgspec.Struct):
    benchmarks: msgspec.Raw = msgspec.Raw()


class _Stats(msgspec.Struct):
    data: list[float] | None = None


class _Benchmark(msgspec.Struct):
    fullname: str
    stats: _Stats
    group: str | None = None


class _Report(msgspec.Struct):
    """The parts of pytest-benchmark's JSON that are used."""

    benchmarks: list[_Benchmark]
    datetime: str
    machine_info: dict[str, Any] = {}
    commit_info: dict[str, Any] = {}


class End(msgspec.Struct, tag="end", tag_field="record"):
    """The last line of the file of a night whose run finished."""

    finished: float


class _Head(msgspec.Struct, tag="night", tag_field="record"):
    night: Night


class _Taken(msgspec.Struct, tag="measurement", tag_field="record"):
    measurement: Measurement


_LINE = msgspec.json.Decoder(_Head | _Taken | End)


def first_line(night: Night) -> bytes:
    """Encode the first line of a night's file: the night without its measurements."""
    return msgspec.json.encode(_Head(msgspec.structs.replace(night, measurements=[]))) + b"\n"


def line(measurement: Measurement) -> bytes:
    """Encode a measurement as a line of a night's file."""
    return msgspec.json.encode(_Taken(measurement)) + b"\n"


def last_line(finished: float) -> bytes:
    """Encode the last line of a night's file.  ``finished``: seconds since the epoch."""
    return msgspec.json.encode(End(finished)) + b"\n"


def dumps(night: Night) -> bytes:
    """Encode a night as JSON lines, which :func:`load` reads."""
    end = last_line(night.started) if night.complete else b""
    return first_line(night) + b"".join(map(line, night.measurements)) + end


def load(file: Path, collective: str = "") -> Night:
    """Read a night from a file of Concord's, pytest-benchmark's or nccl-tests'.  Errors: BadNight.

    ``collective``: the test whose output it is, if it is of nccl-tests and does not say that.
    """
    try:
        data = contents(file, LARGEST)
        changed = file.stat().st_mtime
    except FileError as e:
        raise BadNight(str(e)) from e
    except OSError as e:
        raise BadNight(f"{file}: {e.strerror}") from e
    return loads(data, str(file), collective, changed)


def loads(data: bytes, where: str, collective: str = "", changed: float = 0.0) -> Night:
    """Read a night from the text of a file.  ``where`` names the file in errors.

    A file of Concord's or nccl-tests' that was cut off gives an incomplete night.  ``collective``: as in :func:`load`;
    ``changed``: when the file was, in seconds since the epoch, for a text that has no time.  Errors: BadNight.
    """
    try:
        if data.startswith(b'{"record"'):
            night = _own(data, where)
        elif data.lstrip()[:1] == b"{":
            of_nccl = nccl_tests.is_json(data)
            night = nccl_tests.of_json(data, collective, changed) if of_nccl else _of_others(data, where)
        else:
            night = (
                nccl_tests.of_text(data, collective, changed) if nccl_tests.is_text(data) else _of_others(data, where)
            )
        check(night)
    except BadNight as e:
        raise e if str(e).startswith(where) else BadNight(f"{where}: {e}") from e
    except nccl_tests.Unreadable as e:
        raise BadNight(f"{where}: output of nccl-tests: {e}") from e
    except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise BadNight(f"{where}: damaged, or no night: {said(e)}") from e
    return night


def _own(data: bytes, where: str) -> Night:
    allowance = Allowance(values=MOST_VALUES)
    allowance.take_lines(data)
    lines = [(number, text) for number, text in enumerate(data.split(b"\n"), 1) if text.strip()]
    night: Night | None = None
    for number, text in lines:
        try:
            allowance.take_json(text)
            record = _LINE.decode(text)
        except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            if number == lines[-1][0] and night is not None and not data.endswith(b"\n"):  # the writer was interrupted
                break
            raise BadNight(f"{where}, line {number}: damaged: {said(e)}") from e
        if night is None:
            if not isinstance(record, _Head) or record.night.schema != SCHEMA:
                raise BadNight(f"{where}: not the file of a night: its first line must describe one")
            night = record.night
            if night.version > VERSION:
                raise BadNight(
                    f"{where}: written by a newer Concord (version {night.version}; this one reads up to {VERSION}): "
                    "update Concord"
                )
            night.complete, night.measurements = False, []
        elif isinstance(record, _Taken):
            night.measurements.append(record.measurement)
        elif isinstance(record, End):
            night.complete = True
    assert night is not None
    return night


def _of_others(data: bytes, where: str) -> Night:
    if not bytes(msgspec.json.decode(json_checked(data, Allowance(values=MOST_VALUES)), type=_Header).benchmarks):
        raise BadNight(
            f"{where}: neither a night of Concord's nor JSON of pytest-benchmark's (no benchmarks): give a perf.jsonl, "
            "what --benchmark-json wrote, or the output of nccl-tests"
        )
    return of_pytest_benchmark(msgspec.json.decode(data, type=_Report))


def check(night: Night) -> None:
    """Check that a night is consistent.

    Errors: BadNight if it has no id, an invalid time, a series twice, or an impossible figure.
    """
    if not night.id:
        raise BadNight("the night has no id")
    if not 0 < night.started <= LATEST:
        raise BadNight(f"the night started at {night.started}, which is no time")
    seen = set()
    for measurement in night.measurements:
        name = measurement.series.name
        if measurement.series in seen:
            raise BadNight(f"{name}: measured twice in one night")
        seen.add(measurement.series)
        if not all(ranks for iterations in measurement.samples for ranks in iterations):
            raise BadNight(f"{name}: an iteration without a figure")
        if not measurement.refused and not measurement.iterations():
            raise BadNight(f"{name}: no samples, and not refused")
        least = 0.0 if measurement.series.metric not in ("collectives", "bytes") else -math.inf
        if not all(least <= figure <= _LARGEST_FIGURE for figure in measurement.iterations()):
            raise BadNight(f"{name}: a figure that is negative, or not finite")
        if not (0 <= measurement.series.bytes <= _LARGEST_FIGURE and 0 <= measurement.series.world <= _MOST_RANKS):
            raise BadNight(f"{name}: a size of message or world that there is not")
        if not (0 <= measurement.started <= LATEST and 0 <= measurement.first <= _LARGEST_FIGURE):
            raise BadNight(f"{name}: a time that is none")


def of_pytest_benchmark(report: _Report) -> Night:
    """Convert a report of pytest-benchmark: each benchmark is a series, its rounds are the iterations of one rank.

    The fingerprint leaves out the parts of ``machine_info`` that vary, such as the processor's clock rate.
    Errors: BadNight if timings were not saved, or if the date is invalid.
    """
    measurements = []
    for benchmark in report.benchmarks:
        if not benchmark.stats.data:
            raise BadNight(
                f"{benchmark.fullname}: no stats.data: save timings with --benchmark-save-data, or --benchmark-json"
            )
        series = Series(operation=benchmark.fullname, variant=(("group", benchmark.group),) if benchmark.group else ())
        measurements.append(Measurement(series=series, samples=[[[figure] for figure in benchmark.stats.data]]))
    try:
        started = datetime.fromisoformat(report.datetime).timestamp()
    except (ValueError, OverflowError) as e:
        raise BadNight(f"datetime: {e}") from e
    machine, cpu = report.machine_info, report.machine_info.get("cpu")
    cpu = cpu if isinstance(cpu, dict) else {}
    of_machine = {"node": machine.get("node"), "machine": machine.get("machine"), "processor": cpu.get("brand_raw")}
    of_machine["cores"] = cpu.get("count")
    of_software = {
        "python": machine.get("python_version"),
        "implementation": machine.get("python_implementation"),
        "kernel": machine.get("release"),
        "system": machine.get("system"),
    }
    identity = [report.datetime, machine.get("node"), report.commit_info.get("id"), measurements]
    digest = hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()
    return Night(
        id=f"pytest-benchmark-{digest[:24]}",
        started=started,
        fingerprint=Fingerprint(machine=_pairs(of_machine), software=_pairs(of_software)),
        commit=str(report.commit_info.get("id") or ""),
        subject=str(report.commit_info.get("project") or "pytest-benchmark"),
        measurements=measurements,
    )


def _pairs(found: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, str(value)) for name, value in found.items() if value not in (None, "")))
