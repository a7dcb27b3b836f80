"""The pytest plug-in: worlds as fixtures, ``-n gpus``, verdicts and evidence in every report.

It is loaded in every pytest run of an environment that has Concord installed, and does nothing there until a test
asks for a world: no torch is imported, no process is started.
"""

from __future__ import annotations

import pytest

from harness.plugin import (
    attempts,
    brought,
    facts,
    junit,
    loaded,
    numprocesses,
    options,
    perf,
    profiles,
    redacting,
    seeds,
    slots,
    summary,
    waivers,
    worlds,
)
from harness.plugin.folder import has_folder
from harness.plugin.perf import perf_of
from harness.plugin.redacting import record_testsuite_property, record_xml_attribute
from harness.plugin.worlds import pytest_generate_tests, pytest_runtest_teardown, several_worlds, world
from harness.thorough import rounds

__all__ = [
    "perf_of",
    "pytest_generate_tests",
    "pytest_runtest_teardown",
    "record_testsuite_property",
    "record_xml_attribute",
    "several_worlds",
    "world",
]

numprocesses.teach_xdist()


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add(parser)
    numprocesses.replace_converter(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "world(*sizes, backend=, device=, warm=, timeout=, env=, exclusive=): the sizes of the worlds that the test "
        "runs on, each a test of its own, and what they are made of.",
    )
    config.addinivalue_line(
        "markers",
        "needs(collective=, dtype=, op=, features=): what the test needs of a backend, where its parameters and "
        "requirements do not say it; a profile that does not claim it makes the test unsupported.",
    )
    config.addinivalue_line("markers", "requirement(requirement): a requirement that the test proves.")
    config.addinivalue_line(
        "markers",
        f"{seeds.MARKER}: the test draws its examples from --concord-seed; tests of suites have it by themselves.",
    )
    if has_folder(config):
        # First: warnings that came before are told to whoever registers, and the terminal is still to do so.
        config.pluginmanager.register(redacting.Redacting(), "concord-redacting")
        config.pluginmanager.register(junit.JUnit(config), "concord-junit")
    made_of = loaded.Loaded(config)
    config.pluginmanager.register(made_of, "concord-loaded")
    perf.settle(config)
    perf.check(config)
    options.check(config)
    brought.add_suites(config)
    found = profiles.Profiles(config)
    config.pluginmanager.register(found, "concord-profiles")
    leasing = slots.Slots(config)
    config.pluginmanager.register(leasing, "concord-slots")
    config.pluginmanager.register(worlds.Worlds(config, found, leasing), "concord-worlds")
    config.pluginmanager.register(waivers.Waivers(config, found), "concord-waivers")
    config.pluginmanager.register(perf.Nights(config, found), "concord-nights")
    rounds.register(config)
    seed = seeds.Seeds(config)
    config.pluginmanager.register(seed, "concord-seeds")
    config.pluginmanager.register(facts.Facts(config, found), "concord-facts")
    config.pluginmanager.register(brought.Brought(config), "concord-brought")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(summary.Summary(config, found, seed, made_of), "concord-summary")
    # After the summary: of two hooks that want to be first, pytest calls the one that was registered last.
    config.pluginmanager.register(attempts.Attempts(), "concord-attempts")
