"""Compare the bytecode of loaded files with their sources, in a low-priority process beside the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL

from harness import bytecode

_LONGEST = 300.0
"""Seconds to wait for the result at the end. All of Concord's files take two, which pass while tests run."""


class Cached:
    """Compares files as they are named. :meth:`strange` returns the result."""

    def __init__(self, config: pytest.Config) -> None:
        self._hook = bool(config.getini("enable_assertion_pass_hook"))
        self._process: subprocess.Popen[bytes] | None = None
        self._named: set[str] = set()
        self._strange: dict[str, str] = {}

    def check(self, files: Iterable[str]) -> None:
        """Compare those files that have cached bytecode and were not named before."""
        new = sorted({file for file in files if file.endswith(".py")} - self._named)
        self._named.update(new)
        there = [file for file in new if any(map(os.path.exists, self._caches(file)))]
        if not there:
            return
        try:
            process = self._process = self._process or self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(there).encode() + b"\n")
            process.stdin.flush()
        except OSError as e:
            self._strange["bytecode"] = f"not compared: {e.strerror}"

    def strange(self) -> dict[str, str]:
        """Return each file whose bytecode does not match its source, with the SHA-256 of the bytecode.

        Waits until everything has been compared.
        """
        process, self._process = self._process, None
        if process is not None:
            try:
                answer, _ = process.communicate(timeout=_LONGEST)
                by_file: dict[str, list[str]] = json.loads(answer)
                self._strange |= {file: ", ".join(digests) for file, digests in by_file.items()}
            except (OSError, ValueError, subprocess.TimeoutExpired) as e:
                process.kill()
                process.communicate()
                self._strange["bytecode"] = f"not compared: {type(e).__name__}"
        return self._strange

    def close(self) -> None:
        """Kill the process if nobody has waited for it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    @staticmethod
    def _caches(file: str) -> tuple[str, str]:
        return bytecode.caches(file, PYC_TAIL, sys.flags.optimize)

    def _started(self) -> subprocess.Popen[bytes]:
        settings = {
            "path": [entry for entry in sys.path if isinstance(entry, str)],
            "prefix": sys.pycache_prefix,
            "tail": PYC_TAIL,
            "optimize": sys.flags.optimize,
            "hook": self._hook,
        }
        script = str(Path(bytecode.__file__).resolve())
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-W", "ignore", script, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for pytest, which then asks for the result
        )
