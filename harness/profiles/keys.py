"""The keys of profiles: how their values are checked and converted, and their JSON Schema for editors."""

from __future__ import annotations

import datetime
import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from harness.profiles.model import UNREPORTED
from harness.profiles.vocabulary import BOUNDED, COLLECTIVES, DTYPES, FEATURES, OPS, STACKS, STARTS
from harness.redaction import has_credentials
from harness.results import ENDED_BADLY

_MOST_SECONDS = 86_400
_MOST_RANKS = 100_000
_MOST_BYTES = 1 << 40
_MOST_FACTOR = 1_000
_MOST_BANDWIDTH = 1_000_000

Schema = dict[str, Any]
"""The JSON Schema of a value."""


@dataclass(frozen=True)
class Key:
    """A key of a table."""

    convert: Callable[[Any], Any]
    """Check and convert a value.

    Errors: ValueError that says what the value should be; :class:`BadItem` for one entry of a table."""
    example: str
    about: str
    schema: Schema
    required: bool = False


class BadItem(ValueError):
    """A mistake in one entry of a table."""

    def __init__(self, item: str, what: str) -> None:
        super().__init__(what)
        self.item = item


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the known word that was probably meant; empty if none is similar."""
    by_folded = {name.lower(): name for name in reversed(list(known))}
    matches = difflib.get_close_matches(word.lower(), by_folded, 1) if isinstance(word, str) else []
    return by_folded[matches[0]] if matches else ""


def shown(value: Any) -> str:
    """Format a value for a message, shortened."""
    try:
        return reprlib.repr(value)
    except (ValueError, RecursionError):
        return "what is there"


def shown_key(name: str) -> str:
    """Format a key for a message, in quotes if it is not a plain word."""
    return name if re.fullmatch(r"[\w-]{1,60}", name) else shown(name)


# values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a text in quotes, not {shown(value)}")
    if not value.strip():
        raise ValueError("is empty")
    for character in value:
        if not character.isprintable():
            raise ValueError(f"a text on one line, without {character!r}")
    return value


def _word(value: Any) -> str:
    if " " in _text(value):
        raise ValueError(f"a name without spaces, not {shown(value)}")
    return _text(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_RANKS:
        raise ValueError(f"a whole number from 1, not {shown(value)}")
    return value


def _bytes(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 8 <= value <= _MOST_BYTES:
        raise ValueError(f"a whole number of bytes from 8, at most {_MOST_BYTES}, not {shown(value)}")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"true or false, without quotes, not {shown(value)}")
    return value


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MOST_SECONDS:
        raise ValueError(f"a number of seconds above 0, at most {_MOST_SECONDS}, not {shown(value)}")
    return float(value)


def _bandwidth(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MOST_BANDWIDTH:
        raise ValueError(f"a number of GB/s above 0, at most {_MOST_BANDWIDTH}, not {shown(value)}")
    return float(value)


def _factor(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 <= value <= _MOST_FACTOR:
        raise ValueError(f"a number from 1 to {_MOST_FACTOR}, not {shown(value)}")
    return float(value)


def _list_of(convert: Callable[[Any], Any], *, empty: bool = False) -> Callable[[Any], tuple[Any, ...]]:
    def converted(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ValueError(f"a list in brackets, not {shown(value)}")
        if not value and not empty:
            raise ValueError("is empty")
        items = tuple(convert(item) for item in value)
        seen = set()
        for item in items:
            if item in seen:
                raise ValueError(f"{shown(item)} is there twice")
            seen.add(item)
        return items

    return converted


def _one_of(known: Sequence[str], what: str) -> Callable[[Any], str]:
    def converted(value: Any) -> str:
        if isinstance(value, str) and value in known:
            return value
        near = nearest(value, known)
        hint = f"did you mean {near}?" if near else f"write some of {', '.join(known)}"
        raise ValueError(f"{shown(value)} is not {what}; {hint}")

    return converted


def _environment(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise ValueError(f"a table of names and values, begun with [env], not {shown(value)}")
    for name, content in value.items():
        if not name or "=" in name or not name.isprintable():
            raise BadItem(name, "not the name of an environment variable")
        if not isinstance(content, str) or "\0" in content:
            raise BadItem(name, f"a text in quotes, not {shown(content)}")
        if has_credentials(name, content):
            raise BadItem(name, "a credential, and profiles are published: set it where pytest runs, ranks inherit it")
    return tuple(sorted(value.items()))


def _variable(value: Any) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", _text(value)):
        raise ValueError(f"the name of an environment variable, not {shown(value)}")
    return _text(value)


def _name(value: Any) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,79}", _text(value), re.ASCII):
        raise ValueError(f"a name of letters, digits, '_', '-' and '.', not {shown(value)}")
    return _text(value)


def _defect(value: Any) -> str:
    if not re.fullmatch(r"[^/ ]+(/[^/ ]+)?", _text(value)):
        raise ValueError(f'an owner, or a single defect as "owner/id", not {shown(value)}')
    return _text(value)


def _some_or_others(value: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = _list_of(_word)(value)
    left_out = [name for name in names if name.startswith("!")]
    if "!" in names:
        raise ValueError("a name after every !")
    if left_out and len(left_out) < len(names):
        raise ValueError("either names, or names after a !, which are left out; not both")
    return names


def _module(value: Any) -> str:
    if not all(part.isidentifier() for part in _text(value).split(".")):
        raise ValueError(f"the name of a module, not {shown(value)}")
    return _text(value)


def _link(value: Any) -> str:
    if _text(value) != UNREPORTED and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        raise ValueError(f'a URL, or "{UNREPORTED}", not {shown(value)}')
    if re.match(r"https?://[^/?#]*@", value):
        raise ValueError("it has a credential in it, and profiles are published")
    return _text(value)


def _date(value: Any) -> datetime.date:
    if type(value) is not datetime.date:
        raise ValueError(f"a date without quotes and without a time, as in 2027-06-30, not {shown(value)}")
    return value


def _now_and_then(value: Any) -> tuple[str, ...]:
    verdicts: tuple[str, ...] = _list_of(_one_of(("passed", *ENDED_BADLY), "a verdict that it can cover"))(value)
    if "passed" not in verdicts:
        raise ValueError("without passed: a test that never passes has a [[waiver]]")
    if len(verdicts) == 1:
        raise ValueError(f"passed alone: name what it comes to now and then ({', '.join(ENDED_BADLY)})")
    return verdicts


def _versions(value: Any) -> str:
    try:
        SpecifierSet(_text(value))
    except InvalidSpecifier:
        raise ValueError(f'a condition on versions, as in ">=2.11,<2.14", not {shown(value)}') from None
    return _text(value)


def _globs(value: Any) -> tuple[str, ...]:
    return _list_of(_text)([value] if isinstance(value, str) else value)


# schemas for editors

_TEXT: Schema = {"type": "string", "pattern": r"\S"}
_WORD: Schema = {"type": "string", "pattern": r"^\S+$"}
_WHOLE: Schema = {"type": "integer", "minimum": 1, "maximum": _MOST_RANKS}
_BOOLEAN: Schema = {"type": "boolean"}
_VARIABLES: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_GLOBS: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "uniqueItems": True}]}


def _items(schema: Schema, *, empty: bool = False) -> Schema:
    return {"type": "array", "items": schema, "uniqueItems": True, **({} if empty else {"minItems": 1})}


def _words(known: Sequence[str], what: str, example: str, about: str, *, empty: bool = False) -> Key:
    """Return a key for a list of known words."""
    schema = _items({"enum": list(known)}, empty=empty)
    return Key(_list_of(_one_of(known, what), empty=empty), example, about, schema)


# tables

_CONDITION = {
    "torch": Key(_versions, '">=2.11,<2.14"', "Versions of torch for which it counts.", _TEXT),
    "python": Key(_versions, '">=3.11,<3.14"', "Versions of Python for which it counts.", _TEXT),
    "machine": Key(_globs, '"aarch64"', "Machines for which it counts, as uname -m names them.", _GLOBS),
    "os": Key(_globs, '"Linux 6.*"', "Systems for which it counts: name and release.", _GLOBS),
    "device_name": Key(_globs, '"NVIDIA H100*"', "Devices for which it counts, as torch names them.", _GLOBS),
}
CONDITION = tuple(_CONDITION)
"""Keys that say where an entry applies."""

_REASON = Key(_text, '"what is wrong"', "What is wrong, on one line.", _TEXT, required=True)
_COLLECTIVES = _words(COLLECTIVES, "a collective", '["all_reduce"]', "Collectives.")
_DTYPES = _words(DTYPES, "a dtype", '["float32"]', "Dtypes, as torch names them.")
_OPS = _words(OPS, "a reduction", '["SUM"]', "Reductions, as ReduceOp names them.")

HEAD: Mapping[str, Key] = {
    "name": Key(_word, '"my-profile"', "What reports call it; a shipped file has the same name.", _WORD, required=True),
    "backend": Key(_word, '"my_backend"', "As init_process_group takes it.", _WORD, required=True),
    "device": Key(_word, '"cpu"', "Type of device, as torch names it.", _WORD, required=True),
    "about": Key(_text, '"who made it, for what"', "A line about the backend, for people.", _TEXT),
    "world_sizes": Key(_list_of(_whole), "[1, 2, 4]", "Numbers of ranks that are claimed.", _items(_WHOLE)),
    "ranks_per_device": Key(_whole, "1", "How many ranks may share an accelerator.", _WHOLE),
    "warm": Key(_boolean, "true", "Whether worlds are used again by other tests.", _BOOLEAN),
    "start": Key(_one_of(STARTS, "a way to start ranks"), '"spawn"', "How ranks begin.", {"enum": list(STARTS)}),
    "bind_device": Key(_boolean, "true", "Whether init_process_group gets the rank's device.", _BOOLEAN),
    "timeout": Key(
        _seconds,
        "60",
        "Seconds for one run on ranks.",
        {"type": "number", "exclusiveMinimum": 0, "maximum": _MOST_SECONDS},
    ),
    "largest_message": Key(
        _bytes,
        "67_108_864",
        "The largest message that benchmarks send, in bytes.",
        {"type": "integer", "minimum": 8, "maximum": _MOST_BYTES},
    ),
    "benchmark_world_sizes": Key(
        _list_of(_whole), "[2, 8]", "Numbers of ranks on which benchmarks are measured.", _items(_WHOLE)
    ),
    "link_bandwidth": Key(
        _bandwidth,
        "450.0",
        "What a rank's link to the others can carry in one direction, in GB/s (10^9 bytes).",
        {"type": "number", "exclusiveMinimum": 0, "maximum": _MOST_BANDWIDTH},
    ),
    "imports": Key(
        _list_of(_module),
        '["my_backend"]',
        "Modules that ranks import first, because they register the backend or the device.",
        _items({"type": "string", "pattern": r"^\w+(\.\w+)*$"}),
    ),
    "env": Key(_environment, '{ NAME = "value" }', "Environment variables of ranks.", _VARIABLES),
    "shared_device_env": Key(
        _environment,
        '{ NAME = "host-{rank}" }',
        "Further environment variables of ranks that share a device with another rank; {rank} is the rank's number.",
        _VARIABLES,
    ),
    "visible_devices": Key(
        _variable, '"MY_VISIBLE_DEVICES"', "The environment variable that masks devices.", {"type": "string"}
    ),
    "torch_build": Key(_word, '"my_platform"', "What torch.version must name for it to be chosen.", _WORD),
    "never_run": Key(_boolean, "true", "Whether its author has never run it on such a device.", _BOOLEAN),
    "stacks": _words(STACKS, "a stack", '["collectives"]', "Stacks that are claimed."),
    "inherits": Key(_word, '"other-profile"', "A profile whose values count where this one has none.", _WORD),
    "inherit_waivers": Key(
        _list_of(_text, empty=True),
        '["suites/replicate/*"]',
        "Which waivers are inherited: those of test globs that match one of these globs. All by default.",
        _items(_TEXT, empty=True),
    ),
}

COLLECTIVES_TABLE: Mapping[str, Key] = {"names": _COLLECTIVES, "dtypes": _DTYPES, "ops": _OPS}
EXCLUSION: Mapping[str, Key] = {
    "collectives": _COLLECTIVES,
    "dtypes": _DTYPES,
    "ops": _OPS,
    "reason": Key(_text, '"why"', "Why it is not claimed.", _TEXT, required=True),
    **_CONDITION,
}
FEATURES_TABLE: Mapping[str, Key] = {
    stack: _words(tuple(known), f"a feature of {stack}", f'["{next(iter(known))}"]', f"Of {stack}.", empty=True)
    for stack, known in FEATURES.items()
}
TOLERANCE: Mapping[str, Key] = {
    "factor": Key(
        _factor,
        "2.0",
        "How many times the bound from rounding is allowed.",
        {"type": "number", "minimum": 1, "maximum": _MOST_FACTOR},
        required=True,
    ),
    "reason": Key(_text, '"it adds up in bfloat16"', "Why.", _TEXT, required=True),
    **_CONDITION,
}
WAIVER: Mapping[str, Key] = {
    "tests": Key(
        _list_of(_text),
        '["suites/collectives/test_x.py::test_y*"]',
        "Globs on whole node ids.",
        _items(_TEXT),
        required=True,
    ),
    "reason": _REASON,
    "link": Key(
        _link,
        f'"{UNREPORTED}"',
        f'URL of the report, or "{UNREPORTED}".',
        {"type": "string", "pattern": rf"^(https?://[^\s/]+(/\S*)?|{UNREPORTED})$"},
        required=True,
    ),
    "expires": Key(
        _date,
        "2027-06-30",
        "The last day on which it counts (UTC).",
        {"type": "string", "format": "date"},
        required=True,
    ),
    "verdicts": _words(ENDED_BADLY, "a verdict that it can cover", '["failed"]', "Bad verdicts that it covers."),
    "shows": Key(
        _list_of(_text), '["no such member"]', "Texts of which a failure that it covers has one.", _items(_TEXT)
    ),
    "subjects": Key(
        _list_of(_word), '["torch", "reference"]', "Whose implementations of the stacks it is about.", _items(_WORD)
    ),
    **_CONDITION,
}
INTERMITTENT: Mapping[str, Key] = {
    **WAIVER,
    "verdicts": Key(
        _now_and_then,
        '["passed", "failed"]',
        "Verdicts that it may come to, passed among them.",
        _items({"enum": ["passed", *ENDED_BADLY]}),
        required=True,
    ),
}

_DEFECTS: Schema = _items({"type": "string", "pattern": r"^[^/ ]+(/[^/ ]+)?$"}, empty=True)
DEFECTS_TABLE: Mapping[str, Key] = {
    "with": Key(
        _list_of(_defect, empty=True),
        '["gloo"]',
        "Owners, or single defects as owner/id, that count here whatever their backends and devices are.",
        _DEFECTS,
    ),
    "without": Key(
        _list_of(_defect, empty=True),
        '["pytorch/tp_import"]',
        "Owners, or single defects as owner/id, that do not count here.",
        _DEFECTS,
    ),
    "keep": Key(
        _list_of(_name, empty=True),
        '["gloo"]',
        "Owners of which a defect that does not show fails the run. It is not inherited.",
        _items(_WORD, empty=True),
    ),
}

LISTS = ("waiver", "intermittent")
"""Lists of tables at the top level."""
TABLES = ("collectives", "features", "tolerance", "defects")
"""Tables at the top level that have keys of their own."""

# files of defects

_BACKENDS = Key(
    _some_or_others, '["gloo"]', "Backends on which it shows, or after a ! those on which it does not.", _items(_WORD)
)
OWNER: Mapping[str, Key] = {
    "owner": Key(_name, '"my-package"', "Who owns the defects; its file has the same name.", _WORD, required=True),
    "about": Key(_text, '"what it is"', "A line about the owner, for people.", _TEXT),
    "backends": _BACKENDS,
}
DEFECT: Mapping[str, Key] = {
    "id": Key(
        _name, '"what_is_wrong"', "Its name, which stays; that of its script, if it has one.", _WORD, required=True
    ),
    **WAIVER,
    "intermittent": Key(_boolean, "true", "Whether tests end badly only now and then.", {"type": "boolean"}),
    "backends": _BACKENDS,
    "devices": Key(
        _some_or_others, '["cpu"]', "Types of devices on which it shows, or after a ! the others.", _items(_WORD)
    ),
}
DEFECT_NOW_AND_THEN: Mapping[str, Key] = {**DEFECT, "verdicts": INTERMITTENT["verdicts"]}
DEFECT_LIST = "defect"
"""The list of tables of a file of defects."""

KEYS: Mapping[str, tuple[str, ...]] = {
    "": (*HEAD, *TABLES, *LISTS),
    "collectives": (*COLLECTIVES_TABLE, "except"),
    "collectives.except": tuple(EXCLUSION),
    "features": tuple(FEATURES_TABLE),
    "tolerance": BOUNDED,
    "tolerance.DTYPE": tuple(TOLERANCE),
    "waiver": tuple(WAIVER),
    "intermittent": tuple(INTERMITTENT),
    "defects": tuple(DEFECTS_TABLE),
}
"""Every key that a profile can have, by table."""
DEFECT_KEYS: Mapping[str, tuple[str, ...]] = {"": (*OWNER, DEFECT_LIST), DEFECT_LIST: tuple(DEFECT)}
"""Every key that a file of defects can have, by table."""
