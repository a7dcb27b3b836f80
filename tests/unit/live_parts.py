"""Which requirements have no test that runs: all of theirs are waived, or not supported."""

from __future__ import annotations

import torch

from harness.plugin.claims import torch_has
from harness.plugin.waivers import Conditions
from harness.profiles import Platform, Profile
from harness.suite_facts import SuiteFacts, TestFacts

HOST = Platform(torch=torch.__version__, python="3.11", machine="x86_64", os="Linux 6.8.0", device_name="cpu")
NONE_LIVE: dict[str, str] = {}
"""Requirements without a live test on gloo on the host, each with the reason."""


def without_live_test(facts: SuiteFacts, profile: Profile, conditions: Conditions) -> list[str]:
    """Return the requirements with a waived test, all of whose other tests are waived or unsupported, too."""
    states: dict[str, set[str]] = {}
    for nodeid, test in facts.tests.items():
        state = _state(nodeid, test, profile, conditions)
        for requirement in test.requirements:
            states.setdefault(requirement, set()).add(state)
    return sorted(name for name, found in states.items() if "waived" in found and "live" not in found)


def _state(nodeid: str, test: TestFacts, profile: Profile, conditions: Conditions) -> str:
    if test.needs.unclaimed(profile.claims.on(HOST)) or (test.needs.torch and not torch_has(test.needs.torch)):
        return "unsupported"
    return "waived" if conditions.concerning(profile, nodeid) else "live"
