"""The controller's end of an agent's connection."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from _pytest._io.saferepr import saferepr

from harness.cluster import messages
from harness.cluster.channel import Channel
from harness.cluster.credentials import Key
from harness.cluster.host import Host
from harness.cluster.launcher import Cluster


class Recorded:
    """A channel that only notes what is sent."""

    lost = ""
    received = 0

    def __init__(self) -> None:
        self.sent: list[tuple[Any, Any]] = []

    def send(self, message: Any, payload: Any = ()) -> None:
        self.sent.append((message, payload))

    def flush(self) -> None: ...

    def receive(self) -> list[Any]:
        return []


def host() -> tuple[Host, list[tuple[Any, Any]]]:
    """A host, and what it is sent."""
    channel = Recorded()
    return Host(("127.0.0.1", 1), cast(Channel, channel), {}), channel.sent


def test_one_frame_for_several_ranks_travels_once() -> None:
    """It is sent when nothing else can be added to it, and other frames are on their own."""
    made, sent = host()
    one, other = [b"one"], [b"one"]
    for token in (3, 4, 5):
        made.pass_on(token, one)
    assert not sent
    made.pass_on(6, other)
    made.pump()
    made.pump()
    assert [(message.tokens, payload) for message, payload in sent] == [([3, 4, 5], one), ([6], other)]


def test_messages_stay_in_order() -> None:
    """What is sent after a frame comes after it."""
    made, sent = host()
    made.pass_on(3, [b"frame"])
    made.send(messages.Kill(3))
    assert [type(message).__name__ for message, _ in sent] == ["Pass", "Kill"]


def test_clocks_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The older a comparison of clocks, the less it says; a less exact one replaces it in time."""
    made, _ = host()
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    made._measure(0, 5_000_000, 100_000)
    assert (made.clock_error_ns, made.time_here(5_000_000)) == (50_000, 50_000)
    made._measure(0, 9_000_000, 400_000)
    assert made.clock_error_ns == 50_000
    now[0] += 10
    assert made.place.error_ns == 50_000 + 1_000_000
    made._measure(0, 9_000_000, 400_000)
    assert (made.clock_error_ns, made.time_here(9_000_000)) == (200_000, 200_000)


def test_keys_are_not_shown() -> None:
    """What shows the arguments of functions does not show a key."""
    key = Key("-----BEGIN PRIVATE KEY-----")
    assert repr(key) == str([key]).strip("[]") == "<the key of a session>"
    assert "PRIVATE" not in f"{Cluster((('a', 1),), key)} {saferepr(key)}"
