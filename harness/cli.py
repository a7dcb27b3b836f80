"""The ``concord`` command."""

from __future__ import annotations

import sys
import traceback

import typer

from harness import reporting
from harness.audit import commands
from harness.bench import commands as perf
from harness.doctor import doctor
from harness.nightly import nightly
from harness.probe import commands as probing
from harness.redaction import redacted
from harness.replaying import replay
from harness.standard import requirements

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

app.add_typer(perf.app, name="perf")
app.command()(commands.audit)
app.command()(commands.faults)
app.command()(commands.reach)
app.command()(doctor)
app.command()(nightly)
app.command()(replay)
app.command()(requirements)
app.command()(reporting.report)
app.command()(reporting.compare)
app.command()(reporting.bundle)
app.command("verify")(reporting.verify_bundle)
app.command()(probing.probe)
app.add_typer(probing.profile_app, name="profile")


@app.callback()
def concord() -> None:
    """Concord: conformance of PyTorch's distributed stack."""


def main() -> None:
    """The entry point.  What nobody has foreseen is a traceback, without the credentials that were given."""
    try:
        app()
    except Exception:
        sys.stderr.write(redacted(traceback.format_exc()))
        sys.exit(1)


if __name__ == "__main__":
    main()
