"""What a fault's words say about the order of tests."""

from __future__ import annotations

from harness.audit.relevance import Relevance, words

TESTS = {
    "test_all_reduce.py::test_sum[2ranks]": "Tensors are summed over all ranks.",
    "test_gather.py::test_strided[2ranks]": "A strided tensor is gathered by its elements.",
    "test_gather.py::test_plain[2ranks]": "A tensor is gathered.",
}


def test_words() -> None:
    """Names and sentences have the same words."""
    assert words("test_all_reduces[2ranks]") == {"test", "all", "reduce", "2", "rank"}


def test_order() -> None:
    """Rare words in common count more; words that all have count nothing."""
    found = Relevance({name: f"{name} {text}" for name, text in TESTS.items()}).of("gather ignores strides: strided")
    assert sorted(found, key=lambda name: -found[name])[0] == "test_gather.py::test_strided[2ranks]"
    assert found["test_all_reduce.py::test_sum[2ranks]"] == 0
    assert 0 < found["test_gather.py::test_plain[2ranks]"] < 1


def test_nothing_in_common() -> None:
    """No words, no order."""
    assert set(Relevance(TESTS).of("").values()) == {0.0}
    assert Relevance({}).of("gather") == {}
