"""``concord verify --rerun``: which results are drawn, how a second run is compared, and how likely a lie is found."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from invented import PROFILE, SUITE, WAIVER, Change, change, checkout, every_test, records, written
from scipy.stats import hypergeom

from harness.commands.rerunning import Asked, Rerun, _judged, asked, rerun
from harness.results import CasesDrawn, GivenWorld, Issued, RunHeader, TooFewDevices, TorchLacks, WaiverEntry, parse
from reports.model import ReportError
from reports.rerun import (
    BETTER,
    NOT_COMPARED,
    OTHER,
    OTHER_CASES,
    OTHER_COUNTS,
    SAME,
    WORSE,
    Outcome,
    Place,
    chance,
    chances,
    compared,
    drawn,
    population,
    surroundings,
    unrepeatable,
)

ONE = "suites/dynamo/test_a.py::test_one[2ranks]"
TWO = "suites/dynamo/test_a.py::test_two[2ranks-float32]"
WAIVED = "suites/replicate/test_a.py::test_two[2ranks-float32]"
UNDECLARED = "suites/collectives/test_a.py::test_one[3ranks]"
ALL = [test.nodeid for test in every_test()]


def run(*changes: Change) -> Any:
    """A run with these changes."""
    made = records()
    for each in changes:
        each(made)
    return parse(written(made), "run")


def failed(nodeid: str = ONE, verdict: str = "failed") -> Change:
    return change(nodeid, verdict=verdict, headline="rank 0 of 2 failed first: no")


def unsupported(cause: Any) -> Change:
    """Makes a test unsupported, for a cause or in the words of a plain skip."""
    data = None if isinstance(cause, str) else cause
    return change(ONE, verdict="unsupported", reason=f"unsupported: {cause}", cause=data, world=None)


def outcome(there: Any, here: Any, nodeid: str = ONE) -> Outcome:
    (found,) = compared([Place(0, nodeid)], [there], {0: here})
    return found


def test_population() -> None:
    """What ran, is of a suite and is known here can be run again; what did not run cannot."""
    places = population([run(), run(failed())], ALL)
    assert Place(0, UNDECLARED) not in places
    assert len(places) == 2 * (len(ALL) - 1)
    assert population([run()], [ONE, "suites/x/test_y.py::test_z", UNDECLARED]) == [Place(0, ONE)]
    assert population([run(change(ONE, verdict="not-run"))], [ONE]) == []
    assert population([run(unsupported(TorchLacks("compass")))], [ONE]) == [Place(0, ONE)]
    assert population([run(unsupported("no wind"))], [ONE]) == [Place(0, ONE)]
    assert population([run(unsupported(TooFewDevices(2, 2, "cuda", 1)))], [ONE]) == []


def test_drawn() -> None:
    """The same seed draws the same results; another draws others; all of them is all of them."""
    places = population([run(), run()], ALL)
    assert drawn(places, 5, "a") == drawn(list(reversed(places)), 5, "a")
    assert len({tuple(drawn(places, 5, str(seed))) for seed in range(20)}) == 20
    assert drawn(places, 10_000, "a") == places
    assert set(drawn(places, 5, "a")) < set(drawn(places, 6, "a"))


def test_every_result_is_as_likely() -> None:
    """Over many seeds, no result is drawn more often than chance has it."""
    places = population([run()], ALL)
    counts = Counter(place for seed in range(4000) for place in drawn(places, 3, str(seed)))
    expected = 4000 * 3 / len(places)
    assert set(counts) == set(places)
    assert max(abs(count - expected) for count in counts.values()) < 5 * math.sqrt(expected)


@pytest.mark.parametrize(("results", "draws", "lies"), [(10, 3, 1), (10, 3, 2), (7, 4, 3), (6, 6, 1), (9, 1, 9)])
def test_chance(results: int, draws: int, lies: int) -> None:
    """The chance is what counting every possible draw gives, and what SciPy has for the hypergeometric distribution."""
    every = list(itertools.combinations(range(results), draws))
    found = sum(any(each < lies for each in draw) for draw in every) / len(every)
    assert math.isclose(chance(results, draws, lies), found)
    assert math.isclose(chance(results, draws, lies), 1 - hypergeom(results, lies, draws).pmf(0))


def test_chances_of_real_sizes() -> None:
    """The figures of the documentation: 50 of the 4,682 results of two whole runs."""
    assert {lies: f"{share:.1%}" for lies, share in chances(4682, 50)} == {
        1: "1.1%",
        2: "2.1%",
        5: "5.2%",
        10: "10.2%",
        20: "19.4%",
    }
    page = (Path(__file__).parents[2] / "docs" / "vouching.md").read_text()
    rows = {1: "1", 2: "2", 5: "5", 10: "10", 20: "20", 47: "47 (1 %)"}
    for lies, name in rows.items():
        shares = [f"{chance(4682, results, lies):.1%}".replace("%", " %") for results in (50, 300, 1000)]
        assert f"| {name} | {' | '.join(shares)} |" in page
    assert list(chances(3, 1)) == [(1, chance(3, 1, 1)), (2, chance(3, 1, 2))]
    assert math.isnan(chance(3, 1, 4))


def another(*, place: str = WAIVER, **fields: Any) -> Change:
    """Changes the waiver, and where the waived test says it is."""

    def apply(made: list[Any]) -> None:
        (told,) = (r for r in made if hasattr(r, "waivers"))
        told.waivers = [msgspec.structs.replace(told.waivers[0], place=place, **fields)]
        change(WAIVED, waiver=place)(made)

    return apply


def of(nodeid: str, *cases: Any) -> Change:
    return change(nodeid, cases=CasesDrawn(*cases))


def issued(times: int, nodeid: str = ONE) -> Change:
    """Ranks issued so many all-reduces."""
    return change(nodeid, issued=Issued({"all_reduce": times} if times else {}, times))


def version(number: int) -> Change:
    """Makes a results file of an older version."""

    def apply(made: list[Any]) -> None:
        made[0].version = number

    return apply


SIZES = GivenWorld(4, "gloo", "cpu", (1, 2, 4))

CASES: dict[str, tuple[tuple[Change, ...], tuple[Change, ...], str, str, str]] = {
    "same": ((), (), ONE, SAME, "passed in the bundle, passed here"),
    "lie": ((), (failed(),), ONE, WORSE, "passed in the bundle, failed here (rank 0 of 2 failed first: no)"),
    "lie-of-a-crash": ((), (failed(ONE, "crashed"),), ONE, WORSE, "passed in the bundle, crashed here"),
    "lie-of-a-waiver": ((), (failed(WAIVED),), WAIVED, WORSE, "waived (failed, of made-up) in the bundle, failed here"),
    "waived-here": (
        (change(WAIVED, verdict="passed", waiver="", bare="", headline="", ranks=[], reason=""),),
        (),
        WAIVED,
        WORSE,
        "passed in the bundle, waived (failed, of made-up) here",
    ),
    "same-waiver-elsewhere": ((), (another(place="mine.toml:6"),), WAIVED, SAME, "made-up"),
    "other-owner": (
        (),
        (another(owner="pytorch"),),
        WAIVED,
        OTHER,
        "waived (failed, of made-up) in the bundle, waived",
    ),
    "other-verdict-under-a-waiver": (
        (),
        (change(WAIVED, bare="hung"),),
        WAIVED,
        OTHER,
        "waived (hung, of made-up) here",
    ),
    "better": ((failed(),), (), ONE, BETTER, "failed in the bundle, passed here"),
    "other": ((failed(),), (failed(ONE, "hung"),), ONE, OTHER, "failed in the bundle, hung here"),
    "flaky": ((failed(ONE, "flaky"),), (), ONE, NOT_COMPARED, "flaky in the bundle"),
    "unsupported": (
        (),
        (
            change(
                ONE, verdict="unsupported", cause=TooFewDevices(2, 2, "cuda", 1), reason="unsupported: too few devices"
            ),
        ),
        ONE,
        NOT_COMPARED,
        "unsupported here: unsupported: too few devices",
    ),
    "unsupported-there": (
        (unsupported(TorchLacks("compass")),),
        (failed(),),
        ONE,
        WORSE,
        "unsupported in the bundle, failed here",
    ),
    "unsupported-on-both": ((unsupported("no wind"),), (unsupported("no wind"),), ONE, SAME, "no wind"),
    "unsupported-otherwise": ((unsupported("no wind"),), (unsupported("no rain"),), ONE, OTHER, "no rain"),
    "supported-here": ((unsupported("no wind"),), (), ONE, OTHER, "unsupported in the bundle, passed here"),
    "not-run": ((), (change(ONE, verdict="not-run", reason="no"),), ONE, NOT_COMPARED, "not-run here: no"),
    "intermittent": ((another(intermittent=True),), (failed(WAIVED),), WAIVED, NOT_COMPARED, "fails intermittently in"),
    "same-cases": ((of(TWO, 5, "a" * 16),), (of(TWO, 5, "a" * 16),), TWO, SAME, ""),
    "no-cases": ((of(TWO, 5, "a" * 16),), (), TWO, SAME, ""),
    "fewer-cases": (
        (of(TWO, 100, "a" * 16),),
        (of(TWO, 5, "b" * 16),),
        TWO,
        OTHER_CASES,
        "its cases are not those that its seed draws: 100 cases there, 5 here",
    ),
    "other-cases": ((of(TWO, 5, "a" * 16),), (of(TWO, 5, "b" * 16),), TWO, OTHER_CASES, "5 cases there, 5 here"),
    "same-collectives": ((issued(12),), (issued(12),), ONE, SAME, ""),
    "other-collectives": (
        (issued(12),),
        (issued(14),),
        ONE,
        OTHER_COUNTS,
        "its ranks issued other collectives (all_reduce: 12 there, 14 here; on groups: 12 there, 14 here)",
    ),
    "collectives-of-none": ((), (issued(14),), ONE, OTHER_COUNTS, "all_reduce: 0 there, 14 here"),
    "collectives-that-are-not-counted-here": ((issued(0),), (), ONE, OTHER_COUNTS, "not counted in one of them"),
    "collectives-of-an-older-bundle": ((version(9),), (issued(14),), ONE, SAME, ""),
    "collectives-of-a-retried-test": ((failed(ONE, "flaky"), issued(24)), (issued(12),), ONE, NOT_COMPARED, "flaky"),
    "collectives-of-a-waived-test": ((issued(3, WAIVED),), (issued(2, WAIVED),), WAIVED, SAME, ""),
    "other-worlds": (
        (change(TWO, world=SIZES),),
        (),
        TWO,
        NOT_COMPARED,
        "other worlds: 4 ranks (gloo on cpu), of [1, 2, 4] there, 2 ranks (gloo on cpu) here",
    ),
}


@pytest.mark.parametrize(("there", "here", "nodeid", "kind", "says"), CASES.values(), ids=CASES)
def test_compared(there: tuple[Change, ...], here: tuple[Change, ...], nodeid: str, kind: str, says: str) -> None:
    """Only what a bundle says better than it is here is a lie; what can't be compared has a reason."""
    found = outcome(run(*there), run(*here), nodeid)
    assert found.kind == kind
    assert says in str(found)
    assert str(found).startswith(f"runs/1.jsonl, {nodeid}: ")


def with_(**facts: str) -> Change:
    def apply(made: list[Any]) -> None:
        made[0].environment = {**made[0].environment, **facts}

    return apply


def test_other_cases_of_other_versions() -> None:
    """Another Hypothesis may draw other cases from the same seed."""
    found = outcome(run(of(TWO, 5, "a" * 16)), run(of(TWO, 5, "b" * 16), with_(hypothesis="6.1")), TWO)
    assert (found.kind, found.why) == (NOT_COMPARED, "other cases, as other versions may draw")


def test_nothing_here() -> None:
    """A test that is not among the results here, or of a run that can't be repeated, is not compared."""
    lacking = msgspec.structs.replace(run(), tests={})
    assert outcome(run(), lacking).why == "not collected here"
    (found,) = compared([Place(0, ONE)], [run(header(seed="free"))], {})
    assert (found.kind, found.here, "its seed is not one" in found.why) == (NOT_COMPARED, "", True)


def header(**fields: Any) -> Change:
    def apply(made: list[Any]) -> None:
        for name, value in fields.items():
            setattr(made[0], name, value)

    return apply


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, ""),
        ({"seed": "4294967295"}, ""),
        ({"seed": "4294967296"}, "its seed is not one that can be given again"),
        ({"seed": "free"}, "its seed is not"),
        ({"seed": ""}, "its seed is not"),
        ({"seed": "--fault=x"}, "its seed is not"),
        ({"seed": "1\n2"}, "its seed is not"),
        ({"seed": "\N{SUPERSCRIPT TWO}"}, "its seed is not"),
        ({"faults": ["no_sync"]}, "it had defects put into its ranks"),
        ({"environment": {"variable CONCORD_EXAMPLES": "thorough"}}, "it is a thorough run"),
        ({"environment": {"variable CONCORD_EXAMPLES": "1e99"}}, "CONCORD_EXAMPLES='1e99'"),
        ({"environment": {"variable CONCORD_EXAMPLES": "smoke"}}, ""),
    ],
)
def test_unrepeatable(changed: dict[str, Any], says: str) -> None:
    """A seed that can't be given again, and one that would be an option, is not given."""
    why = unrepeatable(run(header(**changed)))
    assert (says in why, bool(why)) == (True, bool(says))


def test_surroundings() -> None:
    """Another torch may change a verdict honestly; another memory does not."""
    assert surroundings(run(), run(with_(memory="8 GiB"))) == []
    assert surroundings(run(), run(with_(torch="2.12.0"))) == ["torch 2.13.0 there, 2.12.0 here"]
    assert surroundings(run(), run(with_(accelerator="8 of X"))) == ["accelerator none there, 8 of X here"]


def judged(*here: Change, there: tuple[Change, ...] = ()) -> Rerun:
    runs, again = [run(*there)], run(*here)
    places = population(runs, ALL)
    return _judged(compared(places, runs, {0: again}), runs, {0: again}, len(places), Asked(99, "s"))


def test_judged() -> None:
    """A lie is wrong; the counts and the chances are told, without what could not be compared."""
    total = len(ALL) - 1
    fine = judged()
    assert (fine.wrong, fine.unchecked, fine.notes) == ([], [], [])
    table = "1: 100.0%, 2: 100.0%, 5: 100.0%, 10: 100.0%, 20: 100.0%"
    assert fine.told == [
        f"{total} of {total} results, drawn by --rerun-seed s: {total} same",
        f"chance that {total} compared results find so many false ones of {total}: {table}",
    ]
    found = judged(failed(), change(TWO, verdict="not-run", reason="no"))
    assert len(found.wrong) == 1
    assert f"--rerun: runs/1.jsonl, {ONE}: passed in the bundle, failed here" in found.wrong[0]
    assert len(found.notes) == 1
    assert found.told[0].endswith(f"{total - 2} same, 1 worse here, 1 not compared")
    assert f"chance that {total - 1} compared results find so many false ones of {total}: 1: 95.7%" in found.told[1]


def test_judged_elsewhere() -> None:
    """What another torch may have caused accuses nobody, and shows nothing."""
    found = judged(failed(), with_(torch="2.12.0"))
    assert found.wrong == []
    assert found.unchecked[0] == "--rerun: runs/1.jsonl had other surroundings: torch 2.13.0 there, 2.12.0 here"
    assert "passed in the bundle, failed here" in found.unchecked[1]


def test_worlds_do_not_hide_a_failure() -> None:
    """A test that fails here on other worlds than it is said to have had is doubtful, and not just passed over."""
    found = judged(failed(TWO), there=(change(TWO, world=SIZES),))
    (line,) = found.unchecked
    assert "not compared: runs/1.jsonl" in line
    assert "failed here" in line


def test_other_cases_are_doubtful() -> None:
    """Other cases accuse nobody, because the verdict is the same, and show nothing."""
    found = judged(of(TWO, 5, "b" * 16), there=(of(TWO, 5, "a" * 16),))
    assert found.wrong == []
    (line,) = found.unchecked
    assert "its cases are not those that its seed draws: 5 cases there, 5 here" in line
    assert "1 other cases here" in found.told[0]


def test_other_collectives_are_doubtful() -> None:
    """A forged count of collectives is found, and accuses nobody; on another torch, other counts are no doubt."""
    found = judged(issued(14), there=(issued(12),))
    assert found.wrong == []
    (line,) = found.unchecked
    assert "its ranks issued other collectives (all_reduce: 12 there, 14 here" in line
    assert "1 other collectives here" in found.told[0]
    found = judged(issued(14), with_(torch="2.12.0"), there=(issued(12),))
    assert not any("collectives" in line for line in found.unchecked)


def test_nothing_compared() -> None:
    """A second run in which nothing could be compared shows nothing."""
    found = judged(*(change(nodeid, verdict="not-run", reason="no") for nodeid in ALL if nodeid != UNDECLARED))
    assert "--rerun: none of the drawn tests could be compared" in found.unchecked
    assert len(found.told) == 1


def test_many_differences_are_counted() -> None:
    """A bundle of lies is not a thousand lines."""
    found = Rerun()
    runs = [run()]
    outcomes = [Outcome(Place(0, ONE), WORSE, "passed", "failed") for _ in range(1000)]
    found = _judged(outcomes, runs, {0: run()}, 5000, Asked(1000, "s"))
    assert (len(found.wrong), found.wrong[-1]) == (51, "--rerun: and 950 more")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((None, "x", None), "for --rerun N, which is not given"),
        ((0, "", None), "at least 1"),
        ((-1, "", None), "at least 1"),
        ((5, "a b", None), "up to 64 letters"),
        ((5, "x" * 65, None), "up to 64 letters"),
    ],
)
def test_bad_options(arguments: Any, says: str) -> None:
    """Options that fit nothing are one line."""
    with pytest.raises(ReportError, match=says):
        asked(*arguments, suite=True)
    with pytest.raises(ReportError, match="--no-suite leaves it out"):
        asked(5, "", None, suite=False)
    assert asked(None, "", None, suite=True) is None


def test_no_suite(tmp_path: Any) -> None:
    """Where the suite is another one, nothing is run, and nothing is shown."""
    ask = Asked(5, "s")
    other = msgspec.structs.replace(run(), header=RunHeader(started=0, suite_hash="6" * 64))
    for runs, here in (([run()], None), ([other], checkout())):
        (line,) = rerun(runs, here, tmp_path, ask, print).unchecked
        assert "nothing was run again, since its suite is not the one here" in line
    (line,) = rerun([run(header(suite_hash=SUITE))], checkout().__class__(SUITE), tmp_path, ask, print).unchecked
    assert "nothing was run again" in line


@pytest.mark.parametrize("name", ["made-up", "../../etc/passwd", "-x", "a\nb"])
def test_the_bundle_s_profile_is_not_run(tmp_path: Any, name: str) -> None:
    """A profile names modules that are imported, so the one in a bundle is not used, whatever its name."""
    with pytest.raises(ReportError, match="a profile is code: read the one in the bundle"):
        rerun([run(header(profile=name))], checkout(), tmp_path, Asked(5, "s"), print)


def test_another_profile(tmp_path: Any) -> None:
    """A local file with another text is not the profile."""
    (tmp_path / "mine.toml").write_text(PROFILE.replace("made up", "made up by somebody else"))
    with pytest.raises(ReportError, match=r"mine\.toml is not the profile that the bundle's run went by"):
        rerun([run()], checkout(), tmp_path, Asked(5, "s", tmp_path / "mine.toml"), print)


def test_entry_of_a_waiver() -> None:
    """The waiver of these tests is what it is taken for."""
    (waiver,) = run().profile.waivers
    assert isinstance(waiver, WaiverEntry)
    assert waiver.owner == "made-up"
