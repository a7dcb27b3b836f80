"""``concord challenge``: make the challenge that a run must answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from harness.commands.refusing import refusing
from harness.results.challenge import ChallengeError, encode, new
from harness.safe_io.writing import write_whole


def challenge(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write. Default: standard output.")
    ] = None,
    audience: Annotated[str, typer.Option("--for", help="For whom it is and from whom, for readers; one line.")] = "",
) -> None:
    """Make a challenge, from which the seed of a run follows that nobody can have tried out before.

    Send it to whoever runs the suites, and keep it. They run `pytest suites/ --concord-challenge FILE -m
    property_based` and send a bundle. Check that with `concord verify BUNDLE --challenge FILE`.
    """
    with refusing(ChallengeError, OSError):
        made = encode(new(audience, time.time()))
        if output is None:
            typer.echo(made.decode(), nl=False)
            return
        write_whole(output, made)
        typer.echo(f"wrote {output}; the run that answers it: --concord-challenge {output} -m property_based")
