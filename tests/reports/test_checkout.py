"""The facts of benchmarks that are measured only if an option asks for them."""

from __future__ import annotations

import pytest

from harness.profiles.needs import Needs
from harness.suite_facts import SuiteFacts, TestFacts
from reports.checkout import Checkout

FACTS = {
    "suites/perf/test_a.py::test_one[2ranks-all_reduce-complex64-1024B]": TestFacts(
        requirements=["PERF-A-01"],
        size=2,
        dtype="complex64",
        needs=Needs("perf", "all_reduce", "complex64", "SUM"),
    ),
    "suites/perf/test_a.py::test_alone": TestFacts(requirements=["PERF-A-02"]),
    "suites/dynamo/test_a.py::test_one[2ranks-x]": TestFacts(requirements=["DYN-A-01"], size=2),
}
CHECKOUT = Checkout("5" * 64, facts=SuiteFacts(tests=FACTS, requirements={}))


@pytest.mark.parametrize(
    ("parameters", "size", "needs"),
    [
        ("2ranks-all_reduce-complex64-4096B", 2, Needs("perf", "all_reduce", "complex64", "SUM")),
        ("16ranks-all_reduce-complex64-1024B", 16, Needs("perf", "all_reduce", "complex64", "SUM")),
        ("1rank-broadcast-int8-1024B", 1, Needs("perf", "broadcast", "int8", "")),
        ("3ranks-reduce-max-float64-8B", 3, Needs("perf", "reduce", "float64", "MAX")),
    ],
)
def test_on_demand(parameters: str, size: int, needs: Needs) -> None:
    """Ranks, dtype, collective and reduction are those of its id; what it proves is what its function proves."""
    facts = CHECKOUT.test(f"suites/perf/test_a.py::test_one[{parameters}]")
    assert facts is not None
    assert (facts.requirements, facts.size, facts.dtype, facts.needs) == (["PERF-A-01"], size, needs.dtype, needs)


@pytest.mark.parametrize(
    "nodeid",
    [
        "suites/perf/test_a.py::test_two[2ranks]",
        "suites/perf/test_b.py::test_one[2ranks]",
        "suites/perf/test_a.py::test_one",
        "suites/dynamo/test_a.py::test_one[2ranks-y]",
    ],
)
def test_not_on_demand(nodeid: str) -> None:
    """Another function, and another parameter of a suite that is not swept, are no tests of the suite."""
    assert CHECKOUT.test(nodeid) is None
