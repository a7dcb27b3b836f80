"""The nightly job: thorough suites, a sample of the audit, and benchmarks with their gate; one line at the end.

Each part is a command that can be run by hand.  A part that ends badly does not keep the others from running.
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
"""Environment variable: where the history is (:mod:`harness.bench.history.store`, which takes its time to import)."""
SUMMARY = "GITHUB_STEP_SUMMARY"
"""Environment variable: where GitHub takes the Markdown of a job from."""
_MOST_SHOWN = 3
CONCORD = "concord"

Said = Callable[[Sequence[str]], str]

_VISITS = "12"
"""Sets of ranks for each figure: three times what a look in between takes, since a night has the time."""


@dataclass(frozen=True)
class Part:
    """One command of the nightly job."""

    name: str
    command: tuple[str, ...]
    said: Said
    """From the lines of its output to what a person has to know, on one line."""
    env: Mapping[str, str] = field(default_factory=dict)
    history: bool = False
    """Whether it is about the history: no other part is told where that is."""
    verdict_only: bool = False
    """Whether what it says is only worth a line if it ends badly."""

    @property
    def by_hand(self) -> str:
        """How to run it by hand; URLs without their credentials."""
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
        """Whether there is nothing to do."""
        return self.code == 0


def of_pytest(lines: Sequence[str]) -> str:
    """What a session says last, and which tests were bad."""
    bad = [found[1] for text in lines if (found := re.match(r"(?:FAILED|ERROR) (\S+)", text))]
    last = next((text.strip("= ") for text in reversed(lines) if re.search(r"\d+ (passed|failed|error)", text)), "")
    more = f" and {len(bad) - _MOST_SHOWN} more" if len(bad) > _MOST_SHOWN else ""
    return ": ".join(filter(None, (last or "no result", ", ".join(bad[:_MOST_SHOWN]) + more if bad else "")))


def last_words(lines: Sequence[str]) -> str:
    """The last line with anything in it."""
    return next((text.strip() for text in reversed(lines) if text.strip()), "no output")


def of_gate(lines: Sequence[str]) -> str:
    """The gate's first alarm, and how many more; or what it said first."""
    alarms = [text.removeprefix("ALARM").strip() for text in lines if text.startswith("ALARM")]
    if not alarms:
        return next((text.strip() for text in lines if text.strip()), "no output")
    return alarms[0] + (f" (and {len(alarms) - 1} more)" if len(alarms) > 1 else "")


def parts(out: Path, *, budget: str, sample: int, history: str, only: Sequence[str] = ()) -> list[Part]:
    """The parts of a night, in their order: what measures comes first, while nothing else has warmed the machine."""
    perf, page = out / "perf", str(out / "perf.html")

    def results(name: str) -> tuple[str, str]:
        return "--concord-results", str(out / name)

    # In the environment, since every user of the machine may read command lines.
    where = {VARIABLE: history} if history else {}
    measured = ("--benchmark-only", "--benchmark-quiet", "--perf-visits", _VISITS, *results("perf"))
    implemented = [f"suites/{stack}" for stack in find("reference").puts]
    found = [
        Part("benchmarks", ("pytest", "suites/perf", *measured), of_pytest),
        Part("history", (CONCORD, "perf", "store", str(perf)), last_words, where, history=True, verdict_only=True),
        Part("gate", (CONCORD, "perf", "gate"), of_gate, where, history=True),
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
    names = [part.name for part in found]
    wrong = [name for name in only if name not in names]
    if wrong:
        raise ValueError(f"no part {wrong[0]!r} of the nightly job; there are {', '.join(names)}")
    return [part for part in found if not only or part.name in only]


def run(part: Part, out: Path, write: Callable[[str], object]) -> Outcome:
    """Run a part; what it prints is passed on as it comes, and kept in ``<name>.log``, both without credentials."""
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
    """What a part prints, in a file; where that can't be written, it says so once, and the part goes on."""

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
        """Append to it."""
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
    """What a person has to know of the night."""
    bad = [f"{o.part.name}: {o.line} (`{o.part.by_hand}`)" for o in outcomes if not o.good]
    if bad:
        return "nightly: " + "; ".join(bad)
    return "nightly: nothing to do; " + "; ".join(
        f"{o.part.name}: {o.line}" for o in outcomes if not o.part.verdict_only
    )


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A table for a job's summary, with the line above it."""
    rows = [
        f"| {o.part.name} | {'ok' if o.good else f'**exit {o.code}**'} | {o.seconds:.0f} s | {_cell(o.line)} |"
        for o in outcomes
    ]
    return "\n".join([one_line(outcomes), "", "| part | | time | |", "|---|---|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", text)


def nightly(
    out: Annotated[Path, typer.Option(help="Folder for results, pages and logs.")] = Path("reports/out/nightly"),
    budget: Annotated[str, typer.Option(help="Time for the properties of the suites, as in 90s, 30m, 8h.")] = "2h",
    sample: Annotated[int, typer.Option(help="So many defects of each sort and component; 0: all.", min=0)] = 40,
    history: Annotated[
        str, typer.Option(help=f"Where figures are kept: a file, or a URL; with a password rather in ${VARIABLE}.")
    ] = "",
    only: Annotated[list[str] | None, typer.Option(help="Only this part; may be given several times.")] = None,
) -> None:
    """Everything that a nightly job does: benchmarks and their gate, thorough suites, a sample of the audit.

    Run it where the suites are.  The last line says what to do.  Exits with 1 if a part ended badly.
    """
    try:
        if not Path("suites").is_dir():
            raise ValueError(f"{Path.cwd()} has no folder suites; run this where they are")
        chosen = parts(out, budget=budget, sample=sample, history=history, only=only or ())
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
