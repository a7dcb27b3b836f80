"""Runs for each answer that a page can give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from invented import Change, change, runs

from harness.results import RankEvidence, TooFewDevices


def few_devices(made: list[Any]) -> None:
    """Makes the machine one of two devices."""
    few = TooFewDevices(3, 3, "gpu", 2)
    change("[3ranks", verdict="unsupported", cause=few, reason=f"unsupported: {few}", ranks=[], waiver="")(made)


def failed(stack: str, verdict: str, ranks: list[RankEvidence]) -> Change:
    """Has a test of a stack end badly."""
    return change(f"suites/{stack}/test_a.py::test_one[2", verdict=verdict, headline="no", ranks=ranks)


ANSWERS: dict[str, tuple[Callable[[], list[tuple[str, bytes]]], str]] = {
    "conformant": (runs, "Conformant at L5 (dynamo)"),
    "not conformant": (lambda: runs(failed("collectives", "failed", [])), "Not conformant at any level"),
    "not shown": (lambda: runs()[:1], "Not shown yet at any level"),
    "partial": (lambda: runs(few_devices), "L5 on 2 ranks: partial"),
}
"""Runs, and the heading of their page, by the answer for L1."""
