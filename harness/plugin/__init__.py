"""The pytest plug-in: worlds as fixtures, ``-n gpus``, and verdicts and evidence in every report.

It is loaded in every pytest run of an environment that has Concord installed. Until a test asks for a world, it imports
no torch and starts no process.
"""

from __future__ import annotations

import pytest

from harness.plugin import (
    attempts,
    brought,
    cases,
    choices,
    facts,
    junit,
    launching,
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
    within,
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
        "world(*sizes, backend=, device=, warm=, timeout=, env=, imports=, record=, exclusive=, network=, hosts=, "
        "keeps=): run the test once for each world size, on worlds with these settings.",
    )
    config.addinivalue_line(
        "markers",
        "needs(collective=, dtype=, op=, features=): what the test needs of a backend, beyond what its parameters and "
        "requirements state. If the profile does not claim it, the test is unsupported.",
    )
    config.addinivalue_line("markers", "requirement(requirement): a requirement that the test proves.")
    config.addinivalue_line(
        "markers",
        f"{choices.MARKER}: test each value of each parameter once by default, and all combinations with --thorough.",
    )
    config.addinivalue_line(
        "markers",
        f"{seeds.MARKER}: the test draws its examples from --concord-seed. Tests of suites have it by themselves.",
    )
    if has_folder(config):
        # First: pytest repeats earlier warnings to each plug-in that registers, and the terminal has yet to do so.
        config.pluginmanager.register(redacting.Redacting(), "concord-redacting")
        config.pluginmanager.register(junit.JUnit(config), "concord-junit")
    recording = loaded.Loaded(config)
    config.pluginmanager.register(recording, "concord-loaded")
    perf.settle(config)
    perf.check(config)
    options.check(config)
    numprocesses.for_shared_devices(config)
    brought.add_suites(config)
    run_profiles = profiles.Profiles(config)
    config.pluginmanager.register(run_profiles, "concord-profiles")
    leasing = slots.Slots(config)
    config.pluginmanager.register(leasing, "concord-slots")
    engine = launching.Launching(config, run_profiles)
    config.pluginmanager.register(engine, "concord-launching")
    config.pluginmanager.register(worlds.Worlds(config, run_profiles, leasing, engine), "concord-worlds")
    config.pluginmanager.register(waivers.Waivers(config, run_profiles), "concord-waivers")
    config.pluginmanager.register(perf.Nights(config, run_profiles), "concord-nights")
    rounds.register(config)
    seed = seeds.Seeds(config)
    config.pluginmanager.register(seed, "concord-seeds")
    config.pluginmanager.register(facts.Facts(config, run_profiles), "concord-facts")
    config.pluginmanager.register(cases.Cases(), "concord-cases")
    config.pluginmanager.register(choices.Choices(config), "concord-choices")
    config.pluginmanager.register(within.Within(config), "concord-within")
    config.pluginmanager.register(brought.Brought(config), "concord-brought")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(summary.Summary(config, run_profiles, seed, recording), "concord-summary")
    # After the summary: of two hooks with tryfirst, pytest calls the one that was registered last.
    config.pluginmanager.register(attempts.Attempts(), "concord-attempts")
