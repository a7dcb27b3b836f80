"""Connections that nobody answers, from the kernel's tables."""

from __future__ import annotations

import os
import socket

import pytest

from harness.cluster import connections

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def row(peer: str, state: str = "01", retries: str = "00000003", inode: int = 7) -> str:
    own = "0100007F".rjust(len(peer), "0")
    return f"   0: {own}:0016 {peer}:C350 {state} 00000000:00000000 01:00000000 {retries}     0        0 {inode} 1\n"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (row("03004D0A"), [("10.77.0.3", "7")]),
        (row("03004D0A", retries="00000002"), []),
        (row("03004D0A", state="02", retries="0000000A"), [("10.77.0.3", "7")]),
        (row("03004D0A", state="06"), []),
        (row("000077FD000000000000000003000000"), [("fd77::3", "7")]),
        (row("0000000000000000FFFF000003004D0A"), [("10.77.0.3", "7")]),
    ],
    ids=["three times", "twice", "connecting", "closed", "IPv6", "IPv4 in IPv6"],
)
def test_rows(line: str, found: list[tuple[str, str]], tmp_path: os.PathLike[str]) -> None:
    """Only peers that do not answer, after several tries."""
    file = os.path.join(tmp_path, "tcp")
    with open(file, "w") as table:
        table.write(HEAD + line)
    family = socket.AF_INET6 if len(line.split()[2]) > 20 else socket.AF_INET
    assert [(each.peer, each.inode) for each in connections._rows(file, family) if each.unanswered] == found


def test_this_process() -> None:
    """A connection that is answered is not one of them, and a process that has gone has none."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()[:2]):
        assert connections.unanswered(os.getpid()) == []
    assert connections.unanswered(1 << 22) == []
