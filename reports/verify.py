"""The check of a bundle, which compares its files with its raw results, and these with the profile and the suite.

The bundle's own word never counts for a fact that the checkout knows, and every derived file is made anew. The check
cannot detect raw results that someone has forged consistently, digests included. Only a second run, or the signature of
the person who ran the suite, helps against that (docs/reports.md).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness.requirements import stack_of
from harness.results import Challenge, Run, TorchLacks
from harness.safe_io.untrusted import Refused, json_checked, said
from reports import bundle
from reports.arguments import asked
from reports.build import Parsed, differences, made_of
from reports.bundle import MANIFEST, Manifest
from reports.by_profile import Entitled, entitled, profile_problems, stale, unmatched, with_profile_of
from reports.by_suite import how_made, other_worlds, suite_problems, with_suite_of
from reports.challenge import challenge_problems
from reports.checkout import Checkout
from reports.coherence import ended_as_it_says, listed, run_problems
from reports.invocation import code_from_elsewhere, header_problems, unjudged
from reports.model import NOT_SHOWN, Report, ReportError
from reports.remade import claimed_report, derived, other_minimums
from reports.tried import case_problems, other_claims
from reports.unsupported import unsupported_problems

_MOST_SAID = 50
"""The number of lines of the check that the new report repeats."""


@dataclass(frozen=True)
class Checked:
    """The result of a check."""

    report: Report | None
    """The report, made anew from the raw results.  Facts from the profile's text and the local suite replace those of
    the results.  No level is conformant if anything is wrong or unchecked."""
    problems: tuple[str, ...]
    """What is wrong, one line each; empty if the bundle is right as far as it was checked."""
    unchecked: tuple[str, ...] = ()
    """What conformance depends on and could not be checked; empty if everything was."""
    notes: tuple[str, ...] = ()
    """Other facts that a reader should know."""
    manifest: str = ""
    """The SHA-256 of the manifest, which identifies the whole bundle."""
    runs: tuple[Run, ...] = field(default=(), repr=False)

    @property
    def shown(self) -> bool:
        """Whether nothing is wrong or unchecked, so that only the raw results must be trusted."""
        return not self.problems and not self.unchecked


@dataclass
class _Findings:
    """The lines of a check, as in :class:`Checked`."""

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(
    path: Path,
    concord: str,
    checkout: Checkout | None,
    now: float,
    *,
    wrong: Sequence[str] = (),
    unchecked: Sequence[str] = (),
    challenge: Challenge | None = None,
) -> Checked:
    """Check a bundle.

    ``concord``: the version of Concord that checks; ``checkout``: the local suite, if there is one; ``now``: seconds
    since the epoch; ``wrong``: what else is known to be wrong with the file, such as its signature; ``unchecked``: what
    else is known not to be checked; ``challenge``: the one that its runs must answer.
    Errors: :class:`ReportError` for a file that is not a bundle.
    """
    files = bundle.unpacked(path)
    manifest = _manifest(path, files)
    digest = hashlib.sha256(files.pop(MANIFEST)).hexdigest()
    findings = _Findings([*wrong, *_checksums(manifest, files)], list(unchecked))
    raw = [(name, data) for name, data in files.items() if re.fullmatch(r"runs/[1-9]\d{0,3}\.jsonl", name)]
    raw.sort(key=lambda pair: int(pair[0][5:-6]))
    if not raw:
        return Checked(None, (*findings.problems, "runs/: the bundle has no run"), manifest=digest)
    try:
        made = bundle.made(raw)
    except ReportError as e:
        return Checked(None, (*findings.problems, str(e)), manifest=digest)
    again, runs = made.files, made.runs
    raw = list(again.items())[: len(runs)]  # ordered by time
    same = manifest.concord == concord
    if not same:
        findings.notes.append(f"Concord {manifest.concord} made the bundle, but Concord {concord} checks it")
    findings.problems += derived(files, again, None if same else findings.unchecked)
    real = [_judge(run, data, name, checkout, now, findings) for (name, data), run in zip(raw, runs, strict=True)]
    if challenge is not None:
        findings.problems += challenge_problems(runs, challenge)
    for what, values in differences(runs).items():
        findings.problems.append(f"the runs differ in {what}: {' and '.join(value or 'none' for value in values)}")
    if len({tuple(sorted(run.tests)) for run in runs}) > 1 and all(run.end for run in runs):
        findings.problems += _uneven(runs)
    findings.unchecked += _nothing_to_hold_it_against(runs, checkout)
    digests = [hashlib.sha256(data).hexdigest() for _, data in raw]
    judged = [Parsed(name, sha256, run) for (name, _), sha256, run in zip(raw, digests, real, strict=True)]
    findings.problems += _claims_more(files.get("report.json", b""), again["report.json"], made_of(judged), same=same)
    problems, unchecked = tuple(dict.fromkeys(findings.problems)), tuple(dict.fromkeys(findings.unchecked))
    report = made_of(judged, _in_the_report(problems, unchecked))
    return Checked(report, problems, unchecked, tuple(dict.fromkeys(findings.notes)), digest, runs)


def _judge(run: Run, data: bytes, name: str, checkout: Checkout | None, now: float, findings: _Findings) -> Run:
    """Check a run, and return it with facts from the profile's text and the suite instead of its own."""
    request = asked(run.header.arguments, run.header.environment)
    by, unreadable = entitled(run)
    problems = [
        *run_problems(run, data, request, now),
        *case_problems(run),
        *unreadable,
        *header_problems(run, request),
    ]
    reasons: list[str] = []
    if by is not None:
        problems += [*profile_problems(run, by), *other_claims(run, by)]
        reasons = list(stale(run, by)) or (list(unmatched(run, by)) if run.exit_status else [])
    problems += ended_as_it_says(run, reasons)
    here = checkout is not None and checkout.suite_hash == run.header.suite_hash and checkout.facts is not None
    if here and checkout is not None:
        problems += suite_problems(run, checkout)
        problems += unsupported_problems(run, by, request, checkout)
        if by is not None and not (request.world_backend or request.world_device):
            problems += other_worlds(run, by, checkout)
    findings.problems += (f"{name}: {problem}" for problem in problems)
    unchecked = [*unjudged(run, request), *how_made(run, checkout if here else None)]
    unchecked += _other_defects(run, by, checkout if here else None)
    findings.unchecked += (f"{name}: {line}" for line in unchecked)
    notes = [*code_from_elsewhere(run), *_lacking(run), *_other_profile(by, checkout)]
    notes += _unknown_owners(run, by, checkout if here else None)
    findings.notes += (f"{name}: {note}" for note in notes)
    return with_suite_of(with_profile_of(run, by), checkout)


def _lacking(run: Run) -> Iterator[str]:
    """Note the tests that say that their torch lacks what they test, which only they can know."""
    lacking = [t.nodeid for t in run.tests.values() if isinstance(t.cause, TorchLacks)]
    if lacking:
        yield listed(f"torch {run.header.environment.get('torch', '')} lacks what these tests are about", lacking)


def _other_profile(by: Entitled | None, checkout: Checkout | None) -> Iterator[str]:
    """Note profiles that differ from the shipped file of the same name, since profiles are not part of the suite."""
    for file, text in by.recorded.texts.items() if by is not None and checkout is not None else ():
        if checkout is not None and checkout.profiles.get(file, text) != text:
            yield f"its {file} differs from the local profile of that name"


def _other_defects(run: Run, by: Entitled | None, checkout: Checkout | None) -> Iterator[str]:
    """Name the owners whose defects are not those here, since whoever runs the suites could have added to them."""
    for owner, text in _used_defects(run, by).items() if checkout is not None else ():
        if checkout is not None and checkout.defects.get(owner, text) != text:
            yield f"its defects of {owner} are not those here: which failures are {owner}'s only the bundle says"


def _unknown_owners(run: Run, by: Entitled | None, checkout: Checkout | None) -> Iterator[str]:
    """Note the owners whose defects are not here, such as packages, since their texts are not part of the suite."""
    for owner in _used_defects(run, by) if checkout is not None else ():
        if checkout is not None and owner not in checkout.defects:
            yield f"tests are waived for defects of {owner}, which are not known here"


def _used_defects(run: Run, by: Entitled | None) -> dict[str, str]:
    """Return the texts of the known defects for which tests of a run are waived, by owner."""
    if by is None:
        return {}
    used = {test.waiver for test in run.records() if test.verdict == "waived"}
    owners = {waiver.owner for waiver in by.profile.waivers if waiver.defect and waiver.place in used}
    return {owner: by.defects[owner] for owner in sorted(owners)}


def _nothing_to_hold_it_against(runs: Sequence[Run], checkout: Checkout | None) -> Iterator[str]:
    """Say why the runs cannot be compared with a local suite, if they cannot."""
    for run in runs[:1]:
        digest = run.header.suite_hash
        if checkout is None or not checkout.suite_hash:
            yield "there is no local suite to compare it with: run this in a checkout of the same suite"
        elif digest != checkout.suite_hash:
            yield (
                f"its suite ({digest[:12] or 'unknown'}) differs from the local one ({checkout.suite_hash[:12]}), so "
                "that its list of tests and the facts about them could not be checked"
            )
        elif checkout.facts is None:
            yield "its suite is the local one, but the tests of the local suite were not collected"


def _claims_more(claimed: bytes, again: bytes, real: Report, *, same: bool) -> Iterator[str]:
    """Find levels at which the bundle's report claims conformance, but not the report made from the checked runs.

    ``same``: whether the version of Concord that checks has made the bundle.
    """
    try:
        old = claimed_report(claimed, again)
    except ReportError:
        return  # already reported
    if not same and other_minimums(old, real):
        return  # already reported
    truly = {level.id: level for level in real.levels}
    for level in old.levels:
        if level.conformant and (level.id not in truly or not truly[level.id].conformant):
            why = truly[level.id].why_not[0] if level.id in truly else "there is no such level."
            what = "not shown" if level.id in truly and truly[level.id].answer == NOT_SHOWN else "not"
            yield f"report.json: says that {level.id} is conformant, but checked locally it is {what}: {why}"


def _in_the_report(problems: Sequence[str], unchecked: Sequence[str]) -> list[str]:
    """Return the sentences that keep every level of the new report from being conformant."""
    lines = [*(f"Wrong: {line}." for line in problems), *(f"Not checked: {line}." for line in unchecked)]
    more = [f"And {len(lines) - _MOST_SAID} more."] if len(lines) > _MOST_SAID else []
    return [*lines[:_MOST_SAID], *more]


def _manifest(path: Path, found: Mapping[str, bytes]) -> Manifest:
    if MANIFEST not in found:
        raise ReportError(f"{path}: not a bundle of Concord: it has no {MANIFEST}")
    try:
        manifest = msgspec.json.decode(json_checked(found[MANIFEST], bundle.bundle_allowance()), type=Manifest)
    except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ReportError(f"{path}: {MANIFEST}: {said(e)}") from None
    if manifest.schema != bundle.SCHEMA:
        raise ReportError(f"{path}: not a bundle of Concord")
    if manifest.version > bundle.VERSION:
        raise ReportError(
            f"{path}: version {manifest.version}, and this Concord reads up to {bundle.VERSION}; update it"
        )
    return manifest


def _checksums(manifest: Manifest, found: Mapping[str, bytes]) -> Iterator[str]:
    for name, digest in manifest.files.items():
        if name not in found:
            yield f"{name}: the manifest lists it, but the bundle lacks it"
        elif hashlib.sha256(found[name]).hexdigest() != digest:
            yield f"{name}: its checksum differs from the one in the manifest"
    for name in found:
        if name not in manifest.files:
            yield f"{name}: the manifest does not list it"


def _uneven(runs: Sequence[Run]) -> Iterator[str]:
    for stack in {stack for run in runs if run.end for stack in run.end.whole}:
        sets = [{t for t in run.tests if stack_of(t) == stack} for run in runs if run.end and stack in run.end.whole]
        odd = set[str]().union(*sets) - sets[0].intersection(*sets)
        if odd:
            yield listed(f"each run says that it ran all of {stack}, but these are not in every run", odd)
