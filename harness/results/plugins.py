"""Which of the plug-ins that a run recorded belong to every run, and which are foreign."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_KNOWN = ("concord-harness", "hypothesis", "pytest", "pytest-benchmark", "pytest-timeout", "pytest-xdist")
"""Distributions whose pytest plug-ins are a part of every run."""
OWN_CONFTEST = ("a6fcb8a3173d922917c8c20b208740fb1520063a46e499434d6e01afacc4bf98",)
"""SHA-256 of the ``conftest.py`` beside the suites, which loads Concord's plug-in and nothing else."""


def foreign(plugins: Mapping[str, str], suite: Collection[str] | None = None) -> dict[str, str]:
    """The plug-ins that are neither pytest's, nor of what Concord stands on, nor of the suites.

    ``plugins``: as in :class:`RunHeader`; ``suite``: SHA-256 of each file of the suite, where they are known; else a
    ``conftest.py`` of the suites is one by its name.  A plug-in can turn any verdict into any other.
    """

    def is_ours(name: str, where: str) -> bool:
        if suite is None and name.startswith("suites/") and name.endswith("/conftest.py"):
            return True
        own = {*OWN_CONFTEST, *(suite or ())}
        return all(each.split(" ")[0] in _KNOWN or each in own for each in where.split(", "))

    return {name: where for name, where in plugins.items() if not is_ours(name, where)}
