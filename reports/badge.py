"""The badge of a report, as SVG and as the response of a shields.io endpoint."""

from __future__ import annotations

import json
from xml.sax.saxutils import escape, quoteattr

from reports.answer import answer, kind, waived_tests
from reports.model import Report

_LABEL = "concord"
_COLOURS = {"brightgreen": "#2f8a4c", "yellow": "#8a6100", "blue": "#0b5cad", "lightgrey": "#6b7280", "red": "#b3261e"}
_WIDTH, _PADDING = 6.6, 12


def message(report: Report) -> tuple[str, str]:
    """Return the text of the badge, and its color by shields.io's name.

    Only a level that is reached has the level's badge.  Of waived tests, it counts those that do not show a defect of
    PyTorch's own.
    """
    match kind(report):
        case "conformant":
            waived = sum(waived_tests(report)[1].values())
            level = report.conformant or "P"
            return (f"{level}, {waived} waived", "yellow") if waived else (level, "brightgreen")
        case "not conformant":
            return "not conformant", "red"
        case "partial":
            return f"no level: {answer(report)}", "blue"
    return "not shown", "lightgrey"


def endpoint(report: Report) -> bytes:
    """Return the JSON response of a shields.io endpoint."""
    text, color = message(report)
    return json.dumps({"schemaVersion": 1, "label": _LABEL, "message": text, "color": color}).encode() + b"\n"


def svg(report: Report) -> bytes:
    """Draw the badge as a self-contained SVG image."""
    text, color = message(report)
    left, right = (round(len(part) * _WIDTH) + _PADDING for part in (_LABEL, text))
    title = quoteattr(f"{_LABEL}: {text}")
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label={title}>
<rect width="{left + right}" height="20" rx="3" fill="#3b4048"/>
<path fill="{_COLOURS[color]}" d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right - 3}z"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{left / 2:g}" y="14" textLength="{left - _PADDING}">{escape(_LABEL)}</text>
<text x="{left + right / 2:g}" y="14" textLength="{right - _PADDING}">{escape(text)}</text>
</g></svg>
""".encode()
