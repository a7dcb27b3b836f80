"""``--concord-seed`` and ``--concord-challenge``: the seed from which the suites' properties draw."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from harness.plugin.constants import of_no_module
from harness.redaction import redacted, redacted_arguments
from harness.requirements import stack_of
from harness.results import DEFAULT_SEED, FREE_SEED, Challenge, ChallengeError
from harness.results.challenge import LARGEST, SLACK, decode
from harness.safe_io.files import FileError, contents

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
        self.challenge = _challenge(config)
        """The verifier's challenge that this run answers."""
        self.drawn = asked == RANDOM or self.challenge is not None
        self._leave = hypothesis is not None or config.pluginmanager.hasplugin("concord-thorough")
        if self.challenge is not None:
            chosen = f"--concord-seed {asked}" if asked != DEFAULT_SEED else f"--hypothesis-seed {hypothesis}"
            if asked != DEFAULT_SEED or self._leave:
                other = chosen if asked != DEFAULT_SEED or hypothesis is not None else "a thorough run"
                raise pytest.UsageError(f"--concord-challenge and {other}: a challenge gives the seed")
            self.seed = self.challenge.seed
        elif hypothesis is not None:
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
        if self.challenge is not None:
            whom = f" for {self.challenge.audience}" if self.challenge.audience else ""
            return f"concord: seed {self.seed}, from the challenge{whom}"
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

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        if self._leave or self.seed == FREE_SEED or pyfuncitem.get_closest_marker(MARKER) is None:
            return (yield)
        with of_no_module():
            return (yield)

    def _fix(self, function: Any) -> None:
        from hypothesis import settings

        before = getattr(function, "_hypothesis_internal_use_settings", settings.default)
        # Without a database: failures of earlier runs would come first, and the cases would not be those of the seed.
        if self.seed != DEFAULT_SEED:
            function._hypothesis_internal_use_seed = int(self.seed)
            function._hypothesis_internal_use_settings = settings(parent=before, database=None)
            return
        function._hypothesis_internal_use_settings = settings(parent=before, derandomize=True, database=None)


def _challenge(config: pytest.Config) -> Challenge | None:
    """Return the challenge that a run was given; None in workers of pytest-xdist, too, to which the seed is sent.

    Errors: UsageError for what is not a challenge, for one that is made later than now, and for one that results can't
    have because they would seem to have a credential.
    """
    given: str | None = config.getoption("concord_challenge", None)
    if given is None or hasattr(config, "workerinput"):
        return None
    try:
        path = config.invocation_params.dir / given if not given.lstrip().startswith("{") else None
        challenge = decode(contents(Path(path), LARGEST) if path is not None else given.encode(errors="replace"))
    except (FileError, ChallengeError) as e:
        raise pytest.UsageError(f"--concord-challenge: {e}") from None
    if challenge.made > time.time() + SLACK:
        late = challenge.made - time.time()
        raise pytest.UsageError(
            f"--concord-challenge: made {late:.0f} s from now by this machine's clock; set the clock"
        )
    if redacted(challenge.audience) != challenge.audience or redacted_arguments([given]) != [given]:
        why = "a part of it is in a variable that results do not show; give a file, and unset the variable"
        raise pytest.UsageError(f"--concord-challenge: {why}")
    return challenge
