"""The monitor thread of a rank: reports, at any time, where the rank is and what its process groups wait for.

It sleeps in a read and costs nothing until the controller asks.  A rank that is stopped, or that holds the interpreter
lock in C code, does not answer.  The controller then uses the black box, the kernel and a signal that dumps the stack.
"""

from __future__ import annotations

import json
import linecache
import os
import socket
import struct
import sys
import threading
import time
from typing import Any

from harness.worlds.places import DISTRIBUTED, is_source
from harness.worlds.watchdog import MOST_GROUPS, MOST_RECORDS, MOST_THREADS

THREAD_NAME = "concord-monitor"
_LENGTH = struct.Struct("!I")
_MOST_FRAMES = 80


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
        called, timeout = _called(frame), None
        f: Any = frame
        while f is not None and len(frames) < _MOST_FRAMES:
            frames.append((f.f_code.co_filename, f.f_lineno or 0, f.f_code.co_name))
            if timeout is None:
                timeout = _timeout_of(f)
            f = f.f_back
        threads.append(
            {
                "name": thread.name if thread else "?",
                "native": thread.native_id if thread else 0,
                "main": ident == main,
                "called": called,
                "timeout": timeout,
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


def _timeout_of(frame: Any) -> float | None:
    """Return the timeout in seconds that a frame of torch.distributed was given (as in monitored_barrier), or None."""
    if not frame.f_code.co_filename.startswith(DISTRIBUTED):
        return None
    timeout = frame.f_locals.get("timeout")
    return timeout.total_seconds() if hasattr(timeout, "total_seconds") else None


def flight_record() -> dict[str, Any]:
    """Return the entries of PyTorch's Flight Recorder, and the process groups, as plain data.

    On gloo, ``state`` stays ``scheduled``, but ``retired`` is set when a collective has completed (seen on 2.11 and
    2.13).  So an entry counts as done if either field says so.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {"records": None, "groups": {}}
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    groups: dict[str, list[int]] = {}
    if c10d is not None:
        world = c10d._world
        for group, ranks in list(world.pg_group_ranks.items())[:MOST_GROUPS]:
            groups[str(world.pg_names.get(group, ""))] = sorted(ranks, key=lambda r: ranks[r])
    records: list[dict[str, Any]] | None = None
    since_epoch = time.time_ns() - time.monotonic_ns()
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is None:
            continue
        try:
            entries = json.loads(dump()).get("entries", [])
        except Exception:  # noqa: S112  half an answer is better evidence than none
            continue
        records = records or []
        for entry in entries[-MOST_RECORDS:]:
            group = entry.get("process_group") or [""]
            records.append(
                {
                    "group": str(group[0]),
                    "seq": entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id"),
                    "p2p": bool(entry.get("is_p2p")),
                    "op": str(entry.get("profiling_name", "?")).split(":", 1)[-1],
                    "sizes": entry.get("input_sizes") or [],
                    "dtypes": entry.get("input_dtypes") or [],
                    "done": bool(entry.get("retired")) or entry.get("state") == "completed",
                    "timeout_s": (entry.get("timeout_ms") or 0) / 1000,
                    "time_ns": entry.get("time_created_ns", 0) - since_epoch,
                }
            )
    return {"records": records, "groups": groups}
