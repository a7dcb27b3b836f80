"""The draft of a profile: it claims what was right, and mentions in comments what was not."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Sequence

from harness.probe.found import ENDS, RIGHT, Ability, Found, Trial, boxes, claimed_features, platform_line, words_of
from harness.profiles.vocabulary import COLLECTIVES, DTYPES, OPS, STACKS

_WIDTH = 118
_LONG = 240
"""The most characters of a comment."""


def draft(found: Found, name: str, today: datetime.date) -> str:
    """Draft a profile, as TOML, that claims what was right, and nothing else that was tried.

    ``name``: the name of the profile; ``today``: for the dates of its waivers, which are commented out.
    """
    sizes = [size.size for size in found.sizes if size.end == RIGHT]
    lines = [
        f"# Drafted by `concord probe` on {today} ({platform_line(found)}).  Every key: docs/profiles.md",
        "# What is claimed gave the right values; look at each comment: is it an omission, or a defect?",
        f"name = {_quoted(name)}",
        f"backend = {_quoted(found.backend)}",
        f"device = {_quoted(found.device)}",
        *([_listed("imports", found.imports)] if found.imports else []),
        *([f"world_sizes = {json.dumps(sizes)}"] if sizes else []),
        *(f"# worlds of {s.size}: {s.end}: {_plain(s.detail)}" for s in found.sizes if s.end != RIGHT),
        *_stacks(found.abilities),
        "",
        *_collectives(found),
        *_features(found.abilities),
        *_waivers(found, today),
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _stacks(abilities: Sequence[Ability]) -> list[str]:
    ends = {a.stack: a for a in abilities if not a.feature}
    bad = [ends[stack] for stack in STACKS if stack in ends and ends[stack].end != RIGHT]
    if not bad:
        return []
    kept = [stack for stack in STACKS if stack not in {a.stack for a in bad}]
    said = [f"# {a.stack}: {a.end}: {_plain(a.detail)}" for a in bad]
    return [*said, _listed("stacks", kept)] if kept else said


def _collectives(found: Found) -> list[str]:
    if not found.trials:
        return []
    right = found.right
    names, dtypes, ops = words_of(right, (COLLECTIVES, DTYPES, OPS))
    if not names:
        return ["# No collective gave the right values of any dtype.", ""]
    lines = ["[collectives]", _listed("names", names), _listed("dtypes", dtypes)]
    lines += [_listed("ops", ops)] if ops else []
    cells = {
        (t.collective, t.dtype, t.op): t
        for t in found.trials
        if t.collective in names and t.dtype in dtypes and (not t.op or t.op in ops)
    }
    for end in ENDS:
        missing = [cell for cell, t in cells.items() if t.end == end != RIGHT]
        others = {cell for cell, t in cells.items() if t.end != end}
        for box in boxes(missing, others, (names, dtypes, ops)):
            first = next(t for cell, t in cells.items() if cell in missing and _within(cell, box))
            lines += ["", "[[collectives.except]]"]
            lines += [_listed("collectives", box[0])] if set(box[0]) != set(names) else []
            lines += [_listed("dtypes", box[1])] if set(box[1]) != set(dtypes) else []
            lines += [_listed("ops", box[2])] if box[2] else []  # even all reductions leave out cells without one
            lines.append(f"reason = {_quoted(_why([first]))}")
    return [*lines, "", *_said(t for t in found.trials if t.end not in (RIGHT, "refused")), ""]


def _within(cell: tuple[str, str, str], box: tuple[tuple[str, ...], ...]) -> bool:
    return all(not words or word in words for word, words in zip(cell, box, strict=True))


def _why(trials: Sequence[Trial]) -> str:
    ends = sorted({t.end for t in trials})
    details = list(dict.fromkeys(t.detail for t in trials if t.detail))
    return f"{' or '.join(ends)} when probed" + (f": {_plain(details[0])}" if details else "")


def _said(trials: Iterable[Trial]) -> list[str]:
    """Describe trials in comments: a line for each collective, reduction and end."""
    alike: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        alike.setdefault((trial.collective, trial.op, trial.end), []).append(trial)
    lines = []
    for (collective, op, end), some in alike.items():
        dtypes = ", ".join(t.dtype for t in some)
        by = f" with {op}" if op else ""
        lines.append(f"# {collective} of {dtypes}{by}: {end}: {_plain(some[0].detail)}"[:_LONG])
    return lines


def _features(abilities: Sequence[Ability]) -> list[str]:
    lines: list[str] = []
    for stack in STACKS:
        bad = [a for a in abilities if a.stack == stack and a.feature and a.end != RIGHT]
        if bad:
            lines += [f"# {a.name}: {a.end}: {_plain(a.detail)}"[:_LONG] for a in bad]
            lines.append(_listed(stack, claimed_features(abilities, stack)))
    return ["[features]", *lines, ""] if lines else []


def _waivers(found: Found, today: datetime.date) -> list[str]:
    """Draft waivers for defects, as opposed to omissions: one for each collective that was wrong, crashed or hung."""
    bad: dict[str, list[Trial]] = {}
    for trial in found.trials:
        if trial.end in ("wrong", "crashed", "hung"):
            bad.setdefault(trial.collective, []).append(trial)
    lines = []
    for collective, trials in bad.items():
        verdicts = sorted({"failed" if t.end == "wrong" else t.end for t in trials})
        lines += [
            "# [[waiver]]  # if this should work: claim it above, and say here until when it does not",
            f"# tests = [{_quoted(f'suites/collectives/*[[]*-{collective}*')}]".replace("[[]", "["),
            f"# reason = {_quoted(_why(trials))}",
            '# link = "unreported"',
            f"# expires = {today + datetime.timedelta(days=180)}",
            f"# {_listed('verdicts', verdicts)}",
            "",
        ]
    return lines


def _listed(key: str, words: Sequence[str]) -> str:
    """Return ``key = ["a", "b"]``, on several lines if one would be too long."""
    line = f"{key} = [{', '.join(map(_quoted, words))}]"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{key} = [", *(f"    {_quoted(word)}," for word in words), "]"])


def _quoted(text: str) -> str:
    return json.dumps(_plain(text), ensure_ascii=False)


def _plain(text: str) -> str:
    """Return a text on one line, without characters that a terminal or TOML would interpret."""
    return "".join(c if c.isprintable() else " " for c in text).strip()[:200] or "no word"
