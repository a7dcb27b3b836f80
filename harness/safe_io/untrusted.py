"""Read files that somebody else may have written: size, depth, counts and numbers are bounded before any parser runs.

A parser's time and memory depend on the contents of a text and not on its length: 4.8 million empty strings are a file
of 37 KB, and a dotted TOML key costs the square of its parts.  This module first scans a text once, in linear time and
without building anything, and refuses it if it exceeds what Concord writes.  Only then, msgspec or tomllib parses it.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from harness.safe_io.shown import one_line

DEPTH = 32
"""Maximum nesting of JSON; Concord's own files are nested 8 deep, and a stored program is a little deeper."""
TOML_SIZE = 512 << 10
"""Maximum characters of a TOML text; the largest profile in this repository has 32,639."""
TOML_LINES = 40_000
TOML_KEYS = 12_000
"""Maximum number of keys and headers; each costs tomllib some 20 microseconds."""
TOML_VALUES = 60_000
TOML_DEPTH = 8
TOML_PARTS = 8
"""Maximum parts of a dotted key, whose cost is the square of their number."""
TOML_WORD = 128
"""Maximum characters of a number, a date or a key without quotes."""

LATEST = 7_258_118_400
"""Seconds from the epoch to the year 2200."""
Moment = Annotated[float, msgspec.Meta(ge=0, le=LATEST)]
"""Seconds since the epoch."""
Seconds = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
"""A duration of up to 31 years; whoever uses it must check that it is not negative."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Ranks = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
"""A rank, or a number of ranks."""
Hosts = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
"""A number of hosts."""
Version = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Status = Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)]
"""An exit status."""
Words = Annotated[str, msgspec.Meta(max_length=4000)]
"""A name or a short text that a decision may use."""

_JSON = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|([\[{])|([\]}])|(")|([^\s"\[\]{}:,]++)', re.DOTALL)
"""A string, an opening bracket, a closing bracket, an unterminated string, or any other value."""
_NUMBER = re.compile(rb"-?\d{1,19}(\.\d{1,40})?([eE](?:-\d{1,3}|\+?\d{1,2}))?")
_TOML = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*+"{3,5}' + r"|'''(?:[^']|'{1,2}(?!'))*+'{3,5}"
    r'|(?P<open>"""|' + r"''')" + r'|"(?:[^"\\\n]|\\[^\n])*+"' + r"|'[^'\n]*+'|#[^\n]*+"
    r"|(?P<line>\n)|(?P<bracket>[\[\]{}])|(?P<mark>[=,.])|(?P<quote>[\"'])|(?P<word>[^\s\"'\[\]{}=,.#]++)",
    re.DOTALL,
)


class Refused(ValueError):
    """A text that is not read because it exceeds what Concord writes.  The message says what is too much."""

    def __init__(self, what: str, line: int = 1) -> None:
        super().__init__(what)
        self.what = what
        self.line = line
        """From 1; always 1 for JSON."""


@dataclass
class Allowance:
    """The amount that may still be read of a file, or of all files of a bundle.  Each check uses up its share."""

    values: int = 5_000_000
    """Strings, keys, numbers and brackets."""
    lines: int = 1_000_000
    line: int = 64 << 20
    """Maximum bytes of one line."""
    tests: int = 200_000
    """Tests in results."""
    depth: int = DEPTH

    def take_lines(self, data: bytes) -> None:
        """Use up the number of lines of a text, before it is split.  Errors: :class:`Refused`."""
        self.lines -= data.count(b"\n") + 1
        if self.lines < 0:
            raise Refused("more lines than any file of Concord has")

    def take_tests(self, count: int) -> None:
        """Use up a number of tests, before anything is built for them.  Errors: :class:`Refused`."""
        self.tests -= count
        if self.tests < 0:
            raise Refused("more tests than Concord reads")

    def take_json(self, text: bytes) -> None:
        """Use up the number of values of a JSON text, before it is parsed.

        Errors: :class:`Refused` for a text that is too long, too deep or has too many values, for an unterminated
        string, and for a number that no field of Concord has (more than 19 integer digits, an exponent of three).
        """
        if len(text) > self.line:
            raise Refused(f"longer than {self.line >> 20} MiB")
        depth, left = 0, self.values
        for token in _JSON.finditer(text):
            left -= 1
            if left < 0:
                raise Refused("more values than any file of Concord has")
            kind = token.lastindex
            if kind is None:
                continue
            if kind == 1:
                depth += 1
                if depth > self.depth:
                    raise Refused(f"nested more than {self.depth} deep")
            elif kind == 2:
                depth -= 1
            elif kind == 3:
                raise Refused("a string in it does not end")
            elif token[4][:1] in b"-0123456789" and not _NUMBER.fullmatch(token[4]):
                raise Refused(f"a number that is none of Concord's: {_short(token[4])}")
        self.values = left


def json_checked(data: bytes, allowance: Allowance | None = None) -> bytes:
    """Return the same JSON text after a check that parsing it takes neither much time nor much memory.

    Errors: :class:`Refused`.
    """
    (allowance or Allowance()).take_json(data)
    return data


def toml(text: str) -> dict[str, Any]:
    """Parse TOML.  Errors: :class:`Refused`, with the line, for a text that exceeds the bounds or is not TOML."""
    _check_toml(text)
    try:
        return tomllib.loads(text)
    except RecursionError:  # no text within the bounds is known to cause this
        raise Refused("not TOML that can be read: nested too deeply") from None
    except ValueError as e:  # TOMLDecodeError, and errors of int() and datetime for invalid values
        found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(e))
        line = int(found[1]) if found and found[1] else text.count("\n") + 1 if found else 1
        raise Refused(f"not TOML: {str(e)[: found.start()] if found else e}", line) from None


def _check_toml(text: str) -> None:
    """Check that tomllib takes neither much time nor much memory for a text.  Errors: :class:`Refused`."""
    if len(text) > TOML_SIZE:
        raise Refused(f"larger than {TOML_SIZE >> 10} KiB")
    line, depth, parts, keys, values = 1, 0, 1, 0, 0
    for token in _TOML.finditer(text):
        kind, found = token.lastgroup, token[0]
        if kind == "line":
            line, parts = line + 1, 1
            if line > TOML_LINES:
                raise Refused(f"more than {TOML_LINES:,} lines", line)
        elif kind == "bracket":
            parts = 1
            keys += found == "["
            depth += 1 if found in "[{" else -1
            if depth > TOML_DEPTH:
                raise Refused(f"nested more than {TOML_DEPTH} deep", line)
        elif kind == "mark":
            parts = parts + 1 if found == "." else 1
            keys += found == "="
            values += found == ","
            if parts > TOML_PARTS:
                raise Refused(f"a key of more than {TOML_PARTS} parts", line)
        elif kind == "open" or kind == "quote":
            raise Refused("not TOML: a string in it does not end", line)
        elif kind == "word":
            if len(found) > TOML_WORD:
                raise Refused(f"a key or a value of {len(found):,} characters without quotes", line)
        else:
            line += found.count("\n")
        if keys > TOML_KEYS:
            raise Refused(f"more than {TOML_KEYS:,} keys and tables", line)
        if values > TOML_VALUES:
            raise Refused(f"more than {TOML_VALUES:,} values in lists", line)


def said(error: Exception) -> str:
    """Format a parser's error on one line, shortened, whatever it quotes of the text."""
    text = str(error)
    shown = f"{text[:200]}...{text[-60:]}" if len(text) > 300 else text
    return one_line(shown)


def _short(text: bytes) -> str:
    shown = text[:24].decode("ascii", "backslashreplace")
    return f"{shown}... ({len(text):,} characters)" if len(text) > 24 else shown
