"""Whether the defects that findings describe are there in several versions of PyTorch.

Each script of ``docs/findings`` runs in each environment, with ranks on gloo.  How it ended there is compared with how
it ended in the version that the finding was written for.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
from packaging.version import Version as Order

from harness.safe_io.waiting import readable
from harness.safe_io.writing import write_whole
from harness.versions.environments import EnvironmentProblem
from harness.versions.scripts import FOLDER, Script, scripts

FILE = FOLDER / "versions.json"
PAGE = Path("docs/findings-by-version.md")
SECONDS = 180.0
"""The limit of a script, whose own groups time out much earlier."""
THERE, GONE = "there", "not there"
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(?:\w+\.)*(\w+(?:Error|Exception|Unsupported|Interrupt|Exit))\b", re.MULTILINE)
_COMPARED = re.compile(r"\bexpected .*\bobserved ")


class Unreadable(ValueError):
    """What is known of versions can't be read."""


class Version(msgspec.Struct):
    """How the scripts ended with one version of PyTorch."""

    torch: str
    """The version with its build, as in ``2.13.0+cpu``."""
    python: str
    outcomes: dict[str, str]
    """By script, without its suffix: :data:`GONE`, or how it ended."""


def outcome(statuses: Sequence[int | None], outputs: Sequence[str]) -> str:
    """Say how a script ended.

    ``statuses``: the exit code of each rank, minus the signal that killed it; None: it was killed at the limit.
    ``outputs``: the end of what each rank printed.
    """
    if not any(statuses):
        return GONE if None not in statuses else "hangs"
    killed = [-status for status in statuses if status is not None and status < 0]
    if killed:
        return f"dies by signal {killed[0]}"
    if None in statuses:
        return "hangs"
    failed = [output for status, output in zip(statuses, outputs, strict=True) if status]
    if any(_COMPARED.search(output) for output in failed):
        return "wrong result"
    errors = [match[-1] for output in failed if (match := _ERROR.findall(output))]
    if errors:
        return f"raises {errors[0]}"
    return "wrong result" if 1 in statuses else f"exits with {next(status for status in statuses if status)}"


class Ranks:
    """A process of an environment that runs scripts, with torch imported once."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._process = subprocess.Popen(
            [python, "-u", str(Path(__file__).parent / "scripts_on_ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        line = self._answer(300.0)
        if not line:
            self._process.kill()
            _, error = self._process.communicate()
            why = error.strip().splitlines()[-1] if error.strip() else "it said nothing for 300 s"
            raise EnvironmentProblem(f"{python}: no script can run there: {why}")
        self.versions: dict[str, str] = json.loads(line)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, script: Script) -> str:
        """Run a script; returns how it ended."""
        assert self._process.stdin is not None
        request = {
            "script": str(script.path.resolve()),
            "ranks": script.ranks,
            "seconds": SECONDS,
            "fresh": script.fresh,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._answer(SECONDS + 60.0)
        if not line:
            raise EnvironmentProblem(f"{script.path}: the process that runs scripts does not answer any more")
        answer = json.loads(line)
        return outcome(answer["statuses"], answer["outputs"])

    def _answer(self, seconds: float) -> str:
        assert self._process.stdout is not None
        ready = readable(self._process.stdout, seconds)
        return self._process.stdout.readline() if ready else ""


def tried(python: Path, folder: Path, chosen: Iterable[Script]) -> Iterator[tuple[Script, str, float, dict[str, str]]]:
    """Run scripts with a Python in a folder.

    Yields each script, how it ended, its seconds, and the versions of PyTorch and Python.
    Errors: :class:`EnvironmentProblem`.
    """
    with Ranks(python, folder) as ranks:
        for script in chosen:
            began = time.monotonic()
            yield script, ranks.run(script), time.monotonic() - began, ranks.versions


def short(torch: str) -> str:
    """Return a version without its build: ``2.13.0`` for ``2.13.0+cpu``."""
    return Order(torch).public


def read(root: Path) -> dict[str, Version]:
    """Return what is known of each version of PyTorch, oldest first; empty if nothing is.

    Errors: :class:`Unreadable`.
    """
    file = root / FILE
    if not file.is_file():
        return {}
    try:
        return _ordered(msgspec.json.decode(file.read_bytes(), type=dict[str, Version]))
    except (OSError, ValueError) as e:  # msgspec's errors and InvalidVersion are ValueErrors
        raise Unreadable(f"{FILE}: not what concord findings writes: {e}; take it from git, or remove it") from None


def keep(root: Path, known: Mapping[str, Version]) -> None:
    """Write what is known of each version."""
    write_whole(root / FILE, msgspec.json.format(msgspec.json.encode(_ordered(known)), indent=1) + b"\n")


def write(root: Path, known: Mapping[str, Version]) -> None:
    """Write what is known of each version, and the page made of it."""
    keep(root, known)
    write_whole(root / PAGE, page(_ordered(known), scripts(root)).encode())


def _ordered(known: Mapping[str, Version]) -> dict[str, Version]:
    return dict(sorted(known.items(), key=lambda each: Order(each[0])))


def state(script: Script, version: str, known: Mapping[str, Version]) -> str:
    """Return whether a finding is there in a version: :data:`THERE`, :data:`GONE`, or how else its script ends.

    Empty if nobody has tried.
    """
    here = known[version].outcomes.get(script.name, "")
    there = known[script.seen].outcomes.get(script.name, "") if script.seen in known else ""
    return THERE if here and here == there and here != GONE else here


def page(known: Mapping[str, Version], tried: Iterable[Script]) -> str:
    """Render what is known of scripts as Markdown: a row for each, a column for each version."""
    rows = {script.name: [state(script, version, known) for version in known] for script in tried}
    names = list(rows)
    changed = [name for name, states in rows.items() if len(set(states)) > 1]
    lines = [
        f"<!-- Generated from {FILE} by: concord findings -->",
        "",
        "# Findings by version of PyTorch",
        "",
        "Each script of [findings](findings.md) ran with each of these versions, on gloo on the host. **there**: the",
        "script ends as with the version for which it was written. **not there**: it shows no defect. Any other text",
        "is how else it ends.",
        "",
        "| PyTorch | Python | scripts | there | not there | otherwise |",
        "|---|---|---|---|---|---|",
    ]
    for number, version in enumerate(known.values()):
        states = [row[number] for row in rows.values() if row[number]]
        there, gone = states.count(THERE), states.count(GONE)
        counts = f"{len(states)} | {there} | {gone} | {len(states) - there - gone}"
        lines.append(f"| {version.torch} | {version.python} | {counts} |")
    for title, shown in (("That differ", changed), ("That do not", [name for name in names if name not in changed])):
        lines += ["", f"## {title}", "", "| finding | " + " | ".join(known) + " |", "|---" * (len(known) + 1) + "|"]
        lines += [f"| [{name}](findings/{name}.py) | {' | '.join(rows[name])} |" for name in shown]
    return "\n".join(lines) + "\n"
