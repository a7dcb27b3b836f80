"""The options of commands whose processes run on the hosts of agents."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from harness.cluster.elsewhere import Place

Where = Annotated[
    str | None,
    typer.Option(
        "--launcher",
        help="Where processes run. local: on this machine; agents=HOST:PORT,...: on the hosts of these agents; ray, "
        "slurm: as for pytest's --launcher.",
    ),
]
KeyFile = Annotated[Path | None, typer.Option("--agents-key", help="File of the key with which agents were started.")]


class Agents(NamedTuple):
    """The hosts of agents."""

    places: Sequence[Place]
    """One on each host."""
    slots: int
    """How many worlds they can run at the same time."""


@contextlib.contextmanager
def agents(launcher: str | None, key_file: Path | None) -> Iterator[Agents | None]:
    """Yield the hosts that were asked for; None for this machine.  Errors: ValueError."""
    from harness.cluster.torchrun import LAUNCHER

    asked = launcher or os.environ.get(LAUNCHER) or "local"
    if asked == "local":
        yield None
        return
    from harness.cluster.host import HostRefused
    from harness.cluster.launcher import check
    from harness.cluster.starting import cluster_of

    with contextlib.ExitStack() as stack:
        try:
            cluster = cluster_of(asked, str(key_file or ""), stack.callback)
            found = check(cluster)
        except (ValueError, HostRefused) as e:
            raise ValueError(f"--launcher {asked}: {e}") from None
        yield Agents([Place(agent, str(cluster.key)) for agent in cluster.agents], len(found.slots))
