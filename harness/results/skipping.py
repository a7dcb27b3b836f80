"""How a test skips itself as unsupported: the skip carries its cause as data."""

from __future__ import annotations

from typing import NoReturn

from harness.results.causes import CAUSES, Cause, shortened
from harness.results.records import UNSUPPORTED

_ATTRIBUTE = "concord_cause"


def unsupported(cause: Cause) -> NoReturn:
    """Skip the running test as unsupported, in the place of ``pytest.skip``.

    Call this in the test, and not on its ranks.

    ``cause``: why the test can't run, such as ``TorchLacks("reset_iter_state")`` (:mod:`harness.results.causes`). Write
    its arguments as literals in the test itself, so that ``concord verify`` knows that the test may skip for it.
    """
    __tracebackhide__ = True
    import pytest

    cause = shortened(cause)
    skip = pytest.skip.Exception(f"{UNSUPPORTED}{cause}")
    setattr(skip, _ATTRIBUTE, cause)
    raise skip


def cause_of(error: BaseException) -> Cause | None:
    """Return the cause that a skip carries; None for a skip of someone else's and for any other exception."""
    cause = getattr(error, _ATTRIBUTE, None)
    return cause if isinstance(cause, CAUSES) else None
