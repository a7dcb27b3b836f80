"""Programs and claims: what a program needs of a backend, so that none is drawn that the profile does not claim."""

from __future__ import annotations

from collections.abc import Sequence

from harness.profiles import Claims
from harness.profiles.obeyed import in_force
from harness.programs.spec import Program

_FEATURES = {
    ("replicate", "static_graph"): "static_graph",
    ("replicate", "hook"): "comm_hooks",
    ("replicate", "find_unused_parameters"): "unused_parameters",
    ("replicate_fsdp", "param_dtype"): "mixed_precision",
    ("replicate_fsdp", "reduce_dtype"): "mixed_precision",
    ("replicate_fsdp", "output_dtype"): "mixed_precision",
}
"""By stack and option of a layout, the feature that it is."""


def claimed_dtypes(dtypes: Sequence[str]) -> tuple[str, ...]:
    """Of some dtypes, those that the profile in force claims for anything.

    A test is unsupported where none is left.
    """
    kept = in_force().claims.claimed_dtypes(dtypes)
    if not kept:
        import pytest

        pytest.skip(f"unsupported: {in_force().why_not(' or '.join(dtypes))}")
    return tuple(kept)


def offered(stack: str, option: str) -> bool:
    """Whether the profile in force claims the feature that an option of a stack's layouts is."""
    return not in_force().claims.lacks_features(stack, [_FEATURES[stack, option]])


def unclaimed(program: Program, claims: Claims) -> str:
    """What of a program is not claimed, in words; empty if all is."""
    under = program.layout.under
    options = {name for name, value in program.layout.options if value}
    features = dict.fromkeys(_FEATURES[under, name] for name in sorted(options) if (under, name) in _FEATURES)
    if under == "tp_extension" and dict(program.layout.options).get("strategy") == "HYBRID_SHARD":
        features["hybrid"] = None
    dtypes = set(program.dtypes) - set(claims.claimed_dtypes(sorted(program.dtypes)))
    return claims.lacks_features(under, features) or ", ".join(sorted(dtypes))
