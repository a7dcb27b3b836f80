"""Files that hold a night: Concord's own, and what pytest-benchmark saves."""

from __future__ import annotations

import hashlib
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from harness.bench.records import SCHEMA, VERSION, Fingerprint, Measurement, Night, Series


class BadNight(ValueError):
    """A file that is no night; says which, what is wrong, and what to do."""


class _Header(msgspec.Struct):
    schema: str = ""
    version: int | str = VERSION  # pytest-benchmark's is a text
    benchmarks: msgspec.Raw = msgspec.Raw()
    fingerprint: msgspec.Raw = msgspec.Raw()


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


def load(file: Path) -> Night:
    """The night in a file of Concord's or of pytest-benchmark's.  Errors: BadNight."""
    try:
        data = file.read_bytes()
    except OSError as e:
        raise BadNight(f"{file}: {e.strerror or e}") from e
    return loads(data, str(file))


def dumps(night: Night) -> bytes:
    """The text of a file that ``load`` reads; what it is and in which version comes first, though it is the default."""
    body = msgspec.json.encode(night)
    return msgspec.json.encode({"schema": SCHEMA, "version": VERSION})[:-1] + b"," + body[1:]


def loads(data: bytes, where: str) -> Night:
    """The night in the text of a file; ``where`` names it in errors.  Errors: BadNight."""
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.schema == SCHEMA or (not header.schema and bytes(header.fingerprint)):
            if isinstance(header.version, str) or header.version > VERSION:
                raise BadNight(
                    f"{where}: written by a newer Concord (version {header.version}; this one reads up to {VERSION}): "
                    "update Concord"
                )
            night = msgspec.json.decode(data, type=Night)
        elif bytes(header.benchmarks):
            night = of_pytest_benchmark(msgspec.json.decode(data, type=_Report))
        else:
            raise BadNight(
                f"{where}: neither a night of Concord's (no schema {SCHEMA!r}) nor JSON of pytest-benchmark's "
                "(no benchmarks): give a perf.json, or what --benchmark-json wrote"
            )
        check(night)
    except BadNight as e:
        raise e if str(e).startswith(where) else BadNight(f"{where}: {e}") from e
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise BadNight(f"{where}: damaged, or no night: {e}") from e
    return night


def check(night: Night) -> None:
    """Errors: BadNight if a night contradicts itself: no name, no time, a series twice, figures that cannot be."""
    if not night.id:
        raise BadNight("the night has no id")
    if not (math.isfinite(night.started) and night.started > 0):
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
        if not all(math.isfinite(figure) and figure >= least for figure in one.iterations()):
            raise BadNight(f"{name}: a figure that is negative, or not finite")


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
    except ValueError as e:
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
