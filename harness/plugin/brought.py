"""What installed packages add to a session: suites and requirements, and one line for each broken entry point."""

from __future__ import annotations

import pytest

from harness import entry_points, subjects
from harness.entry_points import GROUPS, SUBJECTS, SUITES, PluginError
from harness.profiles.values import nearest
from harness.requirements import Requirement, note

ALL = "all"


def add_suites(config: pytest.Config) -> None:
    """Have pytest collect the suites that ``--suite`` names, beside the named files or instead of the default.

    Errors: UsageError for an unknown name, or a package that is broken.
    """
    asked: list[str] = config.getoption("suite")
    if not asked or hasattr(config, "workerinput"):  # workers are told what to collect
        return
    there, _ = entry_points.points(SUITES)
    names = list(there) if ALL in asked else asked
    folders = []
    for name in names:
        if name not in there:
            near = nearest(name, there)
            hint = f"did you mean {near}? " if near else ""
            known = f"there are: {', '.join(there)}" if there else "no installed package has one"
            raise pytest.UsageError(f"--suite {name}: no such suite; {hint}{known}")
        try:
            folders.append(str(entry_points.folder_of(there[name])))
        except PluginError as e:
            raise pytest.UsageError(f"--suite {name}: {e}") from None
    named = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.args = [*named, *folders]


def _broken_stacks() -> list[entry_points.Broken]:
    """Return the broken entry points of stacks. Imports the stacks, and so torch, only if a package names one."""
    if not any(entry_points.points(entry_points.STACKS)):
        return []
    from harness.stacks import registry

    return registry.broken()


class Brought:
    """Loads the requirements of packages when a session starts, and reports what is broken."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.requirements: list[Requirement] = []
        """The requirements of packages, whether any test proves them or not."""

    def pytest_sessionstart(self) -> None:
        by_entry_point, self._wrong = entry_points.requirements()
        for name, listed in by_entry_point.items():
            for requirement in listed:
                try:
                    note(requirement)
                    self.requirements.append(requirement)
                except ValueError as e:
                    self._wrong.append(f"entry point {name!r} of {entry_points.REQUIREMENTS}: {e}")

    def pytest_report_header(self) -> list[str]:
        broken = [str(each) for group in GROUPS if group != SUBJECTS for each in entry_points.points(group)[1]]
        broken += [str(each) for each in (*subjects.known()[1], *_broken_stacks())]
        return [f"concord: broken plug-in: {line}" for line in dict.fromkeys([*broken, *self._wrong])]
