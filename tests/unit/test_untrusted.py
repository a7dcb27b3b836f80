"""Bounds on texts that others may have written: what is too much is refused before it is parsed, with where."""

from __future__ import annotations

import json
import time
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.safe_io.untrusted import DEPTH, Allowance, Refused, json_checked, said, toml

ROOT = Path(__file__).parents[2]
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(-1e50, 1e50) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(deadline=None, max_examples=50)
@given(_JSON)
def test_json_is_read(value: object) -> None:
    """JSON of ordinary values is no more and no less after the check, whatever its strings hold."""
    for text in (json.dumps(value).encode(), msgspec.json.encode(value)):
        assert json_checked(text) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[" * (DEPTH + 1), "nested more than 32 deep"),
        (b'{"a":' * (DEPTH + 1), "nested more than 32 deep"),
        (b"[" + b"0," * 1000, "more values than"),
        (b'["' + b'","' * 1000, "more values than"),
        (b'"' + b"a" * 200_000 + b'"', "longer than 0 MiB"),
        (b'["a', "a string in it does not end"),
        (b'["a\\"]', "a string in it does not end"),
        (b'"' + b'\\"' * 50_000, "a string in it does not end"),
        (b"12345678901234567890", "a number that is none of Concord's: 12345678901234567890"),
        (b"[" + b"9" * 5000 + b"]", "(5,000 characters)"),
        (b"1e999", "a number that is none of Concord's: 1e999"),
        (b"-1e-9999", "a number"),
        (b"0." + b"1" * 41, "a number"),
        (b"1.2.3", "a number"),
    ],
)
def test_json_that_is_too_much(text: bytes, says: str) -> None:
    """JSON that is too deep, too long or too much, or has a number that is none of ours, is refused."""
    with pytest.raises(Refused) as caught:
        Allowance(values=1000, line=100_001).take_json(text)
    assert says in str(caught.value)


def test_allowance_is_used_up() -> None:
    """What one text takes is not there for the next one."""
    allowance = Allowance(values=10, lines=5, tests=3)
    allowance.take_json(b"[1,2,3]")
    assert allowance.values == 5
    for take in (
        lambda: allowance.take_json(b"[1,2,3,4,5]"),
        lambda: allowance.take_lines(b"\n" * 5),
        lambda: allowance.take_tests(4),
    ):
        with pytest.raises(Refused, match="more"):
            take()


@pytest.mark.parametrize("file", sorted((ROOT / "fixtures").rglob("*.toml")), ids=lambda file: file.name)
def test_our_own_toml(file: Path) -> None:
    """Every TOML file of this repository is far within bounds."""
    assert toml(file.read_text()) == tomllib.loads(file.read_text())


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("\n" + "a." * 8 + "a = 1", 2, "a key of more than 8 parts"),
        ("['a' . \"b\" . " + "c." * 8 + "d]", 1, "a key of more than 8 parts"),
        ("x = 1\na = " + "[" * 9, 2, "nested more than 8 deep"),
        ("a = " + "{a=" * 9, 1, "nested more than 8 deep"),
        ("a = " + "9" * 129, 1, "a key or a value of 129 characters"),
        ("a = 0x" + "f" * 200, 1, "a key or a value of 202 characters"),
        ('a = """\n\n"""\nb = """', 4, "a string in it does not end"),
        ('a = """' + '\\"""' * 100_000, 1, "a string in it does not end"),
        ("a = '''" + "'" * 1, 1, "a string in it does not end"),
        ('a = "\n', 1, "a string in it does not end"),
        ("#" * (512 << 10) + "\n", 1, "larger than 512 KiB"),
        ("a = 1\na = 2", 2, "not TOML: Cannot overwrite a value"),
        ("a = 2027-13-01", 1, "not TOML: "),
        ("a =", 1, "not TOML: "),
    ],
)
def test_toml_that_is_too_much(text: str, line: int, says: str) -> None:
    """TOML that would take much time or memory is refused with its line, as is what is not TOML."""
    with pytest.raises(Refused) as caught:
        toml(text)
    assert (caught.value.line, says in str(caught.value)) == (line, True), str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'a = """x "quoted" \\""" y"""',
        "a = '''it''s'''\nb = ''",
        'a = """"four""""',
        'a = "\\"" # "comment\nb = [1.5, 2027-06-30, 1e5, -inf]',
        "a.b.c = {d = [[1], ['x']], e = 1.5}",
        "# " + "a." * 1000,
        "a = '" + "a." * 1000 + "[[[[[[[[[['",
    ],
)
def test_toml_is_read(text: str) -> None:
    """Strings and comments may hold whatever they like."""
    assert toml(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"k{i}.b.c.d.e.f.g.h = 1\n" for i in range(11_900)),
        "".join(f"[t{i}.b.c.d.e.f.g.h]\n" for i in range(11_900)),
        "a = [" + "[[[[[[0]]]]]]," * 1_700 + "]",
        "a = [" + "1," * 59_000 + "]",
        'a = """' + '\\"' * 250_000 + '"""',
        "a = '''" + "''\n" * 39_000 + "'''",
        "\n" * 39_000,
        " " * 500_000 + "a = 1",
    ],
    ids=["keys", "headers", "nested", "values", "escapes", "quotes", "lines", "blanks"],
)
def test_toml_at_the_bounds(text: str) -> None:
    """The most expensive TOML that is within bounds takes a second or two."""
    begun = time.process_time()
    toml(text)
    assert time.process_time() - begun < 5


def test_said() -> None:
    """What a parser quotes of a text makes no second line, no escape sequence and no long message."""
    assert said(ValueError("plain")) == "plain"
    assert said(ValueError("a\nb\x1b[2J\u202e")) == "a\\nb\\x1b[2J\\u202e"
    assert len(said(ValueError("x" * 100_000))) < 300
