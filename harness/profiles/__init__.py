"""Profiles: what a backend claims on a device type, and which of its defects are known.

A profile is a TOML file (docs/profiles.md; JSON Schema: docs/schemas/profile.schema.json).  Nothing here imports torch
or reads the clock: callers pass the date and the platform of the run.
"""

from harness.profiles.defects import Defect, Defects
from harness.profiles.keys import DEFECT_KEYS, KEYS
from harness.profiles.model import (
    NEVER_RUN,
    UNREPORTED,
    Claims,
    Condition,
    Exclusion,
    Mistake,
    Platform,
    Profile,
    ProfileError,
    Tolerance,
    Waiver,
    pattern,
)
from harness.profiles.reading import Base, defects_among, is_of_defects, parse, parse_defects, read, text_of

__all__ = [
    "DEFECT_KEYS",
    "KEYS",
    "NEVER_RUN",
    "UNREPORTED",
    "Base",
    "Claims",
    "Condition",
    "Defect",
    "Defects",
    "Exclusion",
    "Mistake",
    "Platform",
    "Profile",
    "ProfileError",
    "Tolerance",
    "Waiver",
    "defects_among",
    "is_of_defects",
    "parse",
    "parse_defects",
    "pattern",
    "read",
    "text_of",
]
