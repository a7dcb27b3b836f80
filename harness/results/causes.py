"""The causes for which a test is unsupported, as data.  ``str(cause)`` is the sentence that users read."""

from __future__ import annotations

import msgspec

from harness.safe_io.untrusted import Bytes, Count, Hosts, Ranks, Words

LONGEST = 1000
"""The characters of a text in a cause as it is written; a reader allows more, because redaction may lengthen it."""


class _Cause(msgspec.Struct, frozen=True, tag_field="cause", omit_defaults=True):
    """What all causes share: they are frozen, and ``cause`` says which one it is."""


class NotClaimed(_Cause, frozen=True, tag="not-claimed", kw_only=True):
    """The profile does not claim what the test needs.

    Either a stack is not claimed, or a feature of it, or a collective, dtype and reduction.
    """

    what: Words
    """The need in words, such as ``all_reduce of int8``, or the first of a test's cases."""
    profile: Words = ""
    """The profile's name."""
    stack: Words = ""
    feature: Words = ""
    """A feature of the stack; empty: the whole stack is not claimed, or the cause is not about a stack."""
    collective: Words = ""
    """Empty: any collective."""
    dtypes: tuple[Words, ...] = ()
    """The dtypes that the test would use, none of which is claimed; empty: any dtype."""
    op: Words = ""
    """The reduction; empty: any."""

    def __str__(self) -> str:
        return f"not claimed: {self.what} (profile {self.profile})" if self.profile else f"not claimed: {self.what}"


class SizeNotClaimed(_Cause, frozen=True, tag="size-not-claimed"):
    """The profile claims worlds of other sizes."""

    profile: Words
    claimed: tuple[Ranks, ...]
    size: Ranks

    def __str__(self) -> str:
        claimed = ", ".join(map(str, self.claimed))
        return f"profile {self.profile} claims worlds of {claimed} ranks, not of {self.size}"


class NoFittingSize(_Cause, frozen=True, tag="no-fitting-size"):
    """A property needs worlds of other sizes than those that it can have here."""

    sizes: tuple[Ranks, ...]
    """The sizes of which it needs one."""
    have: tuple[Ranks, ...]

    def __str__(self) -> str:
        needed, here = " or ".join(map(str, self.sizes)), ", ".join(map(str, self.have))
        return f"a world of {needed} ranks is needed, and the test can have worlds of {here} here"


class TooFewDevices(_Cause, frozen=True, tag="too-few-devices"):
    """The machine has fewer devices than the test's world needs."""

    size: Ranks
    need: Count
    kind: Words
    """The type of device."""
    have: Count
    each: tuple[Count, ...] = ()
    """How many each host has, if there are several."""

    def __str__(self) -> str:
        there = f"there are {self.have}"
        if self.each:
            there = f"hosts have {', '.join(map(str, self.each[:-1]))} and {self.each[-1]}"
        return f"a world of {self.size} ranks needs {self.need} {self.kind} devices, and {there}"


class TooFewHosts(_Cause, frozen=True, tag="too-few-hosts"):
    """The run has fewer hosts than the test's world is spread over."""

    hosts: Hosts
    have: Hosts

    def __str__(self) -> str:
        return f"a world on {self.hosts} hosts is needed, and ranks start on {self.have} here"


class NoBackend(_Cause, frozen=True, tag="no-backend"):
    """torch was built without the backend of the test's world."""

    backend: Words

    def __str__(self) -> str:
        return f"torch has no backend {self.backend!r} here"


class NoStack(_Cause, frozen=True, tag="no-stack"):
    """The subject of the run does not implement the stack of the test."""

    subject: Words
    stack: Words
    implemented: tuple[Words, ...]
    """The stacks that the subject implements."""

    def __str__(self) -> str:
        return f"subject {self.subject} has no {self.stack}; it implements {', '.join(self.implemented)}"


class NoDevice(_Cause, frozen=True, tag="no-device"):
    """The machine has no device of the type that the test's world needs."""

    kind: Words
    why: Words

    def __str__(self) -> str:
        return f"no {self.kind} device: {self.why}"


class HostLacks(_Cause, frozen=True, tag="host-lacks"):
    """The test is about a feature of accelerators, and its world is on the host."""

    what: Words

    def __str__(self) -> str:
        return f"{self.what}: the host has none"


class HostsLack(_Cause, frozen=True, tag="hosts-lack"):
    """The hosts of the test's world do not have what it is about; only the test can know."""

    what: Words

    def __str__(self) -> str:
        return f"the hosts have no {self.what}"


class TorchLacks(_Cause, frozen=True, tag="torch-lacks"):
    """The installed torch has no such function, class or argument; only the test can know."""

    what: Words

    def __str__(self) -> str:
        return f"this torch has no {self.what}"


class TooLittleMemory(_Cause, frozen=True, tag="too-little-memory"):
    """A message does not fit into the memory of the devices; only the test can know."""

    what: Words
    need: Bytes
    """Bytes of the message."""
    have: Bytes
    """Bytes of the largest message that fits, with what a rank holds besides."""

    def __str__(self) -> str:
        return f"{self.what} is a message of {_mib(self.need)}, and at most {_mib(self.have)} fit on each rank here"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


Cause = (
    NotClaimed
    | SizeNotClaimed
    | NoFittingSize
    | TooFewDevices
    | TooFewHosts
    | NoBackend
    | NoStack
    | NoDevice
    | HostLacks
    | HostsLack
    | TorchLacks
    | TooLittleMemory
)

CAUSES: tuple[type[Cause], ...] = (
    NotClaimed,
    SizeNotClaimed,
    NoFittingSize,
    TooFewDevices,
    TooFewHosts,
    NoBackend,
    NoStack,
    NoDevice,
    HostLacks,
    HostsLack,
    TorchLacks,
    TooLittleMemory,
)


def shortened(cause: Cause) -> Cause:
    """Return a cause whose texts have at most :data:`LONGEST` characters."""

    def short(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(short, value))
        return f"{value[: LONGEST - 3]}..." if isinstance(value, str) and len(value) > LONGEST else value

    return msgspec.structs.replace(cause, **{name: short(getattr(cause, name)) for name in cause.__struct_fields__})
