"""What a profile says, as frozen data; what it means for a case, a test or a platform is asked here."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from harness.profiles.vocabulary import COLLECTIVES, DTYPES, OPS, REDUCING, STACKS
from harness.results import ENDED_BADLY

UNREPORTED = "unreported"
"""The link of a defect that has been reported nowhere."""


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong in a profile."""

    file: str
    line: int
    """From 1; 0: it is about the file as such."""
    key: str
    """With its table; empty: it is about no key."""
    what: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key}: {self.what}" if self.key else f"{place}: {self.what}"


class ProfileError(ValueError):
    """A profile that can't be used; says what is wrong where, one mistake a line."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = tuple(mistakes)


@dataclass(frozen=True)
class Platform:
    """What a run is on, as far as conditions ask."""

    torch: str = ""
    """Version."""
    python: str = ""
    """Version."""
    machine: str = ""
    """As :func:`platform.machine` has it."""
    os: str = ""
    """Name and release, as in ``Linux 6.8.0``."""
    device_name: str = ""
    """As the device's module of torch has it; ``cpu`` on the host."""


@dataclass(frozen=True)
class Condition:
    """Where something of a profile counts; without any, everywhere."""

    torch: str = ""
    """Versions, as in ``>=2.11,<2.14``."""
    python: str = ""
    machine: tuple[str, ...] = ()
    """Globs, any of which has to match."""
    os: tuple[str, ...] = ()
    device_name: tuple[str, ...] = ()

    def holds(self, platform: Platform) -> bool:
        """Whether it counts on a platform.  Pre-releases and local builds are of their version."""
        return all(_within(getattr(self, k), getattr(platform, k)) for k in ("torch", "python")) and all(
            _any_of(getattr(self, k), getattr(platform, k)) for k in ("machine", "os", "device_name")
        )


def _within(condition: str, version: str) -> bool:
    try:
        return not condition or SpecifierSet(condition).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def _any_of(globs: tuple[str, ...], name: str) -> bool:
    return not globs or any(pattern(glob).match(name) for glob in globs)


ALWAYS = Condition()


@dataclass(frozen=True)
class Waiver:
    """Tests that are known to end badly: always, or (``intermittent``) now and then."""

    tests: tuple[str, ...]
    """Globs on whole node ids; ``*`` and ``?`` only, brackets mean themselves."""
    reason: str
    link: str
    """URL of the report, or :data:`UNREPORTED`."""
    expires: datetime.date
    """The last day on which it counts."""
    verdicts: tuple[str, ...] = ENDED_BADLY
    """The verdicts that it covers; an intermittent one names ``passed`` as well."""
    when: Condition = ALWAYS
    """Where it counts."""
    subjects: tuple[str, ...] = ("torch",)
    """Whose implementations of the stacks it is about (:mod:`harness.subjects`)."""
    intermittent: bool = False
    place: str = ""
    """``file:line``."""

    def matches(self, nodeid: str) -> bool:
        """Whether it is about a test."""
        return any(pattern(glob).match(nodeid) for glob in self.tests)

    def has_expired(self, today: datetime.date) -> bool:
        """Whether it no longer counts."""
        return today > self.expires


@dataclass(frozen=True)
class Exclusion:
    """Combinations that are not claimed, though each of their words is: any of its collectives, dtypes and ops."""

    collectives: tuple[str, ...] = ()
    """Empty: all; so for the other two."""
    dtypes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    reason: str = ""
    when: Condition = ALWAYS

    def covers(self, collective: str, dtype: str, op: str) -> bool:
        """Whether it takes a combination away; ``op`` is empty for a collective that has none."""
        axes = ((self.collectives, collective), (self.dtypes, dtype), (self.ops, op))
        return all(not words or word in words for words, word in axes)


@dataclass(frozen=True)
class Claims:
    """What a backend says that it can do.  Without a word about something, it claims all of that."""

    stacks: tuple[str, ...] = STACKS
    collectives: tuple[str, ...] = COLLECTIVES
    dtypes: tuple[str, ...] = DTYPES
    ops: tuple[str, ...] = OPS
    exclusions: tuple[Exclusion, ...] = ()
    features: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """By stack; a stack that is not there claims all of its features."""

    def on(self, platform: Platform) -> Claims:
        """As they are on a platform: exclusions are those that count there, without their conditions."""
        counting = [e for e in self.exclusions if e.when.holds(platform)]
        return dataclasses.replace(self, exclusions=tuple(dataclasses.replace(e, when=ALWAYS) for e in counting))

    def has(self, collective: str, dtype: str, op: str = "") -> bool:
        """Whether a combination is claimed; ``op`` counts for collectives that reduce."""
        op = op if collective in REDUCING else ""
        if collective not in self.collectives or dtype not in self.dtypes or (op and op not in self.ops):
            return False
        return not any(exclusion.covers(collective, dtype, op) for exclusion in self.exclusions)

    def lacks(self, collective: str = "", dtype: str = "", op: str = "") -> str:
        """What is not claimed of a combination, in words; empty if some of it is.

        What is left empty may be anything: ``lacks(dtype="int8")`` asks whether int8 is claimed for anything at all.
        """
        if collective and collective not in COLLECTIVES:
            return ""
        collectives = (collective,) if collective else REDUCING if op else self.collectives
        dtypes = (dtype,) if dtype else self.dtypes
        for name, kind in itertools.product(collectives, dtypes):
            ops = ("",) if name not in REDUCING else (op,) if op else self.ops
            if any(self.has(name, kind, each) for each in ops):
                return ""
        of, by = (f" of {dtype}" if dtype else ""), (f" with {op}" if op else "")
        return f"{collective}{of}{by}".strip() if collective else f"{dtype}{by}".strip() or "every collective"

    def claimed_dtypes(self, names: Iterable[str]) -> list[str]:
        """Of some dtypes, those that are claimed for anything."""
        return [name for name in names if not self.lacks(dtype=name)]

    def features_of(self, stack: str) -> tuple[str, ...] | None:
        """The features of a stack that are claimed; None: all."""
        return dict(self.features).get(stack)

    def lacks_features(self, stack: str, names: Iterable[str]) -> str:
        """The first of some features of a stack that is not claimed, in words; empty if all are."""
        if stack in STACKS and stack not in self.stacks:
            return f"the stack {stack}"
        claimed = self.features_of(stack)
        missing = [name for name in names if claimed is not None and name not in claimed]
        return f"feature {missing[0]} of {stack}" if missing else ""


EVERYTHING = Claims()


@dataclass(frozen=True)
class Tolerance:
    """By how much more than rounding explains the results of a dtype may differ."""

    dtype: str
    factor: float
    """On the bound of docs/tolerances.md; at least 1."""
    reason: str
    when: Condition = ALWAYS


@dataclass(frozen=True)
class Profile:
    """What a backend claims on a type of device."""

    name: str
    backend: str
    device: str
    about: str = ""
    world_sizes: tuple[int, ...] = ()
    """Numbers of ranks; empty: any."""
    ranks_per_device: int = 1
    largest_message: int | None = None
    """Bytes of the largest message that benchmarks send; None: as the type of device has it."""
    visible_devices: str = ""
    """The environment variable that masks devices; empty: found by its name (:func:`harness.devices.accelerators`)."""
    warm: bool | None = None
    """Whether worlds are used again; None: on accelerators."""
    timeout: float | None = None
    """Seconds for one run on ranks."""
    env: tuple[tuple[str, str], ...] = ()
    imports: tuple[str, ...] = ()
    """Modules that register the backend or the device."""
    claims: Claims = EVERYTHING
    tolerances: tuple[Tolerance, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    """In the file's order, intermittent ones among them, those that are inherited before."""
    file: str = ""
    bases: tuple[str, ...] = ()
    """The files of the profiles that it inherits from, the nearest first."""

    def is_about(self, backend: str, device: str) -> bool:
        """Whether its claims are about worlds of this backend on this type of device."""
        return (self.backend, self.device) == (backend, device)

    @property
    def asks_for_device_name(self) -> bool:
        """Whether any condition is about the name of the device, which only the device's driver knows."""
        conditions = [x.when for x in self.waivers]
        conditions += [x.when for x in self.claims.exclusions]
        conditions += [x.when for x in self.tolerances]
        return any(condition.device_name for condition in conditions)


@functools.cache
def pattern(glob: str) -> re.Pattern[str]:
    """A glob on node ids as a regular expression; brackets mean themselves, since ids of parameters have them."""
    return re.compile(fnmatch.translate(glob.replace("[", "[[]")))
