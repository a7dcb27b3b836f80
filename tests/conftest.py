"""What takes long runs in the nightly job, and where somebody asks for it: ``-m nightly``."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

LATER = Path(__file__).with_name("nightly.toml")
"""The list of tests that only the nightly job runs, although each takes no minutes."""


def listed() -> list[str]:
    """Return the node ids, and the files, in the list, as they are seen from the folder above this."""
    return [name for group in tomllib.loads(LATER.read_text())["group"] for name in group["tests"]]


@pytest.hookimpl(tryfirst=True)  # before -k and -m select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the list has, and deselect tests that are marked ``nightly``, unless ``-m`` says something of them.

    A test that is named on the command line runs in any case, and so does a file of which the list has all tests.
    Errors: UsageError for a test in the list that is not in its file.
    """
    there = {item.nodeid for item in items}
    there |= {name.partition("[")[0] for name in there}
    files = {name.partition("::")[0] for name in there}
    by_name = any("::" in argument for argument in config.args)
    names = set(listed())
    stale = sorted(name for name in names - there - files if name.partition("::")[0] in files)
    stale += sorted(name for name in names if "::" not in name and not (config.rootpath / name).is_file())
    asked = {(config.invocation_params.dir / argument).resolve() for argument in config.args}
    if stale and not by_name:
        raise pytest.UsageError(f"{LATER}: there is no {', no '.join(stale)}")
    for item in items:
        file = item.nodeid.partition("::")[0] if item.path not in asked else ""
        if {item.nodeid, item.nodeid.partition("[")[0], file} & names:
            item.add_marker(pytest.mark.nightly)
    if "nightly" in str(config.getoption("markexpr")) or by_name:
        return
    later = [item for item in items if item.get_closest_marker("nightly")]
    if later:
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
