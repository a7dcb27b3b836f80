"""The commands of reports: ``concord report``, ``concord compare``, ``concord bundle``, ``concord verify``."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

import harness
from harness.commands import rerunning
from harness.commands.collecting import checkout_of
from harness.commands.outputs import appended
from harness.commands.refusing import bad
from harness.profiles import NEVER_RUN
from harness.provenance import suite_hash
from harness.requirements import LEVELS
from harness.results import VERSION
from harness.safe_io.ceiling import Exceeded, ceiling
from harness.safe_io.files import FileError, contents
from harness.safe_io.shown import one_line
from harness.safe_io.writing import write_whole
from reports import badge as badges
from reports import bundle as bundles
from reports import challenge as challenges
from reports import compare as comparing
from reports import junit as junits
from reports import markdown as markdowns
from reports import model, relay, signing
from reports.answer import answer, explained, state, waived_tests, waivers
from reports.build import FILE, LARGEST, build, load
from reports.checkout import Checkout
from reports.model import CONFORMANT, LevelReport, Report, ReportError
from reports.page import comparison_page, page
from reports.text import plural, visible
from reports.verify import Checked, verify

_MEMORY, _SECONDS = 1 << 30, 120.0
"""Bytes and seconds that checking a bundle may take: more than three times what the largest honest one takes."""
NOT_SHOWN = 3
"""Exit status of ``concord verify`` if nothing is wrong, but something that decides could not be checked."""

Runs = Annotated[list[Path] | None, typer.Argument(help="Results of runs: results.jsonl, or the folder with it.")]


def report(
    runs: Runs = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page to this file; it opens offline.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file as JSON.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Append the report as Markdown to this file, such as $GITHUB_STEP_SUMMARY.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    badge: Annotated[
        Path | None, typer.Option(help="Write a badge to this file, and its endpoint beside it as .json.")
    ] = None,
    relay_to: Annotated[
        Path | None, typer.Option("--relay", help="Write the input of PyTorch's cross-repository CI relay.")
    ] = None,
    artifact_url: Annotated[str, typer.Option(help="URL at which the rest will be, for --relay.")] = "",
    require: Annotated[str, typer.Option(help="Exit with 1 if it is not conformant at this level.")] = "",
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a report, and read no run.")
    ] = False,
) -> None:
    """Report at which levels a backend is conformant according to its runs, and why not at the others.

    Without an output, report.html, report.json and report.md are written beside the last run. A level needs a run with
    the default seed, and one with a random seed of the tests that draw from it, so give both.
    """
    with _said():
        outputs_given = [html, json, markdown, junit, badge, badge.with_suffix(".json") if badge else None, relay_to]
        if schema:
            if runs or any(outputs_given) or require or artifact_url:
                raise ReportError("--schema prints the JSON Schema and reads no run: give it alone")
            typer.echo(model.json_schema().decode(), nl=False)
            return
        if not runs:
            raise ReportError("no run was given: concord report reports/out/*/")
        if artifact_url and relay_to is None:
            raise ReportError("--artifact-url is for --relay FILE, which is not given")
        _check_outputs([path for path in outputs_given if path is not None], runs)
        if require and require not in LEVELS:
            raise ReportError(f"--require {require}: one of {', '.join(LEVELS)}")
        made = build([load(path) for path in runs])
        if not any((html, json, markdown, junit, badge, relay_to)):
            folder = runs[-1] if runs[-1].is_dir() else runs[-1].parent
            html, json, markdown = folder / "report.html", folder / "report.json", None
            _write(folder / "report.md", markdowns.markdown(made).encode(errors="replace"))
        outputs: list[tuple[Path | None, Callable[[], bytes]]] = [
            (html, lambda: page(made).encode(errors="replace")),
            (json, lambda: model.encode(made)),
            (junit, lambda: junits.junit(made)),
            (badge, lambda: badges.svg(made)),
            (badge.with_suffix(".json") if badge else None, lambda: badges.endpoint(made)),
            (relay_to, lambda: relay.encode(made, artifact_url)),
        ]
        for path, content in outputs:
            if path is not None:
                _write(path, content())
        if markdown is not None:
            _append(markdown, markdowns.markdown(made).encode(errors="replace"))
        _show(made)
        if made.foreign:
            names = one_line(", ".join(made.foreign))
            typer.echo(f"  a bundle will show no level: the runs had plug-ins of neither pytest nor Concord: {names}")
        _require(require, made)


def compare(
    before: Annotated[Path, typer.Argument(help="Run, report (JSON) or bundle.")],
    after: Annotated[Path, typer.Argument(help="Run, report (JSON) or bundle to compare with it.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page to this file; it opens offline.")] = None,
) -> None:
    """Compare two runs: newly failing, fixed, added, removed and changed tests.

    Exits with 1 if AFTER is worse: a test newly fails, is no longer run or no longer exists, or a level is lost.
    """
    with _said():
        if markdown and json:
            raise ReportError("--markdown and --json: one of them")
        if html is not None:
            _check_outputs([html], [before, after])
        old, new = _report_of(before), _report_of(after)
        comparison = comparing.compare(old, new)
        if html is not None:
            _write(html, comparison_page(old, new).encode(errors="replace"), aside=json or markdown)
        if json:
            typer.echo(msgspec.json.format(msgspec.json.encode(comparison), indent=1).decode())
        else:
            for line in comparing.lines(comparison, markdown=markdown):
                typer.echo(line)
        if comparison.worse:
            raise typer.Exit(1)


def bundle(
    runs: Annotated[list[Path], typer.Argument(help="Results of runs: results.jsonl, or the folder with it.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")],
    sign: Annotated[
        Path | None, typer.Option(help="Sign the file with this SSH key, or with the public key of one in an agent.")
    ] = None,
    signer: Annotated[str, typer.Option(help="Your name in the customer's file of signers, for --sign.")] = "",
) -> None:
    """Pack runs into one file that others can check with `concord verify`.

    With --sign, ssh-keygen writes a detached signature to FILE.sig. A line for the customer's file of signers and the
    command that checks the signature are printed.
    """
    with _said():
        if signer and sign is None:
            raise ReportError("--signer is for --sign KEY, which is not given")
        signature = bundles.signature_of(output)
        _check_outputs([output, *([signature] if sign is not None else [])], runs)
        name = signing.signer_of(sign, signer) if sign is not None else ""
        signed: list[signing.Signed] = []

        def signs(data: bytes) -> bytes:
            assert sign is not None
            signed.append(signing.sign(data, sign))
            return signed[0].signature

        every = [load(path) for path in runs]
        made, digest = bundles.write(every, output, harness.__version__, signs if sign is not None else None)
        typer.echo(f"{output}: {answer(made)}, {plural(len(made.runs), 'run')}, {plural(len(made.tests), 'test')}")
        typer.echo(f"manifest {digest}")
        for each in signed:
            typer.echo(f"{signature}: by {each.by}")
            typer.echo(
                f"Give the customer this line for a file of signers, in a way that they trust:\n  {each.line(name)}"
            )
            check = ["concord", "verify", output.name, "--signature", signature.name, "--signers", "FILE"]
            typer.echo(f"They check it with:\n  {shlex.join([*check, '--signer', name])}")


def verify_bundle(
    file: Annotated[Path, typer.Argument(help="Bundle to check.")],
    suite: Annotated[
        bool, typer.Option("--suite/--no-suite", help="Whether to collect the suite here, if it is the same.")
    ] = True,
    require: Annotated[str, typer.Option(help="Exit with 1 if it is not conformant at this level.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 also if there are notes.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the page, rebuilt from the results, to this file. Read this one.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report, rebuilt from the results, as JSON.")] = None,
    signature: Annotated[Path | None, typer.Option(help="Detached signature of the file (ssh-keygen -Y sign).")] = None,
    signers: Annotated[Path | None, typer.Option(help="File of those who may sign (ssh's ALLOWED SIGNERS).")] = None,
    signer: Annotated[str, typer.Option(help="The signer's name in that file.")] = "",
    challenge: Annotated[
        Path | None, typer.Option(help="Your challenge (`concord challenge`), which its runs must answer.")
    ] = None,
    rerun: Annotated[int | None, typer.Option(help="Draw so many results, run the tests here, and compare.")] = None,
    rerun_seed: Annotated[str, typer.Option(help="Seed of the draw, to repeat it. Default: a new one.")] = "",
    rerun_profile: Annotated[
        Path | None, typer.Option(help="Your file with the bundle's profile, which --rerun obeys.")
    ] = None,
) -> None:
    """Check a bundle: its suite against the suite here, and everything else by rebuilding it from the raw results.

    Run it in a checkout of the suite. Exits with 1 if anything is wrong, 2 if FILE is no bundle, and 3 if nothing is
    wrong but something could not be checked, for example because the suite is another one.
    """
    with _said():
        if require and require not in LEVELS:
            raise ReportError(f"--require {require}: one of {', '.join(LEVELS)}")
        _check_signing(signature, signers, signer)
        again = rerunning.asked(rerun, rerun_seed, rerun_profile, suite=suite)
        given = challenges.read(challenge) if challenge is not None else None
        wrong = signing.problems_of(file, signature, signers, signer) if signature and signers else []
        root = Path.cwd()

        def check(here: Checkout | None, second: rerunning.Rerun) -> Checked:
            with ceiling(_MEMORY, _SECONDS):
                now, known = time.time(), [*wrong, *second.wrong]
                return verify(
                    file, harness.__version__, here, now, wrong=known, unchecked=second.unchecked, challenge=given
                )

        second = rerunning.Rerun()
        here = Checkout(suite_hash(root), harness.__version__, VERSION) if suite else None
        checked = check(here, second)
        if here is not None and here.suite_hash and here.suite_hash in {r.header.suite_hash for r in checked.runs}:
            here = checkout_of(root)
            checked = check(here, second)
        if again is not None:
            second = rerunning.rerun(checked.runs, here, root, again, lambda line: typer.echo(f"{'rerun':<9} {line}"))
            checked = check(here, second)
        problems = checked.problems
        told = challenges.told(checked.runs, given) if given is not None else ()
        notes = [*checked.notes, *second.notes]
        said = {"WRONG": problems, "unchecked": checked.unchecked, "note": notes, "challenge": told}
        said["rerun"] = second.told
        for kind, lines in said.items():
            for line in lines:
                typer.echo(f"{kind:<9} {one_line(line)}")
        if checked.report is not None:
            _show(checked.report)
            if html is not None:
                _write(html, page(checked.report).encode(errors="replace"))
            if json is not None:
                _write(json, model.encode(checked.report))
        typer.echo(f"manifest {checked.manifest}")
        typer.echo(f"{one_line(str(file))}: {_in_a_word(len(problems), len(checked.unchecked))}")
        if problems:
            raise typer.Exit(1)
        if checked.unchecked or (strict and notes):
            raise typer.Exit(NOT_SHOWN)
        _require(require, checked.report)


def _require(required: str, report: Report | None) -> None:
    """Exit with 1, and say which answer it is, unless a report says that a level is conformant.

    ``required``: the level; empty: none.
    """
    levels = report.levels if report is not None else []
    level = next((level for level in levels if level.id == required), None)
    if required and (level is None or level.answer != CONFORMANT):
        said = state(level) if level is not None else "not shown"
        typer.echo(f"concord: --require {required}: {required} is {said}", err=True)
        raise typer.Exit(1)


def _in_a_word(problems: int, unchecked: int) -> str:
    if problems:
        return f"{plural(problems, 'thing')} {'is' if problems == 1 else 'are'} wrong"
    if unchecked:
        return f"not shown: {plural(unchecked, 'thing')} could not be checked"
    return "is what it says it is"


def _check_signing(signature: Path | None, signers: Path | None, signer: str) -> None:
    """Require all or none of a signature, its signer and who may sign. Errors: :class:`ReportError`."""
    given = {"--signature FILE": signature, "--signers FILE": signers, "--signer NAME": signer or None}
    missing = [option for option, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ReportError(f"{' and '.join(missing)}: not given; a signature is checked with all of {', '.join(given)}")
    for option, value in given.items():
        if isinstance(value, Path) and not value.is_file():
            raise ReportError(f"{option.split()[0]} {value}: no such file")


def _report_of(path: Path) -> Report:
    if path.suffix == ".zip":
        return model.decode(bundles.unpacked(path).get("report.json", b""), f"{path}: report.json")
    if path.suffix == ".json":
        try:
            return model.decode(contents(path, LARGEST), str(path))
        except FileError as e:
            raise ReportError(str(e)) from None
    return build([load(path)])


def _show(made: Report) -> None:
    of = f"profile {one_line(made.profile)}" if made.profile else "no profile"
    typer.echo(f"{answer(made)}, {of}")
    if explained(made):
        typer.echo(f"  {one_line(explained(made))}")
    for number, step in enumerate(made.steps):
        typer.echo(f"  {'then' if number else 'next'}: {one_line(step.do)}")
        if step.command:
            typer.echo(f"    {one_line(step.command)}")
    if made.never_run:
        typer.echo(f"  the profile: {NEVER_RUN}")
    for problem in made.problems:
        typer.echo(f"  {one_line(problem)}")
    for level in made.levels:
        if level.tests:
            verdicts = ", ".join(f"{count} {verdict}" for verdict, count in level.tests.items())
            typer.echo(f"  {level.id} {level.stack}: {state(level)} ({verdicts})")
            _show_reasons(level, len(made.problems))
    of_pytorch, of_others = waived_tests(made)
    counts = [f"{count} of {one_line(owner)}" for owner, count in of_others.items()]
    counts += [f"{of_pytorch} of PyTorch's own defects"] if of_pytorch else []
    if counts:
        typer.echo(f"  waived tests: {', '.join(counts)}")


def _show_reasons(level: LevelReport, problems: int) -> None:
    """Print the notes and reasons of a level; ``problems``: how many of its reasons are the runs' problems."""
    for sentence in (*level.notes, *([waivers(level)] if waivers(level) else [])):
        typer.echo(f"    {one_line(sentence)}")
    for what, sentences in (("wrong", level.reds), ("missing", level.missing[problems:])):
        for sentence in sentences:
            typer.echo(f"    {what}: {one_line(sentence)}")


def _check_outputs(outputs: Sequence[Path], runs: Sequence[Path]) -> None:
    """Require that no file is written twice, or over a run that is read. Errors: :class:`ReportError`."""
    seen = {os.path.realpath(path / FILE if path.is_dir() else path): "a run that is read" for path in runs}
    for path in outputs:
        name = os.path.realpath(path)
        if name in seen:
            raise ReportError(f"{path}: to be written, and it is {seen[name]}; give it another name")
        seen[name] = "written already"


def _write(path: Path, data: bytes, *, aside: bool = False) -> None:
    """Write a file and say so; ``aside``: on standard error, because standard output is data."""
    try:
        write_whole(path, data)
    except OSError as e:
        raise ReportError(f"{path}: {e.strerror}") from None
    typer.echo(f"wrote {one_line(str(path))}", err=aside)


def _append(path: Path, data: bytes) -> None:
    try:
        appended(path, data)
    except OSError as e:
        raise ReportError(f"{path}: {e.strerror}") from None


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Report on one line what is wrong with the input, and exit with 2."""
    try:
        yield
    except (ReportError, Exceeded) as e:
        raise bad(visible(str(e))) from None
