"""What a run has loaded: its pytest plug-ins, and its files of harness, suites and fixtures.

The record contains everything that was registered as a plug-in, even if it removed itself again, each module that was
imported because a package or a profile names it, and bytecode that does not match its source. Code that is imported in
another way can do the same harm, and code that runs in this process can forge the record. The record shows what was
loaded in good faith or carelessly. It is no proof.
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
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import harness
from harness import entry_points
from harness.plugin.cached import Cached
from harness.plugin.folder import has_folder

CONCORD = "concord-harness"
_NO_FILE = "no file"
_CUSTOMIZE = ("sitecustomize", "usercustomize")
_AHEAD = ("worlds/*.py", "oracles/exact.py")
"""The files with which the server and its ranks begin. This process has loaded any others of ours that they load."""


class Loaded:
    """Records what was loaded and where it is from, in each pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._registered: list[tuple[str, object]] = []
        self._seen: dict[str, str] = {}
        self._others: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self._owners: Owners | None = None
        self._cached = Cached(config)
        self._strange: dict[str, str] = {}
        folder, root = Path(harness.__file__).parent, config.rootpath
        self._roots = {"harness": folder, "suites": root / "suites", "fixtures": root / "fixtures"}

    # hooks

    def pytest_plugin_registered(self, plugin: object, plugin_name: str) -> None:
        """Record a plug-in. pytest also calls this for plug-ins that were registered before this one."""
        self._registered.append((plugin_name, plugin))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        if has_folder(self._config) and self._worker is None:  # the files of harness are the same in each process
            self._cached.check(map(str, self._roots["harness"].rglob("*.py")))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        if has_folder(self._config):
            self._look()
            self._cached.check(self._share())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, None, None]:
        if has_folder(self._config):
            self._cached.check(self._share())
            self._strange = {f"bytecode of {self._name(file)}": d for file, d in self._cached.strange().items()}
        self._hand_over()
        return (yield)

    def pytest_unconfigure(self) -> None:
        self._cached.close()

    def _hand_over(self) -> None:
        if hasattr(self._config, "workeroutput") and has_folder(self._config):
            self._config.workeroutput["concord_loaded"] = [self.plugins(), self.files()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for mine, its in zip(self._others, getattr(node, "workeroutput", {}).get("concord_loaded", ()), strict=False):
            _merge(mine, its)

    # what there is

    def plugins(self) -> dict[str, str]:
        """Return the origin of each plug-in: a distribution and its version, or the SHA-256 of a file."""
        owners = self._owners = self._owners or Owners(self._config)
        origins: dict[str, str] = {}
        for registered, plugin in self._registered:
            name = registered
            if registered == str(id(plugin)):
                kind = plugin if isinstance(plugin, type) else type(plugin)
                name = f"{kind.__module__}.{kind.__qualname__}"
            elif registered.endswith(".py") and Path(registered).is_relative_to(self._config.rootpath):
                name = Path(registered).relative_to(self._config.rootpath).as_posix()
            _merge(origins, {name: owners.of(_file_of_plugin(plugin))})
        for name in _CUSTOMIZE:
            if name in sys.modules:
                origins[name] = owners.of(_file_of(sys.modules[name]))
        for name, file in entry_points.imported().items():
            _merge(origins, {name: owners.of(file)})
        origins |= owners.startup | self._strange
        _merge(origins, self._others[0])
        return dict(sorted(origins.items()))

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of every loaded file of harness, suites and fixtures; two if it has changed since."""
        before = dict(self._seen)
        self._seen = {}
        self._look()
        now, self._seen = self._seen, before
        _merge(self._seen, now)
        digests = dict(self._seen)
        _merge(digests, self._others[1])
        return dict(sorted(digests.items()))

    def _look(self) -> None:
        ahead = "harness.worlds.launch" in sys.modules
        folder = self._roots["harness"]
        files = {str(path) for pattern in _AHEAD for path in folder.glob(pattern)} if ahead else set()
        for file in files | self._ours():
            self._seen.setdefault(self._name(file), _sha256(Path(file)))

    def _ours(self) -> set[str]:
        """Return the files of harness, suites and fixtures whose modules are loaded here."""
        starts = tuple(f"{path}/" for path in self._roots.values())
        return {file for module in list(sys.modules.values()) if (file := _file_of(module)).startswith(starts)}

    def _name(self, file: str) -> str:
        """Return the name of one of our files in results; the path of any other."""
        folders = ((name, path) for name, path in self._roots.items() if file.startswith(f"{path}/"))
        of_ours = (f"{name}/{Path(file).relative_to(path).as_posix()}" for name, path in folders)
        return next(of_ours, "conftest.py" if file == self._conftest else file)

    @property
    def _conftest(self) -> str:
        """The ``conftest.py`` beside the suites, which loads this plug-in."""
        return str(self._config.rootpath / "conftest.py")

    @property
    def _worker(self) -> tuple[int, int] | None:
        """The number of this pytest-xdist worker, and how many there are; None outside of a worker."""
        told = getattr(self._config, "workerinput", None)
        return (int(told["workerid"].removeprefix("gw")), told["workercount"]) if told is not None else None

    def _share(self) -> set[str]:
        """Return our files whose bytecode this process compares. Workers have loaded the same files and divide them."""
        number, count = self._worker or (0, 1)
        ours = {file for file in self._ours() if self._worker is None or not self._name(file).startswith("harness/")}
        ours.add(self._conftest)
        return {file for file in ours if zlib.crc32(file.encode(errors="replace")) % count == number % count}


class Owners:
    """Maps files to distributions, using the lists of what was installed (``RECORD``)."""

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
        """Return the distribution and version of a file that is as it was installed; otherwise the file's SHA-256."""
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
        """SHA-256 of each ``.pth`` file that executes something and that no distribution beside it has recorded."""
        changed = {}
        for file in startup_files():
            digest, line = _sha256(file), f"\n{file.name},"
            texts = (record.read_text(errors="replace") for record in file.parent.glob("*.dist-info/RECORD"))
            if not any(_recorded(text).get(file.name) == digest for text in texts if line in f"\n{text}"):
                changed[file.name] = digest
        return changed


def listed(distribution: importlib.metadata.Distribution) -> dict[str, tuple[str, str]]:
    """Return the distribution's name and version, and the SHA-256 if known, for each Python file of a distribution."""
    whose = f"{distribution.metadata['Name']} {distribution.version}"
    files = _recorded(distribution.read_text("RECORD") or "")
    return {str(distribution.locate_file(name)): (whose, files[name]) for name in files if name.endswith(".py")}


def _recorded(text: str) -> dict[str, str]:
    """Return the SHA-256 of each file that a ``RECORD`` lists; empty if it states none, or none that can be read."""
    digests = {}
    for name, digest in (line[:2] for line in csv.reader(text.splitlines()) if len(line) > 1):
        kind, _, encoded = digest.partition("=")
        try:
            digests[name] = base64.urlsafe_b64decode(f"{encoded}==").hex() if kind == "sha256" else ""
        except ValueError:
            digests[name] = ""
    return digests


def startup_files() -> Iterator[Path]:
    """Yield the ``.pth`` files that execute something when the interpreter starts."""
    folders = {*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])}
    for folder in sorted(folders):
        for path in sorted(Path(folder).glob("*.pth")):
            try:
                text = path.read_text(errors="replace")
            except OSError:  # a file that can't be read has not been executed either
                continue
            if any(line.startswith(("import ", "import\t")) for line in text.splitlines()):
                yield path


def _installed(file: str) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in Path(file).parts)


def _file_of_plugin(plugin: object) -> str:
    """Return the source file of a plug-in: a module, a class, or an instance of one."""
    if isinstance(plugin, types.ModuleType):
        return _file_of(plugin)
    kind = plugin if isinstance(plugin, type) else type(plugin)
    if (
        kind.__module__ == "__channelexec__"
    ):  # a worker of pytest-xdist executes xdist's source in a module without a name
        codes = (getattr(value, "__code__", None) for value in vars(kind).values())
        return next((code.co_filename for code in codes if code is not None), "")
    return _file_of(sys.modules.get(kind.__module__))


def _file_of(module: object) -> str:
    """Return the source file of a module, without triggering a lazy one."""
    file = getattr(module, "__dict__", {}).get("__file__") if isinstance(module, types.ModuleType) else None
    return file if isinstance(file, str) else ""


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return _NO_FILE


def _merge(into: dict[str, str], more: Mapping[str, str]) -> None:
    """Add entries to ``into``. Where two differ, keep both."""
    for name, value in more.items():
        both = [*into.get(name, value).split(", "), *value.split(", ")]
        into[name] = ", ".join(dict.fromkeys(both))
