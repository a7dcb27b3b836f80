"""docs/forgeries.md is what the checks of forged bundles say, and each column can say something else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_forgeries import FORGERIES
from vouched import BEFORE, COLUMNS, DURING, FAILS, FOUND, GROUPS, IF_DRAWN, NOTHING, Said, Vouching, made, nothing

from harness.results import RunHeader
from reports import bundle

PAGE = Path(__file__).parents[2] / "docs" / "forgeries.md"

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "page", lambda report: "no page")


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    """Every cell of the page is what the checks say now."""
    assert PAGE.read_text() == made(tmp_path), "run: python tests/reports/vouched.py > docs/forgeries.md"


def test_an_honest_bundle(tmp_path: Path) -> None:
    """Of a bundle that nobody forged, no means says anything."""
    said = Vouching(tmp_path).of(nothing)
    assert [getattr(said, column) for column in COLUMNS] == [NOTHING] * len(COLUMNS)


def test_each_means(tmp_path: Path) -> None:
    """A lie is found by the means that look at when it was told, and by no other."""
    vouching = Vouching(tmp_path)
    silent = dict.fromkeys(COLUMNS, NOTHING)
    after = Said(**{**silent, "changed": FOUND, "attestation": FOUND, "rerun": IF_DRAWN})
    assert vouching.of(nothing, FAILS) == after
    assert vouching.of(nothing, FAILS, BEFORE) == Said(**{**silent, "attestation": FOUND, "rerun": IF_DRAWN})
    assert vouching.of(nothing, FAILS, DURING) == Said(**{**silent, "rerun": IF_DRAWN})


def test_a_challenge_that_nobody_answers(tmp_path: Path) -> None:
    """The column of the challenge is about the seed alone."""

    def another(made: list[object]) -> None:
        header = made[0]
        assert isinstance(header, RunHeader)
        if header.seed_drawn:
            header.seed = "5"

    vouching = Vouching(tmp_path)
    assert (vouching.of(another).challenge, vouching.of(nothing).challenge) == (FOUND, NOTHING)


def test_every_forgery_has_a_group() -> None:
    """The groups begin with the first forgery, and each of them is one."""
    assert set(GROUPS) <= set(FORGERIES)
    assert next(iter(FORGERIES)) == next(iter(GROUPS))
