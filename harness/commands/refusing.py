"""How commands end that were given bad input: one line on standard error, and exit code 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from harness.redaction import redacted
from harness.safe_io.shown import printable

BAD_INPUT = 2


def bad(message: str) -> typer.Exit:
    """Say what was wrong with bad input, without credentials and escapes; returns the exit of the command."""
    typer.echo(f"concord: {printable(redacted(message))}", err=True)
    return typer.Exit(BAD_INPUT)


@contextlib.contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """One line for what can't be done: these errors are about the input."""
    try:
        yield
    except errors as e:
        raise bad(said(e)) from e


def said(error: Exception) -> str:
    """An error in a line: one of the system with its file and its reason."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
