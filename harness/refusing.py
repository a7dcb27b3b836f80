"""How commands end that were given bad input: one line on standard error, and exit code 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from harness.shown import printable

BAD_INPUT = 2


def bad(message: str) -> typer.Exit:
    """How a command ends that was given bad input, once this has said so."""
    typer.echo(f"concord: {printable(message)}", err=True)
    return typer.Exit(BAD_INPUT)


@contextlib.contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """One line for what can't be done: these errors are about the input."""
    try:
        yield
    except errors as e:
        raise bad(str(e)) from e
