"""pytest's JUnit file, written whole or not at all.

On a full disk, pytest itself leaves a part of the file, and ends in a traceback without a summary.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from _pytest.junitxml import LogXML

from harness.plugin.folder import lose
from harness.safe_io.writing import write_whole


class JUnit:
    """Replaces what writes the file when a session starts, because pytest has created it by then."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        manager = self._config.pluginmanager
        plugins: list[Any] = [each for each in manager.get_plugins() if type(each) is LogXML]
        for plugin in plugins:
            manager.unregister(plugin)  # pluggy keeps the methods that a plug-in had when it was registered
            plugin.__class__ = _Whole
            plugin.config = self._config
            manager.register(plugin)


class _Whole(LogXML):
    """pytest's writer of the file, which writes it whole or not at all."""

    config: pytest.Config
    kept = True

    def pytest_sessionfinish(self) -> None:
        wanted, memory = self.logfile, os.memfd_create("junit")
        try:
            self.logfile = f"/proc/self/fd/{memory}"
            super().pytest_sessionfinish()
            with open(self.logfile, "rb") as file:
                write_whole(Path(wanted), file.read())
        except OSError as e:
            self.kept = False
            lose(self.config, wanted, e)
        finally:
            self.logfile = wanted
            os.close(memory)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if self.kept:
            super().pytest_terminal_summary(terminalreporter, config)
