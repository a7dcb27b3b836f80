"""``-p harness.plugin.telling --suite-facts FILE``: write the facts about every collected test to a file.

This is not part of the plug-in that every session loads. Only the process that collects a checkout loads it.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest

from harness.plugin.claims import needs_of
from harness.plugin.facts import dtype_of, requirements_of
from harness.plugin.seeds import MARKER
from harness.plugin.worlds import request_of
from harness.results import UNSUPPORTED, RequirementText
from harness.suite_facts import SuiteFacts, TestFacts, encode

_OPTION = "--suite-facts"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, metavar="FILE", help="Write the facts about every collected test to this file.")


def pytest_collection_finish(session: pytest.Session) -> None:
    file = session.config.getoption("suite_facts")
    if file:
        Path(file).write_bytes(encode(facts_of(session.items)))


def facts_of(items: list[pytest.Item]) -> SuiteFacts:
    """Return the facts about collected tests."""
    requirements: dict[str, RequirementText] = {}
    tests: dict[str, TestFacts] = {}
    for item in items:
        proves = requirements_of(item)
        for each in proves:
            requirements.setdefault(each.id, each)
        asked = request_of(item)
        tests[item.nodeid] = TestFacts(
            requirements=[each.id for each in proves],
            size=asked.size if asked is not None else 0,
            dtype=dtype_of(getattr(getattr(item, "callspec", None), "params", {})),
            property_based=item.get_closest_marker(MARKER) is not None,
            backend=(asked.mark.backend or "") if asked is not None else "",
            device=(asked.mark.device or "") if asked is not None else "",
            needs=needs_of(item),
            skips=_skips(item),
        )
    return SuiteFacts(tests=tests, requirements=requirements)


def _skips(item: pytest.Item) -> list[str]:
    name: Any = getattr(item, "originalname", None) or item.name
    return list(_reasons(item.path).get(name, ()))


@functools.cache
def _reasons(path: Path) -> dict[str, tuple[str, ...]]:
    """Return, by function of a file, the strings in it that are reasons of unsupported skips."""
    if path.suffix != ".py":
        return {}
    by_function: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef):
            constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            reasons = [text for text in constants if isinstance(text, str) and text.startswith(UNSUPPORTED)]
            by_function[node.name] = (*by_function.get(node.name, ()), *dict.fromkeys(reasons))
    return by_function
