"""Which profile a run goes by: ``--profile``, or the shipped one that is about what the run uses."""

from __future__ import annotations

import difflib
import functools
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.profiles import Profile, ProfileError, parse, text_of

SHIPPED = Path("fixtures/profiles")
"""Where profiles are, relative to the root directory."""

NONE = "none"
_TEXTS = "concord_profiles"


class Profiles:
    """The profiles that a run could go by, read when it starts.

    Errors: UsageError for an unknown name, and for a file with mistakes, which it names.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._asked: str | None = config.getoption("profile")
        self._used_by_workers: Profile | None = None
        try:
            self._texts = self._read()
            self.candidates = tuple(parse(text, file) for file, text in self._texts.items())
        except ProfileError as e:
            raise pytest.UsageError(f"profile: {e}" if len(e.mistakes) == 1 else f"profile:\n{e}") from None

    @property
    def explicit(self) -> Profile | None:
        """The profile that was asked for by name."""
        return self.candidates[0] if self._asked is not None and self.candidates else None

    @property
    def settled(self) -> Profile | None:
        """The profile that this run goes by, if it is known by now."""
        return self.explicit or self.__dict__.get("_fitting") or self._used_by_workers

    def chosen(self) -> Profile | None:
        """The profile that this run goes by.  Imports torch if there are several to choose from, or one by default."""
        return self.explicit or (self._fitting if self.candidates else None)

    @functools.cached_property
    def _fitting(self) -> Profile | None:
        """Of the shipped ones that are about this run's backend and device, the one of that name, or the first."""
        from harness.devices import DeviceError, inventory

        try:
            kind = inventory(self._config.getoption("world_device")).kind
        except DeviceError:
            return None
        backend = self._config.getoption("world_backend") or backend_for(kind)
        fitting = [profile for profile in self.candidates if profile.is_about(backend, kind)]
        return min(fitting, key=lambda profile: (profile.name != f"{kind}-{backend}", profile.name), default=None)

    def chosen_for(self, nodeid: str) -> Profile | None:
        """The profile that this run goes by, if any that it could be has a waiver for a test."""
        matched = any(waiver.matches(nodeid) for profile in self.candidates for waiver in profile.waivers)
        return self.chosen() if matched else None

    def note_worker(self, file: str) -> None:
        """Note the file of the profile that a worker of pytest-xdist went by; empty for none."""
        self._used_by_workers = next((p for p in self.candidates if p.file == file), self._used_by_workers)

    def described(self) -> tuple[str, str]:
        """Name and SHA-256 of the profile that this run goes by; empty where there is none, or it is not known yet."""
        found = self.settled or (self.chosen() if "torch" in sys.modules else None)
        if found is None:
            return "", ""
        return found.name, hashlib.sha256(self._texts[found.file].encode(errors="surrogatepass")).hexdigest()

    # texts

    def _read(self) -> Mapping[str, str]:
        """What messages call each file, and its text.

        Workers of pytest-xdist get the texts that their controller read, lest a file changes meanwhile.
        """
        sent: Mapping[str, str] | None = getattr(self._config, "workerinput", {}).get(_TEXTS)
        if sent is not None:
            return sent
        if self._asked == NONE or self._config.option.help or self._config.option.version:
            return {}
        folder = self._config.rootpath / SHIPPED
        if self._asked is None:
            return {self._shown(path): text_of(path, self._shown(path)) for path in sorted(folder.glob("*.toml"))}
        if "/" in self._asked or self._asked.endswith(".toml"):
            path = self._config.invocation_params.dir / self._asked
        else:
            path = folder / f"{self._asked}.toml"
            if not path.is_file():
                raise pytest.UsageError(self._unknown(sorted(p.stem for p in folder.glob("*.toml"))))
        return {self._shown(path): text_of(path, self._shown(path))}

    def _unknown(self, known: list[str]) -> str:
        nearest = difflib.get_close_matches(str(self._asked), known, 1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        there = f"in {SHIPPED} are: {', '.join(known)}" if known else f"there is none in {SHIPPED}"
        return f"--profile {self._asked!r}: no profile of that name; {hint}{there}; a path has a / or ends in .toml"

    def _shown(self, path: Path) -> str:
        try:
            return str(path.relative_to(self._config.rootpath))
        except ValueError:
            return str(path)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_TEXTS] = dict(self._texts)

    def pytest_report_header(self) -> str | None:
        if self._asked is None:
            return None  # which one fits depends on what torch finds, and nobody has asked it yet
        if self.explicit is None:
            return "concord: no profile"
        return f"concord: profile {self.explicit.name} ({self.explicit.file})"


def backend_for(kind: str) -> str:
    """The backend that torch itself would take for a device."""
    import torch.distributed as dist

    return dist.Backend.default_device_backend_map.get(kind) or dist.get_default_backend_for_device(kind)
