"""The search for profiles by name: next to the inheriting file, in the shipped folder, and in installed packages.

Known defects are found here, too: those in the shipped folder, and those of installed packages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from harness import entry_points
from harness.entry_points import DEFECTS, PROFILES, PluginError
from harness.profiles.defects import Defects
from harness.profiles.model import Mistake, Profile, ProfileError
from harness.profiles.reading import defects_among, parse, parse_defects, text_of
from harness.profiles.values import nearest

SHIPPED = Path("fixtures/profiles")
"""Folder of the shipped profiles, relative to the root directory."""

SHIPPED_DEFECTS = Path("fixtures/defects")
"""Folder of the shipped files of defects, relative to the root directory."""

OURS = Path(__file__).parents[2] / SHIPPED
"""Folder of the shipped profiles in Concord's own tree, for profiles elsewhere that inherit from them."""


def shipped_defects(root: Path) -> list[Path]:
    """Return the files of defects under a root directory, or, if it has no such folder, those in Concord's own tree."""
    folder = root / SHIPPED_DEFECTS
    return sorted((folder if folder.is_dir() else OURS.parents[1] / SHIPPED_DEFECTS).glob("*.toml"))


class Shelf:
    """Profiles by name; it keeps the text of each file that it has read.

    ``root``: the folder that contains ``fixtures/profiles``; names of files are relative to it.  ``texts``: texts that
    other processes have read, so that all processes use the same.
    """

    def __init__(self, root: Path, texts: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.texts: dict[str, str] = dict(texts or {})
        """Texts by the file's name in messages."""
        self.broken: list[str] = []
        """Files of defects of packages that can't be read, one line each."""
        self._defects = defects_among(self.texts) if texts is not None else None

    @property
    def folder(self) -> Path:
        """The folder of the shipped profiles."""
        return self.root / SHIPPED

    def names(self) -> list[str]:
        """Return the names of all profiles, shipped ones first."""
        return [*self.shipped(), *(name for name in entry_points.points(PROFILES)[0] if name not in self.shipped())]

    def shipped(self) -> list[str]:
        """Return the names of the shipped profiles."""
        return sorted(path.stem for path in self.folder.glob("*.toml"))

    def path(self, name: str) -> Path:
        """Return the file of a profile that is shipped or in a package.

        Errors: ValueError that names the nearest profile; PluginError (a ValueError) if the package is broken.
        """
        if (self.folder / f"{name}.toml").is_file():
            return self.folder / f"{name}.toml"
        point = entry_points.points(PROFILES)[0].get(name)
        if point is not None:
            return entry_points.profile_file(point)
        known = self.names()
        near = nearest(name, known)
        hint = f"did you mean {near}? " if near else ""
        there = f"there are: {', '.join(known)}" if known else f"there is none in {SHIPPED}, and no package has one"
        raise ValueError(f"no profile of that name; {hint}{there}")

    def shown(self, path: Path) -> str:
        """Return the name of a file in messages."""
        try:
            return str(path.resolve().relative_to(self.root.resolve()))
        except ValueError:
            return str(path)

    def text(self, path: Path) -> tuple[str, str]:
        """Return the name of a file in messages, and its text.  Errors: :class:`ProfileError`."""
        file = self.shown(path)
        if file not in self.texts:
            self.texts[file] = text_of(path, file)
        return file, self.texts[file]

    def read(self, path: Path) -> Profile:
        """Read a profile, with those that it inherits from.  Errors: :class:`ProfileError`."""
        file, text = self.text(path)
        return self.parse(text, file)

    def parse(self, text: str, file: str) -> Profile:
        """Parse a profile, with those that it inherits from and known defects.  Errors: :class:`ProfileError`."""
        return parse(text, file, self.base, self.defects())

    def defects(self) -> tuple[Defects, ...]:
        """Return all known defects: PyTorch's and the backends' that are shipped, and those of packages.

        They are those of the root directory if it has any, and otherwise those of Concord's own tree.  Errors:
        :class:`ProfileError` for a shipped file; those of packages that can't be read are left out.
        """
        if self._defects is None:
            shipped = [self._defects_in(path) for path in shipped_defects(self.root)]
            self._defects = (*shipped, *self._of_packages({each.owner for each in shipped}))
        return self._defects

    def _of_packages(self, taken: set[str]) -> Iterator[Defects]:
        for name, point in entry_points.points(DEFECTS)[0].items():
            try:
                if name in taken:
                    raise PluginError(f"{point}: the defects of {name} are shipped with Concord")
                of_package = self._defects_in(entry_points.defects_file(point))
                anywhere = [each for each in of_package.defects if not each.backends or each.backends[0][0] == "!"]
                if anywhere:
                    why = "name its backends: only PyTorch's defects count for any backend"
                    raise PluginError(f"{anywhere[0].waiver.place}: {anywhere[0].waiver.defect}: {why}")
            except ValueError as e:
                self.broken += str(e).split("\n")
            else:
                yield of_package

    def _defects_in(self, path: Path) -> Defects:
        file, text = self.text(path)
        return parse_defects(text, file)

    def base(self, name: str, file: str) -> tuple[str, str]:
        """Find the profile that a file inherits from (:data:`Base`).  Returns its name in messages, and its text."""
        own = (self.root / file).resolve()
        for folder in (own.parent, self.folder, OURS):
            path = folder / f"{name}.toml"
            if path.is_file() and path.resolve() != own:  # a profile may have its base's name
                return self.text(path)
        return self.text(self.path(name))


def profile_named(name: str) -> Profile:
    """Read the profile in a file, or a shipped or a package's profile by its name.

    Errors: :class:`~harness.profiles.ProfileError`.
    """
    file = Path(name)
    if not file.exists() and file.suffix != ".toml":
        try:
            file = Shelf(OURS.parents[1]).path(name)
        except ValueError as e:
            raise ProfileError([Mistake(name, 0, "", str(e))]) from e
    return Shelf(Path.cwd()).read(file)
