"""The keys of profiles: how their values are checked and converted, and their JSON Schema for editors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.profiles import values
from harness.profiles.model import UNREPORTED
from harness.profiles.vocabulary import BOUNDED, COLLECTIVES, DTYPES, FEATURES, KINDS, OPS, STACKS, STARTS
from harness.results import ENDED_BADLY

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


# schemas for editors

_TEXT: Schema = {"type": "string", "pattern": r"\S"}
_WORD: Schema = {"type": "string", "pattern": r"^\S+$"}
_WHOLE: Schema = {"type": "integer", "minimum": 1, "maximum": values.MOST_RANKS}
_BOOLEAN: Schema = {"type": "boolean"}
_VARIABLES: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_GLOBS: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "uniqueItems": True}]}


def _items(schema: Schema, *, empty: bool = False) -> Schema:
    return {"type": "array", "items": schema, "uniqueItems": True, **({} if empty else {"minItems": 1})}


def _words(known: Sequence[str], what: str, example: str, about: str, *, empty: bool = False) -> Key:
    """Return a key for a list of known words."""
    schema = _items({"enum": list(known)}, empty=empty)
    return Key(values.list_of(values.one_of(known, what), empty=empty), example, about, schema)


# tables

_CONDITION = {
    "torch": Key(values.versions, '">=2.11,<2.14"', "Versions of torch for which it counts.", _TEXT),
    "python": Key(values.versions, '">=3.11,<3.14"', "Versions of Python for which it counts.", _TEXT),
    "machine": Key(values.globs, '"aarch64"', "Machines for which it counts, as uname -m names them.", _GLOBS),
    "os": Key(values.globs, '"Linux 6.*"', "Systems for which it counts: name and release.", _GLOBS),
    "device_name": Key(values.globs, '"NVIDIA H100*"', "Devices for which it counts, as torch names them.", _GLOBS),
}
CONDITION = tuple(_CONDITION)
"""Keys that say where an entry applies."""

_REASON = Key(values.text, '"what is wrong"', "What is wrong, on one line.", _TEXT, required=True)
_COLLECTIVES = _words(COLLECTIVES, "a collective", '["all_reduce"]', "Collectives.")
_DTYPES = _words(DTYPES, "a dtype", '["float32"]', "Dtypes, as torch names them.")
_OPS = _words(OPS, "a reduction", '["SUM"]', "Reductions, as ReduceOp names them.")

HEAD: Mapping[str, Key] = {
    "name": Key(
        values.word, '"my-profile"', "What reports call it; a shipped file has the same name.", _WORD, required=True
    ),
    "backend": Key(values.word, '"my_backend"', "As init_process_group takes it.", _WORD, required=True),
    "device": Key(values.word, '"cpu"', "Type of device, as torch names it.", _WORD, required=True),
    "about": Key(values.text, '"who made it, for what"', "A line about the backend, for people.", _TEXT),
    "world_sizes": Key(values.list_of(values.whole), "[1, 2, 4]", "Numbers of ranks that are claimed.", _items(_WHOLE)),
    "ranks_per_device": Key(values.whole, "1", "How many ranks may share an accelerator.", _WHOLE),
    "warm": Key(values.boolean, "true", "Whether worlds are used again by other tests.", _BOOLEAN),
    "start": Key(values.one_of(STARTS, "a way to start ranks"), '"spawn"', "How ranks begin.", {"enum": list(STARTS)}),
    "bind_device": Key(values.boolean, "true", "Whether init_process_group gets the rank's device.", _BOOLEAN),
    "timeout": Key(
        values.number_of("seconds", values.MOST_SECONDS),
        "60",
        "Seconds for one run on ranks.",
        {"type": "number", "exclusiveMinimum": 0, "maximum": values.MOST_SECONDS},
    ),
    "largest_message": Key(
        values.size_in_bytes,
        "67_108_864",
        "The largest message that benchmarks send, in bytes.",
        {"type": "integer", "minimum": 8, "maximum": values.MOST_BYTES},
    ),
    "benchmark_world_sizes": Key(
        values.list_of(values.whole), "[2, 8]", "Numbers of ranks on which benchmarks are measured.", _items(_WHOLE)
    ),
    "link_bandwidth": Key(
        values.number_of("GB/s", values.MOST_BANDWIDTH),
        "450.0",
        "What a rank's link to the others can carry in one direction, in GB/s (10^9 bytes).",
        {"type": "number", "exclusiveMinimum": 0, "maximum": values.MOST_BANDWIDTH},
    ),
    "imports": Key(
        values.list_of(values.module),
        '["my_backend"]',
        "Modules that ranks import first, because they register the backend or the device.",
        _items({"type": "string", "pattern": r"^\w+(\.\w+)*$"}),
    ),
    "env": Key(values.environment, '{ NAME = "value" }', "Environment variables of ranks.", _VARIABLES),
    "shared_device_env": Key(
        values.environment,
        '{ NAME = "host-{rank}" }',
        "Further environment variables of ranks that share a device with another rank; {rank} is the rank's number.",
        _VARIABLES,
    ),
    "visible_devices": Key(
        values.variable, '"MY_VISIBLE_DEVICES"', "The environment variable that masks devices.", {"type": "string"}
    ),
    "torch_build": Key(values.word, '"my_platform"', "What torch.version must name for it to be chosen.", _WORD),
    "never_run": Key(values.boolean, "true", "Whether its author has never run it on such a device.", _BOOLEAN),
    "stacks": _words(STACKS, "a stack", '["collectives"]', "Stacks that are claimed."),
    "inherits": Key(values.word, '"other-profile"', "A profile whose values count where this one has none.", _WORD),
    "inherit_waivers": Key(
        values.list_of(values.text, empty=True),
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
    "reason": Key(values.text, '"why"', "Why it is not claimed.", _TEXT, required=True),
    **_CONDITION,
}
FEATURES_TABLE: Mapping[str, Key] = {
    stack: _words(tuple(known), f"a feature of {stack}", f'["{next(iter(known))}"]', f"Of {stack}.", empty=True)
    for stack, known in FEATURES.items()
}
TOLERANCE: Mapping[str, Key] = {
    "factor": Key(
        values.factor,
        "2.0",
        "How many times the bound from rounding is allowed.",
        {"type": "number", "minimum": 1, "maximum": values.MOST_FACTOR},
        required=True,
    ),
    "reason": Key(values.text, '"it adds up in bfloat16"', "Why.", _TEXT, required=True),
    **_CONDITION,
}
WAIVER: Mapping[str, Key] = {
    "tests": Key(
        values.list_of(values.text),
        '["suites/collectives/test_x.py::test_y*"]',
        "Globs on whole node ids.",
        _items(_TEXT),
        required=True,
    ),
    "reason": _REASON,
    "link": Key(
        values.link,
        f'"{UNREPORTED}"',
        f'URL of the report, or "{UNREPORTED}".',
        {"type": "string", "pattern": rf"^(https?://[^\s/]+(/\S*)?|{UNREPORTED})$"},
        required=True,
    ),
    "expires": Key(
        values.date,
        "2027-06-30",
        "The last day on which it counts (UTC).",
        {"type": "string", "format": "date"},
        required=True,
    ),
    "verdicts": _words(ENDED_BADLY, "a verdict that it can cover", '["failed"]', "Bad verdicts that it covers."),
    "shows": Key(
        values.list_of(values.text),
        '["no such member"]',
        "Texts of which a failure that it covers has one.",
        _items(_TEXT),
    ),
    "subjects": Key(
        values.list_of(values.word),
        '["torch", "reference"]',
        "Whose implementations of the stacks it is about.",
        _items(_WORD),
    ),
    **_CONDITION,
}
INTERMITTENT: Mapping[str, Key] = {
    **WAIVER,
    "verdicts": Key(
        values.now_and_then,
        '["passed", "failed"]',
        "Verdicts that it may come to, passed among them.",
        _items({"enum": ["passed", *ENDED_BADLY]}),
        required=True,
    ),
}

_DEFECTS: Schema = _items({"type": "string", "pattern": r"^[^/ ]+(/[^/ ]+)?$"}, empty=True)
DEFECTS_TABLE: Mapping[str, Key] = {
    "with": Key(
        values.list_of(values.defect, empty=True),
        '["gloo"]',
        "Owners, or single defects as owner/id, that count here whatever their backends and devices are.",
        _DEFECTS,
    ),
    "without": Key(
        values.list_of(values.defect, empty=True),
        '["pytorch/tp_import"]',
        "Owners, or single defects as owner/id, that do not count here.",
        _DEFECTS,
    ),
    "keep": Key(
        values.list_of(values.name, empty=True),
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
    values.some_or_others,
    '["gloo"]',
    "Backends on which it shows, or after a ! those on which it does not.",
    _items(_WORD),
)
OWNER: Mapping[str, Key] = {
    "owner": Key(
        values.name, '"my-package"', "Who owns the defects; its file has the same name.", _WORD, required=True
    ),
    "about": Key(values.text, '"what it is"', "A line about the owner, for people.", _TEXT),
    "backends": _BACKENDS,
}
DEFECT: Mapping[str, Key] = {
    "id": Key(
        values.name,
        '"what_is_wrong"',
        "Its name, which stays; that of its script, if it has one.",
        _WORD,
        required=True,
    ),
    **WAIVER,
    "kind": Key(
        values.one_of(tuple(KINDS), "a kind of defect"),
        '"wrong"',
        f"What it does to users: {'; '.join(f'{kind}: {meaning}' for kind, meaning in KINDS.items())}.",
        {"enum": list(KINDS)},
    ),
    "intermittent": Key(values.boolean, "true", "Whether tests end badly only now and then.", {"type": "boolean"}),
    "backends": _BACKENDS,
    "devices": Key(
        values.some_or_others, '["cpu"]', "Types of devices on which it shows, or after a ! the others.", _items(_WORD)
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
