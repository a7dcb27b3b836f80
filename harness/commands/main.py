"""The ``concord`` command."""

from __future__ import annotations

import sys
import traceback

import typer

from harness.commands import audit, perf, reports
from harness.commands import probe as probing
from harness.commands.agent import agent
from harness.commands.bisect import bisect
from harness.commands.board import board
from harness.commands.challenge import challenge
from harness.commands.confirming import baseline, confirm
from harness.commands.doctor import doctor
from harness.commands.duet import duet
from harness.commands.durations import durations
from harness.commands.findings import findings
from harness.commands.nightly import nightly
from harness.commands.parameters import parameters
from harness.commands.perf_counts import counts
from harness.commands.replay import replay
from harness.commands.standard import requirements
from harness.commands.upstream import upstream
from harness.commands.versions import PASSED_ON, versions
from harness.redaction import redacted

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

app.add_typer(perf.app, name="perf")
perf.app.command()(counts)
perf.app.command()(duet)
perf.app.command()(baseline)
perf.app.command()(confirm)
app.command()(agent)
app.command()(audit.audit)
app.command()(audit.faults)
app.command()(audit.reach)
app.command()(bisect)
app.command()(board)
app.command()(challenge)
app.command()(doctor)
app.command()(durations)
app.command()(findings)
app.command()(nightly)
app.command()(parameters)
app.command()(replay)
app.command()(requirements)
app.command()(reports.report)
app.command()(reports.compare)
app.command()(reports.bundle)
app.command("verify")(reports.verify_bundle)
app.command()(probing.probe)
app.add_typer(probing.profile_app, name="profile")
app.command()(upstream)
app.command(context_settings=PASSED_ON)(versions)


@app.callback()
def concord() -> None:
    """Concord: conformance of PyTorch's distributed stack."""


def main() -> None:
    """Run the command. The traceback of an unexpected error is printed without credentials."""
    try:
        app()
    except Exception:
        sys.stderr.write(redacted(traceback.format_exc()))
        sys.exit(1)


if __name__ == "__main__":
    main()
