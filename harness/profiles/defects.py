"""Known defects by owner: those of PyTorch, of a backend, or of a package, and which of them count for a profile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from harness.profiles.model import Profile, Waiver


@dataclass(frozen=True)
class Defect:
    """A known defect: a waiver with an owner and an id, and where it shows."""

    waiver: Waiver
    backends: tuple[str, ...] = ()
    """The backends on which it shows, or, each after a ``!``, those on which it does not; empty: any."""
    devices: tuple[str, ...] = ()
    """The same for types of devices."""
    kind: str = ""
    """One of :data:`~harness.profiles.vocabulary.KINDS`; empty if its file does not say."""

    def concerns(self, backend: str, device: str) -> bool:
        """Return whether it shows on a backend and a type of device."""
        return _is_among(self.backends, backend) and _is_among(self.devices, device)


@dataclass(frozen=True)
class Defects:
    """A file of defects."""

    owner: str
    file: str = ""
    """Its name in messages."""
    about: str = ""
    defects: tuple[Defect, ...] = ()

    def may_concern(self, profile: Profile) -> bool:
        """Return whether a profile names the owner, or its backend is one on which any of the defects shows."""
        named = {name.partition("/")[0] for name in (*profile.with_defects, *profile.without_defects)}
        return self.owner in {*named, *profile.keeps} or any(
            _is_among(defect.backends, profile.backend) for defect in self.defects
        )


def _is_among(names: Collection[str], name: str) -> bool:
    if any(each.startswith("!") for each in names):
        return f"!{name}" not in names
    return not names or name in names


def names_of(known: Iterable[Defects]) -> list[str]:
    """Return everything that a profile can add or leave out: owners, and defects as ``owner/id``."""
    return [name for each in known for name in (each.owner, *(defect.waiver.named for defect in each.defects))]


def with_defects(profile: Profile, known: Sequence[Defects]) -> Profile:
    """Return a profile with the known defects that count for it.

    These are the ones that show on its backend and device, and the ones that it adds, without those that it leaves out.
    A single defect that a profile names goes before its owner: ``with = ["gloo/x"]`` adds one of an owner that is left
    out, and ``without = ["gloo/x"]`` leaves one out of an owner that is added.
    """
    concerned = [each for each in known if each.may_concern(profile)]
    counting = [defect.waiver for each in concerned for defect in each.defects if _counts(defect, profile)]
    files = tuple(each.file for each in concerned)
    return replace(profile, waivers=(*counting, *profile.waivers), defect_files=files)


def _counts(defect: Defect, profile: Profile) -> bool:
    for name in (defect.waiver.named, defect.waiver.owner):
        if name in profile.without_defects:
            return False
        if name in profile.with_defects:
            return True
    return defect.concerns(profile.backend, profile.device)
