"""Collect the suite of a checkout with pytest, in a separate process, so that results can be compared with it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

import harness
from harness.profiles.shelf import SHIPPED, shipped_defects
from harness.provenance import suite_hash
from harness.results import VERSION
from harness.suite_facts import SuiteFacts, decode
from reports.checkout import Checkout
from reports.model import ReportError

_LONGEST = 600.0
_KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables that the collecting process sees. None of them affects pytest, Python, Hypothesis, torch or Concord."""
_PLUGINS = ("harness.plugin", "harness.plugin.suite_facts", "pytest_timeout", "pytest_benchmark.plugin", "xdist.plugin")
_SUFFIXES = (".py", ".json", ".toml")


def checkout_of(root: Path) -> Checkout:
    """Return the suite of a checkout. Errors: :class:`ReportError`."""
    try:
        facts = collected(root)
    except ReportError as e:
        raise ReportError(f"{e}; try --no-suite") from None
    return Checkout(
        suite_hash=suite_hash(root),
        concord=harness.__version__,
        results=VERSION,
        facts=facts,
        files=files_of(root),
        profiles={f"{SHIPPED}/{path.name}": path.read_text() for path in (root / SHIPPED).glob("*.toml")},
        defects={path.stem: path.read_text() for path in shipped_defects(root)},
    )


def collected(root: Path, environment: Mapping[str, str] = os.environ) -> SuiteFacts:
    """Return the facts about each test of a checkout's suites, as pytest collects them; no rank is started.

    Only the plug-ins that the suite needs are loaded, whatever else is installed, and no variable changes what is
    collected. Errors: :class:`ReportError`.
    """
    command = [sys.executable, "-m", "pytest", "suites", "--collect-only", "-q", "--profile", "none"]
    command += ["-p", "no:cacheprovider", *(word for name in _PLUGINS for word in ("-p", name))]
    variables = {name: environment[name] for name in _KEPT if name in environment}
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    variables["PYTHONPATH"] = str(Path(harness.__file__).parents[1])  # this Concord, and no other
    with tempfile.TemporaryDirectory(prefix="concord-") as folder:
        file = Path(folder, "facts.json")
        try:
            done = subprocess.run(
                [*command, "--suite-facts", str(file)],
                cwd=root,
                env=variables,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LONGEST,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ReportError(f"collecting the suite took more than {_LONGEST:g} s") from None
        try:
            facts = decode(file.read_bytes())
        except (OSError, msgspec.MsgspecError):
            facts = None
    if done.returncode or facts is None or not facts.tests:
        last = (done.stdout + done.stderr).strip().rpartition("\n")[2]
        raise ReportError(f"the suite here can't be collected: {last}")
    return facts


def files_of(root: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of harness, suites and fixtures, by its name in results."""
    here = Path(harness.__file__).parent
    paths = {f"harness/{path.relative_to(here).as_posix()}": path for path in here.rglob("*")}
    for folder in ("suites", "fixtures"):
        paths |= {path.relative_to(root).as_posix(): path for path in (root / folder).rglob("*")}
    paths["conftest.py"] = root / "conftest.py"
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in sorted(paths.items())
        if path.suffix in _SUFFIXES and path.is_file()
    }
