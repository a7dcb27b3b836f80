"""No input, however it was made, is a traceback, takes 5 s or 300 MiB: bundles, profiles, reports and nights."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from invented import STARTED
from measured import Cost, Worker
from mutations import KINDS, honest, hostile

from harness import profiles
from harness.bench.history.nights import BadNight, loads
from reports.compare import compare, lines
from reports.model import ReportError, decode
from reports.text import visible
from reports.verify import verify

EXPECTED = (ReportError, BadNight)
SEED = "concord"


def check(data: bytes) -> str:
    """Read an input, as the commands do that are given such a file, and show it."""
    kind, rest = data[: len(KINDS[0])], data[len(KINDS[0]) :]
    if kind == KINDS[0]:
        with tempfile.NamedTemporaryFile(suffix=".zip") as file:
            file.write(rest)
            file.flush()
            found = verify(Path(file.name), "0.1.0", None, STARTED + 86400)
        return "".join(map(visible, (*found.unchecked, *found.problems, *found.notes)))[:1000]
    if kind == KINDS[1]:
        try:
            return profiles.parse(rest.decode(errors="replace"), "p.toml").name
        except profiles.ProfileError as e:
            return str(e).split("\n")[0]  # a mistake is a line, and a profile may have several
    if kind == KINDS[2]:
        report = decode(rest, "x")
        return "".join(lines(compare(decode(honest()["report.json"], "y"), report)))[:1000]
    return loads(rest, "x").id


def fuzz(begin: int, end: int) -> tuple[list[str], Cost, Cost]:
    """What is wrong with inputs of these numbers, the slowest and the largest of all."""
    wrong: list[str] = []
    costs = []
    with Worker(check, EXPECTED) as worker:
        for number in range(begin, end):
            cost = worker.cost(hostile(f"{SEED}:{number}"))
            if cost.wrong:
                wrong.append(f"{SEED}:{number}: {cost.wrong}")
            costs.append(cost)
    return wrong, max(costs, key=lambda c: c.seconds), max(costs, key=lambda c: c.memory)


def test_a_few_inputs() -> None:
    """A hundred inputs, the same every time."""
    wrong, _, _ = fuzz(0, 100)
    assert wrong == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_many_inputs(record_property: pytest.RecordProperty) -> None:
    """20,000 inputs, the same every time."""
    begun = time.monotonic()
    wrong, slowest, largest = fuzz(0, 20_000)
    figures = (
        f"slowest {slowest.seconds:.2f} s, largest {largest.memory >> 20} MiB, {time.monotonic() - begun:.0f} s in all"
    )
    record_property("figures", figures)
    print(figures)
    assert wrong == []


def test_honest_inputs_are_read() -> None:
    """What nothing was changed in is read without a complaint: the check gets as deep as it should."""
    from mutations import MANIFEST, PROFILE, manifest_of, night, packed

    files = honest()
    inputs = [packed({**files, MANIFEST: manifest_of(files, "0.1.0")}), PROFILE.encode(), files["report.json"], night()]
    said = [check(kind + data) for kind, data in zip(KINDS, inputs, strict=True)]
    assert said[0].startswith("there is no local suite")
    assert said[1] == "made-up"
    assert "24" in said[2] or "8 unchanged" in said[2]
    assert said[3] == "n"


def test_inputs_get_deep() -> None:
    """One bundle in ten or more has runs that are read, and an input comes from its seed alone."""
    said = []
    for number in range(80):
        data = hostile(f"{SEED}:{number}")
        assert data == hostile(f"{SEED}:{number}")
        if data.startswith(KINDS[0]):
            try:
                said.append(check(data))
            except ReportError:
                said.append("")
    read = [text for text in said if "no local suite" in text]
    assert len(read) > len(said) / 10
    assert len(set(said)) > len(said) / 4
