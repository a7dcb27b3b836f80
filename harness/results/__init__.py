"""Verdicts and evidence on disk: one JSON object per line, appended as tests end, so that a crash loses nothing.

The first line describes the run. The following lines are mostly tests. The last line says that the run reached its end,
so a file without it is a run that was cut off. :data:`VERSION` increases whenever readers must change.

Version 2 has what a report needs: requirements, the profile's text and waivers, the seed, the suite hash, the omitted
tests, and a digest of the file in its last line. Files of version 1 can still be read, and have none of this.

Since version 4, each attempt at a test is a record (:attr:`TestResult.attempt`), so a plug-in that reruns a failed test
cannot turn it into a passed one. Readers merge the attempts (:func:`merged`). Version 4 also records the plug-ins and
files that the run loaded.

Since version 5, the cause of an unsupported test and the reasons why tests were left out are data (:mod:`~.causes`,
:mod:`~.left_out`). Since version 6, so are the world of a test (:class:`GivenWorld`) and the platform of a run. Readers
turn the sentences of older files into the same data (:mod:`~.old`).

Since version 8, a run says which challenge it answers (:mod:`~.challenge`), and a test which cases it drew. Since
version 9, a test says which cases it executed and checked (:mod:`~.tried`), and since version 10, how many collectives
its ranks issued.
"""

from __future__ import annotations

from harness.results.causes import (
    CAUSES,
    Cause,
    HostLacks,
    HostsLack,
    NoBackend,
    NoDevice,
    NoFittingSize,
    NoStack,
    NotClaimed,
    SizeNotClaimed,
    TooFewDevices,
    TooFewHosts,
    TooLittleMemory,
    TorchLacks,
)
from harness.results.challenge import Challenge, ChallengeError
from harness.results.left_out import Deselected, LeftOut, MaybeLeftOut, NotCollected, OnlySome, OptionGiven
from harness.results.plugins import OWN_CONFTEST, foreign
from harness.results.reading import ResultsError, Run, merged, parse, read
from harness.results.records import (
    BAD,
    DEFAULT_SEED,
    ENDED_BADLY,
    FREE_SEED,
    SCHEMA,
    UNSUPPORTED,
    VERDICTS,
    VERSION,
    CasesDrawn,
    Collected,
    GivenWorld,
    ProfileText,
    RankEvidence,
    Record,
    Reproducer,
    RequirementText,
    RunEnd,
    RunHeader,
    TestResult,
    WaiverEntry,
)
from harness.results.skipping import cause_of, unsupported
from harness.results.tried import (
    ENDINGS,
    EVERYONE,
    GROUPS,
    NOT_REACHED,
    ONE,
    PASSED,
    SOME,
    STOPPED,
    UNDECLARED,
    WHOLE,
    WRONG,
    Call,
    CaseOf,
    Cases,
    Issued,
    Setting,
    Table,
    Tried,
)
from harness.results.writing import Writer, header, torch_version

__all__ = [
    "BAD",
    "CAUSES",
    "DEFAULT_SEED",
    "ENDED_BADLY",
    "ENDINGS",
    "EVERYONE",
    "FREE_SEED",
    "GROUPS",
    "NOT_REACHED",
    "ONE",
    "OWN_CONFTEST",
    "PASSED",
    "SCHEMA",
    "SOME",
    "STOPPED",
    "UNDECLARED",
    "UNSUPPORTED",
    "VERDICTS",
    "VERSION",
    "WHOLE",
    "WRONG",
    "Call",
    "CaseOf",
    "Cases",
    "CasesDrawn",
    "Cause",
    "Challenge",
    "ChallengeError",
    "Collected",
    "Deselected",
    "GivenWorld",
    "HostLacks",
    "HostsLack",
    "Issued",
    "LeftOut",
    "MaybeLeftOut",
    "NoBackend",
    "NoDevice",
    "NoFittingSize",
    "NoStack",
    "NotClaimed",
    "NotCollected",
    "OnlySome",
    "OptionGiven",
    "ProfileText",
    "RankEvidence",
    "Record",
    "Reproducer",
    "RequirementText",
    "ResultsError",
    "Run",
    "RunEnd",
    "RunHeader",
    "Setting",
    "SizeNotClaimed",
    "Table",
    "TestResult",
    "TooFewDevices",
    "TooFewHosts",
    "TooLittleMemory",
    "TorchLacks",
    "Tried",
    "WaiverEntry",
    "Writer",
    "cause_of",
    "foreign",
    "header",
    "merged",
    "parse",
    "read",
    "torch_version",
    "unsupported",
]
