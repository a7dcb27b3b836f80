"""The nightly job: thorough suites, a sample of the audit, and benchmarks with their gate.

Each part is a command that can also be run by hand. A part that fails does not keep the others from running. The last
line of the output sums up the night.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from harness.commands.refusing import bad, refusing
from harness.redaction import Redactor, recorded, redacted
from harness.safe_io.writing import append_or_nothing, open_new, own_folder, write_whole
from harness.subjects import find

VARIABLE = "CONCORD_HISTORY"
"""Environment variable: where the history is (:mod:`harness.bench.history.store`, which is slow to import)."""
SUMMARY = "GITHUB_STEP_SUMMARY"
"""Environment variable: the file from which GitHub reads the Markdown summary of a job."""
_MOST_SHOWN = 3
CONCORD = "concord"

Said = Callable[[Sequence[str]], str]

_VISITS = "12"
"""Sets of ranks for each figure: three times the default, because a night has the time."""


@dataclass(frozen=True)
class Part:
    """One command of the nightly job."""

    name: str
    command: tuple[str, ...]
    said: Said
    """Reduces the lines of its output to what a person has to know, on one line."""
    env: Mapping[str, str] = field(default_factory=dict)
    history: bool = False
    """Whether it uses the history. Other parts are not told where that is."""
    verdict_only: bool = False
    """Whether its line is shown only if it fails."""

    @property
    def by_hand(self) -> str:
        """The command that runs it by hand, without the credentials of URLs."""
        settings = [f"{name}={recorded(name, value)}" for name, value in self.env.items()]
        return redacted(" ".join([*settings, *self.command]))


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    part: Part
    code: int
    seconds: float
    line: str

    @property
    def good(self) -> bool:
        """Whether it succeeded."""
        return self.code == 0


def of_pytest(lines: Sequence[str]) -> str:
    """Return the last line of a pytest session, and which tests failed."""
    bad = [match[1] for text in lines if (match := re.match(r"(?:FAILED|ERROR) (\S+)", text))]
    last = next((text.strip("= ") for text in reversed(lines) if re.search(r"\d+ (passed|failed|error)", text)), "")
    more = f" and {len(bad) - _MOST_SHOWN} more" if len(bad) > _MOST_SHOWN else ""
    return ": ".join(filter(None, (last or "no result", ", ".join(bad[:_MOST_SHOWN]) + more if bad else "")))


def last_words(lines: Sequence[str]) -> str:
    """Return the last line that is not blank."""
    return next((text.strip() for text in reversed(lines) if text.strip()), "no output")


def of_gate(lines: Sequence[str]) -> str:
    """Return the gate's first alarm and the number of others, or its first line if there is no alarm."""
    alarms = [text.removeprefix("ALARM").strip() for text in lines if text.startswith("ALARM")]
    if not alarms:
        return next((text.strip() for text in lines if text.strip()), "no output")
    return alarms[0] + (f" (and {len(alarms) - 1} more)" if len(alarms) > 1 else "")


def of_confirm(lines: Sequence[str]) -> str:
    """Return the series that a duet found slower, or the last line."""
    slower = [text.strip() for text in lines if text.startswith("slower:")]
    more = f" and {len(slower) - _MOST_SHOWN} more" if len(slower) > _MOST_SHOWN else ""
    return "; ".join(slower[:_MOST_SHOWN]) + more or last_words(lines)


def parts(
    out: Path,
    *,
    budget: str,
    sample: int,
    history: str,
    only: Sequence[str] = (),
    duet: Sequence[str] = (),
) -> list[Part]:
    """Return the parts of a night in their order. Benchmarks come first, before anything else warms up the machine.

    ``duet``: options of ``concord perf confirm``. Errors: ValueError if ``only`` names an unknown part.
    """
    perf, page = out / "perf", str(out / "perf.html")

    def results(name: str) -> tuple[str, str]:
        return "--concord-results", str(out / name)

    # Passed in the environment, because every user of the machine can read command lines.
    where = {VARIABLE: history} if history else {}
    measured = ("--benchmark-only", "--benchmark-quiet", "--perf-visits", _VISITS, *results("perf"))
    implemented = [f"suites/{stack}" for stack in find("reference").puts]
    every_part = [
        Part("benchmarks", ("pytest", "suites/perf", *measured), of_pytest),
        Part("history", (CONCORD, "perf", "store", str(perf)), last_words, where, history=True, verdict_only=True),
        Part("gate", (CONCORD, "perf", "gate"), of_gate, where, history=True),
        Part(
            "confirm",
            (CONCORD, "perf", "confirm", "--out", str(out / "confirm"), *duet),
            of_confirm,
            where,
            history=True,
        ),
        Part("page", (CONCORD, "perf", "page", "-o", page), last_words, where, history=True, verdict_only=True),
        Part(
            "suites",
            ("pytest", "suites/", "-n", "gpus", "-q", "--thorough", *results("suites")),
            of_pytest,
            {"CONCORD_EXAMPLES": "thorough", "CONCORD_BUDGET": budget},
        ),
        Part(
            "reference",
            ("pytest", *implemented, "-n", "gpus", "-q", "--subject", "reference", *results("reference")),
            of_pytest,
        ),
        Part(
            "audit",
            (
                *(CONCORD, "audit", "--again", "fixtures/faults/noticed.json"),
                *("--compare", "fixtures/faults/noticed.json", "--sample", str(sample)),
                *("--save", str(out / "audit.json"), "--html", str(out / "audit.html")),
            ),
            last_words,
        ),
    ]
    names = [part.name for part in every_part]
    wrong = [name for name in only if name not in names]
    if wrong:
        raise ValueError(f"no part {wrong[0]!r} of the nightly job; there are {', '.join(names)}")
    return [part for part in every_part if not only or part.name in only]


def run(part: Part, out: Path, write: Callable[[str], object]) -> Outcome:
    """Run a part. Its output is passed on as it comes and kept in ``<name>.log``, both without credentials."""
    began = time.monotonic()
    modules = {"pytest": ("-m", "pytest"), CONCORD: ("-m", "harness.commands.main")}
    first, *rest = part.command
    lines: list[str] = []
    without = Redactor({**os.environ, **part.env}, sys.argv[1:])
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE or part.history}
    with (
        _Log(out / f"{part.name}.log", write) as log,
        subprocess.Popen(
            [sys.executable, *modules[first], *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**inherited, **part.env},
        ) as process,
    ):
        assert process.stdout is not None
        for text in map(without, process.stdout):
            lines.append(text.rstrip("\n"))
            write(text)
            log.write(text)
    return Outcome(part, process.returncode, time.monotonic() - began, part.said(lines))


class _Log:
    """The output of a part in a file. If that can't be written, it says so once, and the part continues."""

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        self._path, self._say = path, say
        self._fd = -1

    def __enter__(self) -> _Log:
        try:
            self._path.unlink(missing_ok=True)
            self._fd = open_new(self._path)
        except OSError as e:
            self._lost(e)
        return self

    def write(self, text: str) -> None:
        """Append text to the log."""
        if self._fd >= 0:
            try:
                append_or_nothing(self._fd, text.encode(errors="replace"))
            except OSError as e:
                self._lost(e)

    def _lost(self, error: OSError) -> None:
        self._say(f"concord: {self._path}: {error.strerror}; the log ends here\n")
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def one_line(outcomes: Sequence[Outcome]) -> str:
    """Return what a person has to know about the night."""
    bad = [f"{o.part.name}: {o.line} (`{o.part.by_hand}`)" for o in outcomes if not o.good]
    if bad:
        return "nightly: " + "; ".join(bad)
    return "nightly: nothing to do; " + "; ".join(
        f"{o.part.name}: {o.line}" for o in outcomes if not o.part.verdict_only
    )


def markdown(outcomes: Sequence[Outcome]) -> str:
    """Return a table for a job's summary, below the line that sums up the night."""
    rows = [
        f"| {o.part.name} | {'ok' if o.good else f'**exit {o.code}**'} | {o.seconds:.0f} s | {_cell(o.line)} |"
        for o in outcomes
    ]
    return "\n".join([one_line(outcomes), "", "| part | | time | |", "|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", text)


def nightly(
    out: Annotated[Path, typer.Option(help="Folder for results, pages and logs.")] = Path("reports/out/nightly"),
    budget: Annotated[str, typer.Option(help="Time for the properties of the suites, such as 90s, 30m or 8h.")] = "2h",
    sample: Annotated[
        int, typer.Option(help="How many faults and mutants of each component to audit. 0: all.", min=0)
    ] = 40,
    history: Annotated[
        str,
        typer.Option(
            help=f"Where figures are kept: a file or a URL. Put a URL with a password into ${VARIABLE} instead."
        ),
    ] = "",
    only: Annotated[list[str] | None, typer.Option(help="Run only this part. Repeatable.")] = None,
    duet_against: Annotated[
        str,
        typer.Option(
            help="Environment with which suspected series are compared in the same night. Default: the one of "
            "`concord perf baseline`."
        ),
    ] = "",
    duet_make: Annotated[str, typer.Option(help="Shell command that makes this environment, in {folder}.")] = "",
    duet_minutes: Annotated[float, typer.Option(help="Time for the duet.", min=0.1)] = 10.0,
) -> None:
    """Run everything that a nightly job does: benchmarks and their gate, thorough suites, a sample of the audit.

    Run it where the suites are. The last line says what to do. Exits with 1 if a part fails.
    """
    try:
        if not Path("suites").is_dir():
            raise ValueError(f"{Path.cwd()} has no folder suites; run this where they are")
        duet = ["--minutes", f"{duet_minutes:g}"]
        duet += [
            word
            for name, value in (("against", duet_against), ("make", duet_make))
            if value
            for word in (f"--{name}", value)
        ]
        chosen = parts(out, budget=budget, sample=sample, history=history, only=only or (), duet=duet)
    except ValueError as e:
        raise bad(str(e)) from e
    with refusing(OSError):
        own_folder(out)
    lost = ""
    outcomes: list[Outcome] = []
    for number, part in enumerate(chosen, 1):
        typer.echo(f"--- {number} of {len(chosen)}: {part.name}: {part.by_hand}")
        outcomes.append(run(part, out, lambda text: typer.echo(text, nl=False)))
        try:
            write_whole(out / "summary.md", markdown(outcomes))
        except OSError as e:
            lost = f"{e.filename}: {e.strerror}"
    summary = os.environ.get(SUMMARY)
    if summary:
        try:
            with open(summary, "ab", buffering=0) as file:
                append_or_nothing(file.fileno(), markdown(outcomes).encode(errors="replace"))
        except OSError as e:
            lost = f"{summary}: {e.strerror}"
    if lost:
        typer.echo(f"concord: {lost}", err=True)
    typer.echo(one_line(outcomes))
    raise typer.Exit(0 if all(o.good for o in outcomes) and not lost else 1)
