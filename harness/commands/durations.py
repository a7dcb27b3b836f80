"""``concord durations``: how long tests take, from a run's results, for ``pytest --within``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from harness.commands.refusing import bad
from harness.results import ResultsError, read
from harness.safe_io.writing import write_whole
from harness.thorough.within import FILE, Durations

_RAN = ("passed", "waived")


def durations(
    results: Annotated[Path, typer.Argument(help="The results.jsonl of a run of all suites on a quiet machine.")],
    file: Annotated[Path, typer.Argument(help="Where to write them.")] = FILE,
) -> None:
    """Write how long each test took; ``pytest --within`` chooses tests by it."""
    try:
        run = read(results)
    except ResultsError as e:
        raise bad(str(e)) from None
    seconds: dict[str, dict[str, float]] = {}
    for nodeid, test in sorted(run.tests.items()):
        if test.verdict in _RAN:
            name, _, rest = nodeid.partition("::")
            seconds.setdefault(name, {})[rest] = float(f"{test.seconds:.2g}")
    if not seconds:
        raise bad(f"{results}: no test passed in this run")
    facts = run.header.environment
    machine = f"{facts.get('cpu', 'a processor')}, {facts.get('cores', '?')} cores"
    found = Durations(machine=machine, torch=str(facts.get("torch", "")), seconds=seconds)
    text = msgspec.json.format(msgspec.json.encode(found), indent=1)
    write_whole(file, text + b"\n")
    count, total = sum(map(len, seconds.values())), sum(sum(tests.values()) for tests in seconds.values())
    typer.echo(f"{file}: {count:,} tests, {total:,.0f} s one after the other")
