"""The check of a bundle's derived files against those that its runs make here.

No derived file is trusted: reports and pages are made anew, and a file of the bundle either equals the new one or is
wrong. Another version of Concord may format the same content differently, so then the content is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from harness.safe_io.untrusted import Refused, json_checked
from reports import bundle
from reports.model import CONFORMANT, NOT_CONFORMANT, Report, ReportError, decode

_VERDICTS = ("tests", "requirements", "waivers")


def derived(found: Mapping[str, bytes], again: Mapping[str, bytes], unchecked: list[str] | None) -> Iterator[str]:
    """Find the derived files of a bundle that differ from what its runs make.

    ``found``: the files of the bundle; ``again``: the files that its runs make.
    ``unchecked``: None if the version that checks has made the bundle, so that every byte is known.  Otherwise, a list
    to which lines are added about files of another version that cannot be judged here.
    """
    for name in sorted({*found, *again}):
        if name not in again:
            yield f"{name}: nothing in the runs makes such a file"
        elif name not in found:
            yield f"{name}: the runs make it, and it is not there"
        elif found[name] == again[name]:
            continue
        elif name == "report.json":
            yield from _report(found[name], again[name], unchecked)
        elif name == "report.html" and unchecked is not None:
            unchecked.append(
                "report.html: a page of another version of Concord, which nobody has checked: do not open it"
            )
        elif name in ("environment.json", "suite.json") and unchecked is not None and _same(found[name], again[name]):
            continue
        elif name.startswith("profile/"):
            yield f"{name}: not the profile that the runs went by"
        elif name == "environment.json":
            yield f"{name}: not the environment in which the runs were made"
        else:
            yield f"{name}: not what the runs make"


def claimed_report(claimed: bytes, again: bytes) -> Report:
    """Decode the report in a bundle; ``again``: the one that its runs make.

    Errors: :class:`ReportError`, also if it is more than twice as long as that one.
    """
    if len(claimed) > 2 * len(again):
        raise ReportError(f"report.json: has {len(claimed):,} bytes, and the runs make {len(again):,}")
    return decode(claimed, "report.json", bundle.bundle_allowance())


def _same(old: bytes, new: bytes) -> bool:
    """Whether two JSON texts have the same content."""
    try:
        return bool(msgspec.json.decode(json_checked(old, bundle.bundle_allowance())) == msgspec.json.decode(new))
    except (Refused, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def _report(claimed: bytes, again: bytes, unchecked: list[str] | None) -> Iterator[str]:
    try:
        old, new = claimed_report(claimed, again), decode(again, "report.json", bundle.bundle_allowance())
    except ReportError as e:
        yield str(e)
        return
    if old == new:
        if unchecked is None:
            yield "report.json: says the same as the runs, in other bytes"
        return
    if len(old.runs) != len(new.runs):
        yield f"report.json: is of {len(old.runs)} runs, and there are {len(new.runs)}"
    if unchecked is not None and other_minimums(old, new):
        unchecked.append(f"report.json: {other_minimums(old, new)}; read the one made here")
    else:
        yield from _levels(old, new)
    for what in _VERDICTS:
        yield from _entries(what[:-1], getattr(old, what), getattr(new, what), verdicts_only=unchecked is not None)
    others = [f for f in Report.__struct_fields__ if f not in (*_VERDICTS, "runs", "conformant")]
    different = [name for name in others if getattr(old, name) != getattr(new, name)]
    if unchecked is not None:
        if old.runs != new.runs or different:
            what = ", ".join(["runs"] * (old.runs != new.runs) + different)
            unchecked.append(f"report.json: another version of Concord says otherwise: {what}; read the one made here")
        return
    if old.runs != new.runs and len(old.runs) == len(new.runs):
        yield "report.json: says something else about the runs than they do"
    for name in different:
        yield f"report.json: {name} is not what the runs say"


def other_minimums(old: Report, new: Report) -> str:
    """Say that two reports judge levels by different versions of the minimums; empty if they do not."""
    versions = (old.levels_version, new.levels_version)
    if versions[0] == versions[1]:
        return ""
    return f"its levels are judged by version {versions[0]} of the minimums, and here by version {versions[1]}"


def _levels(old: Report, new: Report) -> Iterator[str]:
    if old.conformant != new.conformant:
        yield f"report.json: says conformant at {old.conformant or 'no level'}; the runs say {new.conformant or 'none'}"
    for level in new.levels:
        said = next((each for each in old.levels if each.id == level.id), None)
        if said is None or said.answer == level.answer:
            continue
        if said.answer == CONFORMANT:
            yield f"report.json: says that {level.id} is conformant; the runs say that it is {_not(level.answer)}"
        elif level.answer == NOT_CONFORMANT:
            yield f"report.json: says that {level.id} is not shown; the runs say that it is not conformant"


def _not(answer: str) -> str:
    return "not" if answer == NOT_CONFORMANT else answer


def _entries(what: str, old: Iterable[Any], new: Iterable[Any], *, verdicts_only: bool) -> Iterator[str]:
    key = {"test": "nodeid", "requirement": "id", "waiver": "place"}[what]
    claimed, real = ({getattr(each, key): each for each in entries} for entries in (old, new))
    for name in sorted({*claimed, *real}):
        if name not in real:
            yield f"report.json: {what} {name} is in no run"
        elif name not in claimed:
            yield f"report.json: {what} {name} is in the runs, and not here"
        elif claimed[name] != real[name]:
            pairs = [(getattr(each, "verdict", "") or "") for each in (claimed[name], real[name])]
            if pairs[0] != pairs[1]:
                yield f"report.json: {what} {name} says {pairs[0]}, and the runs say {pairs[1]}"
            elif not verdicts_only:
                yield f"report.json: {what} {name} is not as in the runs"
