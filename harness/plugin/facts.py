"""The facts about a test that go along with its reports: requirements, dtype, world size, cause and reproducer."""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import provenance, reproducers
from harness.plugin.claims import with_case
from harness.plugin.profiles import Profiles
from harness.plugin.seeds import MARKER
from harness.plugin.worlds import given_to, plugin_of, request_of
from harness.profiles.recorded import as_recorded
from harness.redaction import redacted
from harness.requirements import LEVELS, stack_of
from harness.results import (
    Cause,
    LeftOut,
    MaybeLeftOut,
    NotCollected,
    OnlySome,
    OptionGiven,
    ProfileText,
    Reproducer,
    RequirementText,
    cause_of,
)
from harness.thorough import effort

LONGEST_TEXT = 20_000
LONGEST_REPRODUCER = 100_000

_DTYPE = re.compile(r"b?float\d+\w*|u?int\d+|complex\d+|bool|bfloat16")
_ASKED_FOR = {
    "keyword": "-k",
    "markexpr": "-m",
    "deselect": "--deselect",
    "ignore": "--ignore",
    "ignore_glob": "--ignore-glob",
    "lf": "--lf",
    "stepwise": "--stepwise",
    "within": "--within",
}
_IN_PARTS = ("rank interfaces", "rank network")
"""Facts in which each process of a run names what its own ranks had, in parts between semicolons."""
_LEVEL_OF = {stack: level for level, stack in LEVELS.items()}


class Facts:
    """Adds facts about tests to their reports where tests run, for :class:`~harness.plugin.summary.Summary`.

    They are attributes of reports, which pytest-xdist sends along as long as they are plain data.
    """

    def __init__(self, config: pytest.Config, profiles: Profiles) -> None:
        self._config = config
        self._profiles = profiles

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            requirements = requirements_of(item)
            if requirements:
                item.user_properties.append(("concord.requirements", ",".join(r.id for r in requirements)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if report.when == "setup":
            asked, given = request_of(item), given_to(item)
            report.concord_facts = {
                "dtype": dtype_of(getattr(getattr(item, "callspec", None), "params", {})),
                "size": asked.size if asked is not None else 0,
                "world": msgspec.to_builtins(given),
                "property_based": item.get_closest_marker(MARKER) is not None,
                "requirements": [msgspec.to_builtins(r) for r in requirements_of(item)],
            }
        if call.excinfo is not None and report.skipped:
            cause = cause_of(call.excinfo.value)
            report.concord_cause = plain(cause) if cause is not None else None
        if call.excinfo is not None and not report.passed:
            reproducer = reproducer_in(call.excinfo.value)
            if reproducer is not None:
                report.concord_reproducer = msgspec.to_builtins(reproducer)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["concord_environment"] = self.environment()

    def environment(self) -> dict[str, str]:
        """Return what this process learned from running tests (:func:`harness.provenance.devices_and_libraries`)."""
        profile = self._profiles.settled
        facts = provenance.devices_and_libraries(profile.imports if profile is not None else ())
        worlds = plugin_of(self._config)
        if worlds.agents:
            facts = {name: value for name, value in facts.items() if name not in ("device", "accelerator", "driver")}
            facts |= {"rank hosts": worlds.agents, **worlds.accelerators_of_agents}
        if networks := worlds.networks:
            facts["rank network"] = networks
        if interfaces := worlds.interfaces:
            facts["rank interfaces"] = interfaces
        slots: Any = self._config.pluginmanager.get_plugin("concord-slots")
        if slots.troubles:  # sessions of this user that don't meet could lease a device twice
            facts["leases not kept in"] = redacted("; ".join(slots.troubles))
        return facts


def merge(known: dict[str, str], found: Mapping[str, str]) -> None:
    """Add what another process of the run learned.  Of facts with several parts, each part is kept once."""
    for name, value in found.items():
        parts = {*known.get(name, value).split("; "), *value.split("; ")} if name in _IN_PARTS else {value}
        known[name] = "; ".join(sorted(parts))


def requirements_of(item: pytest.Item) -> list[RequirementText]:
    """Return the requirements that a test proves, each with its level."""
    return [
        RequirementText(
            id=r.id,
            sentence=r.sentence,
            source=r.source,
            level=r.level or _LEVEL_OF.get(stack_of(item.nodeid), ""),
            mandatory=r.mandatory,
        )
        for r in dict.fromkeys(mark.args[0] for mark in item.iter_markers("requirement") if mark.args)
    ]


def dtype_of(parameters: Mapping[str, Any]) -> str:
    """Return the name of the dtype among a test's parameters; empty if there is not exactly one.

    A parameter states a dtype if it is one of torch's, the name of one, or the case that is tried or timed.
    """
    dtypes = set()
    for name, value in with_case(parameters).items():
        text = str(value).removeprefix("torch.") if isinstance(value, str) or type(value).__name__ == "dtype" else ""
        if _DTYPE.fullmatch(text) and (type(value).__name__ == "dtype" or "dtype" in name):
            dtypes.add(text)
    return dtypes.pop() if len(dtypes) == 1 else ""


def plain(data: Cause | LeftOut) -> dict[str, Any]:
    """Return data as dicts and lists, which is what reports may have."""
    fields: dict[str, Any] = msgspec.to_builtins(data)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def text_of(report: Any) -> str:
    """Return what pytest shows of a failure, or the end of it if that is long."""
    return str(getattr(report, "longreprtext", ""))[-LONGEST_TEXT:]


def message_of(report: Any) -> str:
    """Return the message of a failure's exception."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(getattr(crash, "message", report.longrepr or "")).strip()


def reproducer_in(error: BaseException) -> Reproducer | None:
    """Return the first reproducer that a failure carries. Its text is empty if it can't be read or is too long."""
    written = next(reproducers.carried(error), None)
    if written is None:
        return None
    try:
        text = written.file.read_text(errors="replace")
    except OSError:
        text = ""
    return Reproducer(
        file=written.file.name, command=written.command, text=text if len(text) <= LONGEST_REPRODUCER else ""
    )


def selection(
    config: pytest.Config, nodeids: Iterable[str], left_out: Collection[LeftOut]
) -> tuple[list[str], list[LeftOut]]:
    """Return the stacks of which every test was collected, and the reasons why others were not.

    ``left_out``: what was seen while tests were collected. An option that leaves out tests explains that tests were
    deselected, and not that a file could not be collected.
    """
    reasons: list[LeftOut] = [OptionGiven(flag) for name, flag in _ASKED_FOR.items() if config.getoption(name, None)]
    known = [each for each in left_out if not isinstance(each, MaybeLeftOut)]
    seen = known or left_out
    reasons += [each for each in seen if isinstance(each, NotCollected) or not reasons]
    suites = (config.rootpath / "suites").resolve()
    there = sorted(p.name for p in suites.glob("*/") if any(p.rglob("test_*.py")))
    asked = [(config.invocation_params.dir / Path(argument)).resolve() for argument in config.args]
    whole = [stack for stack in there if any((suites / stack).is_relative_to(path) for path in asked)]
    stacks = {stack_of(nodeid) for nodeid in nodeids} - {""}
    partly = sorted(stacks - set(whole))
    if partly:
        reasons.append(OnlySome(tuple(partly)))
    return ([] if len(reasons) > bool(partly) else [s for s in whole if s in stacks]), reasons


def share_of_examples() -> float:
    """Return the factor by which numbers of examples are multiplied; 0 if the variable is invalid."""
    try:
        return effort.effort().share
    except effort.EffortError:
        return 0.0


def profile_text(profiles: Profiles, subject: str) -> ProfileText | None:
    """Return the run's profile as results keep it; None if there is none, or it is not known yet."""
    profile = profiles.settled
    return None if profile is None else as_recorded(profile, profiles.shelf.texts, profiles.platform(), subject)
