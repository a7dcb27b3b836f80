"""Relate programs to claims, so that only programs are drawn whose needs the profile claims."""

from __future__ import annotations

from collections.abc import Sequence

from harness.profiles import Claims
from harness.profiles.obeyed import in_force
from harness.programs.options import dtypes_of
from harness.results import NoFittingSize, unsupported
from harness.specs.program import Program
from harness.stacks.registry import parted
from harness.stacks.stack import Stack


def claimed_dtypes(dtypes: Sequence[str]) -> tuple[str, ...]:
    """Return those of the dtypes that the profile in force claims for anything.

    The test is skipped as unsupported if none is left.
    """
    kept = in_force().claims.claimed_dtypes(dtypes)
    if not kept:
        unsupported(in_force().not_claimed(" or ".join(dtypes), dtypes))
    return tuple(kept)


def fitting_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return those of the world sizes that the test can have here.

    The test is skipped as unsupported if none is left.
    """
    kept = tuple(size for size in sizes if in_force().fits(size))
    if not kept:
        unsupported(NoFittingSize(tuple(sizes), in_force().sizes or ()))
    return kept


def offered(stack: Stack, option: str) -> bool:
    """Return whether the profile in force claims the feature that an option of a stack's layouts belongs to."""
    feature = stack.features.get(option)
    return feature is None or not in_force().claims.lacks_features(stack.name, [str(feature)])


def unclaimed(program: Program, claims: Claims) -> str:
    """Return what a program needs that is not claimed, in words; empty if all is claimed."""
    stack, _, options = parted(program.layout)
    used = sorted(name for name, value in options.items() if value and name in stack.features)
    features = dict.fromkeys([*(str(stack.features[name]) for name in used), *stack.claims(options)])
    stored = dtypes_of(program)
    dtypes = stored - set(claims.claimed_dtypes(sorted(stored)))
    return claims.lacks_features(stack.name, features) or ", ".join(sorted(dtypes))
