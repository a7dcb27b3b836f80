"""What is made of a probe's outcome: the draft of a profile, and what a profile says otherwise."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.commands.probe import table
from harness.probe import trials
from harness.probe.draft import draft
from harness.probe.found import Ability, Found, Size, Trial, against, boxes, decoded, encoded
from harness.probe.run import _agreed
from harness.profiles import Profile, parse
from harness.profiles.vocabulary import FEATURES, REDUCING

TODAY = datetime.date(2027, 1, 1)
CELLS = [
    (collective, dtype, op)
    for collective, dtype in itertools.product(("all_reduce", "reduce", "gather"), ("int8", "float32", "complex64"))
    for op in (("SUM", "MAX", "AVG") if collective in REDUCING else ("",))
    if (dtype, op) not in (("int8", "AVG"), ("complex64", "MAX"))
]


TWO = Size(2, "right")


def found(trials: Any = (), abilities: Any = (), sizes: Any = (TWO,)) -> Found:
    return Found("b", "d", ("m",), {"torch": "2.13"}, tuple(sizes), tuple(trials), tuple(abilities))


def drafted(outcome: Found) -> Profile:
    return parse(draft(outcome, "p", TODAY), "p.toml")


@given(
    st.lists(
        st.sampled_from(["right", "refused", "wrong", "crashed", "hung"]), min_size=len(CELLS), max_size=len(CELLS)
    )
)
def test_draft_claims_what_was_right(ends: list[str]) -> None:
    """Of what was tried, a draft claims exactly what was right, whatever that is."""
    outcome = found(Trial(*cell, end, "x") for cell, end in zip(CELLS, ends, strict=True))
    claims = drafted(outcome).claims
    if outcome.right:  # a profile can't claim nothing at all
        assert {cell for cell in CELLS if claims.has(*cell)} == outcome.right


@given(st.sets(st.sampled_from(CELLS)))
def test_boxes_hold_what_is_missing(right: set[tuple[str, str, str]]) -> None:
    """Every missing cell is in a box, and no right one."""
    missing = [cell for cell in CELLS if cell not in right]
    made = boxes(
        missing, right, (("all_reduce", "reduce", "gather"), ("int8", "float32", "complex64"), ("SUM", "MAX", "AVG"))
    )
    inside = {c for c in CELLS if any(all(not w or x in w for x, w in zip(c, box, strict=True)) for box in made)}
    assert inside == set(missing)


def test_draft_of_a_head() -> None:
    """Backend, device, imports and sizes are in the draft; sizes that failed are comments."""
    outcome = found(sizes=[Size(1, "right"), Size(2, "right"), Size(3, "crashed", "rank 2: killed")])
    profile = drafted(outcome)
    assert (profile.name, profile.backend, profile.device, profile.imports) == ("p", "b", "d", ("m",))
    assert profile.world_sizes == (1, 2)
    assert "\n# worlds of 3: crashed: rank 2: killed\n" in draft(outcome, "p", TODAY)


def test_draft_of_features() -> None:
    """What was not right is not claimed, nor a stack that does not train; what nobody tries is."""
    abilities = [
        Ability("collectives", "messages", "refused", "no"),
        Ability("replicate", "", "right"),
        Ability("dynamo", "", "hung", "x"),
    ]
    claims = drafted(found(abilities=abilities)).claims
    assert "dynamo" not in claims.stacks
    assert "replicate" in claims.stacks
    assert set(FEATURES["collectives"]) - set(claims.features_of("collectives") or ()) == {"messages"}
    assert claims.features_of("replicate") is None


def test_defects_are_said() -> None:
    """What was wrong, crashed or hung is in comments, with the beginning of a waiver."""
    text = draft(
        found([Trial("all_reduce", "int8", "SUM", "hung", "rank 0 waits"), Trial("gather", "int8", "", "right")]),
        "p",
        TODAY,
    )
    assert "# all_reduce of int8 with SUM: hung: rank 0 waits" in text
    assert '# verdicts = ["hung"]' in text
    assert "# expires = 2027-06-30" in text


@given(st.text(max_size=30), st.text(max_size=30))
def test_hostile_details(detail: str, name: str) -> None:
    """Whatever a backend says, the draft is a profile."""
    outcome = found(
        [Trial("gather", "int8", "", "right"), Trial("gather", "int16", "", "wrong", detail)],
        [Ability("dynamo", "ddp", "hung", name)],
    )
    assert drafted(outcome).claims.has("gather", "int8")


def test_against() -> None:
    """What was found and is not claimed is undeclared; what is claimed and was tried in vain is not found."""
    profile = parse(
        'name = "p"\nbackend = "b"\ndevice = "d"\nworld_sizes = [1]\n[collectives]\ndtypes = ["int8"]\n'
        "[features]\nreplicate = []",
        "p.toml",
    )
    outcome = found(
        [
            Trial("gather", "int8", "", "refused", "no"),
            Trial("gather", "int16", "", "right"),
            Trial("reduce", "int16", "SUM", "hung"),
        ],
        [
            Ability("replicate", "comm_hooks", "right"),
            Ability("dynamo", "", "not-tried"),
            Ability("tp_extension", "", "wrong", "3"),
        ],
    )
    difference = against(outcome, profile, profile.claims)
    assert difference.undeclared == ("worlds of 2", "gather of int16", "comm_hooks of replicate")
    assert difference.not_found == ("gather of int8: refused: no", "tp_extension: wrong: 3")
    assert decoded(encoded(outcome, difference)) == outcome


@pytest.mark.parametrize("text", ["", "[]", '{"backend": 3}', "\0", '{"trials": [{}]}'])
def test_garbage(text: str) -> None:
    """What is no outcome is refused with what is wrong."""
    with pytest.raises(ValueError, match="no probe's outcome"):
        decoded(text)


def test_other_format() -> None:
    """An outcome of another version is refused."""
    with pytest.raises(ValueError, match=r"the format 'concord.probe/9'"):
        decoded(encoded(found(), None).replace("concord.probe/1", "concord.probe/9"))


@pytest.mark.parametrize(
    ("ranks", "end", "detail"),
    [
        ([("right", ""), ("right", "")], "right", ""),
        ([("refused", "no"), ("refused", "nope")], "refused", "no"),
        ([("right", ""), ("wrong", "3")], "wrong", "3"),
        ([("right", ""), ("refused", "no")], "wrong", "ranks differ: rank 0: right, rank 1: refused: no"),
    ],
)
def test_agreed(ranks: list[tuple[str, str]], end: str, detail: str) -> None:
    """Ranks that end otherwise than each other are wrong."""
    assert (_agreed(ranks).end, _agreed(ranks).detail) == (end, detail)


def test_every_trial_has_an_answer() -> None:
    """Every case that is tried is one that the exact model can answer, and features that are tried are known ones."""
    from harness.oracles.collectives import outputs

    assert all(outputs(case, 3, case.root) for cases in trials.portions() for case in cases)
    assert set(trials.FEATURES) <= set(FEATURES["collectives"])
    assert {(s, f) for s, f in (*trials.programs(2), *trials.WORK) if f and f not in FEATURES[s]} == set()


def test_table() -> None:
    """A row for each collective says which dtypes ended how."""
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    ends = [("int8", "MAX", "hung"), ("int8", "SUM", "right"), ("int16", "SUM", "refused")]
    console.print(table(found([Trial("reduce", dtype, op, end) for dtype, op, end in ends])))
    text = console.export_text()
    assert "int8 (1 of 2 ops) hung" in " ".join(text.split())
    assert "int16" in text


def test_draft_is_short() -> None:
    """One exception says what is missing alike, with no word more than that."""
    ends = {("all_reduce", "int8", op): "refused" for op in ("SUM", "MAX")}
    outcome = found(Trial(*cell, ends.get(cell, "right")) for cell in CELLS)
    (exclusion,) = drafted(outcome).claims.exclusions
    assert (exclusion.collectives, exclusion.dtypes, exclusion.ops) == (("all_reduce",), ("int8",), ("SUM", "MAX"))
