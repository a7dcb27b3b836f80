"""A challenge: what a verifier makes before a run, so that nobody can have known the run's seed earlier."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Literal

import msgspec

from harness.safe_io.shown import printable
from harness.safe_io.untrusted import LATEST, Allowance, Refused, json_checked, said

SLACK = 60
"""Seconds by which the clocks of a verifier and of a machine that runs the suites may disagree."""
LARGEST = 4096
"""The largest size of a challenge, in bytes."""
_LONGEST = 200


class ChallengeError(ValueError):
    """The error for a text that is not a challenge; it says why."""


class Challenge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number that nobody can guess, with the time at which it was made and for whom."""

    schema: Literal["concord.challenge"] = "concord.challenge"
    version: Literal[1] = 1
    nonce: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    """256 random bits, in hexadecimal."""
    made: Annotated[int, msgspec.Meta(ge=0, le=LATEST)]
    """Seconds since the epoch, by the verifier's clock."""
    audience: Annotated[str, msgspec.Meta(max_length=_LONGEST)] = ""
    """For whom it was made, and by whom, in the verifier's words."""

    @property
    def seed(self) -> str:
        """The seed that a run must use.

        It is the number that the first 8 hexadecimal digits of the SHA-256 of ``NONCE MADE AUDIENCE`` are.
        """
        text = f"{self.nonce} {self.made} {self.audience}"
        return str(int(hashlib.sha256(text.encode()).hexdigest()[:8], 16))


def new(audience: str, now: float) -> Challenge:
    """Make a challenge.

    ``now``: seconds since the epoch.  Errors: :class:`ChallengeError` for a long or an invisible text.
    """
    if len(audience) > _LONGEST or "\n" in audience or printable(audience) != audience:
        raise ChallengeError(f"for whom it is: one line of at most {_LONGEST} visible characters")
    return Challenge(nonce=secrets.token_hex(32), made=int(now), audience=audience)


def encode(challenge: Challenge) -> bytes:
    """Encode a challenge on one line."""
    return msgspec.json.encode(challenge) + b"\n"


def decode(data: bytes) -> Challenge:
    """Decode a challenge.  Errors: :class:`ChallengeError`."""
    if len(data) > LARGEST:
        raise ChallengeError(f"not a challenge: larger than {LARGEST} bytes")
    try:
        challenge = msgspec.json.decode(json_checked(data, Allowance(values=100)), type=Challenge)
        challenge.audience.encode()
    except (Refused, msgspec.MsgspecError, UnicodeError, RecursionError) as e:
        raise ChallengeError(f"not a challenge as `concord challenge` makes it: {said(e)}") from None
    if printable(challenge.audience) != challenge.audience or "\n" in challenge.audience:
        raise ChallengeError("not a challenge as `concord challenge` makes it: invisible characters in its audience")
    return challenge
