"""Whose defect a waived test shows: reports say it, and a check of a bundle derives it from the texts of defects."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from invented import FILE, PROFILE, STARTED, WAIVER, Change, change, checkout, runs

from harness.results import ProfileText
from reports.build import build
from reports.bundle import MANIFEST, made, manifest_of, packed
from reports.junit import junit
from reports.markdown import markdown
from reports.model import encode
from reports.page import page
from reports.verify import Checked, verify

DEFECTS = """owner = "pytorch"

[[defect]]
id = "replicate_two"
tests = ["suites/replicate/test_a.py::test_two[2*]"]
reason = "known to be wrong"
link = "https://example.com/issues/1"
expires = 2027-06-30
verdicts = ["failed"]
"""
OF_DEFECTS = "defects/pytorch.toml"
WAIVED = "suites/replicate/test_a.py::test_two[2ranks-float32]"
PLAIN = PROFILE[: PROFILE.index("[[waiver]]")] + PROFILE[PROFILE.index("[[collectives.except]]") :]
LEFT: dict[str, Any] = {"headline": "", "ranks": [], "waiver": "", "bare": "", "reason": "", "reproducer": None}


def owned(defects: str = DEFECTS, profile: str = PLAIN, **entry: Any) -> Change:
    """Has the waived test waived for a defect of PyTorch, and no waiver in the profile."""

    def apply(made: list[Any]) -> None:
        (told,) = (record for record in made if isinstance(record, ProfileText))
        told.texts = {FILE: profile, OF_DEFECTS: defects}
        values = {"place": f"{OF_DEFECTS}:3", "owner": "pytorch", "defect": "replicate_two", **entry}
        told.waivers = [msgspec.structs.replace(told.waivers[0], **values)]
        made[0].profile_hash = hashlib.sha256("\0".join(told.texts.values()).encode()).hexdigest()
        change(WAIVED, waiver=f"{OF_DEFECTS}:3")(made)

    return apply


def checked(path: Path, *changes: Change, here: str | None = DEFECTS, status: int | None = None) -> Checked:
    """The check of a bundle; ``here``: the defects of PyTorch in the checkout, if it has any."""
    found = made(runs(*changes, status=status)).files
    file = path / "x.zip"
    file.write_bytes(packed({**found, MANIFEST: manifest_of(found, "0.1.0")}))
    defects = {} if here is None else {"pytorch": here}
    return verify(file, "0.1.0", dataclasses.replace(checkout(), defects=defects), STARTED + 86400)


# reports


def test_report() -> None:
    """A report has the owner and the id of each waived test's defect, and the number of tests of each owner."""
    report = json.loads(encode(build(runs(owned()))))
    (test,) = (test for test in report["tests"] if test["verdict"] == "waived")
    assert (test["owner"], test["defect"]) == ("pytorch", "replicate_two")
    assert [(w["owner"], w["defect"]) for w in report["waivers"]] == [("pytorch", "replicate_two")]
    assert report["owners"] == {"pytorch": 1}


def test_own_waiver() -> None:
    """A waiver of the profile is the profile's."""
    report = build(runs())
    assert "<dd>1 test for <bdi>made-up</bdi></dd></div>" in page(report)
    assert "<h3>Of PyTorch itself" not in page(report)
    assert (report.owners, [w.named for w in report.waivers]) == ({"made-up": 1}, ["made-up"])


def test_older_results() -> None:
    """Results that do not say the owner make a report without owners, and no count."""
    report = build(runs(owned(owner="", defect="")))
    assert (report.counts["waived"], report.owners, report.waivers[0].named) == (1, {}, "")
    assert "waived for" not in markdown(report)
    assert 'class="owner"' not in page(report)


def test_markdown() -> None:
    """The summary of a job counts by owner, and lists waived tests under their owners."""
    lines = markdown(build(runs(owned()))).splitlines()
    assert lines[2].endswith("1 waiver, 1 test for defects of PyTorch's own")
    at = lines.index("### 1 test waived for known defects of pytorch")
    assert lines[at + 2].startswith("- replicate&#95;two: known to be wrong: suites/replicate/test&#95;a")


def test_markdown_fits() -> None:
    """Where they do not fit, waived tests are left out before tests that ended badly."""
    report = build(runs(owned(), change("test_one[2ranks]", verdict="failed", headline="no")))
    whole = markdown(report)
    cut = markdown(report, largest=len(whole.encode()) - 1)
    assert ("### 1 test waived" in whole, "### 1 test waived" in cut, "- failed" in cut) == (True, False, True)


def test_page() -> None:
    """The page has the owner beside the test, at the waiver and in the count."""
    html = page(build(runs(owned())))
    assert 'class="owner">of <bdi>pytorch</bdi></span> <code>suites/replicate/test_a.py::test_two[2ranks' in html
    assert 'class="owner"><bdi>pytorch/replicate_two</bdi></span> known to be wrong' in html
    assert "<dd>none of the backend's own</dd><dd class=\"soft\">and 1 test for defects of PyTorch's own</dd>" in html
    assert "<h3>Of PyTorch itself, whatever the backend is</h3>" in html
    assert "<h3>Of the backend" not in html
    assert "as a known defect of pytorch (replicate_two)" in html


def test_page_of_a_hostile_owner() -> None:
    """An owner's name is text, whatever is in it."""
    html = page(build(runs(owned(owner="<owner>", defect="<script>x"))))
    assert ("<owner>" in html, "<script>x" in html) == (False, False)


def test_junit() -> None:
    """JUnit XML has owner and defect as properties."""
    properties = {
        p.get("name"): p.get("value") for p in ElementTree.fromstring(junit(build(runs(owned())))).iter("property")
    }
    assert (properties["concord.owner"], properties["concord.defect"]) == ("pytorch", "replicate_two")


# checks


def test_honest(tmp_path: Path) -> None:
    """A bundle whose tests are waived for PyTorch's defects of this checkout is what it says it is."""
    found = checked(tmp_path, owned())
    assert (found.problems, found.unchecked) == ((), ())
    assert found.report is not None
    assert (found.report.conformant, found.report.owners) == ("L5", {"pytorch": 1})


def test_of_an_older_concord(tmp_path: Path) -> None:
    """Results that do not say the owner are checked all the same, and the owner is the text's."""
    found = checked(tmp_path, owned(owner="", defect=""))
    assert found.problems == ()
    assert found.report is not None
    assert found.report.owners == {"pytorch": 1}


def test_other_defects(tmp_path: Path) -> None:
    """Whoever adds to the defects of PyTorch does not show by it that a failure is PyTorch's."""
    found = checked(tmp_path, owned(), here=DEFECTS.replace("test_two", "test_to"))
    line = "its defects of pytorch are not those here: which failures are pytorch's only the bundle says"
    assert (found.problems, found.unchecked) == ((), (f"runs/1.jsonl: {line}", f"runs/2.jsonl: {line}"))
    assert found.report is not None
    assert found.report.conformant == ""


def test_other_defects_that_do_not_matter(tmp_path: Path) -> None:
    """Where no test is waived for an owner's defects, it does not matter whose they are."""
    of_other = owned(DEFECTS.replace("test_two", "test_to"), profile=PROFILE, place=WAIVER, owner="made-up", defect="")
    own = checked(tmp_path, of_other, change(WAIVED, waiver=WAIVER))
    assert not any("defects of pytorch" in line for line in own.unchecked)


def test_unknown_owner(tmp_path: Path) -> None:
    """Defects of an owner who is not known here, such as a package, are noted, as profiles are."""
    found = checked(tmp_path, owned(), here=None)
    assert (found.problems, found.unchecked) == ((), ())
    assert "runs/1.jsonl: tests are waived for defects of pytorch, which are not known here" in found.notes


def test_does_not_show(tmp_path: Path) -> None:
    """A run is green in which a defect of PyTorch does not show; where the profile keeps PyTorch, it is not."""
    passed = change(WAIVED, verdict="passed", tried=[], **LEFT)
    assert checked(tmp_path, owned(), passed, status=0).problems == ()
    strict = owned(profile=PLAIN + '[defects]\nkeep = ["pytorch"]\n')
    found = checked(tmp_path, strict, passed, status=0)
    assert any("a stale waiver makes a run fail" in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (owned(owner="vendor"), "its owner is vendor, and by the profile's text pytorch"),
        (owned(defect="other"), "its defect is other, and by the profile's text replicate_two"),
        (owned(DEFECTS + "[[defekt]]\n"), "its profile can't be read: defects/pytorch.toml:10: "),
        (owned(DEFECTS.replace("pytorch", "torch")), "its profile can't be read: defects/pytorch.toml:1: owner: "),
        (owned(DEFECTS + 'backends = ["nccl"]\n'), f"the waiver {OF_DEFECTS}:3 is not in the profile's text"),
        (owned(DEFECTS + 'devices = ["!cpu"]\n'), f"waived by {OF_DEFECTS}:3, and the profile has no such waiver"),
        (
            owned(profile=PLAIN + '[defects]\nwithout = ["pytorch/replicate_two"]\n'),
            f"the waiver {OF_DEFECTS}:3 is not in the profile's text",
        ),
        (owned(PLAIN), "texts that its profile does not inherit from: defects/pytorch.toml"),
        (owned(DEFECTS.replace("2*", "3*")), "its tests is suites/replicate/test_a.py::test_two[2*], and by the"),
    ],
    ids=["owner", "id", "key", "name", "backend", "device", "left-out", "no-defects", "tests"],
)
def test_forged(tmp_path: Path, made: Change, said: str) -> None:
    """What a run says of owners and defects is held against the texts."""
    found = checked(tmp_path, made)
    assert any(said in problem for problem in found.problems), found.problems
