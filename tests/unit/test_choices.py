"""Which combinations of parameters a default run tests: each value of each parameter, in as few tests as it takes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.plugin.choices import each_choice

COUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), min_size=1)


def product(counts: dict[str, int]) -> list[dict[str, int]]:
    """All combinations of the values of these parameters."""
    values = itertools.product(*(range(n) for n in counts.values()))
    return [dict(zip(counts, each, strict=True)) for each in values]


def pairs(variants: list[dict[str, int]]) -> set[tuple[str, int]]:
    return {pair for variant in variants for pair in variant.items()}


@given(COUNTS)
def test_of_a_whole_product(counts: dict[str, int]) -> None:
    """As many variants as the longest parameter has values, and each value is in one."""
    variants = product(counts)
    chosen = each_choice(variants)
    assert len(chosen) == max(counts.values())
    assert pairs([variants[i] for i in chosen]) == pairs(variants)


@given(COUNTS, st.data())
def test_of_some(counts: dict[str, int], data: st.DataObject) -> None:
    """Combinations that do not exist are not chosen, and each value that is left is in a variant."""
    variants = data.draw(st.lists(st.sampled_from(product(counts)), min_size=1, unique_by=lambda v: (*v.items(),)))
    chosen = each_choice(variants)
    assert chosen == sorted(set(chosen))
    assert pairs([variants[i] for i in chosen]) == pairs(variants)
    assert len(chosen) <= len(pairs(variants))


@given(COUNTS, st.data())
def test_of_any_order(counts: dict[str, int], data: st.DataObject) -> None:
    """The same combinations are chosen from variants in another order, as workers have them."""
    variants = data.draw(st.lists(st.sampled_from(product(counts)), min_size=1, unique_by=lambda v: (*v.items(),)))
    other = data.draw(st.permutations(variants))
    assert [variants[i] for i in each_choice(variants)] == sorted(
        (other[i] for i in each_choice(other)), key=variants.index
    )


@pytest.mark.parametrize("count", [0, 1, 3])
def test_without_parameters(count: int) -> None:
    """Variants that nothing tells apart all stay."""
    assert each_choice([{}] * count) == list(range(count))
