"""Which profile a run uses: the one that ``--profile`` names, or the one for the run's backend and device."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import platform
import sys
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from harness import entry_points
from harness.entry_points import DEVICES, PluginError
from harness.profiles import Platform, Profile, ProfileError, pattern
from harness.profiles.shelf import Shelf
from harness.provenance import operating_system
from harness.results import torch_version

if TYPE_CHECKING:
    from harness.devices import Inventory

NONE = "none"


class Elsewhere(Protocol):
    """The devices of other machines."""

    def inventory(self, kind: str | None) -> Inventory:
        """Return the devices of a type; None: of whichever there is.  Errors: NoDeviceError."""

    def device_name(self, kind: str) -> str:
        """Return what the driver calls such a device, or its type if it has no name for it."""


_TEXTS = "concord_profiles"


class Profiles:
    """The profiles that a run could use, read when it starts.

    Errors: UsageError for an unknown name, and for a file with mistakes, which it names.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._asked: str | None = config.getoption("profile")
        self._used_by_workers: Profile | None = None
        self.shelf = Shelf(config.rootpath)
        self.elsewhere: Elsewhere | None = None
        """Where ranks start, if that is not this machine."""
        self.broken: list[str] = []
        """Profiles and defects of packages that can't be read, one line each."""
        try:
            self.candidates = self._read()
        except ProfileError as e:
            raise pytest.UsageError(f"profile: {e}" if len(e.mistakes) == 1 else f"profile:\n{e}") from None
        self.broken += self.shelf.broken

    @property
    def explicit(self) -> Profile | None:
        """The profile that was requested by name."""
        return self.candidates[0] if self._asked is not None and self.candidates else None

    @property
    def settled(self) -> Profile | None:
        """The profile that this run uses, if it is known by now."""
        return self.explicit or self.__dict__.get("_fitting") or self._used_by_workers

    def chosen(self) -> Profile | None:
        """Return the profile that this run uses. Imports torch unless it was requested by name or there are none."""
        return self.explicit or (self._fitting if self.candidates else None)

    @functools.cached_property
    def _fitting(self) -> Profile | None:
        """Of the profiles for this run's backend, device and torch, the one named after both, or else the first."""
        from harness.devices import DeviceError, backend_for, inventory, is_built_for

        look = inventory if self.elsewhere is None else self.elsewhere.inventory
        try:
            kind = look(self._config.getoption("world_device")).kind
        except DeviceError:
            return None
        backend = self._config.getoption("world_backend") or backend_for(kind)
        about = [profile for profile in self.candidates if profile.is_about(backend, kind)]
        fitting = [profile for profile in about if not profile.torch_build or is_built_for(profile.torch_build)]
        return min(fitting, key=lambda profile: (profile.name != f"{kind}-{backend}", profile.name), default=None)

    def chosen_for(self, nodeid: str) -> Profile | None:
        """Return the profile that this run uses, if any profile that it could use has a waiver for a test."""
        return self.chosen() if any(pattern(glob).match(nodeid) for glob in self._waived) else None

    @functools.cached_property
    def _waived(self) -> list[str]:
        """The globs of all waivers, each once: profiles share known defects."""
        globs = (glob for profile in self.candidates for waiver in profile.waivers for glob in waiver.tests)
        return list(dict.fromkeys(globs))

    def note_worker(self, file: str) -> None:
        """Note the file of the profile that a worker of pytest-xdist used; empty for none."""
        self._used_by_workers = next((p for p in self.candidates if p.file == file), self._used_by_workers)

    def described(self) -> tuple[str, str]:
        """Return the name and SHA-256 of the run's profile; empty if there is none, or it is not known yet."""
        profile = self.settled or (self.chosen() if "torch" in sys.modules else None)
        if profile is None:
            return "", ""
        texts = "\0".join(self.shelf.texts[file] for file in profile.files)
        return profile.name, hashlib.sha256(texts.encode(errors="surrogatepass")).hexdigest()

    def ways_to(self, kind: str | None) -> tuple[tuple[str, ...], str]:
        """Return the modules that register a type of device, and the variable that masks it, if that is known."""
        profile = self.settled
        ours = profile if profile is not None and profile.device == kind else None
        imports = (*(ours.imports if ours else ()), *(entry_points.modules_for(DEVICES, kind) if kind else ()))
        return imports, ours.visible_devices if ours else ""

    def platform(self) -> Platform:
        """Return the platform of this run, as far as the profile's conditions need it."""
        profile = self.settled
        kind = profile.device if profile is not None and profile.asks_for_device_name else ""
        if kind and self.elsewhere is not None:
            return dataclasses.replace(here(), device_name=self.elsewhere.device_name(kind))
        return here(kind)

    # texts

    def _read(self) -> tuple[Profile, ...]:
        """Read the profiles. Workers of pytest-xdist use their controller's texts, in case a file changes meanwhile."""
        sent: tuple[list[str], dict[str, str]] | None = getattr(self._config, "workerinput", {}).get(_TEXTS)
        if sent is not None:
            files, self.shelf = sent[0], Shelf(self._config.rootpath, sent[1])
            return tuple(self.shelf.parse(self.shelf.texts[file], file) for file in files)
        if self._asked == NONE or self._config.option.help or self._config.option.version:
            return ()
        if self._asked is None:
            return tuple(self.shelf.read(self.shelf.path(name)) for name in self.shelf.shipped()) + self._of_packages()
        if "/" in self._asked or self._asked.endswith(".toml"):
            return (self.shelf.read(self._config.invocation_params.dir / self._asked),)
        try:
            return (self.shelf.read(self.shelf.path(self._asked)),)
        except PluginError as e:
            raise pytest.UsageError(f"--profile {self._asked!r}: {e}") from None
        except ProfileError:
            raise
        except ValueError as e:
            raise pytest.UsageError(f"--profile {self._asked!r}: {e}; a path has a / or ends in .toml") from None

    def _of_packages(self) -> tuple[Profile, ...]:
        """Read the profiles of packages, for a run that names no profile. Broken ones are left out."""
        profiles = []
        for name in self.shelf.names():
            if name not in self.shelf.shipped():
                try:
                    profiles.append(self.shelf.read(self.shelf.path(name)))
                except ValueError as e:
                    self.broken.append(str(e))
        return tuple(profiles)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_TEXTS] = [p.file for p in self.candidates], dict(self.shelf.texts)

    def pytest_report_header(self) -> str | list[str] | None:
        if self._asked is None:  # which one fits depends on torch's devices, which are not known yet
            return [f"concord: broken plug-in: {line}" for line in self.broken]
        if self.explicit is None:
            return "concord: no profile"
        profile = f"concord: profile {self.explicit.name} ({self.explicit.file})"
        return [profile, *(f"concord: broken plug-in: {line}" for line in self.shelf.broken)]


@functools.cache
def here(device: str = "") -> Platform:
    """Return the platform of this process.

    ``device``: a type of device whose name to include. Asking for it imports torch and may start the device's driver.
    """
    return Platform(
        torch=torch_version(),
        python=platform.python_version(),
        machine=platform.machine(),
        os=operating_system(),
        device_name=_device_name(device) if device else "",
    )


def _device_name(kind: str) -> str:
    """Return torch's name for the first device of a type, or the type if there is none."""
    from harness.devices import device_name

    try:
        return device_name(kind)
    except (RuntimeError, AssertionError):  # there is no such device
        return kind
