"""Ranks that import this are slower by what ``CONCORD_SLOWER`` says, as in :mod:`tests.bench.slower`.

A profile imports it (``profile.toml``), so any command that takes a profile has environments that differ by a variable.
"""

from __future__ import annotations

import os

from tests.bench.slower import VARIABLE, put

if VARIABLE in os.environ:
    put(os.environ[VARIABLE])
