"""Where profiles are found by name: beside the file that asks, in the shipped folder, in installed packages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness import entry_points
from harness.entry_points import PROFILES
from harness.profiles.keys import nearest
from harness.profiles.model import Profile
from harness.profiles.reading import parse, text_of

SHIPPED = Path("fixtures/profiles")
"""Where profiles are, relative to the root directory."""

OURS = Path(__file__).parents[2] / SHIPPED
"""Where they are in Concord's own tree, for those that inherit from them elsewhere."""


class Shelf:
    """Profiles by name; keeps the text of each file that it has read.

    ``root``: the folder that has ``fixtures/profiles``, and that names of files are relative to; ``texts``: what other
    processes have read, so that they all go by the same.
    """

    def __init__(self, root: Path, texts: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.texts: dict[str, str] = dict(texts or {})
        """By what messages call a file, its text."""

    @property
    def folder(self) -> Path:
        """Where the shipped profiles are."""
        return self.root / SHIPPED

    def names(self) -> list[str]:
        """Every name that there is, shipped ones first."""
        return [*self.shipped(), *(name for name in entry_points.points(PROFILES)[0] if name not in self.shipped())]

    def shipped(self) -> list[str]:
        """The names of the shipped profiles."""
        return sorted(path.stem for path in self.folder.glob("*.toml"))

    def path(self, name: str) -> Path:
        """The file of a shipped profile, or of a package's.

        Errors: ValueError that names the nearest; PluginError, which is one, if its package is broken.
        """
        if (self.folder / f"{name}.toml").is_file():
            return self.folder / f"{name}.toml"
        point = entry_points.points(PROFILES)[0].get(name)
        if point is not None:
            return entry_points.profile_file(point)
        known = self.names()
        near = nearest(name, known)
        hint = f"did you mean {near}? " if near else ""
        there = f"in {SHIPPED} are: {', '.join(known)}" if known else f"there is none in {SHIPPED}"
        raise ValueError(f"no profile of that name; {hint}{there}")

    def shown(self, path: Path) -> str:
        """What messages call a file."""
        try:
            return str(path.resolve().relative_to(self.root.resolve()))
        except ValueError:
            return str(path)

    def text(self, path: Path) -> tuple[str, str]:
        """What messages call a file, and its text.  Errors: :class:`ProfileError`."""
        file = self.shown(path)
        if file not in self.texts:
            self.texts[file] = text_of(path, file)
        return file, self.texts[file]

    def read(self, path: Path) -> Profile:
        """The profile of a file, with those that it inherits from.  Errors: :class:`ProfileError`."""
        file, text = self.text(path)
        return parse(text, file, self.base)

    def base(self, name: str, file: str) -> tuple[str, str]:
        """The profile of a name that a file inherits from: what messages call it, and its text (:data:`Base`)."""
        own = (self.root / file).resolve()
        for folder in (own.parent, self.folder, OURS):
            path = folder / f"{name}.toml"
            if path.is_file() and path.resolve() != own:  # one may be called as the one that it goes on from
                return self.text(path)
        return self.text(self.path(name))
