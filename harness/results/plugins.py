"""The distinction between plug-ins that belong to every run and foreign ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping

_KNOWN = ("concord-harness", "hypothesis", "pytest", "pytest-benchmark", "pytest-timeout", "pytest-xdist")
"""The distributions whose pytest plug-ins are part of every run."""
OWN_CONFTEST = ("a6fcb8a3173d922917c8c20b208740fb1520063a46e499434d6e01afacc4bf98",)
"""The SHA-256 of the ``conftest.py`` beside the suites, which loads Concord's plug-in and nothing else."""


def foreign(plugins: Mapping[str, str], suite: Collection[str] | None = None) -> dict[str, str]:
    """Select the plug-ins that belong neither to pytest, nor to Concord's dependencies, nor to the suites.

    They matter because a plug-in can turn any verdict into any other.
    ``plugins``: as in :class:`RunHeader`; ``suite``: the SHA-256 of each file of the suite.  If it is None, a
    ``conftest.py`` under ``suites/`` counts as one of the suites.
    """

    def is_ours(name: str, where: str) -> bool:
        if suite is None and name.startswith("suites/") and name.endswith("/conftest.py"):
            return True
        own = {*OWN_CONFTEST, *(suite or ())}
        return all(each.split(" ")[0] in _KNOWN or each in own for each in where.split(", "))

    return {name: where for name, where in plugins.items() if not is_ours(name, where)}
