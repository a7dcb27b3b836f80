"""The records of a results file: one a line, and what their fields mean."""

from __future__ import annotations

from typing import Annotated

import msgspec

from harness.safe_io.untrusted import Count, Moment, Ranks, Seconds, Status
from harness.safe_io.untrusted import Version as VersionNumber

SCHEMA = "concord.results"
VERSION = 4

VERDICTS = ("passed", "failed", "crashed", "hung", "flaky", "unsupported", "waived", "not-run")
"""What a test can come to.  ``unsupported``: the profile does not claim it; ``not-run``: nobody looked; ``flaky``: an
attempt of it ended badly, and the last one did not, so no single attempt comes to it."""

ENDED_BADLY = ("failed", "crashed", "hung")
"""Bad verdicts of an attempt: what a waiver can cover."""
BAD = (*ENDED_BADLY, "flaky")
"""Bad verdicts of a test; none of them is a pass."""
UNSUPPORTED = "unsupported: "
"""How the reason of a skip begins that is one of the backend, the profile or the machine."""
NOT_CLAIMED = "unsupported: not claimed: "
"""How it begins where nobody knows whether the backend could do it: the profile does not say that it does."""

DEFAULT_SEED = "default"
"""The seed of a run whose properties draw what their own text decides, the same in every run."""
FREE_SEED = "free"
"""The seed of a run in which Hypothesis draws as it likes."""


class RunHeader(msgspec.Struct, tag="run", tag_field="record", kw_only=True):
    """The first line: what ran, where, on what."""

    schema: str = SCHEMA
    version: VersionNumber = VERSION
    started: Moment
    """Seconds since the epoch."""
    arguments: list[str] = []
    environment: dict[str, str] = {}
    subject: str = "torch"
    """Whose implementation of the stacks ran (:mod:`harness.subjects`)."""
    profile: str = ""
    """Name of the profile that the run goes by."""
    profile_hash: str = ""
    """SHA-256 of its text."""
    concord: str = ""
    """Version of Concord."""
    suite_hash: str = ""
    """SHA-256 over the suite (:func:`harness.provenance.suite_hash`)."""
    seed: str = ""
    """What properties draw from: :data:`DEFAULT_SEED`, a number, :data:`FREE_SEED`; empty: nobody has said."""
    seed_drawn: bool = False
    """Whether that number was drawn for this run, and not chosen by anyone."""
    effort: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 1.0
    """How many examples properties have, as a share of what suites say (``CONCORD_EXAMPLES``)."""
    faults: list[str] = []
    """Defects that were put into ranks on purpose."""
    plugins: dict[str, str] = {}
    """Each pytest plug-in loaded when the first test was about to run: its name, and where it is from: the distribution
    and its version, or the SHA-256 of a file that belongs to no distribution (:mod:`harness.plugin.loaded`)."""


class Collected(msgspec.Struct, tag="collected", tag_field="record"):
    """The tests that were to run."""

    tests: list[str]


class WaiverEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A waiver of the profile, or (``intermittent``) what a test comes to now and then."""

    place: str
    """``file:line``."""
    tests: list[str]
    reason: str
    link: str
    expires: str
    """The last day on which it counts, as in 2027-06-30."""
    verdicts: list[str]
    intermittent: bool = False
    applies: bool = True
    """Whether it is about the torch and the subject of this run."""


class ProfileText(msgspec.Struct, tag="profile", tag_field="record", kw_only=True):
    """The profile that the run goes by, whole."""

    name: str
    file: str
    """What messages call it: a key of ``texts``."""
    texts: dict[str, str]
    """Of its file and of those that it stands on."""
    backend: str = ""
    device: str = ""
    about: str = ""
    claims: dict[str, str] = {}
    """What it claims, for people: what, and how much of it."""
    waivers: list[WaiverEntry] = []


class RequirementText(msgspec.Struct, tag="requirement", tag_field="record", kw_only=True, omit_defaults=True):
    """A requirement that a test of this run proves."""

    id: str
    sentence: str
    source: str = ""
    level: str = ""
    """Of :data:`LEVELS`."""
    mandatory: bool = True


class RankEvidence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one rank of a failed world said."""

    rank: Ranks
    kind: str
    what: str = ""
    first: bool = False
    text: str = ""
    stack: str = ""
    collectives: list[str] = []
    output: str = ""


class Reproducer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A file that shows a failure with torch alone."""

    file: str
    command: str
    text: str = ""
    """Of the file; empty where it is too long."""


class TestResult(msgspec.Struct, tag="test", tag_field="record", kw_only=True, omit_defaults=True):
    """One test's verdict, with its evidence if it is a bad one."""

    __test__ = False

    nodeid: str
    verdict: str
    attempt: int = 1
    """Which run of the test this is, from 1: other plug-ins may run one that failed again."""
    stack: str = ""
    requirements: list[str] = []
    world: str = ""
    seconds: Seconds = 0.0
    """How long it took, without what it waited for devices."""
    waited: Seconds = 0.0
    """Seconds for which it waited for devices that other tests and sessions held."""
    reason: str = ""
    headline: str = ""
    ranks: list[RankEvidence] = []
    size: Ranks = 0
    """How many ranks its world has, at most; 0: it has none."""
    dtype: str = ""
    """The dtype that it is about, if it is one."""
    bare: str = ""
    """What a waived test came to: ``failed``, ``crashed`` or ``hung``."""
    waiver: str = ""
    """The place of the waiver that was used."""
    property_based: bool = False
    """Whether it draws its examples from the run's seed; nobody has said so before version 3."""
    finished: Moment = 0.0
    """Seconds since the epoch."""
    text: str = ""
    """What pytest showed of a failure that is not one of ranks."""
    reproducer: Reproducer | None = None

    @property
    def undeclared(self) -> bool:
        """Whether it was not run because the profile does not claim what it is about."""
        return self.verdict == "unsupported" and self.reason.startswith(NOT_CLAIMED)


class RunEnd(msgspec.Struct, tag="end", tag_field="record"):
    """The last line of a run that came to its end."""

    finished: Moment
    exit_status: Status
    profile: str = ""
    """As in :class:`RunHeader`, where it is only known now which one fits; a reader puts it there."""
    profile_hash: str = ""
    environment: dict[str, str] = {}
    """What was found out while tests ran; a reader puts it to the header's."""
    whole: list[str] = []
    """Stacks of which every test was collected."""
    partial: list[str] = []
    """Why others were not: a sentence each."""
    lost: list[str] = []
    """What else the run was to write and could not, which fails it: a file and the reason each."""
    counts: dict[str, Count] = {}
    """How many tests came to each verdict."""
    plugins: dict[str, str] = {}
    """As in :class:`RunHeader`, of every process of the run, at its end."""
    files: dict[str, str] = {}
    """SHA-256 of every file of harness, suites and fixtures that a process of the run has loaded, by the name that the
    suite hash knows it by (:func:`harness.provenance.suite_files`)."""
    digest: str = ""
    """SHA-256 of the file up to here."""


Record = RunHeader | Collected | ProfileText | RequirementText | TestResult | RunEnd
