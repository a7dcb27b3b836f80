"""The page of an audit, which opens offline: the table, and every defect with its outcome."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

_TEMPLATE = Path(__file__).parent / "templates"


def page(audit: Mapping[str, Any], rows: Sequence[Sequence[str]], columns: Sequence[str]) -> str:
    """Render the page of a saved audit, in which all texts are escaped; ``rows`` and ``columns``: the table."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_TEMPLATE), autoescape=True, trim_blocks=True)
    when = datetime.datetime.fromtimestamp(audit["started"], datetime.UTC)
    noticed_last = sorted(audit["results"], key=lambda result: result["state"] == "killed")
    return environment.get_template("audit.html").render(
        audit=audit, results=noticed_last, rows=rows, columns=columns, when=f"{when:%Y-%m-%d %H:%M} UTC"
    )
