"""Files that hold a night: Concord's own, and what pytest-benchmark saves."""

from __future__ import annotations

import hashlib
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from harness.bench.records import SCHEMA, VERSION, Fingerprint, Measurement, Night, Series
from harness.safe_io.files import FileError, contents
from harness.safe_io.untrusted import LATEST, Allowance, Refused, json_checked, said

LARGEST = 256 << 20
"""Bytes of a file; a night of all benchmarks comes to some megabytes."""
MOST_VALUES = 20_000_000
_LARGEST_FIGURE = 1e18
_MOST_RANKS = 1_000_000


class BadNight(ValueError):
    """A file that is no night; says which, what is wrong, and what to do."""


class _Header(msgspec.Struct):
    benchmarks: msgspec.Raw = msgspec.Raw()


class _Stats(msgspec.Struct):
    data: list[float] | None = None


class _Benchmark(msgspec.Struct):
    fullname: str
    stats: _Stats
    group: str | None = None


class _Report(msgspec.Struct):
    """What is used of pytest-benchmark's JSON."""

    benchmarks: list[_Benchmark]
    datetime: str
    machine_info: dict[str, Any] = {}
    commit_info: dict[str, Any] = {}


class End(msgspec.Struct, tag="end", tag_field="record"):
    """The last line of the file of a night that came to its end."""

    finished: float


class _Head(msgspec.Struct, tag="night", tag_field="record"):
    night: Night


class _Taken(msgspec.Struct, tag="measurement", tag_field="record"):
    measurement: Measurement


_LINE = msgspec.json.Decoder(_Head | _Taken | End)


def first_line(night: Night) -> bytes:
    """How the file of a night begins: with the night, and none of its measurements."""
    return msgspec.json.encode(_Head(msgspec.structs.replace(night, measurements=[]))) + b"\n"


def line(measurement: Measurement) -> bytes:
    """One more measurement in the file of a night."""
    return msgspec.json.encode(_Taken(measurement)) + b"\n"


def last_line(finished: float) -> bytes:
    """How the file of a night ends."""
    return msgspec.json.encode(End(finished)) + b"\n"


def dumps(night: Night) -> bytes:
    """The text of a file that :func:`load` reads: JSON lines."""
    end = last_line(night.started) if night.complete else b""
    return first_line(night) + b"".join(map(line, night.measurements)) + end


def load(file: Path) -> Night:
    """The night in a file of Concord's or of pytest-benchmark's.  Errors: BadNight."""
    try:
        data = contents(file, LARGEST)
    except FileError as e:
        raise BadNight(str(e)) from e
    return loads(data, str(file))


def loads(data: bytes, where: str) -> Night:
    """The night in the text of a file; ``where`` names it in errors.

    A file of Concord's that was cut off is a night that is not complete.  Errors: BadNight.
    """
    try:
        night = _own(data, where) if data.startswith(b'{"record"') else _of_others(data, where)
        check(night)
    except BadNight as e:
        raise e if str(e).startswith(where) else BadNight(f"{where}: {e}") from e
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
            if number == lines[-1][0] and night is not None and not data.endswith(b"\n"):  # the writer was cut off here
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
            "or what --benchmark-json wrote"
        )
    return of_pytest_benchmark(msgspec.json.decode(data, type=_Report))


def check(night: Night) -> None:
    """Errors: BadNight if a night contradicts itself: no name, no time, a series twice, figures that cannot be."""
    if not night.id:
        raise BadNight("the night has no id")
    if not 0 < night.started <= LATEST:
        raise BadNight(f"the night started at {night.started}, which is no time")
    seen = set()
    for one in night.measurements:
        name = one.series.name
        if one.series in seen:
            raise BadNight(f"{name}: measured twice in one night")
        seen.add(one.series)
        if not all(ranks for iterations in one.samples for ranks in iterations):
            raise BadNight(f"{name}: an iteration without a figure")
        if not one.refused and not one.iterations():
            raise BadNight(f"{name}: no samples, and not refused")
        least = 0.0 if one.series.metric not in ("collectives", "bytes") else -math.inf
        if not all(least <= figure <= _LARGEST_FIGURE for figure in one.iterations()):
            raise BadNight(f"{name}: a figure that is negative, or not finite")
        if not (0 <= one.series.bytes <= _LARGEST_FIGURE and 0 <= one.series.world <= _MOST_RANKS):
            raise BadNight(f"{name}: a size of message or world that there is not")
        if not (0 <= one.started <= LATEST and 0 <= one.first <= _LARGEST_FIGURE):
            raise BadNight(f"{name}: a time that is none")


def of_pytest_benchmark(report: _Report) -> Night:
    """A night of pytest-benchmark's: a series a benchmark, all its rounds as one round of iterations on one rank.

    The fingerprint leaves out what its ``machine_info`` says of the moment, as the clock rate of the processor.
    Errors: BadNight if timings were not saved.
    """
    measurements = []
    for one in report.benchmarks:
        if not one.stats.data:
            raise BadNight(
                f"{one.fullname}: no stats.data: save timings with --benchmark-save-data, or --benchmark-json"
            )
        series = Series(operation=one.fullname, variant=(("group", one.group),) if one.group else ())
        measurements.append(Measurement(series=series, samples=[[[figure] for figure in one.stats.data]]))
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
    what = [report.datetime, machine.get("node"), report.commit_info.get("id"), measurements]
    digest = hashlib.sha256(msgspec.json.encode(what, order="deterministic")).hexdigest()
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
