"""``-p harness.plugin.suite_facts --suite-facts FILE``: write the facts about every collected test to a file.

This is not part of the plug-in that every session loads. Only the process that collects a checkout loads it.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.plugin.claims import needs_of
from harness.plugin.facts import dtype_of, plain, requirements_of
from harness.plugin.seeds import MARKER
from harness.plugin.worlds import request_of
from harness.results import CAUSES, UNSUPPORTED, Cause, RequirementText, TorchLacks
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
        gives, needs = _gives(item), needs_of(item)
        tests[item.nodeid] = TestFacts(
            requirements=[each.id for each in proves],
            size=asked.size if asked is not None else 0,
            sizes=sorted(asked.mark.sizes) if asked is not None and asked.several else [],
            dtype=dtype_of(getattr(getattr(item, "callspec", None), "params", {})),
            property_based=item.get_closest_marker(MARKER) is not None,
            backend=(asked.mark.backend or "") if asked is not None else "",
            device=(asked.mark.device or "") if asked is not None else "",
            hosts=(asked.mark.hosts or 0) if asked is not None else 0,
            needs=needs,
            causes=[*gives.causes, *([TorchLacks(needs.torch)] if needs.torch else [])],
            skips=list(gives.reasons),
        )
    return SuiteFacts(tests=tests, requirements=requirements)


@dataclass(frozen=True)
class _Gives:
    """The causes, and the reasons without a cause, with which a test may skip itself as unsupported."""

    causes: tuple[Cause, ...] = ()
    reasons: tuple[str, ...] = ()


def _gives(item: pytest.Item) -> _Gives:
    name: Any = getattr(item, "originalname", None) or item.name
    return _by_function(item.path).get(name, _Gives())


@functools.cache
def _by_function(path: Path) -> dict[str, _Gives]:
    """Return, by function of a file, the causes in it whose arguments are literals, and the reasons of plain skips."""
    if path.suffix != ".py":
        return {}
    found: dict[str, _Gives] = {}
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef):
            before = found.get(node.name, _Gives())
            causes = [cause for part in ast.walk(node) if (cause := _cause(part)) is not None]
            constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            reasons = [text for text in constants if isinstance(text, str) and text.startswith(UNSUPPORTED)]
            found[node.name] = _Gives(
                tuple(dict.fromkeys((*before.causes, *causes))), tuple(dict.fromkeys((*before.reasons, *reasons)))
            )
    return found


def _cause(node: ast.AST) -> Cause | None:
    """Return the cause that an expression creates from literals; None for any other expression."""
    if not isinstance(node, ast.Call):
        return None
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    for kind in CAUSES:
        if kind.__name__ == called:
            try:
                arguments = [ast.literal_eval(each) for each in node.args]
                named = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
                return msgspec.convert(plain(kind(*arguments, **named)), kind)  # checks the types of its fields
            except (ValueError, TypeError):
                return None
    return None
