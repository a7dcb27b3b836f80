"""Series, measurements, and the file of a night."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from harness.bench.fingerprint import fingerprint
from harness.bench.history.nights import BadNight, first_line, last_line, line, load
from harness.bench.records import Fingerprint, Measurement, Night, Series

SERIES = Series(operation="all_reduce", op="sum", dtype="float32", bytes=1 << 20, world=2, backend="gloo", device="cpu")
NIGHT = Night(id="1", started=1.0, fingerprint=Fingerprint(machine=(("cores", "2"),)))


def measured(*rounds: list[list[float]], series: Series = SERIES) -> Measurement:
    return Measurement(series=series, samples=list(rounds))


def test_the_slowest_rank_decides() -> None:
    """An iteration has taken as long as its slowest rank; a figure is the 25th percentile of iterations."""
    found = measured([[1.0, 2.0], [3.0, 1.0]], [[9.0, 9.0]], [[4.0, 5.0]])
    assert found.iterations() == [2, 3, 9, 5]
    assert found.rounds() == [2.25, 9, 5]
    assert found.value == 3


def test_rounds_weigh_the_same() -> None:
    """A round with many iterations counts for no more than one with few; what disturbs half of a night is no figure."""
    assert measured([[7.0]] * 100, [[2.0]], [[2.0]]).value == 2
    assert measured([[2.0]] * 2, [[7.0]] * 50).value == 2
    assert measured([[2.0], [7.0], [7.0], [7.0], [7.0]]).value == 7
    with pytest.raises(ValueError, match="no samples"):
        _ = measured().value


@dataclass
class Changed:
    what: str
    value: object


@pytest.mark.parametrize(
    "other",
    [
        Changed("bytes", 8),
        Changed("dtype", "int8"),
        Changed("op", "max"),
        Changed("world", 4),
        Changed("metric", "exposed"),
        Changed("variant", (("place", "out"),)),
        Changed("backend", "mine"),
        Changed("device", "sim"),
    ],
    ids=lambda c: c.what,
)
def test_whatever_differs_makes_another_series(other: Changed) -> None:
    """Its name for people differs as well as its key."""
    changed = msgspec.structs.replace(SERIES, **{other.what: other.value})
    assert changed.key != SERIES.key
    assert changed.name != SERIES.name


def test_a_fingerprint_says_what_it_is_of() -> None:
    """Equal machines have equal keys; the variables that change how ranks run are in it, places are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
        one, same = fingerprint(), fingerprint()
        patch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        other = fingerprint()
    assert one == same
    assert one.key != other.key
    names = dict(one.software)
    assert names["GLOO_SOCKET_IFNAME"] == "lo"
    assert "TORCHINDUCTOR_CACHE_DIR" not in names
    assert {"torch", "python", "kernel"} <= set(names)
    assert {"cores", "memory", "processor"} <= set(dict(one.machine))


def write(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def test_a_night_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Measurements in order, complete if its end is there."""
    found = load(write(tmp_path / "n", first_line(NIGHT), line(measured([[1.0]])), last_line(2.0)))
    assert found.complete
    assert found.fingerprint == NIGHT.fingerprint
    assert [m.value for m in found.measurements] == [1]


@pytest.mark.parametrize("torn", [b"", b'{"record":"measurem', b'{"record":"measurement","measurement":{"ser'])
def test_a_night_that_was_cut_off(tmp_path: Path, torn: bytes) -> None:
    """What was measured before is there; the night is not complete."""
    found = load(write(tmp_path / "n", first_line(NIGHT), line(measured([[1.0]])), torn))
    assert not found.complete
    assert len(found.measurements) == 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"record":"night"', "line 1"),
        (b'{"record":"night","night":' + b"[" * 100_000, "line 1"),
        (line(measured([[1.0]])), "not the file of a night"),
        (first_line(NIGHT) + b"garbage\n" + last_line(1.0), "line 2"),
        (first_line(msgspec.structs.replace(NIGHT, version=99)), "newer Concord .version 99"),
        (first_line(msgspec.structs.replace(NIGHT, schema="other")), "not the file of a night"),
    ],
)
def test_what_is_no_night(tmp_path: Path, data: bytes, says: str) -> None:
    """One clear error that names the file."""
    path = write(tmp_path / "n", data)
    with pytest.raises(BadNight, match=says) as error:
        load(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """It is named."""
    with pytest.raises(BadNight, match="No such file"):
        load(tmp_path / "none")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"started":1.0', b'"started":1e99', "which is no time"),
        (b'"started":1.0', b'"started":1e999', "a number that is none of Concord's: 1e999"),
        (b'"bytes":1048576', b'"bytes":' + b"9" * 19, "a size of message or world that there is not"),
        (b'"world":2', b'"world":' + b"9" * 5000, "a number that is none of Concord's: 9999"),
        (b"[[[1.0]]]", b"[[[1e40]]]", "a figure that is negative, or not finite"),
        (b"[[[1.0]]]", b"[" * 100_000, "nested more than 32 deep"),
    ],
)
def test_hostile_night(tmp_path: Path, old: bytes, new: bytes, says: str) -> None:
    """A night with numbers that cannot be, or nested without end, is refused in one line."""
    data = first_line(NIGHT) + line(measured([[1.0]])) + last_line(2.0)
    assert old in data
    (tmp_path / "perf.jsonl").write_bytes(data.replace(old, new, 1))
    with pytest.raises(BadNight) as caught:
        load(tmp_path / "perf.jsonl")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_endless_night() -> None:
    """What is no plain file is not read at all."""
    with pytest.raises(BadNight, match="not a file"):
        load(Path("/dev/zero"))
