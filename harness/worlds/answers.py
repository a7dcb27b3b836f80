"""A rank's messages to its controller: typed data of bounded size, which is checked before it is used.

Only the result of a function is a pickle, and it travels inside as bytes: see :mod:`harness.worlds.unpickling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from harness.worlds import wire

_NAME, _LINE, _TEXT, _MOST_FRAMES, _MOST_LEFT, _MOST_NAMES = 1000, 4000, 100_000, 300, 200, 100
_BESIDE = 1 << 16  # bytes; a longer pickle travels as a buffer, which is not copied

Name = Annotated[str, Meta(max_length=_NAME)]
Line = Annotated[str, Meta(max_length=_LINE)]
Number = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Job = Annotated[int, Meta(ge=-1, le=1 << 62)]
Times = Annotated[int, Meta(ge=0, le=1 << 40)]
Frames = Annotated[list[tuple[Line, Annotated[int, Meta(ge=0, le=1 << 31)], Name]], Meta(max_length=_MOST_FRAMES)]


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """An exception, as :func:`harness.worlds.evidence.describe_exception` describes it."""

    type: Name
    message: Line
    text: Annotated[str, Meta(max_length=_TEXT)]
    context: Line
    frames: Frames
    in_collective: bool
    skip: bool
    out_of_memory: bool
    exit_code: Number | Line | None
    time_ns: Annotated[int, Meta(ge=0, le=1 << 62)]


class Ready(msgspec.Struct, tag="ready", forbid_unknown_fields=True):
    """The rank is in its group."""

    job: Job
    descriptor: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    """The descriptor of the rank's end of the control channel."""


class Returned(msgspec.Struct, tag="returned", forbid_unknown_fields=True):
    """The function returned."""

    job: Job
    pickled: bytes = b""
    """The result; empty for None, or if the pickle is the first of the frame's buffers."""
    issued: Annotated[dict[Name, Times], Meta(max_length=_MOST_NAMES)] = {}
    """How often the rank issued each collective from Python while it ran the function."""
    on_groups: Times = 0
    """How many collectives were issued on its groups, from Python or not."""


class Raised(msgspec.Struct, tag="raised", forbid_unknown_fields=True):
    """The function raised, or it or its arguments could not be unpickled (then ``job`` is -1)."""

    job: Job
    report: Report


class Checked(msgspec.Struct, tag="checked", forbid_unknown_fields=True):
    """The residue that the last test left in the rank."""

    job: Job
    left: Annotated[list[Line], Meta(max_length=_MOST_LEFT)]


class Debug(msgspec.Struct, tag="debug", forbid_unknown_fields=True):
    """The rank asks for the terminal."""

    job: Job


class Debugged(msgspec.Struct, tag="debugged", forbid_unknown_fields=True):
    """The rank gives the terminal back."""

    job: Job


Answer = Ready | Returned | Raised | Checked | Debug | Debugged
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class NotAnAnswer(ValueError):
    """A frame is not one of these answers; the message says why."""


# the rank's side


def frame(answer: Answer, buffers: Sequence[bytes] = ()) -> list[bytes]:
    """Return the parts of the frame of an answer, ready for :func:`harness.worlds.wire.send_parts`."""
    return wire.parts_of(_ENCODER.encode(answer), buffers)


def returned(
    job: int, pickled: bytes, buffers: Sequence[bytes], issued: Mapping[str, int] | None = None, on_groups: int = 0
) -> list[bytes]:
    """Return the frame of a result, from its pickle and the bytes of its storages.

    ``issued``, ``on_groups``: how many collectives the rank issued (:mod:`harness.worlds.issued`).
    """
    beside = bool(buffers) or len(pickled) > _BESIDE
    answer = Returned(job, b"" if beside else pickled, dict(issued or {}), on_groups)
    return frame(answer, [pickled, *buffers] if beside else ())


def raised(job: int, report: Mapping[str, Any]) -> list[bytes]:
    """Return the frame of an exception, cut to the sizes that may be sent."""
    code = report["exit_code"]
    if isinstance(code, int) and not -(1 << 62) <= code <= 1 << 62:
        code = hex(code)
    frames = [(_cut(f, _LINE), max(0, int(line or 0)), _cut(name, _NAME)) for f, line, name in report["frames"]]
    return frame(
        Raised(
            job,
            Report(
                type=_cut(report["type"], _NAME),
                message=_cut(report["message"], _LINE),
                text=_cut(report["text"][-_TEXT:], _TEXT),
                context=_cut(report["context"], _LINE),
                frames=[*frames[: _MOST_FRAMES // 3], *frames[_MOST_FRAMES // 3 :][-(_MOST_FRAMES // 3) :]],
                in_collective=bool(report["in_collective"]),
                skip=bool(report["skip"]),
                out_of_memory=bool(report["out_of_memory"]),
                exit_code=_cut(code, _LINE) if isinstance(code, str) else code,
                time_ns=report["time_ns"],
            ),
        )
    )


def checked(job: int, left: Sequence[str]) -> list[bytes]:
    """Return the frame of what a test left, cut to the sizes that may be sent."""
    return frame(Checked(job, [_cut(each, _LINE) for each in left[:_MOST_LEFT]]))


def _cut(text: str, most: int) -> str:
    """Cut a text to ``most`` characters, and make it encodable: halves of surrogate pairs become escapes."""
    text = text[:most]
    if not text.isascii():
        text = text.encode(errors="backslashreplace").decode()[:most]
    return text


# the controller's side


def read(received: tuple[bytes | bytearray, list[bytearray]]) -> tuple[Answer, list[bytearray]]:
    """Return the answer in a frame, and the buffers that came with it.

    Errors: :class:`NotAnAnswer`, whatever is wrong with the frame.
    """
    body, buffers = received
    try:
        answer = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as e:
        raise NotAnAnswer(f"{bytes(body[:16])!r} ({e})") from None
    if buffers and not isinstance(answer, Returned):
        raise NotAnAnswer(f"{kind(answer)!r} with {len(buffers):,} buffers")
    return answer, buffers


def kind(answer: Answer) -> str:
    """Return the kind of an answer: ``returned`` and the like."""
    return str(answer.__struct_config__.tag)
