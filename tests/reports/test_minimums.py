"""What a level takes at the least: the figures of Concord, a run for each that falls short of it, and their reader."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from invented import PROFILE, WAIVER, of_stack, records, requirement, written

from harness.profiles import Platform
from harness.profiles.shelf import Shelf
from harness.requirements import LEVELS
from harness.results import (
    GivenWorld,
    HostLacks,
    ProfileText,
    RequirementText,
    TestResult,
    TooFewDevices,
    TooFewHosts,
    TooLittleMemory,
    TorchLacks,
)
from reports import badge, minimums
from reports.answer import answer, kind
from reports.build import build
from reports.markdown import markdown
from reports.minimums import Minimums, read
from reports.model import LevelReport, Report, ReportError
from reports.page import page
from reports.shortfall import unclaimed

ROOT = Path(__file__).parents[2]
TEXT = minimums.FILE.read_text()
REAL = read(TEXT, "levels.toml")
MANY = 36
"""Requirements of each stack besides those about groups and sizes."""
CLAIMS_ALL = PROFILE[: PROFILE.index("[[collectives.except]]")]

Change = Callable[[list[Any]], None]


@pytest.fixture(autouse=True)
def the_real_minimums(monkeypatch: pytest.MonkeyPatch, minimums_of_the_invented_suite: None) -> None:
    monkeypatch.setattr("reports.minimums.shipped", lambda: REAL)


def suite_of(level: str, stack: str) -> list[TestResult]:
    """As many tests as the level takes: groups, every size, many on two ranks, and a property of several sizes."""
    least = REAL.levels[level]
    asked = [(name, least.world_sizes[-1]) for name in least.subgroups]
    asked += [(requirement(stack, f"size{size}"), size) for size in least.world_sizes]
    asked += [(requirement(stack, f"many{i}"), 2) for i in range(MANY)]
    tests = [
        TestResult(
            nodeid=f"suites/{stack}/test_a.py::test_{name.lower().replace('-', '_')}[{size}ranks]",
            verdict="passed",
            requirements=[name],
            world=GivenWorld(size, "gloo", "cpu"),
            size=size,
        )
        for name, size in asked
    ]
    drawn = TestResult(
        nodeid=f"suites/{stack}/test_a.py::test_drawn[worlds]",
        verdict="passed",
        requirements=[requirement(stack, "drawn")],
        world=GivenWorld(4, "gloo", "cpu", (1, 2, 4)),
        size=4,
        property_based=True,
    )
    return [msgspec.structs.replace(test, stack=stack) for test in (*tests, drawn)]


def whole(*changes: Change, profile: str = CLAIMS_ALL) -> list[tuple[str, bytes]]:
    """Two whole runs of a suite with all that the levels take; each change is made to the records of both."""
    files = []
    for name, seed, drawn, later in (("first", "default", False, 0.0), ("second", "123", True, 1000.0)):
        of = [test for level, stack in LEVELS.items() for test in suite_of(level, stack)]
        made = [
            record
            for record in records(seed, drawn=drawn, of=of, profile=profile, later=later)
            if not isinstance(record, RequirementText)
        ]
        levels = {name: of_stack(test.stack) for test in of for name in test.requirements}
        made[3:3] = [RequirementText(id=n, sentence="So.", source="x", level=level) for n, level in levels.items()]
        for change in changes:
            change(made)
        files.append((name, written(made)))
    return files


def judged(*changes: Change, profile: str = CLAIMS_ALL) -> Report:
    return build(whole(*changes, profile=profile))


def level_of(report: Report, name: str) -> LevelReport:
    return next(level for level in report.levels if level.id == name)


def where(matches: str, stack: str = "", **fields: Any) -> Change:
    """Changes the results of all tests whose name matches a pattern."""

    def apply(made: list[Any]) -> None:
        hit = [t for t in made if isinstance(t, TestResult) and re.search(matches, t.nodeid) and stack in t.stack]
        assert hit
        for test in hit:
            for key, value in fields.items():
                setattr(test, key, value)

    return apply


def unsupported(cause: Any) -> dict[str, Any]:
    return {"verdict": "unsupported", "cause": cause, "reason": f"unsupported: {cause}"}


def devices(count: int) -> Change:
    """Makes the machine one of so many devices."""

    def apply(made: list[Any]) -> None:
        for test in made:
            if not isinstance(test, TestResult) or test.size <= count:
                continue
            sizes = tuple(size for size in test.world.sizes if size <= count) if test.world else ()
            if sizes:
                test.world = GivenWorld(max(sizes), "gloo", "cpu", sizes)
                continue
            for key, value in unsupported(TooFewDevices(test.size, test.size, "gpu", count)).items():
                setattr(test, key, value)

    return apply


# the figures


def test_version() -> None:
    """A change of a figure is another version of the levels: raise it, say so in CHANGELOG.md, and write the digest."""
    digests = {1: "c2cb330a47c87fd0"}
    content = msgspec.json.encode({**tomllib.loads(TEXT), "version": None}, order="deterministic")
    assert sha256(content).hexdigest()[:16] == digests[REAL.version]


def test_sizes() -> None:
    """L1 to L5 take one rank, an even number, an odd one above one, and four."""
    for level in LEVELS:
        assert level == "P" or {1, 2, 3, 4} <= {*REAL.levels[level].world_sizes}


def test_groups() -> None:
    """L1 to L5 take requirements about groups, which the standard has at that level."""
    for level, stack in LEVELS.items():
        page = (ROOT / "docs" / "requirements" / f"{stack}.md").read_text()
        names = REAL.levels[level].subgroups
        assert (level == "P") == (not names)
        assert [name for name in names if f"| `{name}` |" not in page] == []


def test_documented() -> None:
    """The table of docs/reports.md has the figures of the file."""
    text = (ROOT / "docs" / "reports.md").read_text()
    for level, least in REAL.levels.items():
        sizes = ", ".join(map(str, least.world_sizes))
        groups = ", ".join(least.subgroups) or "none"
        row = f"| {level} | {sizes} | {groups} | {least.unsupported:.0%} | {least.waived:.0%} |"
        assert row in text, row
    for words in (REAL.levels["L1"].collectives, REAL.levels["L1"].dtypes, REAL.levels["L1"].ops):
        for word in words:
            assert f"`{word}`" in text, word


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0"])
@pytest.mark.parametrize("path", sorted((ROOT / "fixtures" / "profiles").glob("*.toml")), ids=lambda path: path.stem)
def test_profiles_claim_enough(path: Path, torch: str) -> None:
    """Every profile that PyTorch's backends have claims what the levels take."""
    profile = Shelf(ROOT).read(path)
    claims = profile.claims.on(Platform(torch=torch))
    for level, least in REAL.levels.items():
        assert list(unclaimed(claims, least)) == [], level
        assert profile.world_sizes == () or {*least.world_sizes} <= {*profile.world_sizes}


def test_installed() -> None:
    """The file is part of the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "levels.toml" in project["tool"]["setuptools"]["package-data"]["reports"]


def test_in_the_report() -> None:
    """A report says by which version it judges."""
    assert build(whole()).levels_version == REAL.version
    assert f"levels of version {REAL.version}." in page(build(whole()))


# enough, and less


def test_enough() -> None:
    """What has all that the levels take is conformant."""
    report = judged()
    assert (report.conformant, report.steps, [level.why_not for level in report.levels]) == ("L5", [], [[]] * 6)


def gone(name: str) -> Change:
    """Leaves out a requirement with its tests."""

    def apply(made: list[Any]) -> None:
        tests = [test for test in made if isinstance(test, TestResult) and name in test.requirements]
        made[1].tests = [nodeid for nodeid in made[1].tests if nodeid not in {test.nodeid for test in tests}]
        made[:] = [each for each in made if each not in tests and getattr(each, "id", "") != name]

    return apply


LESS = [
    (where("size3_", "collectives", **unsupported(None)), "none passed on worlds of 3 ranks."),
    (where("size1_", "collectives", **unsupported(None)), "none passed on worlds of one rank."),
    (where("coll_group_05", **unsupported(None)), "L1 takes COLL-GROUP-05, which is about groups of some ranks; it is"),
    (gone("COLL-GROUP-05"), "L1 takes COLL-GROUP-05, which is about groups of some ranks; no run that counts has it."),
    (where("many[0-3]_", "collectives", **unsupported(None)), "4 of 45 mandatory requirements are unsupported, or"),
]


@pytest.mark.parametrize(("change", "says"), LESS, ids=[says for _, says in LESS])
def test_less(change: Change, says: str) -> None:
    """Each minimum that is not met is a sentence; nothing is wrong, and it is not the level."""

    def but_drawn(made: list[Any]) -> None:  # of which the property would make up for the sizes
        where("drawn", "collectives", world=GivenWorld(4, "gloo", "cpu", (2, 4)))(made)

    report = judged(change, but_drawn)
    level = level_of(report, "L1")
    assert (report.conformant, level.answer, level.reds) == ("", "not shown", [])
    assert any(says in sentence for sentence in level.missing), level.missing
    assert level.partial.startswith("L1 ")
    assert level.partial.endswith(": partial")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_size(level: str, size: int) -> None:
    """Each level takes each of its sizes, and not others."""
    stack = LEVELS[level]

    def without(made: list[Any]) -> None:
        for test in made:
            if isinstance(test, TestResult) and test.stack == stack and test.size == size:
                for key, value in unsupported(None).items():
                    setattr(test, key, value)
            sizes = test.world.sizes if isinstance(test, TestResult) and test.stack == stack and test.world else ()
            if size in sizes:
                left = tuple(each for each in sizes if each != size)
                test.world = GivenWorld(left[-1], "gloo", "cpu", left)

    said = f"none passed on worlds of {'one rank' if size == 1 else f'{size} ranks'}."
    missing = level_of(judged(without), level).missing
    assert any(said in sentence for sentence in missing) == (size in REAL.levels[level].world_sizes)


def test_drawn_from_one_size() -> None:
    """A property that had worlds of one size and asks for more falls short; one of a single size does not."""
    one = where("drawn", "replicate", world=GivenWorld(2, "gloo", "cpu", (2,)))
    (said, *_) = level_of(judged(one), "L2").missing
    assert said.startswith("1 property drew its worlds from fewer than 2 sizes, although they ask for up to 4 ranks: ")
    alone = where("drawn", "replicate", world=GivenWorld(2, "gloo", "cpu", (2,)), size=2)
    assert judged(alone).conformant == "L5"


def test_few_examples() -> None:
    """A run with fewer examples does not count, so that one is missing."""

    def smoke(made: list[Any]) -> None:
        made[0].effort = 0.1

    report = judged(smoke)
    said = "The runs of collectives drew 0.1 of its examples (CONCORD_EXAMPLES), and L1 takes all of them."
    assert (report.problems, level_of(report, "L1").missing[0]) == ([], said)
    assert (level_of(report, "L1").answer, level_of(report, "L1").partial) == ("not shown", "")
    assert "Not shown yet at any level" in answer(report)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ('dtypes = ["float32", "float16", "int64", "int32"]', "all_reduce of bfloat16 with SUM"),
        ('names = ["all_reduce", "broadcast"]', "reduce of float32 with SUM"),
        ('ops = ["SUM"]', "all_reduce of float32 with MIN"),
    ],
)
def test_undeclared(lines: str, says: str) -> None:
    """What no backend may leave undeclared is missing if the profile does not claim it."""
    level = level_of(judged(profile=f"{CLAIMS_ALL}\n[collectives]\n{lines}\n"), "L1")
    (said,) = level.missing
    assert (level.answer, level.partial) == ("not shown", "L1 in part: partial")
    assert said.startswith(f"L1 takes a profile that claims {says}, ")
    assert re.search(r" and \d+ more\.$", said)


def test_profile_that_cannot_be_read() -> None:
    """If the profile's text can't be read here, it is unknown what it claims, and nothing is shown."""
    level = level_of(judged(profile=CLAIMS_ALL + "nonsense = 1\n"), "L1")
    assert any(said.startswith("What the profile claims is unknown: ") for said in level.missing)
    assert (level.answer, level.partial) == ("not shown", "")


def test_profile_without_a_text() -> None:
    """The same holds if no run has the text of its profile."""
    level = level_of(judged(lambda made: made.remove(next(r for r in made if isinstance(r, ProfileText)))), "L1")
    assert level.missing == ["What the profile claims is unknown: no run has its text."]


@pytest.mark.parametrize(
    "cause",
    [TorchLacks("compass"), TooFewHosts(2, 1), HostLacks("streams of the device"), TooLittleMemory("a bucket", 2, 1)],
    ids=lambda c: type(c).__name__,
)
def test_no_fault_of_the_backend(cause: Any) -> None:
    """What this PyTorch lacks, several hosts, and what the host lacks does not count as unsupported."""
    assert judged(where("many", "collectives", **unsupported(cause))).conformant == "L5"


def test_host_that_is_none() -> None:
    """On an accelerator, what the host lacks is no excuse."""
    gpu = where("many", "collectives", world=GivenWorld(2, "gloo", "gpu"), **unsupported(HostLacks("streams")))
    assert any(said.startswith("36 of 45 mandatory") for said in level_of(judged(gpu), "L1").missing)


def test_pass_on_one_rank() -> None:
    """A requirement that passed on one rank alone, and has tests on more, is shown as little as an unsupported one."""
    extra = [f"COLLECTIVES-MANY{i}-01" for i in range(4)]

    def alone(made: list[Any]) -> None:
        where("many[0-3]_", "collectives", **unsupported(None))(made)
        where("size1_", "collectives", requirements=["COLLECTIVES-SIZE1-01", *extra])(made)

    (said,) = level_of(judged(alone), "L1").missing
    assert said.startswith("4 of 45 mandatory requirements are unsupported, or had one rank alone although their tests")


@pytest.mark.parametrize(
    ("count", "name"),
    [(1, "L5 on one rank: partial"), (2, "L5 on 1 and 2 ranks: partial"), (3, "L5 on 1, 2 and 3 ranks: partial")],
)
def test_few_devices(count: int, name: str) -> None:
    """A machine with one device is at no level, whatever passes there; what it shows has its own name and badge."""
    report = judged(devices(count))
    assert (report.conformant, kind(report), answer(report)) == ("", "partial", name)
    assert badge.message(report) == (f"no level: {name}", "blue")
    for text in (page(report), markdown(report)):
        assert name in text
        assert "Conformant at" not in text
    (step,) = report.steps
    assert step.do == f"Run it on a machine with at least 4 gpu devices; this one has {count}:"


def test_made_up_for_by_few_examples() -> None:
    """What passed only in a run with few examples, such as one on more devices, does not make up for less."""
    (name, alone), second = whole(devices(1))
    smoke = records(
        "default", of=[test for level, stack in LEVELS.items() for test in suite_of(level, stack)], later=500
    )
    smoke[0].effort, smoke[0].profile_hash = 0.1, msgspec.json.decode(alone.splitlines()[0])["profile_hash"]
    report = build(
        [(name, alone), second, ("smoke", written([r for r in smoke if not isinstance(r, RequirementText)]))]
    )
    assert report.counts["passed"] > report.runs[0].counts["passed"]
    assert (report.problems, answer(report)) == ([], "L5 on one rank: partial")


def test_enough_devices() -> None:
    """A machine with four devices is enough for every level."""
    assert judged(devices(4)).conformant == "L5"


# waivers


def waived(count: int, owner: str, defect: str) -> Change:
    """Has so many requirements of L2 waived for a defect."""

    def apply(made: list[Any]) -> None:
        (told,) = (record for record in made if isinstance(record, ProfileText))
        told.waivers = [msgspec.structs.replace(told.waivers[0], owner=owner, defect=defect)]
        tests = [
            t for t in made if isinstance(t, TestResult) and "replicate/test_a.py::test_replicate_many" in t.nodeid
        ]
        for test in tests[:count]:
            test.verdict, test.bare, test.waiver, test.headline = "waived", "failed", WAIVER, "no"

    return apply


def test_waivers_of_others() -> None:
    """A level allows a share of requirements that are waived for the backend's own defects, and no more."""
    most = level_of(judged(), "L2").may_be_waived
    assert most == 2
    assert judged(waived(most, "vendor", "a")).conformant == "L5"
    level = level_of(judged(waived(most + 1, "vendor", "a")), "L2")
    (said,) = level.reds
    assert (level.answer, level.waived_of_others, level.waived_of_pytorch) == ("not conformant", 3, 0)
    assert said.startswith("3 of 42 mandatory requirements are waived for defects that are not PyTorch's own, and L2 ")


def test_waivers_of_pytorch() -> None:
    """However many of PyTorch's own defects there are, they are no fault of the vendor's, and are counted apart."""
    report = judged(waived(30, "pytorch", "a"))
    level = level_of(report, "L2")
    assert (report.conformant, level.waived_of_pytorch, level.waived_of_others) == ("L5", 30, 0)
    assert badge.message(report) == ("L5", "brightgreen")
    assert badge.message(judged(waived(1, "vendor", "a"))) == ("L5, 1 waived", "yellow")
    assert "Waived: 30 requirements for defects of PyTorch&#39;s own." in page(report)


@pytest.mark.parametrize("owner", ["pytorch", ""])
def test_waivers_that_are_called_pytorchs(owner: str) -> None:
    """A waiver of a profile is the profile's, even if the profile is called pytorch; so is one without an owner."""
    assert level_of(judged(waived(30, owner, "")), "L2").answer == "not conformant"


# the reader


def test_read() -> None:
    """The reader gives what the file says."""
    assert isinstance(REAL, Minimums)
    assert list(REAL.levels["P"].world_sizes) == tomllib.loads(TEXT)["levels"]["P"]["world_sizes"]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("version = 1", "version = 0", "Expected `int` >= 1 - at `$.version`"),
        ("version = 1", "versoin = 1", "versoin"),
        ("version = 1", 'version = "1"', "Expected `int`, got `str` - at `$.version`"),
        ("unsupported = 0.03", "unsupported = 3", "Expected `float` <= 1.0 - at `$.unsupported`"),
        ("unsupported = 0.03\n", "", "[levels.L1] Object missing required field `unsupported`"),
        ("drawn = 2", "drawn = 0", "Expected `int` >= 1 - at `$.drawn`"),
        ("drawn = 2", "drawn = 2\ndrown = 2", "unknown field `drown`"),
        ("examples = 1.0", "examples = nan", "examples"),
        ("world_sizes = [1, 2, 3, 4]", "world_sizes = []", "length >= 1 - at `$.world_sizes`"),
        ("world_sizes = [1, 2, 3, 4]", "world_sizes = [4, 2]", "[levels.L1] world_sizes: [4, 2]: write each size once"),
        ("world_sizes = [1, 2, 3, 4]", "world_sizes = [2, 2]", "[levels.L1] world_sizes: [2, 2]: write each size once"),
        ('"COLL-GROUP-01"', '"the first"', "at `$.subgroups[0]`"),
        ('"int32"]', '"int33"]', "[levels.L1] dtypes: 'int33' is none of them: write some of bool, "),
        ('"gather", ', '"gathre", ', "[levels.L1] collectives: 'gathre' is none of them: write some of all_reduce, "),
        ('"MAX"]', '"MOST"]', "[levels.L1] ops: 'MOST' is none of them: write some of SUM, "),
        ('dtypes = ["float32", "bfloat16", "float16", "int64", "int32"]\n', "", "give both or neither"),
        ("[levels.L5]", "[levels.L6]", "no table [levels.L5]: write one table for each of L1, L2, "),
        ("[levels.P]", "[levels.Q]\n[levels.P]", "'Q' is no level: write one table for each of L1, L2, "),
        ("version = 1", "version = ", "not TOML: "),
        ("version = 1", "version = 1\nversion = 1", "not TOML: "),
        ("version = 1", "x = " + "[" * 5000, "x.toml: "),
    ],
)  # fmt: skip
def test_bad_file(before: str, after: str, says: str) -> None:
    """A file that is not as it must be is one sentence: the file, the place, and what belongs there."""
    assert before in TEXT
    with pytest.raises(ReportError) as e:
        read(TEXT.replace(before, after, 1), "x.toml")
    assert str(e.value).startswith("x.toml: ")
    assert says in str(e.value)
    assert "\n" not in str(e.value)


def test_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation without the file says so."""
    monkeypatch.undo()
    monkeypatch.setattr(minimums, "FILE", tmp_path / "levels.toml")
    minimums.shipped.cache_clear()
    with pytest.raises(ReportError, match="No such file.*install Concord again"):
        minimums.shipped()
