"""The JSON Schemas of profiles and of files of defects, made from the reader's keys, for editors to complete and check.

``python -m harness.profiles.schema`` prints that of profiles for ``docs/schemas/profile.schema.json``, and with the
argument ``defects`` that of defects for ``docs/schemas/defects.schema.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from harness.profiles import keys
from harness.profiles.keys import Key, Schema
from harness.profiles.vocabulary import BOUNDED, FEATURES

ABOUT_DEFECTS = "Known defects of one owner: PyTorch, a backend or a package (docs/profiles.md)."
ABOUT = "What a backend claims on a type of device, and which of its defects are known (docs/profiles.md)."


def schema() -> Schema:
    """Return the schema, in draft 2020-12."""
    head = {name: _value(key) for name, key in keys.HEAD.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A profile of Concord",
        "description": ABOUT,
        "type": "object",
        "properties": {
            **head,
            "collectives": _collectives(),
            "features": _features(),
            "tolerance": _table({dtype: _of(keys.TOLERANCE, f"Of {dtype}.") for dtype in BOUNDED}, "Allowed rounding."),
            "defects": _of(
                keys.DEFECTS_TABLE, "Which known defects count, besides those of PyTorch and of the backend."
            ),
            "waiver": _list(_of(keys.WAIVER, "Tests that are known to end badly.")),
            "intermittent": _list(_of(keys.INTERMITTENT, "Tests that end badly now and then.")),
        },
        "additionalProperties": False,
        "required": ["name"],
        "anyOf": [{"required": ["inherits"]}, {"required": [name for name, key in keys.HEAD.items() if key.required]}],
    }


def schema_of_defects() -> Schema:
    """Return the schema of files of defects, in draft 2020-12."""
    listed = _of(keys.DEFECT, "Tests that are known to end badly.")
    listed["properties"]["verdicts"] = {**listed["properties"]["verdicts"], **keys.INTERMITTENT["verdicts"].schema}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Known defects of one owner, for Concord",
        "description": ABOUT_DEFECTS,
        "type": "object",
        "properties": {**{name: _value(key) for name, key in keys.OWNER.items()}, keys.DEFECT_LIST: _list(listed)},
        "additionalProperties": False,
        "required": [name for name, key in keys.OWNER.items() if key.required],
    }


def _value(key: Key) -> Schema:
    return {"description": key.about, **key.schema}


def _table(properties: Mapping[str, Schema], about: str, required: list[str] | None = None) -> Schema:
    table: dict[str, Any] = {"description": about, "type": "object", "properties": dict(properties)}
    return {**table, "additionalProperties": False, **({"required": required} if required else {})}


def _of(known: Mapping[str, Key], about: str) -> Schema:
    required = [name for name, key in known.items() if key.required]
    return _table({name: _value(key) for name, key in known.items()}, about, required)


def _list(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def _collectives() -> Schema:
    plain = {name: _value(key) for name, key in keys.COLLECTIVES_TABLE.items()}
    exceptions = _list(_of(keys.EXCLUSION, "Combinations that are not claimed."))
    return _table({**plain, "except": exceptions}, "What is claimed of collectives.")


def _features() -> Schema:
    tables = {}
    for stack, key in keys.FEATURES_TABLE.items():
        meanings = [{"const": name, "description": feature.meaning} for name, feature in FEATURES[stack].items()]
        tables[stack] = {**_value(key), "items": {"oneOf": meanings}}
    return _table(tables, "Features that are claimed, by stack; all of a stack that is not there.")


def text(of: Schema | None = None) -> str:
    """Return the text of a published schema; by default, that of profiles."""
    return json.dumps(of or schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(text(schema_of_defects() if sys.argv[1:] == ["defects"] else None), end="")
