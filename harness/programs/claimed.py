"""Programs and claims: what a program needs of a backend, so that none is drawn that the profile does not claim."""

from __future__ import annotations

from collections.abc import Sequence

from harness.profiles import Claims
from harness.profiles.obeyed import in_force
from harness.programs.options import dtypes_of
from harness.specs.program import Program
from harness.stacks.registry import parted
from harness.stacks.stack import Stack


def claimed_dtypes(dtypes: Sequence[str]) -> tuple[str, ...]:
    """Of some dtypes, those that the profile in force claims for anything.

    A test is unsupported where none is left.
    """
    kept = in_force().claims.claimed_dtypes(dtypes)
    if not kept:
        import pytest

        pytest.skip(f"unsupported: {in_force().why_not(' or '.join(dtypes))}")
    return tuple(kept)


def offered(stack: Stack, option: str) -> bool:
    """Whether the profile in force claims the feature that an option of a stack's layouts is."""
    feature = stack.features.get(option)
    return feature is None or not in_force().claims.lacks_features(stack.name, [str(feature)])


def unclaimed(program: Program, claims: Claims) -> str:
    """What of a program is not claimed, in words; empty if all is."""
    stack, _, options = parted(program.layout)
    used = sorted(name for name, value in options.items() if value and name in stack.features)
    features = dict.fromkeys([*(str(stack.features[name]) for name in used), *stack.claims(options)])
    stored = dtypes_of(program)
    dtypes = stored - set(claims.claimed_dtypes(sorted(stored)))
    return claims.lacks_features(stack.name, features) or ", ".join(sorted(dtypes))
