"""What is swept: message sizes as large as the profile and the machine allow, and what options ask for besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from harness.bench.figures import sizes
from harness.bench.measuring import sweeps
from harness.bench.measuring.asked import OVERLAP, at_least
from harness.bench.measuring.steps import described as step_named
from harness.bench.measuring.steps import overlapping
from harness.bench.measuring.sweeps import SIZES, described
from harness.plugin.perf import asked_for, largest_of, more_of, ranks_of

Chosen = Callable[[pytest.Config], tuple[Sequence[Any], list[str]]]


def _sizes(config: pytest.Config) -> tuple[Sequence[Any], list[str]]:
    """Return bytes of a message, from 8 B to the largest; only a few sizes if nothing is measured."""
    swept = sizes(largest_of(config, max(ranks_of(config) or (4,)))) if asked_for(config) else [8, *SIZES]
    return swept, [f"{size}B" for size in swept]


def _timed(choose: Callable[[Sequence[str]], list[Any]]) -> Chosen:
    def chosen(config: pytest.Config) -> tuple[Sequence[Any], list[str]]:
        found = choose(more_of(config))
        return found, [described(timed) for timed in found]

    return chosen


def _gradients(config: pytest.Config) -> tuple[Sequence[Any], list[str]]:
    found = sweeps.two_level_sizes(more_of(config))
    return found, [f"{size}B" for size in found]


def _payloads(config: pytest.Config) -> tuple[Sequence[Any], list[str]]:
    found = sweeps.payloads(more_of(config))
    names = [f"{p.model}-{p.kind}-{p.collective}-{str(p.dtype).removeprefix('torch.')}" for p in found]
    return found, names


def _steps(compiled: bool) -> Chosen:
    def chosen(config: pytest.Config) -> tuple[Sequence[Any], list[str]]:
        found = overlapping(more=OVERLAP in more_of(config), compiled=compiled)
        return found, [step_named(step) for step in found]

    return chosen


BEFORE: Mapping[str, Chosen] = {"size": _sizes}
"""Parameters of tests by name: their values and ids under the options of a run.  These come before the ranks in ids."""
SWEPT: Mapping[str, Chosen] = {
    "further_dtype": _timed(sweeps.dtypes),
    "within": _timed(sweeps.groups),
    "gradients": _gradients,
    "payload": _payloads,
    "eager_step": _steps(compiled=False),
    "compiled_step": _steps(compiled=True),
}
"""The same, for those that come after the ranks."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Set the numbers of ranks that were asked for, before the world reads its mark, and parametrize what is swept."""
    usual = next((mark.args for mark in metafunc.definition.iter_markers("world") if mark.args), ())
    asked = ranks_of(metafunc.config) if usual else ()
    if 2 not in usual:  # a test of four ranks needs as many; to those of two, a world of one is where a curve begins
        asked = at_least(min(usual, default=1), asked)
    if asked:
        metafunc.definition.add_marker(pytest.mark.world(*asked), append=False)
    _parametrize(metafunc, BEFORE)
    yield
    _parametrize(metafunc, SWEPT)


def _parametrize(metafunc: pytest.Metafunc, parameters: Mapping[str, Chosen]) -> None:
    for name, values in parameters.items():
        if name in metafunc.fixturenames:
            found, ids = values(metafunc.config)
            metafunc.parametrize(name, found, ids=ids)
