"""Command lines: the options that values belong to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from harness.redaction.shapes import HIDDEN, says_secret


def without_values(arguments: Sequence[str]) -> list[str]:
    """Hide the values of options whose names say that they are credentials."""
    shown = list(arguments)
    for i, (option, value) in enumerate(valued(arguments)):
        if value and says_secret(option):
            shown[i] = shown[i][: len(shown[i]) - len(value)] + HIDDEN
    return shown


def valued(arguments: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield for each argument the name of its option (``--name=value``, ``--name value``) and the value."""
    before = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and re.fullmatch(r"[\w.-]+", name):
            yield name, value
        elif argument.startswith("-"):
            yield "", ""
        else:
            yield before, argument
        before = name if argument.startswith("-") and not equals else ""
