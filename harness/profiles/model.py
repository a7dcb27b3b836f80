"""The contents of a profile as frozen data, with queries by case, test and platform."""

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
"""The link of a defect that has not been reported."""

NEVER_RUN = "its author has never run it on such a device: it claims what documentation says"
"""What is said of a profile with ``never_run``, after its name."""


@dataclass(frozen=True)
class Mistake:
    """One mistake in a profile."""

    file: str
    line: int
    """From 1; 0: the mistake is about the whole file."""
    key: str
    """The key with its table; empty: the mistake is about no key."""
    what: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key}: {self.what}" if self.key else f"{place}: {self.what}"


class ProfileError(ValueError):
    """A profile that can't be used.  The message has one line for each mistake."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = tuple(mistakes)


@dataclass(frozen=True)
class Platform:
    """The platform of a run, as far as conditions use it."""

    torch: str = ""
    """Version."""
    python: str = ""
    """Version."""
    machine: str = ""
    """As :func:`platform.machine` returns it."""
    os: str = ""
    """Name and release, as in ``Linux 6.8.0``."""
    device_name: str = ""
    """As torch's module for the device names it; ``cpu`` on the host."""


@dataclass(frozen=True)
class Condition:
    """The platforms on which a part of a profile applies; an empty condition applies everywhere."""

    torch: str = ""
    """A version specifier: ``>=2.11,<2.14``."""
    python: str = ""
    machine: tuple[str, ...] = ()
    """Globs, one of which must match."""
    os: tuple[str, ...] = ()
    device_name: tuple[str, ...] = ()

    def holds(self, platform: Platform) -> bool:
        """Return whether it applies on a platform.  Pre-releases and local builds may match a version specifier."""
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
    """Tests that are known to end badly: always, or sometimes (``intermittent``)."""

    tests: tuple[str, ...]
    """Globs for whole node ids, with ``*`` and ``?``; brackets are literal."""
    reason: str
    link: str
    """URL of the report, or :data:`UNREPORTED`."""
    expires: datetime.date
    """The last day on which it applies."""
    verdicts: tuple[str, ...] = ENDED_BADLY
    """The verdicts that it covers; an intermittent waiver also covers ``passed``."""
    shows: tuple[str, ...] = ()
    """Texts of which the report of a failure that it covers has one; empty if any failure will do."""
    when: Condition = ALWAYS
    """The platforms on which it applies."""
    subjects: tuple[str, ...] = ("torch",)
    """The subjects to which it applies (:mod:`harness.subjects`)."""
    intermittent: bool = False
    place: str = ""
    """``file:line``."""
    owner: str = ""
    """The owner of the defect, or the name of the profile whose file has the waiver."""
    defect: str = ""
    """The id of the defect, unique among those of its owner; empty for a waiver in a profile's file."""

    @property
    def named(self) -> str:
        """Its owner, with the id of the defect if it has one: ``pytorch/tp_frozen``."""
        return f"{self.owner}/{self.defect}" if self.defect else self.owner

    def matches(self, nodeid: str) -> bool:
        """Return whether it is about a test."""
        return any(pattern(glob).match(nodeid) for glob in self.tests)

    def has_expired(self, today: datetime.date) -> bool:
        """Return whether it no longer applies."""
        return today > self.expires

    def is_shown_by(self, report: str) -> bool:
        """Return whether a failure is the known one, by the text of its report."""
        return not self.shows or any(text in report for text in self.shows)


@dataclass(frozen=True)
class Exclusion:
    """Unclaimed combinations of claimed parts: every listed collective with every listed dtype and op."""

    collectives: tuple[str, ...] = ()
    """Empty: all; the same for ``dtypes`` and ``ops``."""
    dtypes: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    reason: str = ""
    when: Condition = ALWAYS

    def covers(self, collective: str, dtype: str, op: str) -> bool:
        """Return whether it excludes a combination.  ``op`` is empty for a collective without a reduction."""
        axes = ((self.collectives, collective), (self.dtypes, dtype), (self.ops, op))
        return all(not words or word in words for words, word in axes)


@dataclass(frozen=True)
class Claims:
    """The claims of a backend.  Everything that a profile does not mention is claimed."""

    stacks: tuple[str, ...] = STACKS
    collectives: tuple[str, ...] = COLLECTIVES
    dtypes: tuple[str, ...] = DTYPES
    ops: tuple[str, ...] = OPS
    exclusions: tuple[Exclusion, ...] = ()
    features: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The claimed features by stack; a stack that is not listed claims all of its features."""

    def on(self, platform: Platform) -> Claims:
        """Return the claims on a platform: with the exclusions that apply there, without their conditions."""
        counting = [e for e in self.exclusions if e.when.holds(platform)]
        return dataclasses.replace(self, exclusions=tuple(dataclasses.replace(e, when=ALWAYS) for e in counting))

    def has(self, collective: str, dtype: str, op: str = "") -> bool:
        """Return whether a combination is claimed.  ``op`` is used only for collectives that reduce."""
        op = op if collective in REDUCING else ""
        if collective not in self.collectives or dtype not in self.dtypes or (op and op not in self.ops):
            return False
        return not any(exclusion.covers(collective, dtype, op) for exclusion in self.exclusions)

    def lacks(self, collective: str = "", dtype: str = "", op: str = "") -> str:
        """Describe a combination that is not claimed; empty if at least a part of it is claimed.

        An empty argument means any: ``lacks(dtype="int8")`` is empty if int8 is claimed for any collective.
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
        """Return those dtypes that are claimed for at least one collective."""
        return [name for name in names if not self.lacks(dtype=name)]

    def features_of(self, stack: str) -> tuple[str, ...] | None:
        """Return the claimed features of a stack; None: all."""
        return dict(self.features).get(stack)

    def lacks_features(self, stack: str, names: Iterable[str]) -> str:
        """Describe the stack, or the first of its named features, that is not claimed; empty if all are claimed."""
        if stack in STACKS and stack not in self.stacks:
            return f"the stack {stack}"
        claimed = self.features_of(stack)
        missing = [name for name in names if claimed is not None and name not in claimed]
        return f"feature {missing[0]} of {stack}" if missing else ""


EVERYTHING = Claims()


@dataclass(frozen=True)
class Tolerance:
    """A factor by which results of a dtype may exceed the rounding bound."""

    dtype: str
    factor: float
    """Multiplies the bound of docs/tolerances.md; at least 1."""
    reason: str
    when: Condition = ALWAYS


@dataclass(frozen=True)
class Profile:
    """A profile: what a backend claims on a device type, and which of its defects are known."""

    name: str
    backend: str
    device: str
    torch_build: str = ""
    """The name in ``torch.version`` that a build of torch must have set for the profile to be chosen without being
    named, such as ``hip``; empty: any build."""
    about: str = ""
    never_run: bool = False
    """Whether its author has never run it on such a device, so that it rests on documentation alone; not inherited."""
    world_sizes: tuple[int, ...] = ()
    """The claimed numbers of ranks; empty: any."""
    ranks_per_device: int = 1
    largest_message: int | None = None
    """Size in bytes of the largest message that benchmarks send; None: the default of the device type."""
    benchmark_world_sizes: tuple[int, ...] = ()
    """Numbers of ranks on which benchmarks are measured; empty: those of the suite."""
    link_bandwidth: float | None = None
    """GB/s (10^9) that a rank's link to the others carries in one direction; None: not known."""
    visible_devices: str = ""
    """The environment variable that masks devices; empty: found by its name (:func:`harness.devices.accelerators`)."""
    warm: bool | None = None
    """Whether later tests reuse worlds; None: only on accelerators, and where ranks are spawned."""
    start: str = ""
    """How ranks begin (:data:`~harness.profiles.vocabulary.STARTS`); empty: they are forked."""
    bind_device: bool = False
    """Whether ranks give their device to init_process_group, which then makes the communicator at once."""
    timeout: float | None = None
    """Timeout of one run on ranks, in seconds."""
    env: tuple[tuple[str, str], ...] = ()
    shared_device_env: tuple[tuple[str, str], ...] = ()
    """Further variables of ranks that share a device with another rank of their world; ``{rank}`` is the rank."""
    imports: tuple[str, ...] = ()
    """Modules that register the backend or the device."""
    claims: Claims = EVERYTHING
    tolerances: tuple[Tolerance, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    """All waivers, including intermittent ones: those of known defects first, then inherited ones, then its own, in the
    order of the files."""
    with_defects: tuple[str, ...] = ()
    """Owners of defects, or single defects as ``owner/id``, that count whatever their backends and devices are."""
    without_defects: tuple[str, ...] = ()
    """Owners of defects, or single defects, that do not count."""
    keeps: tuple[str, ...] = ()
    """Owners of which a defect that does not show is an error."""
    file: str = ""
    bases: tuple[str, ...] = ()
    """Files of the profiles that it inherits from, nearest first."""
    defect_files: tuple[str, ...] = ()
    """Files of the defects that may count for it, whether any of them does."""

    def is_about(self, backend: str, device: str) -> bool:
        """Return whether its claims are about worlds of this backend on this device type."""
        return (self.backend, self.device) == (backend, device)

    @property
    def files(self) -> tuple[str, ...]:
        """All files that decide what it is, its own first."""
        return (self.file, *self.bases, *self.defect_files)

    def expects(self, waiver: Waiver) -> bool:
        """Return whether a waiver that is not needed is an error: one of its own, or of an owner whom it keeps."""
        return not waiver.defect or waiver.owner in self.keeps

    @property
    def asks_for_device_name(self) -> bool:
        """Whether a condition uses the name of the device, which only the device's driver knows."""
        conditions = [x.when for x in self.waivers]
        conditions += [x.when for x in self.claims.exclusions]
        conditions += [x.when for x in self.tolerances]
        return any(condition.device_name for condition in conditions)


@functools.cache
def pattern(glob: str) -> re.Pattern[str]:
    """Translate a glob for node ids to a regular expression.  Brackets are literal: parameter ids contain them."""
    return re.compile(fnmatch.translate(glob.replace("[", "[[]")))
