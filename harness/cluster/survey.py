"""Which devices a host has: found out in a process of its own, because ranks are forked from where it is asked.

A process that has asked a driver for its devices can't be forked into ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import msgspec

from harness.cluster.messages import Devices, Survey
from harness.safe_io.shown import printable
from harness.worlds.processes import die_with_parent


class Surveyor:
    """Finds out what a message asks for, without waiting."""

    def __init__(self, asked: Survey) -> None:
        self._number = asked.number
        self._kind = asked.kind
        ours = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **asked.env},
            preexec_fn=lambda: die_with_parent(ours),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        try:
            self._process.stdin.write(msgspec.json.encode(asked))
            self._process.stdin.close()
        except BrokenPipeError:  # it has ended, and says why
            pass
        self._said = b""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something new."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def answer(self) -> Devices | None:
        """Return what it has found; None if it is not ready."""
        try:
            while part := os.read(self.fileno(), 1 << 16):
                self._said += part
        except BlockingIOError:
            return None
        status = self._process.wait()
        self.close()
        last = (self._said.decode(errors="replace").strip().splitlines() or [""])[-1]
        try:
            return msgspec.structs.replace(msgspec.json.decode(last, type=Devices), number=self._number)
        except (msgspec.MsgspecError, ValueError):
            said = printable(last)[-300:]
            return Devices(self._number, self._kind, [], [], "", f"looking for them ended with status {status}: {said}")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def look(asked: Survey) -> Devices:
    """Find the devices.  Imports torch, and may start a driver."""
    from harness.devices import DeviceError, device_name, inventory

    try:
        found = inventory(asked.kind or None, imports=asked.imports, mask=asked.mask)
    except DeviceError as e:
        return Devices(asked.number, asked.kind, [], [], "", str(e))
    name = "" if found.on_host else device_name(found.kind)
    return Devices(asked.number, found.kind, list(found.devices), list(found.keys), name, "")


if __name__ == "__main__":
    print(json.dumps(msgspec.to_builtins(look(msgspec.json.decode(sys.stdin.buffer.read(), type=Survey)))), flush=True)
