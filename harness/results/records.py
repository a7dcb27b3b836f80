"""The records of a results file, one per line, and the meaning of their fields."""

from __future__ import annotations

from typing import Annotated

import msgspec

from harness.results.causes import Cause, NotClaimed
from harness.results.challenge import Challenge
from harness.results.left_out import LeftOut
from harness.results.tried import Cases, Issued, Tried
from harness.safe_io.untrusted import Count, Hosts, Moment, Ranks, Seconds, Status, Words
from harness.safe_io.untrusted import Version as VersionNumber

SCHEMA = "concord.results"
VERSION = 10

VERDICTS = ("passed", "failed", "crashed", "hung", "flaky", "unsupported", "waived", "not-run")
"""The verdicts of a test.  ``unsupported``: the backend, the profile or the machine does not support it.  ``not-run``:
it should have run and did not.  ``flaky``: an attempt ended badly and the last one did not; no single attempt is flaky.
"""

ENDED_BADLY = ("failed", "crashed", "hung")
"""Bad verdicts of an attempt, which a waiver can cover."""
BAD = (*ENDED_BADLY, "flaky")
"""Bad verdicts of a test; none of them is a pass."""
UNSUPPORTED = "unsupported: "
"""The beginning of a skip's reason if the backend, the profile or the machine is the cause. A skip of Concord's own
also has a cause (:mod:`harness.results.causes`); for a plain ``pytest.skip`` of somebody else, this word decides."""

DEFAULT_SEED = "default"
"""The seed of a run whose properties have examples that depend on their source only, the same in every run."""
FREE_SEED = "free"
"""The seed of a run in which Hypothesis chooses the examples."""


class GivenWorld(msgspec.Struct, frozen=True, omit_defaults=True):
    """The world that a test was given; the largest of them for a test with several."""

    ranks: Ranks
    backend: Words
    device: Words
    """The type of device, as torch names it."""
    sizes: tuple[Ranks, ...] = ()
    """The sizes of the worlds of a test with several, smallest first; empty for others, and in older files."""
    hosts: Hosts = 1
    """The number of hosts that the ranks were on, or are to be on if the test is unsupported."""

    def __str__(self) -> str:
        hosts = f", {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''} ({self.backend} on {self.device}{hosts})"


class CasesDrawn(msgspec.Struct, frozen=True):
    """The cases that a property-based test drew."""

    count: Count
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    """The beginning of the SHA-256 of their texts, in order (:mod:`harness.plugin.cases`)."""


class RunHeader(msgspec.Struct, tag="run", tag_field="record", kw_only=True):
    """The first record: the command, the machine, and the subject of the run."""

    schema: str = SCHEMA
    version: VersionNumber = VERSION
    started: Moment
    """Seconds since the epoch."""
    arguments: list[str] = []
    environment: dict[str, str] = {}
    subject: str = "torch"
    """Whose implementation of the stacks ran (:mod:`harness.subjects`)."""
    profile: str = ""
    """The name of the run's profile."""
    profile_hash: str = ""
    """The SHA-256 of the profile's text."""
    concord: str = ""
    """The version of Concord."""
    suite_hash: str = ""
    """The SHA-256 of the suite (:func:`harness.provenance.suite_hash`)."""
    seed: str = ""
    """The seed of properties: :data:`DEFAULT_SEED`, a number, or :data:`FREE_SEED`; empty if unknown."""
    seed_drawn: bool = False
    """Whether the seed is a number that was drawn for this run, rather than chosen; also if a challenge gives it."""
    challenge: Challenge | None = None
    """A verifier's challenge, from which the seed follows."""
    effort: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 1.0
    """The number of examples of properties, as a share of the number that suites set (``CONCORD_EXAMPLES``)."""
    faults: list[str] = []
    """The defects that were injected into ranks."""
    plugins: dict[str, str] = {}
    """The pytest plug-ins that were loaded when the first test was about to run, by name.  The value is the
    distribution and its version, or the SHA-256 of a file that belongs to no distribution
    (:mod:`harness.plugin.loaded`)."""


class Collected(msgspec.Struct, tag="collected", tag_field="record"):
    """The tests that should run."""

    tests: list[str]


class WaiverEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A waiver of the profile, or a known intermittent failure (``intermittent``)."""

    place: str
    """``file:line``."""
    tests: list[str]
    reason: str
    link: str
    expires: str
    """The last day on which it applies, such as 2027-06-30."""
    verdicts: list[str]
    intermittent: bool = False
    applies: bool = True
    """Whether it applies to the platform and the subject of this run."""
    owner: str = ""
    """The owner of the defect, or the name of the profile that has the waiver; empty in older files."""
    defect: str = ""
    """The id of the defect among those of its owner; empty for a waiver of the profile."""


class ProfileText(msgspec.Struct, tag="profile", tag_field="record", kw_only=True):
    """The whole profile of the run."""

    name: str
    file: str
    """The name of its file in messages, which is a key of ``texts``."""
    texts: dict[str, str]
    """The text of its file and of those from which it inherits, by the file's name in messages."""
    backend: str = ""
    device: str = ""
    about: str = ""
    never_run: bool = False
    """Whether its author has never run it on such a device."""
    claims: dict[str, str] = {}
    """Its claims for readers: a subject, and the amount claimed."""
    waivers: list[WaiverEntry] = []


class RequirementText(msgspec.Struct, tag="requirement", tag_field="record", kw_only=True, omit_defaults=True):
    """A requirement that a test of this run proves."""

    id: str
    sentence: str
    source: str = ""
    level: str = ""
    """One of :data:`LEVELS`."""
    mandatory: bool = True


class RankEvidence(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The evidence from one rank of a failed world."""

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
    """The text of the file; empty if it is too long."""


class TestResult(msgspec.Struct, tag="test", tag_field="record", kw_only=True, omit_defaults=True):
    """The verdict of a test, or of one attempt at it, with the evidence if the verdict is bad."""

    __test__ = False

    nodeid: str
    verdict: str
    attempt: int = 1
    """The number of the attempt, from 1; other plug-ins may rerun a failed test."""
    stack: str = ""
    requirements: list[str] = []
    world: GivenWorld | None = None
    """Its world; the largest of them for a test with several."""
    seconds: Seconds = 0.0
    """The time that it took, without the time for which it waited for devices."""
    waited: Seconds = 0.0
    """The time for which it waited for devices that other tests and sessions held."""
    reason: str = ""
    """Why it was skipped, or is expected to fail, for readers."""
    cause: Cause | None = None
    """Why it is unsupported; None for a plain ``pytest.skip``.  ``reason`` is this as a sentence."""
    headline: str = ""
    ranks: list[RankEvidence] = []
    size: Ranks = 0
    """The largest number of ranks that it asks for; 0 if it asks for no world."""
    dtype: str = ""
    """The dtype of the test, if it has a single one."""
    bare: str = ""
    """The verdict that a waived test would have: ``failed``, ``crashed`` or ``hung``."""
    waiver: str = ""
    """The place of the waiver that was used."""
    property_based: bool = False
    """Whether it draws its examples from the run's seed; results before version 3 do not say."""
    cases: CasesDrawn | None = None
    """The cases that it drew, if it passed; results before version 8 do not say."""
    tried: list[Tried] = []
    """The cases that it executed and checked; of tests that say so, and since version 9."""
    issued: Issued | None = None
    """The collectives that its ranks issued; None if it had no world, only warm ones, or before version 10."""
    finished: Moment = 0.0
    """Seconds since the epoch."""
    text: str = ""
    """The text with which pytest showed the failure, if it is not a failure of ranks."""
    reproducer: Reproducer | None = None

    @property
    def undeclared(self) -> bool:
        """Whether the test did not run because the profile does not claim what it tests."""
        return self.verdict == "unsupported" and isinstance(self.cause, NotClaimed)


class RunEnd(msgspec.Struct, tag="end", tag_field="record"):
    """The last record of a run that was not cut off."""

    finished: Moment
    exit_status: Status
    profile: str = ""
    """As in :class:`RunHeader`, if it became known only after the run began.  A reader moves it to the header."""
    profile_hash: str = ""
    environment: dict[str, str] = {}
    """Facts that became known while tests ran.  A reader adds them to the header's."""
    whole: list[str] = []
    """The stacks of which every test was collected."""
    left_out: list[LeftOut] = []
    """The reasons why other stacks are not whole."""
    lost: list[str] = []
    """The other files that the run could not write, each with the reason.  They make the run fail."""
    counts: dict[str, Count] = {}
    """The number of tests with each verdict."""
    plugins: dict[str, str] = {}
    """As in :class:`RunHeader`, for every process of the run, at its end."""
    files: dict[str, str] = {}
    """The SHA-256 of every file of harness, suites and fixtures that a process of the run has loaded, by its name in
    the suite hash (:func:`harness.provenance.suite_files`)."""
    digest: str = ""
    """The SHA-256 of the file before this line."""


Record = RunHeader | Collected | ProfileText | RequirementText | Cases | TestResult | RunEnd
