"""Hosts for tests: network namespaces that a switch in user space connects."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from tests.cluster.switch import enter

HERE = Path(__file__).parent


def missing() -> str:
    """Return why this machine can't have such hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces with a switch need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "a switch in user space needs /dev/net/tun"


class Network:
    """``count`` hosts on one switch, in a ``with``.  The controller is on host 0."""

    def __init__(self, count: int) -> None:
        self.names = [f"concord-{os.getpid()}-{number}" for number in range(count)]
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        self._switch = subprocess.Popen(
            [sys.executable, str(HERE / "switch.py"), *self.names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._switch.stdout is not None
        assert self._switch.stdout.readline() == "ready\n"

    def __exit__(self, *exc: object) -> None:
        """Remove the hosts.  Their processes must have ended."""
        if self._switch is not None:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            self._switch.wait(10)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def command(self, host: int, *command: str) -> list[str]:
        """Return the command that executes a command on a host."""
        return ["nsenter", f"--net=/run/netns/{self.names[host]}", *command]  # ip netns exec would replace /sys, too

    @staticmethod
    def address(host: int, *, ipv6: bool = False) -> str:
        """Return the address of a host."""
        return f"fd77::{host + 1}" if ipv6 else f"10.77.0.{host + 1}"

    @contextlib.contextmanager
    def second(self, one: int, other: int) -> Iterator[None]:
        """Give two hosts another interface, ``eth1``, with a link of its own."""
        first, second = self.names[one], self.names[other]
        subprocess.run(
            ["ip", "link", "add", "eth1", "netns", first, "type", "veth", "peer", "name", "eth1", "netns", second],
            check=True,
        )
        try:
            for host, name in ((one, first), (other, second)):
                for command in (f"addr add 10.78.0.{host + 1}/24 dev eth1", "link set eth1 up"):
                    subprocess.run(["ip", "-n", name, *command.split()], check=True)
            yield
        finally:
            subprocess.run(["ip", "-n", first, "link", "del", "eth1"], check=True)

    def link(self, one: int, other: int, *, both: bool = True, **changes: Any) -> None:
        """Change a link: ``delay=``, ``loss=``, ``rate=``, ``cut=``; without any, it is perfect again."""
        assert self._switch is not None
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        links = [[one, other, changes], *([[other, one, changes]] if both else [])]
        self._switch.stdin.write(json.dumps(links) + "\n")
        self._switch.stdin.flush()
        assert self._switch.stdout.readline() == "set\n"

    @contextlib.contextmanager
    def inside(self, host: int = 0) -> Iterator[None]:
        """Make this thread's new sockets, and new processes, belong to a host."""
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        theirs = os.open(f"/run/netns/{self.names[host]}", os.O_RDONLY)
        try:
            enter(theirs)
            yield
        finally:
            enter(own)
            os.close(own)
            os.close(theirs)

    def on(self, host: int, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another with its sockets on a host."""

        def call(*args: Any, **named: Any) -> Any:
            with self.inside(host):
                return make(*args, **named)

        return call
