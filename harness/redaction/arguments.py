"""Command lines: which option a value belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from harness.redaction.shapes import HIDDEN, says_secret


def without_values(arguments: Sequence[str]) -> list[str]:
    """A command line without the values of options whose names say that they are credentials."""
    found = list(arguments)
    for i, (option, value) in enumerate(valued(arguments)):
        if value and says_secret(option):
            found[i] = found[i][: len(found[i]) - len(value)] + HIDDEN
    return found


def valued(arguments: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Of each argument, the name that it is given under (``--name=value``, ``--name value``), and the value."""
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
