"""``concord versions``: the same suites with several versions of PyTorch, and what changes between them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from harness.cluster.elsewhere import Place
from harness.commands import hosts
from harness.commands.hosts import KeyFile, Where
from harness.commands.outputs import appended, writable
from harness.commands.refusing import bad, refusing
from harness.provenance import suite_hash
from harness.safe_io.writing import own_folder, write_whole
from harness.versions import sessions
from harness.versions.environments import Environment, checkout, environment
from harness.versions.sessions import HostGone, Session
from reports import versions as reporting

OUT = Path("reports/out/versions")
PASSED_ON = {"ignore_unknown_options": True}
"""Settings of the command: pytest's own options are not ours, and are arguments."""


def versions(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Suites and options of pytest. Default: suites/.", metavar="SUITES")
    ] = None,
    env: Annotated[
        list[Path] | None, typer.Option(help="Environment: a virtual environment's folder, or a Python. Repeatable.")
    ] = None,
    launcher: Where = None,
    agents_key: KeyFile = None,
    out: Annotated[Path, typer.Option(help="Folder for results, from which an interrupted call continues.")] = OUT,
    json: Annotated[
        Path | None, typer.Option(help="Write the comparison to this file as JSON.", callback=writable)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Append the comparison as Markdown to this file, such as $GITHUB_STEP_SUMMARY.")
    ] = None,
) -> None:
    """Run the same suites in several environments, one after another, and show what changes from version to version.

    Run it where the suites are. The harness and the suites are those of this folder in every environment. Environments
    with whole results of the same suites and arguments are not run again. Exits with 1 if a test ends badly or a
    session is not whole. With agents, each host runs one environment at a time; hosts must share this folder and the
    environments.
    """
    with refusing(ValueError, OSError):
        root = checkout(Path.cwd())
        environments = _ordered([environment(path, root) for path in env or []])
        chosen = list(arguments or ["suites/"])
        own_folder(root / out)
        identity = sessions.digest(root, chosen)
    console = Console()
    with refusing(ValueError, OSError), hosts.agents(launcher, agents_key) as elsewhere:
        places = elsewhere.places if elsewhere else [Place()]
        folders = [sessions.kept_in(root / out, each, identity) for each in environments]
        try:
            found = _everywhere(environments, folders, root, chosen, places)
        except KeyboardInterrupt:
            typer.echo("\ninterrupted; the same command continues", err=True)
            raise typer.Exit(130) from None
    compared = reporting.compared(columns(found))
    reporting.show(compared, console)
    with refusing(OSError):
        if json is not None:
            write_whole(json, msgspec.json.format(msgspec.json.encode(compared), indent=1) + b"\n")
        if markdown is not None:
            appended(markdown, reporting.markdown(compared).encode(errors="replace"))
    raise typer.Exit(1 if compared.bad or any(session.status for session in found) else 0)


def _everywhere(
    environments: Sequence[Environment],
    folders: Sequence[Path],
    root: Path,
    chosen: Sequence[str],
    places: Sequence[Place],
) -> list[Session]:
    """Run the session of each environment, as many at a time as there are places.

    What a host that goes had in flight is done by the others. Errors: OSError; ValueError if no host is left.
    """
    suite, count = suite_hash(root), len(environments)
    waiting, free = deque(range(count)), deque(places)
    found: dict[int, Session] = {}
    running: dict[Future[Session], tuple[int, Place]] = {}

    def say(number: int, text: str) -> None:
        named = f"[{environments[number].torch}] " if len(places) > 1 else ""
        typer.echo(f"{named}{text}", nl=False)

    with ThreadPoolExecutor(len(places)) as threads:
        while waiting or running:
            while waiting and free:
                number, place = waiting.popleft(), free.popleft()
                each, folder = environments[number], folders[number]
                whole = sessions.look(each, folder, suite).whole
                where = f" on {place}" if place.agent and not whole else ""
                typer.echo(
                    f"--- {number + 1} of {count}: torch {each.torch} ({each.folder}){where}"
                    + (": whole already" if whole else f": {folder}")
                )
                told = partial(say, number)
                running[threads.submit(sessions.run, each, root, chosen, folder, told, place)] = number, place
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                number, place = running.pop(done)
                try:
                    found[number] = done.result()
                    free.append(place)
                except HostGone as e:
                    typer.echo(f"concord versions: {e}", err=True)
                    waiting.append(number)
            if waiting and not running and not free:
                raise ValueError("no host is left; what was done is kept, and the same command continues")
    return [found[number] for number in range(count)]


def _ordered(environments: Sequence[Environment]) -> list[Environment]:
    """Return environments in the order of their torch. Errors: :class:`typer.Exit` if there is none, or for twins."""
    twice = [str(each) for each, count in Counter(each.python for each in environments).items() if count > 1]
    if twice:
        raise bad(f"--env {twice[0]}: it is given twice")
    if not environments:
        raise bad("no environment was given: concord versions --env PATH --env PATH")
    return sorted(environments, key=lambda each: each.version)


def columns(found: Sequence[Session]) -> list[reporting.Column]:
    """Return the columns of the comparison. Environments with the same torch are told apart by their folders."""
    counted = Counter(each.environment.torch for each in found)
    return [
        reporting.Column(
            name=of.torch if counted[of.torch] == 1 else f"{of.torch} ({of.folder})",
            torch=of.torch,
            python=of.python_version,
            tests=each.tests,
            commit=of.commit,
            problem=each.problem,
        )
        for each in found
        for of in (each.environment,)
    ]
