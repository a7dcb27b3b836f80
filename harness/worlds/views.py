"""What is known about each rank at one moment, as the watchdog sees it: made from what monitors answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STOPPED_FOR = 1.5
"""Seconds after which a stopped rank (SIGSTOP) is assumed not to come back."""
MOST_THREADS, MOST_RECORDS, MOST_RECORDERS, MOST_GROUPS = 1000, 400, 4, 2000
"""The most that a rank's monitor reports (records: from each recorder).  An answer with more than that is not from a
monitor, and comparing it would take forever."""

_CLOCKS_DIFFER_NS = 1_000_000
"""By how much a recorder's time may be wrong, which it takes from another clock."""


@dataclass(frozen=True)
class Record:
    """One collective, as the Flight Recorder recorded it."""

    group: str
    seq: int
    op: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    done: bool = False
    p2p: bool = False
    timeout: float = 0.0
    """In seconds; 0 if unknown."""
    time_ns: int = 0
    """When it was issued, on the monotonic clock."""

    @property
    def tensors(self) -> str:
        """``float32[4]`` for the first tensor, with the number of tensors if there are more; empty without tensors."""
        if not self.sizes:
            return ""
        dtype = _DTYPES.get(self.dtypes[0], self.dtypes[0].lower()) if self.dtypes else ""
        more = f" x{len(self.sizes)}" if len(self.sizes) > 1 else ""
        return f"{dtype}{list(self.sizes[0])}{more}"

    def __str__(self) -> str:
        return f"{self.op}({self.tensors})"


_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Int": "int32",
    "Long": "int64",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}


@dataclass(frozen=True)
class View:
    """The facts that are known about one rank at one moment."""

    index: int
    state: str
    """``running``, or how it ended: ``returned``, ``raised``, ``skipped``, ``died``."""
    answered: bool = True
    """Whether the monitor thread answered; if not, frames and records are unknown."""
    quiet: bool = False
    """Whether its main thread slept and it used almost no CPU since the last look."""
    on_device: bool = False
    """Whether it is on an accelerator."""
    stopped: bool = False
    """Whether a signal has stopped it, for at least :data:`STOPPED_FOR` seconds."""
    frames: tuple[tuple[str, int, str], ...] = ()
    """(file, line, function) of the main thread, outermost first."""
    called: str = ""
    """Source text of the call that the innermost frame is executing."""
    operator: str = ""
    """The operator that the innermost frame is in the middle of, as ``namespace.name.overload``; empty if of none."""
    timeout: float | None = None
    """The timeout in seconds that a frame of torch.distributed was given, if there is one."""
    alarm: str = ""
    """The name of a thread that may act later by itself; empty if there is none."""
    records: tuple[Record, ...] | None = None
    """Entries of the Flight Recorder, oldest first; None if there is no recorder."""
    complete: bool = False
    """Whether ``records`` has everything that it has issued since the run began, as far as the recorder can tell."""
    groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and global ranks of the process groups that it is a member of."""
    issuing: Record | None = None
    """The collective in the middle of whose call it is, if no recorder has it yet: many libraries connect first."""

    @property
    def known(self) -> tuple[Record, ...]:
        """All collectives that are known, oldest first."""
        return (*(self.records or ()), *([self.issuing] if self.issuing else []))

    @property
    def outstanding(self) -> tuple[Record, ...]:
        """Those that are not done."""
        return tuple(r for r in self.known if not r.done)


def view_of(
    index: int, snapshot: Mapping[str, object] | None, *, quiet: bool, stopped: bool, alarm_of: Mapping[int, bool]
) -> View:
    """Build a live rank's view from its monitor's answer.

    ``alarm_of``: by the kernel's id of a thread, whether it may wake up by itself.  Missing threads may, except the
    main thread.
    """
    unknown = View(index, "running", answered=False, quiet=quiet, stopped=stopped)
    if not isinstance(snapshot, Mapping):
        return unknown
    try:
        known = _read_snapshot(snapshot, alarm_of)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return unknown  # this is not a monitor's answer
    return dataclasses.replace(known, index=index, quiet=quiet, stopped=stopped)


def _read_snapshot(snapshot: Mapping[str, Any], alarm_of: Mapping[int, bool]) -> View:
    frames: tuple[tuple[str, int, str], ...] = ()
    called, operator, timeout, alarm, issued = "", "", None, "", None
    told = (snapshot["threads"], snapshot.get("records") or (), snapshot.get("groups") or ())
    limits = (MOST_THREADS, MOST_RECORDERS * MOST_RECORDS, MOST_GROUPS)
    if any(len(each) > most for each, most in zip(told, limits, strict=True)):
        raise ValueError("more than a monitor tells")
    for thread in snapshot["threads"]:
        own = tuple((str(file), int(line), str(function)) for file, line, function in thread["frames"])
        if thread["main"]:
            frames, called, operator = own, str(thread["called"]), str(thread.get("operator", ""))
            timeout = None if thread["timeout"] is None else float(thread["timeout"])
            issued = thread.get("issuing")
            if alarm_of.get(thread["native"], False):
                alarm = "the main thread"
        elif alarm_of.get(thread["native"], True):
            alarm = str(thread["name"]) or "a thread without a name"
    raw = snapshot.get("records")
    records = None if raw is None else tuple(_read_record(r) for r in raw)
    complete = snapshot.get("complete") is True
    groups = tuple((str(k), tuple(map(int, v))) for k, v in (snapshot.get("groups") or {}).items())
    issuing = _read_issuing(issued, records or ())
    return View(
        0,
        "running",
        frames=frames,
        called=called,
        operator=operator,
        timeout=timeout,
        alarm=alarm,
        records=records,
        complete=complete,
        groups=groups,
        issuing=issuing,
    )


def _read_issuing(raw: Mapping[str, Any] | None, records: Sequence[Record]) -> Record | None:
    """Return a collective that is being issued, with the number that it will have; None if a recorder may have it."""
    if raw is None:
        return None
    record = _read_record({"seq": 0, "done": False, "timeout_s": 0.0, **raw})
    own = [r for r in records if (r.group, r.p2p) == (record.group, record.p2p)]
    if any(r.time_ns >= record.time_ns - _CLOCKS_DIFFER_NS for r in own):
        return None
    return dataclasses.replace(record, seq=max((r.seq for r in own), default=0) + 1)


def _read_record(raw: Mapping[str, Any]) -> Record:
    return Record(
        str(raw["group"]),
        int(raw["seq"] or 0),
        str(raw["op"]),
        tuple(tuple(map(int, size)) for size in raw["sizes"]),
        tuple(map(str, raw["dtypes"])),
        bool(raw["done"]),
        bool(raw["p2p"]),
        float(raw["timeout_s"]),
        int(raw["time_ns"]),
    )
