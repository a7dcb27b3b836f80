"""Profiles: what a backend claims on a type of device, and which of its defects are known.

A TOML file (docs/profiles.md; JSON Schema: docs/schemas/profile.schema.json).  Nothing in here imports torch, and
nothing asks for the time: whoever uses a profile says what day it is and what the run is on.
"""

from harness.profiles.keys import KEYS
from harness.profiles.model import (
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
from harness.profiles.reading import Base, parse, read, text_of

__all__ = [
    "KEYS",
    "UNREPORTED",
    "Base",
    "Claims",
    "Condition",
    "Exclusion",
    "Mistake",
    "Platform",
    "Profile",
    "ProfileError",
    "Tolerance",
    "Waiver",
    "parse",
    "pattern",
    "read",
    "text_of",
]
