"""The report in JUnit XML, with the names and counts of pytest's own."""

from __future__ import annotations

from datetime import UTC, datetime
from xml.etree import ElementTree

from harness.results import BAD
from reports.model import Report, TestReport
from reports.text import visible

LONGEST = 100_000
"""The largest number of characters of a failure's text."""


def junit(report: Report) -> bytes:
    """Encode a report as one suite with every test.

    Waived, unsupported and undeclared tests, and tests that did not run, are skipped.  Requirements are properties of
    tests, as in the XML that pytest writes.
    """
    root = ElementTree.Element("testsuites", name="concord")
    bad = sum(test.verdict in BAD for test in report.tests)
    skipped = sum(test.verdict != "passed" for test in report.tests) - bad
    started = datetime.fromtimestamp(report.runs[0].started, UTC).isoformat(timespec="seconds")
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name="concord",
        errors="0",
        failures=str(bad),
        skipped=str(skipped),
        tests=str(len(report.tests)),
        time=f"{sum(test.seconds for test in report.tests):.3f}",
        timestamp=started,
    )
    for test in report.tests:
        _add(suite, test)
    ElementTree.indent(root, " ")
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def names(nodeid: str) -> tuple[str, str]:
    """Return the class and name of a test as in pytest's JUnit XML.

    For example, ``a/test_b.py::TestC::test_d[x::y]`` becomes ``a.test_b.TestC`` and ``test_d[x::y]``.
    """
    path, bracket, parameters = nodeid.partition("[")
    parts = path.split("::")
    parts[0] = parts[0].replace("/", ".").removesuffix(".py")
    return ".".join(parts[:-1]), parts[-1] + bracket + parameters


def _add(suite: ElementTree.Element, test: TestReport) -> None:
    classname, name = names(test.nodeid)
    case = ElementTree.SubElement(
        suite, "testcase", classname=visible(classname), name=visible(name), time=f"{test.seconds:.3f}"
    )
    properties = {
        "concord.requirements": ",".join(test.requirements),
        "concord.world": test.world,
        "concord.verdict": test.verdict,
        "concord.waived": test.waiver,
        "concord.owner": test.owner,
        "concord.defect": test.defect,
    }
    listed = ElementTree.SubElement(case, "properties")
    for key, value in properties.items():
        if value:
            ElementTree.SubElement(listed, "property", name=key, value=visible(value))
    if test.verdict in BAD:
        failure = ElementTree.SubElement(case, "failure", message=visible(test.headline or test.verdict))
        failure.text = visible(failure_text(test))[:LONGEST]
    elif test.verdict != "passed":
        kind = "pytest.xfail" if test.verdict == "waived" else "pytest.skip"
        ElementTree.SubElement(case, "skipped", type=kind, message=visible(test.reason or test.verdict))
    output = "".join(f"[rank {rank.rank}]\n{rank.output}\n" for rank in test.ranks if rank.output)
    if output:
        ElementTree.SubElement(case, "system-out").text = visible(output)[:LONGEST]


def failure_text(test: TestReport) -> str:
    """Return everything that is known about a failed test: attempts, texts, evidence from ranks, reproducer."""
    parts = [
        f"attempt {number} {attempt.verdict}: {attempt.headline}".removesuffix(": ")
        for number, attempt in enumerate(test.attempts, 1)
    ]
    parts += [test.text] if test.text else []
    for rank in test.ranks:
        parts.append(f"rank {rank.rank} {rank.kind}{' first' if rank.first else ''}: {rank.what}\n{rank.text}")
        if rank.collectives:
            parts.append("last collectives:\n" + "\n".join(rank.collectives))
        if rank.stack:
            parts.append(f"stack:\n{rank.stack}")
    if test.reproducer is not None:
        parts.append(f"reproducer: {test.reproducer.command}")
    return "\n".join(parts)
