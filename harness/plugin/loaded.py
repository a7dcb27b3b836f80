"""What a run was made with: the pytest plug-ins, and the files of harness, suites and fixtures, that it has loaded.

Whatever was registered as a plug-in is recorded, also where it has taken itself out again, and so is each module that
was imported because a package or a profile names it.  Code that is imported in another way can do the same harm, and
code that runs in this process can forge the record: it shows what was loaded in good faith or carelessly, and is no
proof.
"""

from __future__ import annotations

import base64
import csv
import functools
import hashlib
import importlib.metadata
import site
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import harness
from harness import entry_points
from harness.plugin.folder import folder_of

CONCORD = "concord-harness"
_NO_FILE = "no file"
_CUSTOMIZE = ("sitecustomize", "usercustomize")
_AHEAD = ("worlds/*.py", "oracles/exact.py")
"""What the server of ranks and ranks begin with; whatever else of ours they load came by way of this process."""


class Loaded:
    """Keeps what was loaded, and tells where it is from; one in each pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._registered: list[tuple[str, object]] = []
        self._seen: dict[str, str] = {}
        self._others: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self._owners: Owners | None = None

    # hooks

    def pytest_plugin_registered(self, plugin: object, plugin_name: str) -> None:
        """Called for every plug-in, those that were there before this one, too."""
        self._registered.append((plugin_name, plugin))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        if folder_of(self._config) is not None:
            self._look()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput") and folder_of(self._config) is not None:
            self._config.workeroutput["concord_loaded"] = [self.plugins(), self.files()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for mine, its in zip(self._others, getattr(node, "workeroutput", {}).get("concord_loaded", ()), strict=False):
            _merge(mine, its)

    # what there is

    def plugins(self) -> dict[str, str]:
        """Name of each plug-in, and where it is from: a distribution and its version, or the SHA-256 of a file."""
        owners = self._owners = self._owners or Owners(self._config)
        found: dict[str, str] = {}
        for registered, plugin in self._registered:
            name = registered
            if registered == str(id(plugin)):
                kind = plugin if isinstance(plugin, type) else type(plugin)
                name = f"{kind.__module__}.{kind.__qualname__}"
            elif registered.endswith(".py") and Path(registered).is_relative_to(self._config.rootpath):
                name = Path(registered).relative_to(self._config.rootpath).as_posix()
            _merge(found, {name: owners.of(_file_of_plugin(plugin))})
        for name in _CUSTOMIZE:
            if name in sys.modules:
                found[name] = owners.of(_file_of(sys.modules[name]))
        for name, file in entry_points.imported().items():
            _merge(found, {name: owners.of(file)})
        found |= owners.startup
        _merge(found, self._others[0])
        return dict(sorted(found.items()))

    def files(self) -> dict[str, str]:
        """SHA-256 of every file of harness, suites and fixtures that was loaded; two of one that has changed since."""
        before = dict(self._seen)
        self._seen = {}
        self._look()
        now, self._seen = self._seen, before
        _merge(self._seen, now)
        found = dict(self._seen)
        _merge(found, self._others[1])
        return dict(sorted(found.items()))

    def _look(self) -> None:
        folder, root = Path(harness.__file__).parent, self._config.rootpath
        roots = {"harness": folder, "suites": root / "suites", "fixtures": root / "fixtures"}
        starts = tuple(f"{path}/" for path in roots.values())
        ahead = "harness.worlds.launch" in sys.modules
        files = {str(path) for pattern in _AHEAD for path in folder.glob(pattern)} if ahead else set()
        files |= {file for module in list(sys.modules.values()) if (file := _file_of(module)).startswith(starts)}
        for file in files:
            name, path = next((n, p) for n, p in roots.items() if file.startswith(f"{p}/"))
            self._seen.setdefault(f"{name}/{Path(file).relative_to(path).as_posix()}", _sha256(Path(file)))


class Owners:
    """Which distribution a file is of, as the list of what was installed (``RECORD``) says."""

    def __init__(self, config: pytest.Config) -> None:
        plugins = [distribution for _, distribution in config.pluginmanager.list_plugin_distinfo()]
        names = {distribution.project_name for distribution in plugins} | {"pytest"}
        self._files: dict[str, tuple[str, str]] = {}
        self._known: dict[str, str] = {}
        self._whole = False
        for name in sorted(names - {CONCORD}):
            try:
                self._files |= listed(importlib.metadata.distribution(name))
            except importlib.metadata.PackageNotFoundError:  # named by an entry point only
                continue

    def of(self, file: str) -> str:
        """The distribution and version of a file that is as it was installed; the SHA-256 of any other file."""
        if file not in self._known:
            self._known[file] = self._of(file) if file else _NO_FILE
        return self._known[file]

    def _of(self, file: str) -> str:
        if Path(file).is_relative_to(Path(harness.__file__).parent):
            return f"{CONCORD} {harness.__version__}"
        digest = _sha256(Path(file))
        whose, expected = self._files.get(file, ("", ""))
        if not whose and not self._whole and _installed(file):
            self._whole = True  # it takes a tenth of a second, and few need it
            for distribution in importlib.metadata.distributions():
                self._files = listed(distribution) | self._files
            whose, expected = self._files.get(file, ("", ""))
        return whose if whose and expected == digest else digest

    @functools.cached_property
    def startup(self) -> dict[str, str]:
        """SHA-256 of each ``.pth`` file that executes something and is not as a distribution beside it has it."""
        found = {}
        for file in startup_files():
            digest, line = _sha256(file), f"\n{file.name},"
            texts = (record.read_text(errors="replace") for record in file.parent.glob("*.dist-info/RECORD"))
            if not any(_recorded(text).get(file.name) == digest for text in texts if line in f"\n{text}"):
                found[file.name] = digest
        return found


def listed(distribution: importlib.metadata.Distribution) -> dict[str, tuple[str, str]]:
    """Of each Python file of a distribution, the distribution's name and version, and the file's SHA-256, if known."""
    whose = f"{distribution.metadata['Name']} {distribution.version}"
    files = _recorded(distribution.read_text("RECORD") or "")
    return {str(distribution.locate_file(name)): (whose, files[name]) for name in files if name.endswith(".py")}


def _recorded(text: str) -> dict[str, str]:
    """The SHA-256 of each file that a ``RECORD`` lists; empty where it states none, or none that can be read."""
    found = {}
    for name, digest in (line[:2] for line in csv.reader(text.splitlines()) if len(line) > 1):
        kind, _, encoded = digest.partition("=")
        try:
            found[name] = base64.urlsafe_b64decode(f"{encoded}==").hex() if kind == "sha256" else ""
        except ValueError:
            found[name] = ""
    return found


def startup_files() -> Iterator[Path]:
    """The ``.pth`` files that execute something when the interpreter starts."""
    folders = {*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])}
    for folder in sorted(folders):
        for path in sorted(Path(folder).glob("*.pth")):
            try:
                text = path.read_text(errors="replace")
            except OSError:  # what can't be read has not been executed either
                continue
            if any(line.startswith(("import ", "import\t")) for line in text.splitlines()):
                yield path


def _installed(file: str) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in Path(file).parts)


def _file_of_plugin(plugin: object) -> str:
    """The source of a plug-in: a module, a class, or an instance of one."""
    if isinstance(plugin, types.ModuleType):
        return _file_of(plugin)
    kind = plugin if isinstance(plugin, type) else type(plugin)
    if (
        kind.__module__ == "__channelexec__"
    ):  # a worker of pytest-xdist executes that package's text in a nameless module
        codes = (getattr(value, "__code__", None) for value in vars(kind).values())
        return next((code.co_filename for code in codes if code is not None), "")
    return _file_of(sys.modules.get(kind.__module__))


def _file_of(module: object) -> str:
    """The source of a module, without waking one that loads itself when it is looked at."""
    file = getattr(module, "__dict__", {}).get("__file__") if isinstance(module, types.ModuleType) else None
    return file if isinstance(file, str) else ""


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return _NO_FILE


def _merge(into: dict[str, str], more: Mapping[str, str]) -> None:
    """Add entries; where two differ, both are kept."""
    for name, value in more.items():
        there = into.get(name, value)
        into[name] = there if value in there.split(", ") else f"{there}, {value}"
