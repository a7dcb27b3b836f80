"""What a rank's monitor thread says when it is asked."""

from __future__ import annotations

import json
import socket
import struct
import threading
from datetime import timedelta
from typing import Any

from harness.worlds import monitor
from harness.worlds.places import TORCH


def thread_called(name: str, found: dict[str, Any]) -> dict[str, Any]:
    (thread,) = [t for t in found["threads"] if t["name"] == name]
    return thread


def function_in(file: str, source: str) -> dict[str, Any]:
    """The names that a piece of source defines, as if it stood in ``file``."""
    names: dict[str, Any] = {"snapshot": monitor.snapshot}
    exec(compile(source, file, "exec"), names)
    return names


def test_answers_when_asked() -> None:
    """Each byte that comes in is answered with a length and a JSON object."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = monitor.start(theirs)
        ours.settimeout(30)
        answers = []  # looked at in the end: an error here would close the socket, which ends this process
        for _ in range(2):
            ours.sendall(b"s")
            (length,) = struct.unpack("!I", ours.recv(4, socket.MSG_WAITALL))
            answers.append(json.loads(ours.recv(length, socket.MSG_WAITALL)))
        theirs.shutdown(socket.SHUT_WR)  # the thread's next answer can't be sent, and it ends
        ours.sendall(b"s")
        thread.join(30)
        assert not thread.is_alive()
    assert [set(answer) for answer in answers] == [{"threads", "records", "groups", "complete"}] * 2


def test_main_thread() -> None:
    """The main thread is marked, with its frames outermost first."""
    (main,) = [t for t in monitor.snapshot()["threads"] if t["main"]]
    assert [function for _, _, function in main["frames"][-2:]] == ["test_main_thread", "snapshot"]


def test_other_threads() -> None:
    """Another thread is told by name and by the kernel's number for it."""
    ready, stop = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        stop.wait()

    thread = threading.Thread(target=wait, name="other")
    thread.start()
    ready.wait()
    found = thread_called("other", monitor.snapshot())
    stop.set()
    thread.join()
    assert (found["native"], found["main"]) == (thread.native_id, False)


def test_it_leaves_itself_out() -> None:
    """The monitor does not tell of itself."""
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(monitor.snapshot()), name=monitor.THREAD_NAME)
    thread.start()
    thread.join()
    assert monitor.THREAD_NAME not in [t["name"] for t in found[0]["threads"]]


def test_deep_stack() -> None:
    """Of a deep stack the innermost frames are told, and not all of it."""

    def down(depth: int) -> dict[str, Any]:
        return down(depth - 1) if depth else monitor.snapshot()

    (main,) = [t for t in down(300)["threads"] if t["main"]]
    assert (len(main["frames"]) < 300, main["frames"][-1][2]) == (True, "snapshot")


def test_time_limit_in_torch_distributed() -> None:
    """A time limit that a frame of torch.distributed was given is told in seconds."""
    names = function_in(f"{TORCH}distributed/x.py", "def barrier(timeout): return snapshot()")
    (main,) = [t for t in names["barrier"](timedelta(seconds=3))["threads"] if t["main"]]
    assert main["timeout"] == 3.0


def test_time_limit_of_the_users() -> None:
    """A variable of the user's own that is called timeout says nothing."""
    names = function_in("/repo/test_x.py", "def body(timeout): return snapshot()")
    (main,) = [t for t in names["body"](timedelta(seconds=3))["threads"] if t["main"]]
    assert main["timeout"] is None


def test_plain_data() -> None:
    """Everything it says can be written as JSON."""
    found = monitor.snapshot()
    assert json.loads(json.dumps(found))["groups"] == found["groups"]
