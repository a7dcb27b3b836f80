"""The controller's end of an agent's connection."""

from __future__ import annotations

from typing import Any, cast

from harness.cluster import messages
from harness.cluster.channel import Channel
from harness.cluster.host import Host


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
