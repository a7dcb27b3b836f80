"""Output of nccl-tests: every format is read, and what is wrong, damaged or hostile is refused in words.

Most figures are made up, in the formats of nccl-tests' sources.  Those in ``printed`` are from an H100.
"""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from harness.bench.detection.gate import decide
from harness.bench.figures import busbw
from harness.bench.history.nights import BadNight, loads
from harness.bench.history.store import VARIABLE, History
from harness.bench.records import Night
from harness.bench.view import view
from harness.commands.main import app
from reports.perf import page
from tests.perf.nccl_output import DEVICE, SIZES, document, dumped, seconds_of, text
from tests.perf.nights import night, series

STARTED = 1.7e9
PRINTED = Path(__file__).parent / "printed"
VERSIONS = ("2.13.0", "2.13.13", "2.16.2", "2.16.9", "2.17.0", "2.17.3", "2.17.6", "2.18.5", "2.19.6")


def read(data: str | bytes, collective: str = "") -> Night:
    return loads(data.encode() if isinstance(data, str) else data, "out.txt", collective, STARTED)


@pytest.mark.parametrize("version", VERSIONS)
def test_versions(version: str) -> None:
    """The texts of all versions give the same series and figures."""
    night = read(text(version), "all_reduce")
    assert (night.subject, night.complete, night.started) == ("nccl-tests", True, STARTED)
    assert len(night.measurements) == 2 * len(SIZES)
    for one in night.measurements:
        assert (one.series.operation, one.series.op, one.series.dtype, one.series.world) == (
            *("all_reduce", "sum", "float32"),
            4,
        )
        assert one.value == pytest.approx(seconds_of(one.series.bytes), rel=1e-3)
    hows = {one.series.how for one in night.measurements}
    assert hows == {"by nccl-tests", "by nccl-tests, place out"}
    assert dict(night.fingerprint.machine) == {"accelerators": f"4 x {DEVICE}", "hosts": "1"}
    assert dict(night.fingerprint.software)["iterations"] == "20"


@pytest.mark.parametrize(("ranks", "sizes", "seconds"), [(2, 24, 18.0778e-3), (4, 6, 0.108391)])
def test_printed(ranks: int, sizes: int, seconds: float) -> None:
    """What nccl-tests 2.19.6 printed on an H100, which its ranks shared, is read as it is."""
    night = read((PRINTED / f"h100-shared-by-{ranks}.txt").read_text())
    assert (night.complete, len(night.measurements)) == (True, 2 * sizes)
    assert dict(night.fingerprint.machine) == {"accelerators": "1 x NVIDIA H100 80GB HBM3", "hosts": "1"}
    assert dict(night.fingerprint.software)["nccl"] == "22809"
    assert {one.series.world for one in night.measurements} == {ranks}
    largest = {2: 32 << 20, 4: 64 << 20}[ranks]
    (found,) = [m for m in night.measurements if m.series.bytes == largest and m.series.how == "by nccl-tests"]
    assert found.value == pytest.approx(seconds)


def test_devices_that_ranks_share() -> None:
    """A device counts once: by its host, its number and its place there."""
    devices = [(0, "0000:06:00"), (0, "0000:06:00"), (0, "0000:07:00"), (1, "0000:06:00")]
    lines = [f"#  Rank  {i} Group  0 Pid 1 on a device  {n} [{at}] {DEVICE}" for i, (n, at) in enumerate(devices)]
    found = read(re.sub(r"(#  Rank .*\n)+", "\n".join(lines) + "\n", text()))
    assert dict(found.fingerprint.machine)["accelerators"] == f"3 x {DEVICE}"


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("per_iteration", [False, True])
def test_more_columns(per_iteration: bool, timestamps: bool) -> None:
    """Columns of options are known by the header."""
    found = read(text(per_iteration=per_iteration, timestamps=timestamps))
    assert [one.samples for one in found.measurements] == [one.samples for one in read(text()).measurements]


@pytest.mark.parametrize(
    ("test", "operation", "place"),
    [
        ("all_gather", "all_gather_into_tensor", "place in"),
        ("reduce_scatter", "reduce_scatter_tensor", "place in"),
        ("alltoall", "all_to_all_single", "place in"),
        ("broadcast", "broadcast", "place out"),
        ("sendrecv", "send_recv", "place in"),
    ],
)
def test_other_tests(test: str, operation: str, place: str) -> None:
    """Each is our series of the operation that PyTorch calls so; what is usual for it has no name of its own."""
    night = read(text(test=test, op="none"))
    assert {(one.series.operation, one.series.op) for one in night.measurements} == {(operation, "")}
    assert {one.series.how for one in night.measurements} == {"by nccl-tests", f"by nccl-tests, {place}"}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_json(version: int) -> None:
    """JSON gives the same series, its own time, and nothing of the environment that it holds."""
    found = read(dumped(document(version=version)))
    assert {one.series for one in found.measurements} == {one.series for one in read(text()).measurements}
    assert found.started == datetime(2026, 11, 25, 4, 5, 6).timestamp()
    assert found.complete
    assert "hunter2" not in repr(found)


def test_values_that_were_not_checked() -> None:
    """N/A is no error: the series says that its values are unchecked, so it is another one."""
    found = read(text(wrong="N/A"))
    assert [dict(one.series.variant).get("values") for one in found.measurements[:2]] == [None, "unchecked"]
    half = document()
    half["results"][0]["in_place"]["nwrong"] = None
    assert sum(dict(one.series.variant).get("values") == "unchecked" for one in read(dumped(half)).measurements) == 1


def test_rounds() -> None:
    """A size that was measured several times has several rounds; a row of no bytes has no figure."""
    found = read(text(sizes=(0, 1 << 20, 1 << 20)))
    assert [len(one.samples) for one in found.measurements] == [2, 2]


def test_in_other_output() -> None:
    """Lines of NCCL, of mpirun and of Windows do not matter."""
    noisy = "host:1:1 [0] NCCL INFO Bootstrap: Using eth0\n" + text().replace("\n", "\r\n")
    tagged = "".join(f"[1,0]<stdout>: {line}\n" for line in noisy.splitlines())
    for other in (noisy, tagged):
        assert len(read(other).measurements) == 2 * len(SIZES)


def test_aborted() -> None:
    """What was measured before the end is an incomplete night; a last row that was cut off does not count."""
    whole = text(ended=False)
    assert not read(whole).complete
    cut = read(whole.rstrip()[:-20])
    assert (cut.complete, len(cut.measurements)) == (False, 2 * (len(SIZES) - 1))
    with_error = whole.rstrip()[:-40] + "host: Test CUDA failure common.cu:295 'unspecified launch failure'\n"
    assert len(read(with_error).measurements) == 2 * (len(SIZES) - 1)
    half = dumped(document())
    with pytest.raises(BadNight, match=r"^out.txt: damaged, or no night: "):
        read(half[: len(half) // 2])


def swapped(old: str, new: str, **fields: object) -> str:
    found = text(**fields)  # type: ignore[arg-type]
    assert old in found
    return found.replace(old, new)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (text(wrong="3"), "line 14: all_reduce of 1048576 B in of place: 3 wrong values; wrong values have no figure"),
        (swapped("values : 0 OK", "values : 7 FAILED"), "7 values are out of bounds: wrong values have no figure"),
        (text("2.13.0"), "does not say which test it is of: give --collective: all_reduce, "),
        (swapped("all_reduce_perf", "hypercube_perf"), "'hypercube' is none of all_reduce"),
        (swapped("all_reduce_perf", "all_gather_perf"), "its busbw is "),
        (swapped("time   algbw", "cputime  algbw"), "times are those of the CPU"),
        (swapped("busbw  #wrong", "busbw   error"), "no format from 2.13 to 2.19"),
        (swapped("Rank  2", "Rank  3"), "its list of 4 devices lacks ranks"),
        (swapped("Rank  2 Group  0", "Rank  2 Group  1"), "in several groups"),
        (re.sub("#  Rank.*\n", "", text()), "no list of devices"),
        (re.sub("\n +\\d.*", "", text()), "it has no results"),
        (swapped("  float", "  flo<b>"), "is no row of a result"),
        (swapped("  float", "  float9"), "type 'float9' with redop 'sum'"),
        (text(ended=False).rstrip()[:-5] + "\n# Out of bounds values : 0 OK\n", "is no row of a result"),
        (re.sub(r"(sum +-1 +)[\d.]+", r"\g<1>nan", text()), "'nan' is no figure"),
        (re.sub(r"(sum +-1 +)[\d.]+", r"\g<1>0.00", text()), "0 us is no time"),
        (re.sub(r"(sum +-1 +)[\d.]+", r"\g<1>1e999", text()), "is no figure"),
        (re.sub(r"(sum +-1 +)[\d.]+", r"\g<1>99999.00", text()), "its algbw is "),
        (dumped(document(version=4)), "its format has version 4, and this Concord reads up to 3"),
        (dumped(document(results=[])), "it has no results"),
        (dumped(document(args=[])), "does not say which test"),
        (dumped(document(start_time="yesterday")), "start_time: "),
        (dumped(document(out_of_bounds={"count": 2})), "2 values are out of bounds"),
        (dumped(document(config={"devices": []})), "no list of devices"),
        (dumped(document(config={"devices": [{"rank": 1}]})), "lacks ranks"),
        (dumped(document(results=[{"size": 8, "type": "float", "redop": "sum", "root": "x"}])), "is no rank"),
        (dumped(document(results=[{"size": -8, "type": "float", "redop": "sum"}])), "damaged, or no night"),
        (dumped(document()).replace(b'"time"', b'"cpu_time"'), "or that of the CPU"),
        (dumped(document()).replace(b'"nwrong": 0.0', b'"nwrong": 5.0'), "5 wrong values"),
        (b'{"nccl_version": ' + b"[" * 100_000, "damaged, or no night"),
        ("nThread algbw\n" + "1 2 float sum -1 " * 100_000, "no list of devices"),
        ("nThread algbw \x1b[31m\0\ud800".encode(errors="surrogatepass"), "no list of devices"),
    ],
)
def test_refused(given: str | bytes, says: str) -> None:
    """The error is one line that names the file, and holds no escapes."""
    with pytest.raises(BadNight) as found:
        read(given)
    said = str(found.value)
    assert said.startswith("out.txt: ")
    assert re.search(says, said), said
    assert len(said) < 600
    assert "\x1b" not in said
    assert "\n" not in said


def test_another_collective_than_it_says() -> None:
    """What the user says must be what the output says."""
    with pytest.raises(BadNight, match="it is of all_reduce, and not of broadcast"):
        read(text(), "broadcast")


@settings(deadline=None)  # a loaded machine
@given(st.data())
def test_damaged_anywhere(data: st.DataObject) -> None:
    """Whatever is changed, removed or repeated, it is a night or a BadNight, and no figure is beyond its bandwidth."""
    given = data.draw(st.sampled_from([text().encode(), text("2.13.0").encode(), dumped(document())]))
    at = data.draw(st.integers(0, len(given)))
    length = data.draw(st.integers(0, 40))
    damaged = given[:at] + data.draw(st.binary(max_size=20)) + given[at + length :]
    try:
        found = read(damaged, "all_reduce")
    except BadNight:
        return
    for one in found.measurements:
        assert one.series.bytes > 0
        assert one.value > 0


def test_huge(tmp_path: Path) -> None:
    """Too many lines, ranks or values are refused before they are read."""
    with pytest.raises(BadNight, match=r"lines|more than"):
        read(text() + "\n" * 1_100_000)


def test_in_the_history_and_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored once, its figures are in the page of our nights, with the same units and formula; names are text."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "perf.sqlite"))
    monkeypatch.setenv("COLUMNS", "300")
    hostile = "<script>alert(1)</script>"
    (tmp_path / "nccl.txt").write_text(text(device=hostile))
    (tmp_path / "bad.txt").write_text(text(wrong="1"))
    run = CliRunner()
    done = run.invoke(app, ["perf", "store", str(tmp_path / "nccl.txt"), str(tmp_path / "bad.txt")])
    assert done.exit_code == 2
    assert "nccl.txt: night nccl-tests-" in done.output
    assert "1 wrong values" in done.output
    assert "there already" in run.invoke(app, ["perf", "store", str(tmp_path / "nccl.txt")]).output
    ours = [one for one in series(15) if one.bytes >= 1 << 20][:3]
    with History() as history:
        history.add(night("mine", started=4e9, of=ours, values=(1e-4, 2e-4, 3e-4)[: len(ours)]))
        line, beside = history.line("mine"), history.newest("nccl-tests")
        assert beside is not None
        shown = view(line, decide(line), beside)
        assert len(shown["collectives"]) == len(ours) + 2 * len(SIZES)
        row = next(one for one in shown["collectives"] if one["how"] == "by nccl-tests" and one["bytes"] == SIZES[0])
        assert row["busbw"] == pytest.approx(busbw("all_reduce", SIZES[0], seconds_of(SIZES[0]), 4), rel=1e-3)
        html = page(shown)
        assert "by nccl-tests" in html
        assert hostile not in html
        own = view(beside, decide(beside))
        assert len(own["collectives"]) == 2 * len(SIZES)
    assert run.invoke(app, ["perf", "page", "-o", str(tmp_path / "p.html"), "--night", "mine"]).exit_code == 0
    assert "beside: 6 figures of nccl-tests" in (tmp_path / "p.html").read_text()
    assert np.isfinite(row["algbw"])
