"""``-n gpus``: as many pytest-xdist workers as worlds can run side by side."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest

GPUS = "gpus"
_MOST_PER_CORE = 4

asked_for_gpus = False
"""Whether this session was started with ``-n gpus``. pytest itself sees only the number."""


def workers() -> int:
    """Return how many worlds can run side by side: one for each accelerator that the mask shows, or each core."""
    from harness.devices import inventory

    return len(inventory().devices)


def parse(text: str) -> Any:
    """Convert ``gpus`` to a number, and anything else as pytest-xdist does."""
    global asked_for_gpus
    if text == GPUS:
        asked_for_gpus = True
        return workers()
    try:
        return _original(text)
    except ValueError:
        import argparse

        raise argparse.ArgumentTypeError(f"{text!r} is none of: a number, auto, logical, gpus") from None


def _original(text: str) -> Any:
    return int(text)


def worlds_per_device(config: pytest.Config) -> int:
    """Return how many worlds share an accelerator: ``--worlds-per-device``, or 1."""
    return cast("int | None", config.getoption("worlds_per_device")) or 1


def for_shared_devices(config: pytest.Config) -> None:
    """With ``-n gpus`` and ``--worlds-per-device``, start a worker for each world that may run."""
    shares = worlds_per_device(config)
    if shares > 1 and asked_for_gpus and getattr(config.option, "numprocesses", None):
        from harness.devices import inventory

        there = inventory()
        if not there.on_host:
            _start(config, len(there.devices) * shares)


def across_hosts(config: pytest.Config, slots: int) -> None:
    """With ``-n gpus``, start as many workers as worlds can run side by side on the hosts of agents.

    Workers run here, so there are at most :data:`_MOST_PER_CORE` for each core.  Each has up to two sessions with every
    agent: one for worlds on a network of their own, and one for others.
    """
    from harness.cluster.agent import MOST_SESSIONS

    if asked_for_gpus and getattr(config.option, "numprocesses", None):
        _start(config, min(slots, MOST_SESSIONS // 2))


def _start(config: pytest.Config, wanted: int) -> None:
    from harness.devices import cores

    count = max(1, min(wanted, _MOST_PER_CORE * cores(), config.option.maxprocesses or wanted))
    config.option.numprocesses = count
    config.option.tx = ["popen"] * count


def teach_xdist() -> None:
    """Replace pytest-xdist's converter, in case xdist registers the option after us."""
    global _original
    try:
        import xdist.plugin
    except ImportError:
        return
    if xdist.plugin.parse_numprocesses is not parse:
        _original = xdist.plugin.parse_numprocesses
        xdist.plugin.parse_numprocesses = parse


def replace_converter(parser: pytest.Parser) -> None:
    """Replace the converter of the option, in case xdist has registered it before us."""
    if "xdist.plugin" not in sys.modules:
        return
    for group in [parser._anonymous, *parser._groups]:
        for option in group.options:
            if "--numprocesses" in option.names():
                attributes: Any = option.attrs()  # what argparse will be given, or since pytest 9 argparse's own option
                attributes["type"] = parse
