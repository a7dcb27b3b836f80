"""``concord verify --rerun N``: run some tests of a bundle again, here, and compare the results."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import harness
from harness.profiles import ProfileError
from harness.profiles.shelf import Shelf
from harness.results import ResultsError, Run, read
from harness.thorough.effort import BUDGET, EXAMPLES, STATE
from reports import rerun as comparing
from reports.checkout import Checkout
from reports.model import ReportError
from reports.rerun import BETTER, KINDS, NOT_COMPARED, OTHER, OTHER_CASES, OTHER_COUNTS, WORSE, Outcome
from reports.text import duration, plural

_NAME = re.compile(r"[0-9A-Za-z_+-][0-9A-Za-z_.+-]{0,100}")
_SEED = re.compile(r"[0-9A-Za-z._-]{1,64}")
_FINISHED = (0, 1)
"""Exit statuses of a pytest session that ran what it collected."""
_NOT_PASSED_ON = ("PYTEST_", "HYPOTHESIS_", EXAMPLES, BUDGET, STATE)
_SHOWN = 50
"""Differences of a kind that are listed; the others are counted."""


@dataclass(frozen=True)
class Asked:
    """What to run again."""

    count: int
    seed: str
    """The seed of the draw."""
    profile: Path | None = None
    """A file with the bundle's profile, if no local profile of its name is the same."""


@dataclass
class Rerun:
    """What came of running again, as lines of a check."""

    wrong: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def asked(count: int | None, seed: str, profile: Path | None, *, suite: bool) -> Asked | None:
    """Check the options of a second run; None if there is to be none. Errors: :class:`ReportError`."""
    if count is None:
        if seed or profile is not None:
            raise ReportError("--rerun-seed and --rerun-profile are for --rerun N, which is not given")
        return None
    if count < 1:
        raise ReportError(f"--rerun {count}: at least 1")
    if not suite:
        raise ReportError("--rerun runs tests of the suite here, and --no-suite leaves it out: give one of them")
    if seed and not _SEED.fullmatch(seed):
        raise ReportError("--rerun-seed: up to 64 letters, digits, dots, dashes and underscores")
    return Asked(count, seed or secrets.token_hex(8), profile)


def rerun(
    runs: Sequence[Run], checkout: Checkout | None, root: Path, ask: Asked, say: Callable[[str], object]
) -> Rerun:
    """Draw tests of a bundle, run them here with its profile and seeds, and compare.

    ``checkout``: the local suite; ``root``: its folder; ``say``: is called with what is about to be run.
    Errors: :class:`ReportError` if the profile is not here, or a session cannot be run.
    """
    if checkout is None or checkout.facts is None or any(r.header.suite_hash != checkout.suite_hash for r in runs):
        return Rerun(unchecked=["--rerun: nothing was run again, since its suite is not the one here"])
    places = comparing.population(runs, checkout.facts.tests)
    if not places:
        return Rerun(unchecked=["--rerun: no test of the bundle ran that could be run again"])
    chosen = comparing.drawn(places, ask.count, ask.seed)
    here: dict[int, Run] = {}
    for number in sorted({place.run for place in chosen}):
        run = runs[number]
        mine = [place.nodeid for place in chosen if place.run == number]
        if comparing.unrepeatable(run):
            continue
        profile = _profile(run, root, ask.profile)
        took = duration(sum(run.tests[nodeid].seconds for nodeid in mine))
        say(f"running {plural(len(mine), 'test')} of runs/{number + 1}.jsonl again, which took {took} there")
        here[number] = _session(mine, run, profile, root)
    return _judged(comparing.compared(chosen, runs, here), runs, here, len(places), ask)


def _judged(outcomes: Sequence[Outcome], runs: Sequence[Run], here: dict[int, Run], results: int, ask: Asked) -> Rerun:
    """Turn outcomes into lines; differences between different surroundings prove nothing, and are unchecked."""
    found = Rerun()
    odd = {number: comparing.surroundings(runs[number], again) for number, again in here.items()}
    for number, facts in odd.items():
        if facts:
            found.unchecked.append(f"--rerun: runs/{number + 1}.jsonl had other surroundings: {'; '.join(facts)}")
    of_kind = {kind: [each for each in outcomes if each.kind == kind] for kind in KINDS}
    for each in of_kind[WORSE]:
        (found.unchecked if odd.get(each.place.run) else found.wrong).append(f"--rerun: {each}")
    found.unchecked += [f"--rerun: {each}" for kind in (OTHER_CASES, OTHER_COUNTS) for each in of_kind[kind]]
    for each in of_kind[NOT_COMPARED]:
        (found.unchecked if each.doubtful else found.notes).append(f"--rerun: not compared: {each}")
    found.notes += [f"--rerun: {each}" for kind in (BETTER, OTHER) for each in of_kind[kind]]
    for lines in (found.wrong, found.unchecked, found.notes):
        if len(lines) > _SHOWN:
            lines[_SHOWN:] = [f"--rerun: and {len(lines) - _SHOWN} more"]
    counts = ", ".join(f"{len(of_kind[kind])} {kind}" for kind in of_kind if of_kind[kind])
    found.told.append(f"{len(outcomes):,} of {plural(results, 'result')}, drawn by --rerun-seed {ask.seed}: {counts}")
    compared = len(outcomes) - len(of_kind[NOT_COMPARED])
    if compared:
        table = ", ".join(f"{lies}: {share:.1%}" for lies, share in comparing.chances(results, compared))
        found.told.append(f"chance that {compared:,} compared results find so many false ones of {results:,}: {table}")
    else:
        found.unchecked.append("--rerun: none of the drawn tests could be compared")
    return found


def _profile(run: Run, root: Path, given: Path | None) -> str:
    """Return the profile of a run for ``--profile``, from a local file with the same text.

    The text in a bundle is not used, because a profile names modules that are imported, and variables.
    Errors: :class:`ReportError`.
    """
    name = run.header.profile
    if not name:
        return "none"
    shelf = Shelf(root)
    try:
        if given is None and not _NAME.fullmatch(name):
            raise ValueError("no name of a profile")
        path = given.resolve() if given is not None else shelf.path(name)
        files = shelf.read(path).files
    except (ProfileError, ValueError) as e:
        raise ReportError(f"--rerun: the profile {name!r}: {str(e).splitlines()[0]}; {_GIVE}") from None
    texts = "\0".join(shelf.texts[file] for file in files)
    if hashlib.sha256(texts.encode(errors="surrogatepass")).hexdigest() != run.header.profile_hash:
        raise ReportError(f"--rerun: {path} is not the profile that the bundle's run went by; {_GIVE}")
    return str(path)


_GIVE = (
    "a profile is code: read the one in the bundle (its folder profile/), save it with those that it inherits from, "
    "and give it with --rerun-profile FILE"
)


def _session(tests: Sequence[str], run: Run, profile: str, root: Path) -> Run:
    """Run tests in a pytest session of its own, and return its results. Errors: :class:`ReportError`."""
    header = run.header
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_PASSED_ON)}
    share = header.environment.get(f"variable {EXAMPLES}", "")
    variables |= {EXAMPLES: share} if share else {}
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(harness.__file__).parents[1]), variables.get("PYTHONPATH", "")))
    )
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        names = Path(folder, "tests")
        names.write_text("".join(f"{nodeid}\n" for nodeid in tests))
        variables["HYPOTHESIS_STORAGE_DIRECTORY"] = str(Path(folder, "hypothesis"))
        command = [sys.executable, "-m", "pytest", f"@{names}", "-q", "-p", "no:cacheprovider"]
        command += ["--profile", profile, "--subject", header.subject, "--concord-seed", header.seed]
        done = subprocess.run(
            [*command, "--concord-results", str(Path(folder, "results"))],
            cwd=root,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        files = list(Path(folder, "results").glob("*/results.jsonl"))
        try:
            found = read(files[0]) if len(files) == 1 else None
        except ResultsError as e:
            raise ReportError(f"--rerun: {e}") from None
    if found is None or done.returncode not in _FINISHED:
        last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        raise ReportError(f"--rerun: the session ended with exit status {done.returncode}: {last}")
    return found
