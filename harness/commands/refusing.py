"""How commands report bad input: one line on standard error, and exit code 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from harness.redaction import redacted
from harness.safe_io.shown import printable

BAD_INPUT = 2


def bad(message: str) -> typer.Exit:
    """Print what is wrong with the input, without credentials and escapes, and return the exit of the command."""
    typer.echo(f"concord: {printable(redacted(message))}", err=True)
    return typer.Exit(BAD_INPUT)


@contextlib.contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Report these errors, which are about the input, on one line, and exit with 2."""
    try:
        yield
    except errors as e:
        raise bad(said(e)) from e


def said(error: Exception) -> str:
    """Format an error on one line; an error of the operating system has its file and reason."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
