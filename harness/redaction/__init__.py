"""Removal of credentials from everything that leaves the machine: results, figures, logs of the nightly job, messages.

There are two rules.  Only listed variables are *recorded*: :mod:`~harness.redaction.variables` names the environment
variables that results may have and the kind of value that each takes, and shows no other value.  Every *text* (a
traceback, the output of a rank, a command line, an error of a database) goes through :class:`Redactor`.  It knows the
values that this process's environment has and has had, the shapes of URLs and of password assignments
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
