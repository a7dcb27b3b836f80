"""What a verdict depends on besides the backend: the suite's own text, and the machine with everything on it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.devices import cores, device_name
from harness.redaction import recorded, redacted

_LEFT_OUT = ("harness/audit/", "harness/bench/", "harness/commands/")
"""Of the harness: what decides nothing about a verdict of the suites."""
_SUFFIXES = (".py", ".json", ".toml")
_SETTINGS = (
    "conftest.py",
    "pytest.toml",
    ".pytest.toml",
    "pytest.ini",
    ".pytest.ini",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
)
"""Files from which pytest takes its settings, and which can turn any verdict into any other."""
_FLAGS = ("dev_mode", "ignore_environment", "isolated", "no_site", "no_user_site", "optimize", "safe_path")
"""Of the interpreter, those that say what is imported and what an ``assert`` does."""
_PACKAGES = ("hypothesis", "numpy", "pytest", "pytest-timeout", "pytest-xdist", "triton")


def suite_files(root: Path) -> dict[str, Path]:
    """What makes the suite, by the name that the hash knows it by.

    Everything under ``suites/``, the modules of ``fixtures/`` that suites share, and the harness as far as it decides
    what runs and what is right (all but ``audit``, ``bench`` and commands).  Python, JSON and TOML; no
    profiles, whose hash is kept beside it.  Beside ``suites``: ``conftest.py``, and what pytest takes its settings
    from.  ``root``: the folder that has ``suites``.
    """
    settings = {name: root / name for name in _SETTINGS if (root / name).is_file()}
    found = {f"suites/{p.relative_to(root / 'suites').as_posix()}": p for p in (root / "suites").rglob("*")}
    found |= {f"fixtures/{p.name}": p for p in (root / "fixtures").glob("*.py")}
    harness = Path(__file__).parent
    found |= {f"harness/{p.relative_to(harness).as_posix()}": p for p in harness.rglob("*")}
    kept = {
        name: path
        for name, path in found.items()
        if path.suffix in _SUFFIXES and path.is_file() and not name.startswith(_LEFT_OUT) and "/." not in name
    }
    return dict(sorted({**settings, **kept}.items()))


def suite_hash(root: Path) -> str:
    """SHA-256 over the suite: one line for each file, in the order of names: its SHA-256, two blanks, its name.

    As ``sha256sum`` writes them, so that anyone can compute it again.  Empty where there is no ``suites`` folder.
    """
    if not (root / "suites").is_dir():
        return ""
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {name}\n" for name, p in suite_files(root).items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a verdict depends on besides the code: versions and machine.  Imports no torch.

    Of ``variables`` it has those that :mod:`harness.redaction.variables` lists, as it shows them.
    """
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": processor(),
        "cores": str(cores()),
        "memory": memory(),
        "python flags": _flags(),
        **_torch(),
        **{f"package {name}": version for name in _PACKAGES if (version := version_of(name))},
    }
    for name in sorted(variables):
        shown = recorded(name, variables[name])
        if shown:
            found[f"variable {name}"] = shown
    return {key: value for key, value in found.items() if value}


def devices_and_libraries(imports: Sequence[str] = ()) -> dict[str, str]:
    """What only torch can say, once it is imported: accelerators, libraries of collectives, packages of a backend.

    ``imports``: modules that a profile names.  Empty where torch is not imported.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    found = {"torch": str(torch.__version__)}
    owners = importlib.metadata.packages_distributions() if imports else {}  # reads what every package has installed
    for module in imports:
        for package in owners.get(module.split(".")[0], ()):
            found[f"package {package}"] = version_of(package)
    try:
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator().type
            names = [device_name(kind, i) for i in range(torch.accelerator.device_count())]
            found["accelerator"] = ", ".join(f"{names.count(n)} of {n}" for n in dict.fromkeys(names))
            found |= _libraries(torch.get_device_module(kind))
            found["driver"] = _driver()
    except Exception as e:  # a driver that is broken is a part of the environment, too
        found["accelerator"] = f"can't be asked: {type(e).__name__}: {redacted(str(e))[:200]}"
    return {key: value for key, value in found.items() if value}


def version_of(package: str) -> str:
    """Of an installed package; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _torch() -> dict[str, str]:
    """Version, commit and toolkits of the torch that would be imported."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return {}
        facts: dict[str, Any] = {}
        exec((Path(spec.origin).parent / "version.py").read_text(), facts)
    except Exception:  # a build without that file: its metadata must do
        return {"torch": version_of("torch")}
    named = {"__version__": "torch", "git_version": "torch commit"}
    own = {named.get(name, name): value for name, value in facts.items() if name in named or not name.startswith("_")}
    return {key: str(value) for key, value in own.items() if value and isinstance(value, str)}


def _libraries(module: Any) -> dict[str, str]:
    """Versions of the libraries that a device's module of torch has a module for, as ``torch.cuda.nccl``."""
    found = {}
    for name, part in vars(module).items():
        if isinstance(part, types.ModuleType) and part.__name__ == f"{module.__name__}.{name}":
            version = getattr(part, "version", None)
            said = version() if callable(version) else None
            if said:
                found[name] = ".".join(map(str, said)) if isinstance(said, tuple) else str(said)
    return found


def _flags() -> str:
    """How the interpreter was started, where that is not as usual: ``optimize=1`` leaves out every ``assert``."""
    given = [f"{name}={int(value)}" for name in _FLAGS if (value := getattr(sys.flags, name, 0))]
    return ", ".join([*given, *(f"-X {name}" for name in sorted(sys._xoptions))])


def _driver() -> str:
    try:
        found = re.search(r"Kernel Module\D*(\d[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def processor() -> str:
    """The processor's model, as Linux names it; empty where it does not."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def memory() -> str:
    """How much this machine has, in whole GiB."""
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (OSError, ValueError):
        return ""
