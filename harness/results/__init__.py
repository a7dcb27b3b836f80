"""Verdicts and evidence on disk: one JSON object a line, appended as tests end, so that a crash loses nothing.

The first line describes the run, each later one a test, and the last says that the run came to its end; a file
without that last line is a run that was cut off.  :data:`VERSION` counts up whenever a reader must change.

Version 2 has what a report needs: requirements, the profile's text and waivers, seed, suite hash, what was left out,
and a digest of the file in its last line.  Files of version 1 are read; they have none of it.

From version 4 on each attempt of a test is a record (:attr:`TestResult.attempt`): a plug-in that runs a failed test
again can't make it a passed one.  Readers merge them (:func:`merged`).  It says how the run was made as well: plug-ins
and files that were loaded.
"""

from __future__ import annotations

from harness.results.plugins import OWN_CONFTEST, foreign
from harness.results.reading import ResultsError, Run, merged, parse, read
from harness.results.records import (
    BAD,
    DEFAULT_SEED,
    ENDED_BADLY,
    FREE_SEED,
    NOT_CLAIMED,
    SCHEMA,
    UNSUPPORTED,
    VERDICTS,
    VERSION,
    Collected,
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
from harness.results.writing import Writer, header, torch_version

__all__ = [
    "BAD",
    "DEFAULT_SEED",
    "ENDED_BADLY",
    "FREE_SEED",
    "NOT_CLAIMED",
    "OWN_CONFTEST",
    "SCHEMA",
    "UNSUPPORTED",
    "VERDICTS",
    "VERSION",
    "Collected",
    "ProfileText",
    "RankEvidence",
    "Record",
    "Reproducer",
    "RequirementText",
    "ResultsError",
    "Run",
    "RunEnd",
    "RunHeader",
    "TestResult",
    "WaiverEntry",
    "Writer",
    "foreign",
    "header",
    "merged",
    "parse",
    "read",
    "torch_version",
]
