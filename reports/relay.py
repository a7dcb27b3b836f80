"""Results for PyTorch's Cross-Repository CI Relay, which shows what out-of-tree backends say of PyTorch's changes.

Its callback action takes counts (``test-results``), failed tests (``failed-tests-detail``), a conclusion and a link to
everything else (``artifact-url``); the receiving side refuses more than 2 MB.  Sources: pytorch/test-infra,
``.github/actions/cross-repo-ci-relay-callback/action.yml`` and ``torchci/lib/oot/ootUtils.ts``; pytorch/rfcs, RFC-0054.
"""

from __future__ import annotations

import json
from typing import Any

from harness.results import BAD
from reports.junit import failure_text, names
from reports.model import Report, TestReport

LARGEST = 2 * 1024 * 1024
"""Bytes that the receiving side takes, for the whole callback."""
LARGEST_INPUT = 120_000
"""Bytes of one input: the action hands it to its script as an environment variable, of which Linux takes 128 KiB."""
MOST_TESTS, LONGEST_MESSAGE, LONGEST_STACK = 1000, 1024, 4096


def payload(report: Report, artifact_url: str = "", *, largest: int = LARGEST_INPUT) -> dict[str, Any]:
    """The action's inputs, by name: those that are JSON are JSON here, too.

    Of failed tests, as many as the limits allow; how many there are beyond is in the counts and in ``note``.
    """
    bad = [test for test in report.tests if test.verdict in BAD]
    skipped = sum(count for verdict, count in report.counts.items() if verdict not in ("passed", *BAD))
    details: list[dict[str, Any]] = []
    size = 0
    for test in bad[:MOST_TESTS]:
        detail = _detail(test)
        size += len(json.dumps(detail)) + 2
        if size > largest:
            break
        details.append(detail)
    conclusion = "success" if not bad and all(run.complete for run in report.runs) else "failure"
    found: dict[str, Any] = {
        "status": "completed",
        "conclusion": conclusion,
        "test-results": {
            "total": len(report.tests),
            "passed": report.counts.get("passed", 0),
            "failed": len(bad),
            "skipped": skipped,
        },
        "failed-tests-detail": details,
        "artifact-url": artifact_url,
    }
    if len(details) < len(bad):
        found["note"] = (
            f"{len(bad) - len(details)} of {len(bad)} failed tests did not fit; the artifact has all of them"
        )
    return found


def encode(report: Report, artifact_url: str = "") -> bytes:
    """The payload as JSON, within the limit."""
    return json.dumps(payload(report, artifact_url)).encode() + b"\n"


def _detail(test: TestReport) -> dict[str, Any]:
    classname, name = names(test.nodeid)
    return {
        "name": _cut(name, LONGEST_MESSAGE),
        "classname": _cut(classname, LONGEST_MESSAGE),
        "message": _cut(f"{test.verdict}: {test.headline}", LONGEST_MESSAGE),
        "stacktrace": _cut(failure_text(test), LONGEST_STACK),
        "duration": round(test.seconds, 3),
    }


def _cut(text: str, bytes_: int) -> str:
    return text.encode(errors="replace")[:bytes_].decode(errors="ignore")
