"""The standard: every requirement of the suites, a page for each stack, and the rules that its sentences follow.

The command ``concord requirements`` writes docs/requirements/ from what pytest collects.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.commands.collecting import collected
from harness.commands.outputs import INDEX, Check, PagesFolder, pages_out, require_folder
from harness.commands.refusing import bad
from harness.requirements import LEVELS
from harness.results import RequirementText
from harness.suite_facts import SuiteFacts
from reports.model import ReportError

FOLDER = "docs/requirements"
MOST_WORDS = 30
_INDIRECT = re.compile(r"(What|Who|Where|How|Which)(ever|soever)?\b")
_WORLD = re.compile(r"^(\d+ranks?|worlds)-?")
"""The part of a test's id that names its world."""
_EDGE = re.compile(r"(?<![^\W_])_+|_+(?![^\W_])")
"""Underscores that Markdown could take for emphasis."""
_ABOUT = {
    "L1": "collectives, messages, process groups and meshes of `torch.distributed`",
    "L2": "composable DDP: `torch.distributed._composable.replicate`",
    "L3": "replication on FSDP2: `torch.distributed._composable.replicate_with_fsdp`",
    "L4": "FSDP1 over tensor parallelism: `torch.distributed.tensor.parallel.fsdp`",
    "L5": "distributed code under `torch.compile`",
    "P": "correct results and plausible times in benchmarks",
}
"""What each level of :data:`harness.requirements.LEVELS` is about."""
_GENERATED = f"<!-- Generated from suites/ by: concord requirements {FOLDER} -->"


def flaws(sentence: str) -> list[str]:
    """Return the rules that the sentence of a requirement breaks."""
    words = len(sentence.split())
    broken = {
        f"it has {words} words, and {MOST_WORDS} is the most": words > MOST_WORDS,
        "it has 'and' twice: make two requirements of it": len(re.findall(r"\band\b", sentence)) > 1,
        "it is not one sentence that ends with a full stop": not re.fullmatch(r"(?:[^.]|\.(?!\s|$))+\.", sentence),
        "it has a semicolon: make two requirements of it": ";" in sentence,
        "it begins with an indirect subject: name the subject": bool(_INDIRECT.match(sentence)),
        "it is not in the present tense": bool(re.search(r"\b(will|shall|should)\b", sentence)),
    }
    return [rule for rule, is_broken in broken.items() if is_broken]


def standard(facts: SuiteFacts) -> dict[str, str]:
    """Render the requirements of a suite as Markdown: pages by the name of their file, one for each level."""
    by_level: dict[str, list[RequirementText]] = {level: [] for level in LEVELS}
    for requirement in facts.requirements.values():
        by_level.setdefault(requirement.level, []).append(requirement)
    by_level = {level: requirements for level, requirements in by_level.items() if requirements}
    tests = _tests(facts)
    pages = {INDEX: [*_introduction(by_level), *_by_version(facts)]}
    for level, requirements in by_level.items():
        lines = pages[_file(level)] = [
            _GENERATED,
            "",
            f"# {_title(level)}",
            "",
            f"Requirements about {_ABOUT[level]}. [The standard]({INDEX}) says how to read this page."
            if level in _ABOUT
            else f"[The standard]({INDEX}) says how to read this page.",
        ]
        topics: dict[str, list[RequirementText]] = defaultdict(list)
        for requirement in sorted(
            requirements, key=lambda requirement: (_topic(requirement.id), _number(requirement.id))
        ):
            topics[_topic(requirement.id)].append(requirement)
        lines += ["", f"Topics: {', '.join(f'[{topic}](#{topic.lower()})' for topic in topics)}"]
        for topic, of_topic in topics.items():
            lines += ["", f"## {topic}", "", "| id | requirement | source | tests |", "|---|---|---|---|"]
            lines += [_row(requirement, tests[requirement.id]) for requirement in of_topic]
    return {name: "\n".join(lines) + "\n" for name, lines in pages.items()}


def requirements(folder: PagesFolder = None, check: Check = False) -> None:
    """Write the standard: every requirement of the suites here, with its level, source and tests.

    Run it in a checkout of Concord; it collects the suites and starts no rank.
    """
    require_folder(folder, check)
    if not Path("suites").is_dir():
        raise bad(f"{Path.cwd()} has no folder suites; run this where they are")
    try:
        pages = standard(collected(Path.cwd()))
    except ReportError as e:
        raise bad(str(e)) from None
    pages_out(pages, folder, check, "requirements")


def _introduction(by_level: Mapping[str, list[RequirementText]]) -> Iterator[str]:
    yield f"""\
{_GENERATED}

# The standard

Each requirement is one claim about what a user of PyTorch's distributed stack sees, with the tests that prove it.
A backend is **conformant** at a level if it meets every mandatory requirement of that level and of the levels before
it, in worlds of enough sizes; [reports](../reports.md#levels) state the exact rule and each level's minimum, and
[the vendors' page](../vendors.md) shows how to run it.

| level | stack | requirements | about |
|---|---|---|---|"""
    for level, requirements in by_level.items():
        optional = sum(not requirement.mandatory for requirement in requirements)
        count = f"{len(requirements)}, {optional} optional" if optional else str(len(requirements))
        link = f"[{level or 'none'}]({_file(level)})"
        yield f"| {link} | `{LEVELS.get(level, '')}` | {count} | {_ABOUT.get(level, '')} |"
    yield f"""
How to read the tables:

- An **id** is `STACK-TOPIC-NN`. It keeps its meaning and is never used again: reports are compared by it.
- The **source** is the page or symbol of PyTorch that promises the behavior, with issues in which it was broken.
- A requirement holds if all of its **tests** pass. Each runs on several world sizes, most with many dtypes, shapes or
  options. A *property* draws its cases, so that a level needs a second run from another seed.
- Requirements are **mandatory** unless marked *optional*. Optional ones are reported, and no level depends on them.
- A [profile](../profiles.md) states what a backend claims. Tests of what it does not claim are reported as unsupported.

These pages are generated. To change one, change the tests under `suites/` ([writing suites](../writing-suites.md)) and
run `concord requirements {FOLDER}`. CI fails while a page is out of date."""


def _by_version(facts: SuiteFacts) -> Iterator[str]:
    """Yield the requirements that not every version of PyTorch can meet, by the name in PyTorch that they need."""
    needing: dict[str, set[str]] = defaultdict(set)
    for test in facts.tests.values():
        if test.needs.torch:
            needing[test.needs.torch].update(test.requirements)
    if not needing:
        return
    yield from ("", "## Requirements that depend on the version", "")
    yield "A test that needs one of these names is unsupported with a PyTorch that does not have it."
    yield from ("", "| name in PyTorch | requirements |", "|---|---|")
    for name in sorted(needing):
        yield f"| `{name}` | {', '.join(f'`{each}`' for each in sorted(needing[name]))} |"


def _tests(facts: SuiteFacts) -> dict[str, list[str]]:
    """Return links to the tests of each requirement, with parameters if only some instances of a test prove it."""
    instances: dict[str, list[str]] = defaultdict(list)
    proving: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for nodeid, test in facts.tests.items():
        function = nodeid.partition("[")[0]
        instances[function].append(nodeid)
        for requirement in test.requirements:
            proving[requirement][function].append(nodeid)
    return {
        requirement: [
            _link(function, nodeids, whole=len(nodeids) == len(instances[function]))
            + (" *(property)*" if facts.tests[nodeids[0]].property_based else "")
            for function, nodeids in functions.items()
        ]
        for requirement, functions in proving.items()
    }


def _link(function: str, nodeids: list[str], *, whole: bool) -> str:
    file, _, name = function.partition("::")
    chosen = dict.fromkeys(_WORLD.sub("", nodeid.partition("[")[2].removesuffix("]")) for nodeid in nodeids)
    parameters = "" if whole else f"[{', '.join(chosen)}]"
    return f"[`{name}{parameters}`](../../{file})"


def _row(requirement: RequirementText, tests: list[str]) -> str:
    optional = "" if requirement.mandatory else " *(optional)*"
    cells = (
        f"`{requirement.id}`{optional}",
        _plain(requirement.sentence),
        _plain(requirement.source),
        ", ".join(tests),
    )
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Escape what Markdown would take for a table border or for emphasis."""
    return _EDGE.sub(lambda match: match[0].replace("_", r"\_"), text.replace("|", r"\|").replace("*", r"\*"))


def _title(level: str) -> str:
    return f"{level}: {LEVELS[level]}" if level in LEVELS else level or "without a level"


def _file(level: str) -> str:
    """Return the name of the page of a level, that of its stack."""
    return f"{LEVELS.get(level) or level or 'without-a-level'}.md"


def _topic(id: str) -> str:
    return id.rpartition("-")[0]


def _number(id: str) -> int:
    return int(id.rpartition("-")[2])
