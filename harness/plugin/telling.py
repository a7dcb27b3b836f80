"""``-p harness.plugin.telling --suite-facts FILE``: writes down what the suite says of every test that is collected.

No part of the plug-in that every session loads: only the process that collects a checkout has it.
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
    parser.addoption(_OPTION, metavar="FILE", help="Write what the suite says of every collected test to this file.")


def pytest_collection_finish(session: pytest.Session) -> None:
    file = session.config.getoption("suite_facts")
    if file:
        Path(file).write_bytes(encode(facts_of(session.items)))


def facts_of(items: list[pytest.Item]) -> SuiteFacts:
    """What is known of tests that have been collected."""
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
    """By function of a file, the strings in it that are reasons of a skip."""
    if path.suffix != ".py":
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef):
            constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            reasons = [text for text in constants if isinstance(text, str) and text.startswith(UNSUPPORTED)]
            found[node.name] = (*found.get(node.name, ()), *dict.fromkeys(reasons))
    return found
