"""Text from elsewhere is shown without driving the terminal, turning lines around, or breaking a file."""

from __future__ import annotations

import unicodedata
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.safe_io.shown import printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain, with\ttab and\nnewline", "plain, with\ttab and\nnewline"),
        ("é ☃ 漢字\u3000\xa0 ❤\ufe0f", "é ☃ 漢字\u3000\xa0 ❤\ufe0f"),
        ("a\r\nb\rc\r\r\nd", "a\nb\\rc\\r\nd"),
        ("\x1b[31mred\x1b[0m \x9b2J \x07", "\\x1b[31mred\\x1b[0m \\x9b2J \\x07"),
        ("\u202eevil\u2066 \u200b\xad\ufeff\U000e0041", "\\u202eevil\\u2066 \\u200b\\xad\\ufeff\\U000e0041"),
        ("\u2028\u2029\x85\x1c", "\\u2028\\u2029\\x85\\x1c"),
        ("\ud800 \ufffe \uffff \x00", "\\ud800 \\ufffe \\uffff \\x00"),
        ("\u3164\u115f", "\\u3164\\u115f"),
    ],
)
def test_what_is_not_seen_is_written_as_its_escape(text: str, expected: str) -> None:
    """Printable characters, spaces, tab and newline stay; everything else is its escape."""
    assert printable(text) == expected


@given(st.text(st.characters()))
def test_nothing_shown_drives_anything(text: str) -> None:
    """No control or format character but tab and newline is left, and the result goes into UTF-8 and XML."""
    shown = printable(text)
    assert {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")} <= {"\t", "\n"}
    assert ElementTree.fromstring(f"<a>{ElementTree.tostring(_element(shown), 'unicode')}</a>")[0].text == (
        shown or None
    )
    assert printable(shown) == shown
    shown.encode()


def _element(text: str) -> ElementTree.Element:
    element = ElementTree.Element("b")
    element.text = text
    return element
