"""The monitor thread of a rank: reports, at any time, where the rank is and what its process groups wait for.

It sleeps in a read and costs nothing until the controller asks.  A rank that is stopped, or that holds the interpreter
lock in C code, does not answer.  The controller then uses the black box, the kernel and a signal that dumps the stack.
"""

from __future__ import annotations

import functools
import json
import linecache
import math
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from harness.worlds import recorder
from harness.worlds.places import DISTRIBUTED, OPERATORS, is_source
from harness.worlds.views import MOST_GROUPS, MOST_RECORDERS, MOST_RECORDS, MOST_THREADS

THREAD_NAME = "concord-monitor"
_LENGTH = struct.Struct("!I")
_MOST_FRAMES = 80
_RUN = {"began_ns": 0}  # since the epoch


def start(sock: socket.socket) -> threading.Thread:
    """Start the thread on an inherited socket."""
    thread = threading.Thread(target=_serve, args=(sock,), name=THREAD_NAME, daemon=True)
    thread.start()
    return thread


def _serve(sock: socket.socket) -> None:
    while True:
        try:
            asked = sock.recv(1)
        except OSError:
            return
        if not asked:
            os._exit(71)  # the controller has gone, so nobody needs this rank
        try:
            answer = json.dumps(snapshot()).encode()
        except Exception as e:
            answer = json.dumps({"error": repr(e)}).encode()
        try:
            sock.sendall(_LENGTH.pack(len(answer)) + answer)
        except OSError:
            return


def snapshot() -> dict[str, Any]:
    """Return the stacks of all Python threads, outermost frame first, and the Flight Recorder's entries and groups."""
    names = {t.ident: t for t in threading.enumerate()}
    main = threading.main_thread().ident
    threads = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] != main)[:MOST_THREADS]:
        thread = names.get(ident)
        if thread is not None and thread.name == THREAD_NAME:
            continue
        frames: list[tuple[str, int, str]] = []
        called, timeout, issuing = _called(frame), None, None
        f: Any = frame
        while f is not None and len(frames) < _MOST_FRAMES:
            frames.append((f.f_code.co_filename, f.f_lineno or 0, f.f_code.co_name))
            if timeout is None:
                timeout = _timeout_of(f)
            issuing = issuing or _issuing(f)
            f = f.f_back
        threads.append(
            {
                "name": thread.name if thread else "?",
                "native": thread.native_id if thread else 0,
                "main": ident == main,
                "called": called,
                "operator": _operator(frame),
                "timeout": timeout,
                "issuing": issuing,
                "frames": frames[::-1],
            }
        )
    return {"threads": threads, **flight_record()}


def _called(frame: Any) -> str:
    """Return the source text of the call that a frame is executing, as far as it is on one line; empty if unknown."""
    try:
        positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        line, end_line, column, end_column = positions
        if line is None or column is None:
            return ""
        file = frame.f_code.co_filename
        text = (linecache.getline(file, line) if is_source(file) else "").encode()
        return text[column : end_column if end_line == line else None].decode(errors="replace").strip()
    except Exception:
        return ""


def _operator(frame: Any) -> str:
    """Return the name of the operator that a frame is in the middle of, ``""`` if of none.

    Compiled code calls operators from files that it generates, so no frame is in torch.distributed.  And since 2.13,
    torch passes through several frames of its own to reach the kernel.
    """
    try:
        while frame is not None and frame.f_code.co_filename.startswith(OPERATORS):
            operator = frame.f_locals.get("self")
            if type(operator).__module__ == "torch._ops":
                return str(operator)
            frame = frame.f_back
    except Exception:  # the frame has gone on
        return ""
    return ""


def _timeout_of(frame: Any) -> float | None:
    """Return the timeout in seconds that a frame of torch.distributed was given (as in monitored_barrier), or None."""
    if not frame.f_code.co_filename.startswith(DISTRIBUTED):
        return None
    timeout = frame.f_locals.get("timeout")
    return timeout.total_seconds() if hasattr(timeout, "total_seconds") else None


def _issuing(frame: Any) -> dict[str, Any] | None:
    """Return the collective that a frame is in the middle of issuing, or None."""
    try:
        return recorder.issuing(frame)
    except Exception:  # the frame has gone on
        return None


def begin_run() -> None:
    """Note that a run begins.  Whether records are complete is a question about the current run alone."""
    _RUN["began_ns"] = time.time_ns()


def flight_record() -> dict[str, Any]:
    """Return the entries of the flight recorders, whether they are complete, and the process groups, as plain data.

    On gloo, ``state`` stays ``scheduled``, but ``retired`` is set when a collective has completed (seen on 2.11 and
    2.13).  So an entry counts as done if either field says so.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {"records": None, "complete": False, "groups": {}}
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    groups: dict[str, list[int]] = {}
    if c10d is not None:
        world = c10d._world
        for group, ranks in list(world.pg_group_ranks.items())[:MOST_GROUPS]:
            groups[str(world.pg_names.get(group, ""))] = sorted(ranks, key=lambda r: ranks[r])
    dumps, complete = _dumps(torch._C._distributed_c10d)
    carriers = {str(name) for dump in dumps for name in dump.get("carriers", ())}
    records: list[dict[str, Any]] = []
    since_epoch = time.time_ns() - time.monotonic_ns()
    for dump in dumps:
        entries = dump.get("entries", [])
        complete &= _reaches_back(entries)
        entries = [entry for entry in entries if _group_of(entry) not in carriers]
        complete &= len(entries) <= MOST_RECORDS or _reaches_back(entries[-MOST_RECORDS:])
        records += [_record(entry, since_epoch) for entry in entries[-MOST_RECORDS:]]
    return {"records": records if dumps else None, "complete": complete, "groups": groups}


def _record(entry: dict[str, Any], since_epoch: int) -> dict[str, Any]:
    return {
        "group": _group_of(entry),
        "seq": entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id"),
        "p2p": bool(entry.get("is_p2p")),
        "op": str(entry.get("profiling_name", "?")).split(":", 1)[-1],
        "sizes": entry.get("input_sizes") or [],
        "dtypes": entry.get("input_dtypes") or [],
        "done": bool(entry.get("retired")) or entry.get("state") == "completed",
        "timeout_s": (entry.get("timeout_ms") or 0) / 1000,
        "time_ns": entry.get("time_created_ns", 0) - since_epoch,
    }


def _dumps(c10d: Any) -> tuple[list[dict[str, Any]], bool]:
    """Return what each flight recorder of this process holds, and whether all of them could be read.

    These are PyTorch's own, NCCL's, and those that other libraries offer as NCCL does: by a handler
    ``dump_<library>_trace_json`` of PyTorch's control plane.  Groups that a library uses to carry its bytes
    (``carriers`` in its answer) are no groups of a user's.
    """
    own = [name for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(c10d, name)]
    offered = [
        name
        for name in c10d._get_handler_names()
        if name.startswith("dump_") and name.endswith("_trace_json") and name != "dump_nccl_trace_json"
    ]
    readers: list[Callable[[], str]] = [getattr(c10d, name) for name in own]
    readers += [functools.partial(_handled, c10d, name) for name in offered]
    readers = readers[:MOST_RECORDERS]
    dumps: list[dict[str, Any]] = []
    for read in readers:
        try:
            dumps.append(json.loads(read()))
        except Exception:  # noqa: S112  half an answer is better evidence than none
            continue
    return dumps, len(dumps) == len(readers)


def _handled(c10d: Any, name: str) -> str:
    """Return what a handler of PyTorch's control plane answers."""

    class Response(c10d._Response):  # type: ignore[misc]  # its class is known only once torch has been imported
        content = ""

        def set_content(self, content: str, kind: str) -> None:
            self.content = content

        def set_status(self, status: int) -> None:
            pass

    response = Response()
    c10d._get_handler(name)(c10d._Request(), response)
    return response.content


def _group_of(entry: dict[str, Any]) -> str:
    return str((entry.get("process_group") or [""])[0])


def _reaches_back(entries: list[dict[str, Any]]) -> bool:
    """Return whether nothing is missing before these entries that was recorded in this run."""
    if not entries or entries[0].get("record_id") == 0:
        return True
    return bool(entries[0].get("time_created_ns", math.inf) < _RUN["began_ns"])
