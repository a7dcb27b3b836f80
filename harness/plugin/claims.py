"""What a test needs of a backend, and whether the profile claims it; decided before any rank starts.

The needs of a test follow from what it states already:

- the stack is the folder of its suite;
- the features are those to whose topics its requirement ids belong (:data:`harness.profiles.vocabulary.FEATURES`);
- the parameters ``collective``, ``dtype`` and ``op`` are what their names say; so are these three attributes of a
  parameter that has them all, such as a case or what is timed;
- the collective may also be the source of a requirement, as in ``torch.distributed.all_reduce``;
- the test states the rest itself: ``@pytest.mark.needs(collective=, dtype=, op=, features=, torch=)``. The collectives
  and features of several such marks add up.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from harness.profiles.needs import Needs
from harness.profiles.vocabulary import COLLECTIVES, FEATURES, OPS, REDUCING, features_of
from harness.requirements import Requirement, stack_of

_SOURCE = re.compile(r"torch\.distributed\.(\w+)(?![\w.,])")
_OF_TORCH = re.compile(r"(torch(?:\.\w+)+)(?:\((\w+)\))?")
MARK = "needs"


def needs(
    nodeid: str,
    parameters: Mapping[str, Any],
    requirements: Iterable[Requirement],
    said: Mapping[str, Any],
) -> Needs:
    """Return the needs of a test. ``said``: the arguments of its ``needs`` marks, as :func:`added_up`."""
    requirements = list(requirements)
    stack = stack_of(nodeid)
    from_source = [m[1] for r in requirements if (m := _SOURCE.match(r.source)) and m[1] in COLLECTIVES]
    parameters = with_case(parameters)
    collective, op = parameters.get("collective"), parameters.get("op")
    return Needs(
        stack=stack,
        collective=said.get("collective")
        or (collective if isinstance(collective, str) and collective in COLLECTIVES else "")
        or (from_source[0] if from_source else ""),
        dtype=said.get("dtype") or name_of(parameters.get("dtype")),
        op=said.get("op") or (op if isinstance(op, str) and op in OPS else ""),
        features=(*features_of(stack, [r.id for r in requirements]), *said.get("features", ())),
        torch=said.get("torch", ""),
        further=tuple(said.get("further", ())),
    )


def added_up(marks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the arguments of several marks say together; of two dtypes, ops or names of torch, the first.

    The first collective is ``collective``, and others are ``further``.
    """
    said: dict[str, Any] = {}
    collectives: dict[str, None] = {}
    features: dict[str, None] = {}
    for each in marks:
        said = {**each, **said}
        collectives.update(dict.fromkeys([each["collective"]] if "collective" in each else []))
        features.update(dict.fromkeys(each.get("features", ())))
    return {**said, "features": tuple(features), "further": tuple(collectives)[1:]}


def with_case(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a test's parameters, with the collective, dtype and op of the parameter that has these three."""
    case = next((p for p in parameters.values() if all(hasattr(p, n) for n in ("collective", "dtype", "op"))), None)
    if case is None:
        return parameters
    op = case.op if case.collective in REDUCING else ""
    return {"collective": case.collective, "dtype": case.dtype, "op": op, **parameters}


def name_of(dtype: object) -> str:
    """Return the name of a dtype, given as torch's or by its name; empty for anything else."""
    text = str(dtype)
    return text.removeprefix("torch.") if text.startswith("torch.") or isinstance(dtype, str) else ""


def needs_of(item: pytest.Item) -> Needs:
    """Return the needs of a test. Errors: UsageError for a ``needs`` mark with unknown arguments or values."""
    marks = list(item.iter_markers(MARK))
    for mark in marks:
        _check(item.nodeid, mark)
    requirements = [arg for mark in item.iter_markers("requirement") for arg in mark.args]
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params if callspec is not None else {}
    said = added_up(mark.kwargs for mark in marks)
    return needs(item.nodeid, parameters, [r for r in requirements if isinstance(r, Requirement)], said)


def torch_has(name: str) -> bool:
    """Return whether this PyTorch has a name (:attr:`Needs.torch`).  Imports its modules."""
    match = _OF_TORCH.fullmatch(name)
    if match is None:
        return False
    parts = match[1].split(".")
    value: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 1):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(parts[: number + 1]))
            except ImportError:
                return False
        value = getattr(value, part)
    return match[2] is None or match[2] in inspect.signature(value).parameters


def _check(nodeid: str, mark: pytest.Mark) -> None:
    known = {"collective": COLLECTIVES, "op": OPS, "dtype": None, "features": None, "torch": None}
    where = f"{nodeid}: @pytest.mark.{MARK}"
    if mark.args or (wrong := [key for key in mark.kwargs if key not in known]):
        what = f"argument {wrong[0]!r}" if not mark.args else "arguments without a name"
        raise pytest.UsageError(f"{where} has no {what}; it has {', '.join(known)}")
    for key, words in known.items():
        if words is not None and (value := mark.kwargs.get(key)) is not None and value not in words:
            raise pytest.UsageError(f"{where}: {key}={value!r}: one of {', '.join(words)}")
    if "torch" in mark.kwargs and not _OF_TORCH.fullmatch(name := str(mark.kwargs["torch"])):
        raise pytest.UsageError(f"{where}: torch={name!r}: a name of PyTorch's, as in torch.distributed.gather_single")
    stack = stack_of(nodeid)
    for name in mark.kwargs.get("features", ()):
        if stack in FEATURES and name not in FEATURES[stack]:
            raise pytest.UsageError(f"{where}: {name!r} is no feature of {stack}; it has {', '.join(FEATURES[stack])}")
