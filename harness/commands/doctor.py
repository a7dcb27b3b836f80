"""``concord doctor``: what this machine offers to ranks, how well it isolates them, and what would improve that."""

from __future__ import annotations

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from harness.commands.machine import Finding, machine
from harness.worlds import network


def doctor() -> None:
    """Report what this machine offers to ranks, whether others can reach them, and what is in the way of a run."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("what", "here", "what would change it"):
        table.add_column(column, overflow="fold")
    for finding in (*machine(), *isolation()):
        table.add_row(finding.what, finding.found, finding.remedy)
    Console(width=None if typer.get_text_stream("stdout").isatty() else 160, markup=False).print(table)


def isolation(refusal: network.Refusal | None = None) -> list[Finding]:
    """Return what keeps other processes on this machine away from ranks.

    ``refusal``: why ranks can't have a network of their own; tried out if it is not given.
    """
    refusal = network.refusal() if refusal is None else refusal
    how = "by CAP_SYS_ADMIN" if network.is_admin() else "in a user namespace"
    if refusal:
        own = Finding("ranks on a network of their own", f"no: {refusal.why}", refusal.remedy)
        reach = "any process on this network can connect to ranks and take part in their groups"
        return [own, Finding("who can reach ranks", reach, "as above; until then, run where all users are trusted")]
    return [
        Finding("ranks on a network of their own", f"yes, {how}"),
        Finding(
            "who can reach ranks",
            "on the host: ranks of the same session, root, and this user; on accelerators: any process on this network",
            "for accelerators, if their library needs no other interface than loopback: --rank-network private",
        ),
    ]
