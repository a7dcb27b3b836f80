"""What leaves the machine (results, figures, logs of the nightly job, messages) has no credentials in it.

Two rules.  What is *recorded* is on a list: :mod:`~harness.redaction.variables` names the environment variables that
results may have, each with the kind of value that it takes, and shows no value that does not fit.  What is *text* (a
traceback, the output of a rank, a command line, an error of a database) goes through :class:`Redactor`, which knows the
values that this process's environment has and has had, what a URL and an assignment of a password look like
(:mod:`~harness.redaction.named`), and tokens of well-known shapes.
"""

from __future__ import annotations

from harness.redaction.named import names_credential
from harness.redaction.shapes import HIDDEN
from harness.redaction.text import (
    Memory,
    Redactor,
    current,
    has_credentials,
    recorded,
    redacted,
    redacted_arguments,
    remember,
)
from harness.redaction.urls import Url
from harness.redaction.variables import NOT_SHOWN

__all__ = [
    "HIDDEN",
    "NOT_SHOWN",
    "Memory",
    "Redactor",
    "Url",
    "current",
    "has_credentials",
    "names_credential",
    "recorded",
    "redacted",
    "redacted_arguments",
    "remember",
]
