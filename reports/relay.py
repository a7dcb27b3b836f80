"""Results for PyTorch's cross-repository CI relay, which shows how out-of-tree backends do on PyTorch's changes.

The relay's callback action takes counts (``test-results``), failed tests (``failed-tests-detail``), a conclusion, and a
link to everything else (``artifact-url``). The receiver refuses more than 2 MB. Sources: pytorch/test-infra,
``.github/actions/cross-repo-ci-relay-callback/action.yml`` and ``torchci/lib/oot/ootUtils.ts``; pytorch/rfcs, RFC-0054.
"""

from __future__ import annotations

import json
from typing import Any

from harness.results import BAD
from reports.junit import failure_text, names
from reports.model import Report, TestReport

LARGEST = 2 * 1024 * 1024
"""The largest callback that the receiver accepts, in bytes."""
LARGEST_INPUT = 120_000
"""The largest input, in bytes.  The action passes it to its script as an environment variable, which Linux limits to
128 KiB."""
MOST_TESTS, LONGEST_MESSAGE, LONGEST_STACK = 1000, 1024, 4096


def payload(report: Report, artifact_url: str = "", *, largest: int = LARGEST_INPUT) -> dict[str, Any]:
    """Return the inputs of the action by name; those that the action takes as JSON are plain data.

    The failed tests include as many as the limits allow.  The counts are complete, and ``note`` gives the number of
    omitted tests.  ``largest``: the limit for the failed tests, in bytes.
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
    inputs: dict[str, Any] = {
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
        inputs["note"] = (
            f"{len(bad) - len(details)} of {len(bad)} failed tests did not fit; the artifact has all of them"
        )
    return inputs


def encode(report: Report, artifact_url: str = "") -> bytes:
    """Encode the payload as JSON, within the limits."""
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
