"""Files on disks that are full, and in folders where others have put links."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.safe_io import writing
from harness.safe_io.writing import append_or_nothing, new_folder, open_new, own_folder, write_whole
from harness.thorough.journal import Begun, Example, Journal, JournalError, Plan

consume = deque[None](maxlen=0).extend
DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
BIG = b"x" * 100_000


@pytest.fixture
def nearly_full() -> Iterator[None]:
    """Files of this process can't be larger than 10,000 bytes: writing more is refused in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


class TestWriteWhole:
    @pytest.mark.parametrize("there", [b"before", None], ids=["over-another", "new"])
    def test_nothing_or_all(self, tmp_path: Path, nearly_full: None, there: bytes | None) -> None:
        """Where a file can't be written whole, what was there before is, and nothing beside it."""
        file = tmp_path / "a" / "report.zip"
        file.parent.mkdir()
        if there is not None:
            file.write_bytes(there)
        with pytest.raises(OSError, match=r"report\.zip'$") as caught:
            write_whole(file, BIG)
        assert caught.value.errno == errno.EFBIG
        assert [p.read_bytes() for p in file.parent.iterdir()] == ([there] if there is not None else [])
        write_whole(file, b"small")
        assert file.read_bytes() == b"small"

    @pytest.mark.parametrize("number", DISKS, ids=errno.errorcode.get)
    @pytest.mark.parametrize("function", ["append", "fsync", "mkstemp", "replace"])
    def test_every_way_to_fail(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int
    ) -> None:
        """Whichever step fails and why, the error names the file, and nothing is left."""

        def fails(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number), "something else")

        where = {"append": writing, "mkstemp": writing.tempfile}.get(function, os)
        monkeypatch.setattr(where, function, fails)
        with pytest.raises(OSError, match="is-it") as caught:
            write_whole(tmp_path / "is-it", b"x")
        assert caught.value.errno == number
        assert list(tmp_path.iterdir()) == []

    def test_mode(self, tmp_path: Path) -> None:
        """A new file has the mode that the process gives files, one in place of another the other's."""
        file = tmp_path / "a"
        before = os.umask(0o027)
        try:
            write_whole(file, "x")
        finally:
            os.umask(before)
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        file.chmod(0o604)
        write_whole(file, "y")
        assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("y", 0o604)

    def test_own_link(self, tmp_path: Path) -> None:
        """A link of this user's leads to the file that is meant."""
        (tmp_path / "real").write_text("before")
        (tmp_path / "link").symlink_to("real")
        write_whole(tmp_path / "link", "after")
        assert ((tmp_path / "link").is_symlink(), (tmp_path / "real").read_text()) == (True, "after")

    def test_link_in_the_place_of_our_file(self, tmp_path: Path) -> None:
        """Where nobody has named the file, a link in its place is taken away, and what it led to is as it was."""
        (tmp_path / "elsewhere").write_text("precious")
        (tmp_path / "repro.py").symlink_to("elsewhere")
        write_whole(tmp_path / "repro.py", "ours", follow=False)
        assert (tmp_path / "elsewhere").read_text() == "precious"
        assert ((tmp_path / "repro.py").is_symlink(), (tmp_path / "repro.py").read_text()) == (False, "ours")

    def test_streams(self, tmp_path: Path) -> None:
        """What is no plain file is written to, and stays."""
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        write_whole(fifo, b"through")
        assert os.read(reader, 100) == b"through"
        os.close(reader)
        write_whole(Path("/dev/null"), b"x")
        assert (fifo.is_fifo(), Path("/dev/null").is_char_device()) == (True, True)
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            write_whole(Path("/dev/full"), b"x")

    def test_standard_output(self, tmp_path: Path) -> None:
        """``/dev/stdout`` that a shell leads to a file is that file, and the link stays."""
        code = (
            "from harness.safe_io.writing import *; from pathlib import Path; write_whole(Path('/dev/stdout'), b'said')"
        )
        with open(tmp_path / "out", "wb") as out:
            subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
        assert (tmp_path / "out").read_bytes() == b"said"
        assert Path("/dev/stdout").is_symlink()

    def test_folder_in_its_place(self, tmp_path: Path) -> None:
        """A folder is no file, and stays."""
        (tmp_path / "a").mkdir()
        with pytest.raises(IsADirectoryError, match="a'$"):
            write_whole(tmp_path / "a", b"x")


@pytest.mark.parametrize("act", [lambda p: write_whole(p, b"x"), own_folder], ids=["file", "folder"])
def test_link_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
    """A link that another user has put into a folder of ours is not followed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    owner = os.geteuid() or 12345
    if os.geteuid() == 0:
        os.chown(tmp_path / "link", owner, -1, follow_symlinks=False)
    else:  # only root can give a link away: be somebody else instead, in a folder of yet another
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        real = Path.stat
        monkeypatch.setattr(Path, "stat", lambda p, **k: os.stat_result([*real(p, **k)[:4], 0, *real(p, **k)[5:]]))
    with pytest.raises(PermissionError, match="a link that another user has put there"):
        act(tmp_path / "link")
    assert list((tmp_path / "elsewhere").iterdir()) == []


class TestAppending:
    def test_nothing_or_all(self, tmp_path: Path, nearly_full: None) -> None:
        """A record that does not fit leaves nothing, so that the file ends with a whole one."""
        fd = open_new(tmp_path / "a")
        append_or_nothing(fd, b"first\n")
        with pytest.raises(OSError, match="File too large"):
            append_or_nothing(fd, BIG)
        append_or_nothing(fd, b"second\n")
        os.close(fd)
        assert (tmp_path / "a").read_bytes() == b"first\nsecond\n"

    @pytest.mark.parametrize("link", [True, False], ids=["link", "file"])
    def test_something_is_there(self, tmp_path: Path, link: bool) -> None:
        """Nothing is appended to what is there already, least of all through a link."""
        (tmp_path / "elsewhere").write_text("precious")
        if link:
            (tmp_path / "results.jsonl").symlink_to("elsewhere")
        else:
            (tmp_path / "results.jsonl").write_text("precious")
        with pytest.raises(FileExistsError):
            open_new(tmp_path / "results.jsonl")
        assert (tmp_path / "elsewhere").read_text() == "precious"


def test_journal_of_a_thorough_run(tmp_path: Path, nearly_full: None) -> None:
    """Where a record does not fit, the journal says so, and can still be read: no part of a line is in it."""
    journal = Journal(tmp_path / "progress.jsonl", "progress.jsonl")
    journal.begin(Begun(1.0, {"torch": "2.13"}))
    journal.write(Plan({"a": "test_a"}))
    with pytest.raises(JournalError, match=r"progress\.jsonl: File too large"):
        consume(journal.write(Example("a", "passed", 0.1, "x" * 12)) for _ in range(1000))
    journal.close()
    assert Journal(tmp_path / "progress.jsonl", "progress.jsonl").read().properties["a"].passed > 50
    assert (tmp_path / "progress.jsonl").read_bytes().endswith(b"\n")


class TestNewFolder:
    def test_each_is_new(self, tmp_path: Path) -> None:
        """Where something is, a link to a folder among it, another name is taken."""
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "run").symlink_to("elsewhere")
        assert [new_folder(tmp_path / "run").name for _ in range(2)] == ["run-2", "run-3"]
        assert list((tmp_path / "elsewhere").iterdir()) == []

    def test_nobody_else_can_write_to_it(self, tmp_path: Path) -> None:
        """Whatever the process lets others do, they can put nothing into it."""
        before = os.umask(0)
        try:
            assert stat.S_IMODE(new_folder(tmp_path / "run").stat().st_mode) == 0o755
        finally:
            os.umask(before)

    def test_folder_above_may_be_a_link(self, tmp_path: Path) -> None:
        """Whoever keeps results elsewhere links the folder that they are in."""
        (tmp_path / "large-disk").mkdir()
        (tmp_path / "out").symlink_to("large-disk")
        new_folder(tmp_path / "out" / "run")
        assert (tmp_path / "large-disk" / "run").is_dir()


def test_real_small_disk(tmp_path: Path) -> None:
    """On a file system that is full, what was there stays, nothing else is left, and the reason is the kernel's."""
    code = f"""
        import errno, os
        from pathlib import Path
        from harness.safe_io.writing import *
        here = Path({str(tmp_path)!r})
        write_whole(here / "a", b"before")
        try:
            write_whole(here / "a", b"x" * 200_000)
        except OSError as e:
            assert e.errno == errno.ENOSPC, e
        else:
            raise AssertionError("it fits")
        assert [p.name for p in here.iterdir()] == ["a"] and (here / "a").read_bytes() == b"before"
        fd = open_new(here / "lines")
        for number in range(10_000):
            try:
                append_or_nothing(fd, b"%099d\\n" % number)
            except OSError as e:
                assert e.errno == errno.ENOSPC, e
                break
        text = (here / "lines").read_bytes()
        assert 0 < number < 10_000 and text.count(b"\\n") == number and text.endswith(b"\\n")
    """
    inside = f"mount -t tmpfs -o size=64k none {tmp_path} && exec {sys.executable} -c '{textwrap.dedent(code)}'"
    inside = inside.replace("'a'", '"a"').replace(f"'{tmp_path}'", f'"{tmp_path}"')
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel lets this user make no namespace, and so no file system")
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", inside], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
