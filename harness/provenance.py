"""What a verdict depends on besides the backend: the suite's own text, and the machine with its software."""

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

_LEFT_OUT = ("harness/audit/", "harness/bench/", "harness/commands/", "harness/versions/")
"""Folders of the harness that do not affect any verdict of the suites."""
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
"""Files from which pytest takes its settings. They can change any verdict."""
_FLAGS = ("dev_mode", "ignore_environment", "isolated", "no_site", "no_user_site", "optimize", "safe_path")
"""Flags of the interpreter that affect what is imported and what an ``assert`` does."""
_PACKAGES = ("hypothesis", "numpy", "pytest", "pytest-timeout", "pytest-xdist", "triton")


def suite_files(root: Path) -> dict[str, Path]:
    """Return the files of the suite by the names under which they are hashed.

    They are everything under ``suites/``, the modules of ``fixtures/`` that suites share, and the parts of the harness
    that decide what runs and what is right (all but ``audit``, ``bench``, ``commands`` and ``versions``). Only Python,
    JSON and TOML files count. Profiles do not, because their hash is kept separately. ``conftest.py`` and pytest's
    settings beside ``suites`` are included. ``root``: the folder that contains ``suites``.
    """
    settings = {name: root / name for name in _SETTINGS if (root / name).is_file()}
    candidates = {f"suites/{p.relative_to(root / 'suites').as_posix()}": p for p in (root / "suites").rglob("*")}
    candidates |= {f"fixtures/{p.name}": p for p in (root / "fixtures").glob("*.py")}
    harness = Path(__file__).parent
    candidates |= {f"harness/{p.relative_to(harness).as_posix()}": p for p in harness.rglob("*")}
    kept = {
        name: path
        for name, path in candidates.items()
        if path.suffix in _SUFFIXES and path.is_file() and not name.startswith(_LEFT_OUT) and "/." not in name
    }
    return dict(sorted({**settings, **kept}.items()))


def suite_hash(root: Path) -> str:
    """Return the SHA-256 of the suite, or an empty string if there is no ``suites`` folder.

    It covers one line for each file, in the order of names: the file's SHA-256, two spaces and its name. ``sha256sum``
    writes the same lines, so anyone can compute it again.
    """
    if not (root / "suites").is_dir():
        return ""
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {name}\n" for name, p in suite_files(root).items()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what a verdict depends on besides the code: versions and machine. Does not import torch.

    Of ``variables``, it contains those that :mod:`harness.redaction.variables` lists, redacted.
    """
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "os": operating_system(),
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
            facts[f"variable {name}"] = shown
    return {key: value for key, value in facts.items() if value}


def devices_and_libraries(imports: Sequence[str] = ()) -> dict[str, str]:
    """Return facts that only an imported torch knows: accelerators, their libraries, a backend's packages.

    ``imports``: modules that a profile names. Returns an empty dict if torch is not imported.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    facts = {"torch": str(torch.__version__)}
    owners = importlib.metadata.packages_distributions() if imports else {}  # reads the file list of every package
    for module in imports:
        for package in owners.get(module.split(".")[0], ()):
            facts[f"package {package}"] = version_of(package)
    try:
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator().type
            names = [device_name(kind, i) for i in range(torch.accelerator.device_count())]
            facts["device"] = names[0]
            facts["accelerator"] = ", ".join(f"{names.count(n)} of {n}" for n in dict.fromkeys(names))
            facts |= _libraries(torch.get_device_module(kind))
            facts["driver"] = _driver()
    except Exception as e:  # a broken driver is part of the environment, too
        facts["accelerator"] = f"can't be asked: {type(e).__name__}: {redacted(str(e))[:200]}"
    return {key: value for key, value in facts.items() if value}


def operating_system() -> str:
    """Return the operating system and its release, such as ``Linux 6.1.0``."""
    return f"{platform.system()} {platform.release()}"


def version_of(package: str) -> str:
    """Return the version of an installed package, or an empty string if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _torch() -> dict[str, str]:
    """Return the version, commit and toolkits of the torch that would be imported."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return {}
        facts: dict[str, Any] = {}
        exec((Path(spec.origin).parent / "version.py").read_text(), facts)
    except Exception:  # a build without that file: fall back to its metadata
        return {"torch": version_of("torch")}
    named = {"__version__": "torch", "git_version": "torch commit"}
    own = {named.get(name, name): value for name, value in facts.items() if name in named or not name.startswith("_")}
    return {key: str(value) for key, value in own.items() if value and isinstance(value, str)}


def _libraries(module: Any) -> dict[str, str]:
    """Return the versions of the libraries for which torch's device module has a module, as ``torch.cuda.nccl``."""
    versions = {}
    for name, part in vars(module).items():
        if isinstance(part, types.ModuleType) and part.__name__ == f"{module.__name__}.{name}":
            version = getattr(part, "version", None)
            answer = version() if callable(version) else None
            if answer:
                versions[name] = ".".join(map(str, answer)) if isinstance(answer, tuple) else str(answer)
    return versions


def _flags() -> str:
    """Return the interpreter's flags and ``-X`` options that are set: ``optimize=1`` removes every ``assert``."""
    given = [f"{name}={int(value)}" for name in _FLAGS if (value := getattr(sys.flags, name, 0))]
    return ", ".join([*given, *(f"-X {name}" for name in sorted(sys._xoptions))])


def _driver() -> str:
    try:
        return driver_version(Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""


def driver_version(text: str) -> str:
    """Return the version that a driver's text names, as ``580.159.04``; empty if it names none.

    NVIDIA's texts name the module and the architecture in either order: ``Open Kernel Module for x86_64  580.159.04``.
    """
    match = re.search(r"Kernel Module\b.*?(?<![\w.])(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def processor() -> str:
    """Return the processor's model as Linux names it, or an empty string if it does not."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return match[1].strip() if match else ""


def memory() -> str:
    """Return this machine's memory in whole GiB, as in ``16 GiB``."""
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (OSError, ValueError):
        return ""
