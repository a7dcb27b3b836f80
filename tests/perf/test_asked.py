"""What options ask for: numbers of ranks, and more than the usual series."""

from __future__ import annotations

import pytest
import torch

from harness.bench.measuring import steps, sweeps
from harness.bench.measuring.asked import DTYPES_MORE, GROUPS, LEVELS, MODELS, MORE, asked_of, at_least, ranks_asked
from harness.bench.measuring.collectives import Timed, shards_of

LARGEST = 4 << 20


def test_lists() -> None:
    """Words with commas, each once; all is all."""
    assert asked_of("models, dtypes,models") == ("models", "dtypes")
    assert asked_of("all") == MORE
    assert ranks_asked("8,2,8") == (2, 8)
    assert at_least(4, (2, 8, 4)) == (4, 8)


@pytest.mark.parametrize("words", ["colors", "", ",", "models,colors"])
def test_no_such_thing(words: str) -> None:
    """Unknown words are refused, and the known ones are named."""
    with pytest.raises(ValueError, match="is none of dtypes, models, overlap, groups, levels, all"):
        asked_of(words)


@pytest.mark.parametrize("words", ["two", "0,2", "2,", "-1", ""])
def test_no_numbers_of_ranks(words: str) -> None:
    """What is no list of numbers from 1 is refused."""
    with pytest.raises(ValueError, match="numbers of ranks from 1 with commas"):
        ranks_asked(words)


def test_the_usual_series() -> None:
    """If nobody asks for more, there are two and four ranks, and no further series than a few."""
    usual = list(sweeps.every(LARGEST))
    assert {ranks for _, ranks in usual} == {2, 4}
    assert len(usual) < 180
    assert len(set(usual)) == len(usual)


def test_on_other_ranks() -> None:
    """Every series is measured on the ranks that are asked for, those of four ranks on those that are enough."""
    found = list(sweeps.every(LARGEST, asked=(1, 3, 8)))
    assert {ranks for timed, ranks in found if timed.group is not None or timed.shards} == {8}
    assert {ranks for timed, ranks in found if timed.dtype == torch.int8} == {3, 8}
    assert {ranks for timed, ranks in found if timed == Timed("all_reduce", 8)} == {1, 3, 8}


@pytest.mark.parametrize("what", [DTYPES_MORE, GROUPS, LEVELS, MODELS])
def test_more_adds_and_renames_nothing(what: str) -> None:
    """Each word adds series, and the usual ones stay what they are."""
    usual = set(sweeps.every(LARGEST))
    found = list(sweeps.every(LARGEST, more=(what,), room=lambda ranks: 1 << 40))
    assert usual < set(found)
    assert len(set(found)) == len(found)


def test_messages_that_do_not_fit_are_not_offered() -> None:
    """Of models' messages, those that are larger than what fits on the ranks are left out."""
    offered = [t.bytes for t, _ in sweeps.every(LARGEST, more=(MODELS,), room=lambda ranks: 100 << 20) if t.payload]
    assert max(offered) <= 100 << 20 < max(p.timed(2).bytes for p in sweeps.payloads((MODELS,)))


def test_more_steps() -> None:
    """Wide steps have more compute; for compilers, there are also steps that average only the last micro-batch."""
    usual, eager, compiled = (
        steps.overlapping(more=more, compiled=compiled)
        for more, compiled in ((False, True), (True, False), (True, True))
    )
    assert set(usual) < set(eager) < set(compiled)
    names = [steps.described(step) for step in compiled]
    assert len(set(names)) == len(names)
    assert {"replicate", "replicate-wide", "replicate-last", "tp_extension-wide"} <= set(names)


@pytest.mark.parametrize(
    ("ranks", "hosts", "shards"), [(4, 1, 2), (8, 2, 4), (8, 4, 2), (6, 1, 3), (9, 1, 3), (5, 1, 1), (7, 2, 1)]
)
def test_shards(ranks: int, hosts: int, shards: int) -> None:
    """HSDP shards within a host if ranks are equally many on each, and otherwise over half of all if that is whole."""
    assert shards_of(ranks, hosts) == shards
