"""Bundles of several backends and versions of PyTorch, taken in for a board."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from invented import STARTED, Change, change, checkout, records, written

from reports import bundle
from reports.board import Entry, Refused, taken
from reports.bundle import MANIFEST, manifest_of, packed
from reports.verify import verify

NOW = STARTED + 86400 * 300
DAY = 86400.0
FAILED = change("replicate_fsdp/test_a.py::test_one[2", verdict="failed", headline="rank 1 of 2 failed first: no")


def with_(**facts: str) -> Change:
    """Changes the environment."""

    def apply(made: list[Any]) -> None:
        made[0].environment = {**made[0].environment, **facts}

    return apply


def bundled(path: Path, *changes: Change, days: float = 0.0) -> Path:
    """Write a bundle of two runs with changes; ``days``: how much later they ran."""
    files = []
    for name, made in (
        ("first", records(later=days * DAY)),
        ("second", records("123", drawn=True, later=1000 + days * DAY)),
    ):
        for each in changes:
            each(made)
        files.append((name, written(made)))
    found = bundle.made(files).files
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed({**found, MANIFEST: manifest_of(found, "0.1.0")}))
    return path


def entry(
    path: Path, *changes: Change, days: float = 0.0, suite: bool = True, name: str = "", signer: str = ""
) -> Entry | Refused:
    """Make a bundle, and take it in."""
    bundled(path, *changes, days=days)
    checked = verify(path, "0.1.0", checkout() if suite else None, NOW)
    return taken(name or path.name, hashlib.sha256(path.read_bytes()).hexdigest(), checked, signer)
