"""Read what nccl-tests prints (``all_reduce_perf`` and the others), and the JSON that it writes with ``-J``.

The formats are those of nccl-tests 2.13.0 to 2.19.6 (``src/common.cu``, ``src/util.cu``): a list of devices, a header
of columns, and a row for each size with an out-of-place and an in-place figure.  The JSON also holds the whole
environment of the run, which is not read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from harness.bench.figures import busbw
from harness.bench.records import Fingerprint, Measurement, Night, Series, pairs
from harness.safe_io.shown import one_line
from harness.safe_io.untrusted import LATEST, Allowance, json_checked

SUBJECT = "nccl-tests"
NEWEST_JSON = 3
"""Version of the JSON up to which it is read."""

OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "alltoall": "all_to_all_single",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "sendrecv": "send_recv",
}
"""The tests that are read, and the operations that they are for us."""
_DTYPES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_DTYPES |= {name: name for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "bfloat16")}
_OPS = {"sum": "sum", "prod": "product", "max": "max", "min": "min", "avg": "avg", "mulsum": "premul_sum", "none": ""}
_USUALLY_IN_PLACE = ("all_reduce", "broadcast", "reduce")
"""Operations that our series without a ``place`` do in place; the others do them out of place."""

_LARGEST = 1 << 60
_MOST_ROWS = 100_000
_MOST_RANKS = 1_000_000
_MARKS = (b"nThread", b"algbw")
_TAG = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>: ?")
"""What ``mpirun --tag-output`` puts in front of a line."""
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+\d+\s+on\s+(\S{1,1024})"
    r"\s+device\s+(\d{1,7})\s+\[([^\]]{0,128})\]\s*(.*)"
)
_ROW = re.compile(r"\s*(\d{1,19})\s+(\d{1,19})\s+([a-z]\w{0,15})\s+([a-z]\w{0,15})\s+(-?\d{1,9})\s+(.*)")
_LIKE_A_ROW = re.compile(r"\s*\d+\s+\d+\s")
_FIGURE = re.compile(r"\d{1,15}(?:\.\d{1,15})?(?:e[+-]?\d{1,2})?")
_FACTS = {"nccl-tests": r"nccl-tests version (\S{1,40})", "nccl": r"nccl-library=(\d{1,9})"}
_SETTINGS = re.compile(
    r"# nThread (\d+) nGpus (\d+) .* warmup iters: (-?\d+) iters: (-?\d+) agg iters: (-?\d+) "
    r"validation: -?\d+ graph: (-?\d+)"
)
_SETTING_NAMES = ("threads", "devices of a thread", "warm-up", "iterations", "aggregated", "graph")


class Unreadable(ValueError):
    """Output of nccl-tests that is not taken.  The message says what is wrong, where, and what to do."""


@dataclass(frozen=True)
class _Body:
    """A figure of a row."""

    seconds: float
    algbw: float
    busbw: float
    wrong: float | None
    """Number of wrong values; None if they were not counted."""


@dataclass(frozen=True)
class _Row:
    where: str
    size: int
    dtype: str
    op: str
    root: int
    bodies: tuple[tuple[str, _Body], ...]
    """Each with its place, ``out`` or ``in``."""


def is_text(data: bytes) -> bool:
    """Return whether a text may be what nccl-tests prints."""
    return all(mark in data[: 4 << 20] for mark in _MARKS)


def is_json(data: bytes) -> bool:
    """Return whether JSON may be what nccl-tests writes."""
    return b'"nccl_version"' in data[: 4 << 20] and not data.lstrip().startswith(b'{"benchmarks"')


def of_text(data: bytes, collective: str, started: float) -> Night:
    """Return the night of a text.

    ``collective``: the test, such as ``all_gather``, for a text that does not say it (before 2.16.7); ``started``:
    seconds since the epoch.  Errors: :class:`Unreadable`.
    """
    Allowance().take_lines(data)
    lines = [_TAG.sub("", line) for line in data.decode(errors="replace").split("\n")]
    devices = _devices(lines)
    named = next((m[1] for line in lines if (m := re.match(r"# Collective test starting: (\S{1,200})", line))), "")
    facts = {name: m[1] for name, text in _FACTS.items() if (m := re.search(text, "\n".join(lines[:200])))}
    settings = next((m for line in lines if (m := _SETTINGS.match(line))), None)
    software = facts | (dict(zip(_SETTING_NAMES, settings.groups(), strict=True)) if settings else {})
    ended = next((m for line in lines if (m := re.match(r"#\s*Out of bounds values\s*:\s*(\d{1,18})", line))), None)
    if ended and int(ended[1]):
        raise Unreadable(f"{ended[1]} values are out of bounds: wrong values have no figure; find out why first")
    rows = list(_rows(lines, whole=ended is not None))
    return _night(data, collective, named, rows, devices, software, started, complete=ended is not None)


def _devices(lines: Sequence[str]) -> list[_Device]:
    """Return what the text says of the device of each rank."""
    found = [m for line in lines if line.startswith("#") and (m := _RANK.fullmatch(line.rstrip()))]
    if not found:
        raise Unreadable("it has no list of devices (# Rank 0 … device …): give the whole output")
    return [_Device(int(m[1]), int(m[2] or 0), m[3], int(m[4]), m[5], m[6].strip()) for m in found]


def _check(devices: Sequence[_Device]) -> None:
    """Raise :class:`Unreadable` unless these are the devices of ranks 0 to n - 1, which are in one group."""
    if len({one.group for one in devices}) > 1:
        raise Unreadable("its ranks are in several groups (NCCL_TESTS_SPLIT), whose sizes it does not say")
    if len(devices) > _MOST_RANKS or sorted(one.rank for one in devices) != list(range(len(devices))):
        raise Unreadable(f"its list of {len(devices)} devices lacks ranks, or has one twice: give the whole output")


def _rows(lines: Sequence[str], *, whole: bool) -> Iterator[_Row]:
    """Yield the rows below each header.  ``whole``: the output has its end; otherwise the last row may be cut off."""
    columns: list[str] = []
    last = max((i for i, line in enumerate(lines) if _LIKE_A_ROW.match(line)), default=-1)
    for i, line in enumerate(lines):
        words = line.lstrip("# ").split()
        if line.startswith("#") and words[:5] == ["size", "count", "type", "redop", "root"]:
            columns = words[5:]
            _check_columns(columns)
        elif columns and _LIKE_A_ROW.match(line):
            try:
                yield _row(line, columns, f"line {i + 1}")
            except Unreadable:
                if whole or i != last:
                    raise


def _check_columns(columns: Sequence[str]) -> None:
    if "cputime" in columns:
        raise Unreadable("its times are those of the CPU (-C), which are no figures of a collective")
    if [name for name in columns if not name.startswith("i_")][:8] != ["time", "algbw", "busbw", "#wrong"] * 2:
        raise Unreadable(f"its columns are {one_line(' '.join(columns))[:200]}: no format from 2.13 to 2.19")


def _row(line: str, columns: Sequence[str], where: str) -> _Row:
    match = _ROW.fullmatch(line.rstrip())
    words = match[6].split() if match else []
    expected = len(columns) + ("timestamp" in columns)  # which is two words
    if match is None or len(words) != expected:
        raise Unreadable(f"{where}: {one_line(line)[:120]!r} is no row of a result")
    found = []
    for place, start in zip(("out", "in"), (i for i, name in enumerate(columns) if name == "time"), strict=True):
        time, alg, bus = (_number(word, where) for word in words[start : start + 3])
        wrong = None if words[start + 3] == "N/A" else _number(words[start + 3], where)
        found.append((place, _Body(time / 1e6, alg, bus, wrong)))
    return _Row(where, int(match[1]), match[3], match[4], int(match[5]), tuple(found))


def _number(word: str, where: str) -> float:
    if not _FIGURE.fullmatch(word):
        raise Unreadable(f"{where}: {one_line(word)[:40]!r} is no figure")
    return float(word)


Small = Annotated[int, Meta(ge=0, le=_MOST_RANKS)]
Large = Annotated[int, Meta(ge=0, le=_LARGEST)]
Double = Annotated[float, Meta(ge=0, le=1e18)]
Name = Annotated[str, Meta(max_length=4096)]


class _Device(msgspec.Struct):
    rank: Small
    group: Small = 0
    hostname: Name = ""
    device: Small = 0
    device_hex: Name = ""
    """Its place in the host, as PCI numbers it."""
    device_info: Name = ""
    """Its name."""


class _Config(msgspec.Struct):
    devices: list[_Device]
    nthreads: int = 0
    ngpus: int = 0
    warmup_iters: int = 0
    iterations: int = 0
    aggregated_iterations: int = 0
    graph: int = 0


class _JsonBody(msgspec.Struct):
    alg_bw: Double
    bus_bw: Double
    time: Double | None = None
    cpu_time: Double | None = None
    nwrong: Double | None = None


class _Result(msgspec.Struct):
    size: Large
    type: Name
    redop: Name
    root: Name = "-1"
    out_of_place: _JsonBody | None = None
    in_place: _JsonBody | None = None


class _OutOfBounds(msgspec.Struct):
    count: int


class _Document(msgspec.Struct):
    """What is read of the JSON.  ``env``, with all variables of the run, is not."""

    version: Small
    config: _Config
    results: list[_Result]
    start_time: Name = ""
    end_time: Name = ""
    args: list[Name] = []
    nccl_version: int = 0
    out_of_bounds: _OutOfBounds | None = None


def of_json(data: bytes, collective: str, started: float) -> Night:
    """Return the night of JSON.  Arguments: as of :func:`of_text`.

    Errors: :class:`Unreadable`, and those of parsers.
    """
    document = msgspec.json.decode(json_checked(data, Allowance()), type=_Document)
    if document.version > NEWEST_JSON:
        raise Unreadable(f"its format has version {document.version}, and this Concord reads up to {NEWEST_JSON}")
    config = document.config
    if not config.devices:
        raise Unreadable("it has no list of devices")
    if document.out_of_bounds is not None and document.out_of_bounds.count:
        raise Unreadable(
            f"{document.out_of_bounds.count} values are out of bounds: wrong values have no figure; find out why first"
        )
    iterations = (config.warmup_iters, config.iterations, config.aggregated_iterations)
    settings = (config.nthreads, config.ngpus, *iterations, config.graph)
    software = {"nccl": str(document.nccl_version or "")} | dict(zip(_SETTING_NAMES, map(str, settings), strict=True))
    if document.start_time:
        try:
            started = datetime.strptime(document.start_time, "%Y-%m-%d %H:%M:%S").timestamp()
        except (ValueError, OverflowError) as e:
            raise Unreadable(f"start_time: {one_line(str(e))[:200]}") from e
    named = document.args[0] if document.args else ""
    rows = [_row_of(one, f"result {i}") for i, one in enumerate(document.results, 1)]
    complete = bool(document.end_time) and document.out_of_bounds is not None
    return _night(data, collective, named, rows, config.devices, software, started, complete=complete)


def _row_of(one: _Result, where: str) -> _Row:
    found = []
    for place, body in (("out", one.out_of_place), ("in", one.in_place)):
        if body is None:
            continue
        if body.time is None:
            raise Unreadable(f"{where}: it has no time, or that of the CPU (-C), which is no figure of a collective")
        found.append((place, _Body(body.time / 1e6, body.alg_bw, body.bus_bw, body.nwrong)))
    root = one.root.strip()
    if not re.fullmatch(r"-?\d{1,9}", root):
        raise Unreadable(f"{where}: root {one_line(root)[:40]!r} is no rank")
    return _Row(where, one.size, one.type, one.redop, int(root), tuple(found))


def _night(
    data: bytes,
    asked: str,
    named: str,
    rows: Sequence[_Row],
    devices: Sequence[_Device],
    software: dict[str, str],
    started: float,
    *,
    complete: bool,
) -> Night:
    _check(devices)
    collective = _collective(asked, named)
    if len(rows) > _MOST_ROWS:
        raise Unreadable(f"{len(rows)} rows; at most {_MOST_ROWS} are read")
    samples: dict[Series, list[list[list[float]]]] = {}
    for row in rows:
        for place, body in row.bodies:
            if row.size:  # of no bytes, where a size is too small to be shared out
                series = _series(collective, row, place, body, len(devices))
                samples.setdefault(series, []).append([[body.seconds]])
    if not samples:
        raise Unreadable("it has no results")
    if not 0 < started <= LATEST:
        raise Unreadable("it has no time at which it started")
    names = sorted({one_line(one.device_info)[:200] for one in devices})
    places = {(one.hostname, one.device, one.device_hex) for one in devices}  # which ranks may share
    hosts = len({one.hostname for one in devices})
    machine = {"accelerators": f"{len(places)} x {', '.join(names)}", "hosts": str(hosts)}
    return Night(
        id=f"{SUBJECT}-{hashlib.sha256(data).hexdigest()[:24]}",
        started=started,
        fingerprint=Fingerprint(machine=pairs(machine), software=pairs(software)),
        subject=SUBJECT,
        complete=complete,
        measurements=[Measurement(series=one, samples=rounds) for one, rounds in samples.items()],
    )


def _collective(asked: str, named: str) -> str:
    """Return the name of the test.  ``asked``: by the user; ``named``: the program in the output, if it says that."""
    program = re.sub(r"(_perf)?(\.exe)?$", "", named.replace("\\", "/").rpartition("/")[2])
    found = asked or program
    if not found:
        raise Unreadable(f"it does not say which test it is of: give --collective: {', '.join(OPERATIONS)}")
    if found not in OPERATIONS:
        raise Unreadable(f"{one_line(found)[:60]!r} is none of {', '.join(OPERATIONS)}: give --collective")
    if asked and program in OPERATIONS and asked != program:
        raise Unreadable(f"it is of {program}, and not of {asked}")
    return found


def _series(collective: str, row: _Row, place: str, body: _Body, ranks: int) -> Series:
    """Return the series of a figure, which must be right and consistent.  Errors: :class:`Unreadable`."""
    operation, form = OPERATIONS[collective], f"{row.where}: {collective} of {row.size} B {place} of place"
    if row.dtype not in _DTYPES or row.op not in _OPS:
        raise Unreadable(f"{row.where}: type {row.dtype!r} with redop {row.op!r}: nccl-tests has no such thing")
    if body.wrong:
        raise Unreadable(f"{form}: {body.wrong:g} wrong values; wrong values have no figure: find out why first")
    if not 0 < row.size <= _LARGEST or not body.seconds > 0:
        raise Unreadable(f"{form}: {body.seconds * 1e6:g} us is no time")
    for name, found, expected in (
        ("algbw", body.algbw, row.size / body.seconds / 1e9),
        ("busbw", body.busbw, busbw(operation, row.size, body.seconds, ranks)),
    ):
        if abs(found - expected) > 0.02 + 0.05 * expected:
            raise Unreadable(
                f"{form}: its {name} is {found:g} GB/s, and {expected:.3g} by its size and time on {ranks} ranks: "
                "damaged, or another --collective"
            )
    usual = "in" if collective in _USUALLY_IN_PLACE else "out"
    variant = {
        "by": SUBJECT,
        "place": "" if place == usual else place,
        "root": str(row.root) if row.root > 0 else "",
        "values": "unchecked" if body.wrong is None else "",
    }
    return Series(
        operation=operation,
        bytes=row.size,
        dtype=_DTYPES[row.dtype],
        op=_OPS[row.op],
        world=ranks,
        backend="nccl",
        device="cuda",
        variant=pairs(variant),
    )
