"""The reader of records from before version 6, which stored sentences where there are data now.

This is the only place that parses one of Concord's own sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from harness.results.causes import (
    Cause,
    HostLacks,
    NoBackend,
    NoDevice,
    NoStack,
    NotClaimed,
    SizeNotClaimed,
    TooFewDevices,
    TorchLacks,
    shortened,
)
from harness.results.left_out import LeftOut, MaybeLeftOut, OnlySome, OptionGiven
from harness.results.records import (
    UNSUPPORTED,
    Collected,
    GivenWorld,
    ProfileText,
    Record,
    RequirementText,
    RunEnd,
    RunHeader,
    TestResult,
)

BEFORE = 6
"""The first version that stores no sentence that a reader would have to parse."""
_HAS_CAUSES = 5

_DTYPE = re.compile(r"\b(?:bfloat16|float\d+\w*|u?int\d+|complex\d+|bool)\b")
_COLLECTIVE = re.compile(r"([a-z]\w*)(?: of | with |\(|$)")
_OP = re.compile(r"(?:\bwith |, )([A-Z][A-Z_]+)\b")


class _OldEnd(RunEnd, tag="end", tag_field="record"):
    """The last record as it was."""

    left_out: Any = None
    partial: list[str] = msgspec.field(default_factory=list)


class _OldTest(TestResult, tag="test", tag_field="record", kw_only=True, omit_defaults=True):
    """A test as it was: its world is a text, and what a file before version 5 calls its cause does not count."""

    cause: Any = None
    world: Any = ""


_DECODER = msgspec.json.Decoder(RunHeader | Collected | ProfileText | RequirementText | _OldTest | _OldEnd)


def decoder(version: int) -> Callable[[bytes], Record]:
    """Return a decoder of records of a version before :data:`BEFORE`, which turns their sentences into data.

    Errors of the decoder: msgspec.MsgspecError.
    """

    def decode(line: bytes) -> Record:
        record: Record = _DECODER.decode(line)
        if isinstance(record, _OldTest):
            fields = {name: getattr(record, name) for name in TestResult.__struct_fields__}
            fields["world"] = world_in(record.world) if isinstance(record.world, str) else None
            if version >= _HAS_CAUSES:
                fields["cause"] = msgspec.convert(record.cause, Cause | None)
            else:
                fields["cause"] = cause_in(record.reason) if record.verdict == "unsupported" else None
            return TestResult(**fields)
        if isinstance(record, _OldEnd):
            fields = {name: getattr(record, name) for name in RunEnd.__struct_fields__}
            if version >= _HAS_CAUSES:
                fields["left_out"] = msgspec.convert(record.left_out or [], list[LeftOut])
            else:
                fields["left_out"] = [left_out_in(sentence) for sentence in record.partial]
            fields["environment"] = environment_in(record.environment)
            return RunEnd(**fields)
        return record

    return decode


def environment_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the facts about a platform, with the operating system and the device's name as facts of their own."""
    facts = dict(environment)
    machine = re.escape(facts.get("machine", ""))
    system = re.match(rf"([A-Za-z]+)-(.+?)(?:-{machine}(?:-.*)?)?$", facts.get("platform", ""))
    device = re.match(r"\d+ of ([^,]+)", facts.get("accelerator", ""))
    if system is not None:
        facts.setdefault("os", f"{system[1]} {system[2]}")
    if device is not None:
        facts.setdefault("device", device[1])
    return facts


def world_in(text: str) -> GivenWorld | None:
    """Return the world that a text names; None if it names none."""
    match = re.fullmatch(r"(\d{1,6}) ranks? \((\S{1,1000}) on (\S{1,1000})\)", text)
    return GivenWorld(int(match[1]), match[2], match[3]) if match is not None else None


def cause_in(reason: str) -> Cause | None:
    """Return the cause that a skip's reason states; None if it is not a sentence of Concord's.

    Whatever begins with "not claimed: " is :class:`NotClaimed`, as it was for older readers.
    """
    if not reason.startswith(UNSUPPORTED):
        return None
    sentence = reason.removeprefix(UNSUPPORTED)
    for pattern, make in _CAUSES:
        match = pattern.fullmatch(sentence)
        if match is not None:
            try:
                cause = msgspec.convert(msgspec.to_builtins(shortened(make(match))), Cause)  # checks the bounds
            except ValueError:
                return None
            return cause if str(cause) == sentence or isinstance(cause, NotClaimed) else None
    return None


def left_out_in(sentence: str) -> LeftOut:
    """Return the reason that a sentence states; :class:`MaybeLeftOut` for any other sentence."""
    given = re.fullmatch(r"(-\S{1,40}) was given", sentence)
    if given is not None:
        return OptionGiven(given[1])
    some = re.fullmatch(r"only some files or tests were asked for of (.{1,1000})", sentence)
    return OnlySome(tuple(some[1].split(", "))) if some is not None else MaybeLeftOut()


def _not_claimed(match: re.Match[str]) -> NotClaimed:
    what, profile = match[1], match[2] or ""
    stack = re.fullmatch(r"the stack (\w+)", what)
    if stack is not None:
        return NotClaimed(what=what, profile=profile, stack=stack[1])
    feature = re.fullmatch(r"feature (\w+) of (\w+)", what)
    if feature is not None:
        return NotClaimed(what=what, profile=profile, stack=feature[2], feature=feature[1])
    dtypes = tuple(_DTYPE.findall(what))
    collective, op = _COLLECTIVE.match(what), _OP.search(what)
    return NotClaimed(
        what=what,
        profile=profile,
        collective=collective[1] if collective is not None and not _DTYPE.fullmatch(collective[1]) else "",
        dtypes=dtypes,
        op=op[1] if op is not None else "",
    )


_CAUSES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Cause]], ...] = (
    (re.compile(r"not claimed: (.*?)(?: \(profile ([^()]+)\))?", re.DOTALL), _not_claimed),
    (
        re.compile(r"profile (.+) claims worlds of ([\d, ]+) ranks, not of (\d{1,9})", re.DOTALL),
        lambda m: SizeNotClaimed(m[1], tuple(int(n[:9]) for n in m[2].split(", ")), int(m[3])),
    ),
    (
        re.compile(r"a world of (\d{1,9}) ranks needs (\d{1,9}) (\S+) devices, and there are (\d{1,9})", re.DOTALL),
        lambda m: TooFewDevices(int(m[1]), int(m[2]), m[3], int(m[4])),
    ),
    (re.compile(r"torch has no backend '(.+)' here", re.DOTALL), lambda m: NoBackend(m[1])),
    (
        re.compile(r"subject (\S+) has no (\S+); it implements (.*)", re.DOTALL),
        lambda m: NoStack(m[1], m[2], tuple(m[3].split(", ")) if m[3] else ()),
    ),
    (re.compile(r"no (\S+) device: (.+)", re.DOTALL), lambda m: NoDevice(m[1], m[2])),
    (re.compile(r"(.+): the host has none", re.DOTALL), lambda m: HostLacks(m[1])),
    (re.compile(r"this torch has no (.+)", re.DOTALL), lambda m: TorchLacks(m[1])),
)
"""By the whole sentence, the cause that it states."""
