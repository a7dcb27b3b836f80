"""Fewer combinations of a test's parameters by default: each value once, and every combination with ``--thorough``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest

MARKER = "each_choice"
_LEFT = "concord_combinations"


def each_choice(variants: Sequence[Mapping[str, int]]) -> list[int]:
    """Choose variants of a test such that each value of each parameter is in one (*each-choice coverage*).

    ``variants``: by the name of a parameter, the number of its value.  Variant ``i`` of the choice has the value ``i``
    of each parameter, which begins again where it has fewer; what is still missing then comes with as few variants as
    possible.  Returns indices in ascending order.  The order of ``variants`` matters only among equal ones.
    """
    missing = {pair for variant in variants for pair in variant.items()}
    if not missing:
        return list(range(len(variants)))
    values: dict[str, list[int]] = defaultdict(list)
    for name, value in sorted(missing):
        values[name].append(value)
    by_pairs = {tuple(sorted(variant.items())): i for i, variant in reversed(list(enumerate(variants)))}
    diagonal = [
        tuple((name, found[i % len(found)]) for name, found in values.items())
        for i in range(max(map(len, values.values())))
    ]
    chosen = [pairs for pairs in diagonal if pairs in by_pairs]
    missing.difference_update(*chosen)
    while missing:
        chosen.append(max(by_pairs, key=lambda pairs: (len(missing.intersection(pairs)), pairs)))
        missing.difference_update(chosen[-1])
    return sorted(by_pairs[pairs] for pairs in chosen)


class Choices:
    """Leaves out variants of tests with the mark ``each_choice``, without ``--thorough`` and if none is named."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._left = 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """Choose after ``-k``, so that each value which that leaves is tested, but by the order of the suites."""
        defined = {item: i for i, item in enumerate(items)}
        yield
        if self._config.getoption("thorough") or any("[" in argument for argument in self._config.args):
            return
        variants: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in sorted(items, key=lambda item: defined.get(item, len(defined))):
            if hasattr(item, "callspec") and item.get_closest_marker(MARKER):
                variants[item.nodeid.partition("[")[0]].append(item)
        left = {item for of_one in variants.values() for item in _left_out(of_one)}
        if left:
            self._left = len(left)
            self._config.hook.pytest_deselected(items=[item for item in items if item in left])
            items[:] = [item for item in items if item not in left]

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_LEFT] = self._left

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the number from a worker: the controller of pytest-xdist collects nothing."""
        self._left = max(self._left, getattr(node, "workeroutput", {}).get(_LEFT, 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.write_line(f"{self._left} more combinations of parameters are tested with --thorough")


def _left_out(items: Sequence[Any]) -> list[pytest.Item]:
    """Return the variants of a test that are not chosen; the values of its parameters are numbered as they come."""
    numbers: dict[str, dict[int, int]] = defaultdict(dict)
    variants = [
        {name: numbers[name].setdefault(id(value), len(numbers[name])) for name, value in item.callspec.params.items()}
        for item in items
    ]
    chosen = set(each_choice(variants))
    return [item for i, item in enumerate(items) if i not in chosen]
