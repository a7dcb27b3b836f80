"""``--concord-seed``: the seed from which the suites' properties draw, to repeat a run or to vary it."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from harness.requirements import stack_of
from harness.results import DEFAULT_SEED, FREE_SEED

RANDOM = "random"
MARKER = "property_based"
"""The marker of tests that draw from the seed. Another seed can change nothing else."""
_INPUT = "concord_seed"
_LARGEST = 2**32 - 1


class Seeds:
    """The seed of a run. It affects only tests under ``suites/``.

    Errors: UsageError for an invalid seed, or if two are given.
    """

    def __init__(self, config: pytest.Config) -> None:
        asked = str(config.getoption("concord_seed"))
        hypothesis: object = config.getoption("hypothesis_seed", None)
        sent: str | None = getattr(config, "workerinput", {}).get(_INPUT)
        self.drawn = asked == RANDOM
        self._leave = hypothesis is not None or config.pluginmanager.hasplugin("concord-thorough")
        if hypothesis is not None:
            if asked != DEFAULT_SEED:
                raise pytest.UsageError(f"--concord-seed {asked} and --hypothesis-seed {hypothesis}: give one of them")
            self.seed = str(hypothesis)
        elif self._leave:  # a thorough run draws its own seeds, round by round
            self.seed = FREE_SEED
        elif sent is not None:
            self.seed = sent
        elif asked == RANDOM:
            self.seed = str(secrets.randbelow(_LARGEST + 1))
        elif asked in (DEFAULT_SEED, FREE_SEED) or (asked.isascii() and asked.isdigit() and int(asked) <= _LARGEST):
            self.seed = asked
        else:
            known = f"{DEFAULT_SEED}, {RANDOM}, {FREE_SEED}, or a whole number from 0 to {_LARGEST}"
            raise pytest.UsageError(f"--concord-seed {asked!r}: {known}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_INPUT] = self.seed

    def pytest_report_header(self) -> str | None:
        if self.seed in (DEFAULT_SEED, FREE_SEED) or self._leave:
            return None
        return f"concord: seed {self.seed}; the same examples again: --concord-seed={self.seed}"

    @pytest.hookimpl(tryfirst=True)  # before -m selects by the marker
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            function: Any = getattr(item, "obj", None)
            function = getattr(function, "__func__", function)
            if not getattr(function, "is_hypothesis_test", False) or not stack_of(item.nodeid):
                continue
            item.add_marker(MARKER)
            if not self._leave and self.seed != FREE_SEED:
                self._fix(function)

    def _fix(self, function: Any) -> None:
        from hypothesis import settings

        if self.seed != DEFAULT_SEED:
            function._hypothesis_internal_use_seed = int(self.seed)
            return
        before = getattr(function, "_hypothesis_internal_use_settings", settings.default)
        function._hypothesis_internal_use_settings = settings(parent=before, derandomize=True, database=None)
