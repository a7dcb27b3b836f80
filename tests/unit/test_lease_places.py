"""Where leases are kept: what makes a folder unusable, and what happens then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.devices import DeviceError, Inventory
from harness.leases import VARIABLE, Leases, survey
from harness.leases import places as where

NOBODY = 65534
ROOT = os.geteuid() == 0
SIM = Inventory("sim", ("sim:0", "sim:1"), ("sim-0", "sim-1"))
OURS = f"concord-leases-{os.geteuid()}"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Two folders that everybody can write to, in the place of /tmp and /dev/shm; no others are tried."""
    top = Path(tempfile.mkdtemp(dir="/tmp"))
    top.chmod(0o755)
    folders = (top / "tmp", top / "shm")
    for folder in folders:
        folder.mkdir()
        folder.chmod(0o1777)
    monkeypatch.setattr(where, "_SHARED", folders)
    monkeypatch.setattr(where, "_RUNTIME", top / "run")
    monkeypatch.setattr(where, "_own", lambda: [top / "own"])
    monkeypatch.delenv(VARIABLE, raising=False)
    yield folders
    subprocess.run(["chmod", "-R", "u+rwx", str(top)], check=False)
    shutil.rmtree(top)


def as_nobody(function: Callable[[], object]) -> object:
    """What a function returns (as JSON) in a child that is another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, json.dumps(function()).encode())
        except BaseException as e:
            os.write(writing, json.dumps(f"{type(e).__name__}: {e}").encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def another_users(path: Path) -> None:
    """Let another user make a folder: really so as root; elsewhere by what the file system says of it."""
    if ROOT:
        assert as_nobody(lambda: os.mkdir(path, 0o777)) is None
        return
    path.mkdir(mode=0o777)
    real = Path.lstat

    def lstat(self: Path) -> os.stat_result:
        status = real(self)
        if self != path:
            return status
        return os.stat_result((*status[:4], NOBODY, NOBODY, *status[6:10]))

    Path.lstat = lstat  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "lstat", Path.lstat)


def hold() -> list[str]:
    """Lease every device; returns why places were not used."""
    leases = Leases(SIM)
    with leases.hold(2, timeout=10):
        return [*leases.refused, *leases.broken]


class TestPlaces:
    def test_all_that_can_be_used(self, shared: tuple[Path, Path]) -> None:
        """Leases are in every shared place, in folders made for this user alone."""
        assert hold() == []
        for folder in shared:
            assert (folder / OURS).stat().st_mode & 0o7777 == 0o700
            assert (folder / OURS / "sim-0.lock").exists()

    def test_looking_makes_nothing(self, shared: tuple[Path, Path]) -> None:
        """Looking for places leaves nothing behind."""
        assert survey().folders == tuple(folder / OURS for folder in shared)
        assert [list(folder.iterdir()) for folder in shared] == [[], []]

    def test_umask(self, shared: tuple[Path, Path]) -> None:
        """An umask that takes everything from files does not make the folders unusable for later sessions."""
        before = os.umask(0o777)
        try:
            assert hold() == []
        finally:
            os.umask(before)
        assert [(folder / OURS).stat().st_mode & 0o777 for folder in shared] == [0o700, 0o700]
        assert hold() == []

    def test_temporary_folders_differ(self, shared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """Sessions with different TMPDIR and XDG_RUNTIME_DIR meet."""
        first = survey()
        monkeypatch.setenv("TMPDIR", str(shared[0].parent))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared[0].parent))
        monkeypatch.setattr(tempfile, "tempdir", None)
        assert survey() == first

    def test_runtime_folder(self, shared: tuple[Path, Path]) -> None:
        """The folder that a login manager makes for the user is used as well, and not missed where there is none."""
        runtime = shared[0].parent / "run" / str(os.geteuid())
        runtime.mkdir(parents=True, mode=0o700)
        assert survey().folders[2:] == (runtime / "concord-leases",)
        assert hold() == []
        shutil.rmtree(runtime)
        assert hold() == []

    def test_one_common_place_is_enough(self, shared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """Two sessions of which each can use another set of places do not get one device both."""
        leases = Leases(SIM)
        with leases.hold(2):
            for only in shared:
                monkeypatch.setattr(where, "_SHARED", (only,))
                with pytest.raises(DeviceError, match="did not become free"):
                    Leases(SIM).hold(1, timeout=0).__enter__()


class TestSquatted:
    def test_one_place(self, shared: tuple[Path, Path]) -> None:
        """A name that another user has taken stops nobody: leases are in the other place, and the reason is said."""
        another_users(shared[0] / OURS)
        (said,) = hold()
        assert said.startswith(f"{shared[0] / OURS}: it belongs to user ")
        assert (shared[1] / OURS / "sim-0.lock").exists()
        assert list((shared[0] / OURS).iterdir()) == []

    def test_every_shared_place(self, shared: tuple[Path, Path]) -> None:
        """If every shared name was taken, leases are in a folder of the user's own."""
        for folder in shared:
            another_users(folder / OURS)
        assert len(hold()) == 2
        assert (shared[0].parent / "own" / "sim-0.lock").exists()

    def test_taken_and_given_up(self, shared: tuple[Path, Path]) -> None:
        """Who began while a name was taken and who begins afterwards exclude each other."""
        another_users(shared[0] / OURS)
        with Leases(SIM).hold(2):
            (shared[0] / OURS).rmdir()
            with pytest.raises(DeviceError, match="did not become free"):
                Leases(SIM).hold(1, timeout=0).__enter__()

    @pytest.mark.skipif(not ROOT, reason="only root can be two users")
    def test_as_the_other_user(self, shared: tuple[Path, Path]) -> None:
        """A user whose names root has taken, with folders open to all, runs all the same, and nothing is put there."""
        names = [folder / f"concord-leases-{NOBODY}" for folder in shared]
        names[0].mkdir()
        names[0].chmod(0o1777)
        assert as_nobody(hold) == [f"{names[0]}: it belongs to user root"]
        assert list(names[0].iterdir()) == []
        names[1].rmdir() if not any(names[1].iterdir()) else shutil.rmtree(names[1])
        names[1].symlink_to(names[0])
        answer = as_nobody(hold)
        assert isinstance(answer, str)
        assert answer.startswith("DeviceError: leases on devices cannot be kept anywhere: ")
        assert f"{names[1]}: it is a symbolic link" in answer

    @pytest.mark.skipif(not ROOT, reason="only root can be two users")
    def test_others_cannot_hold_our_locks(self, shared: tuple[Path, Path]) -> None:
        """Another user can't open a lock file of ours, and so can't hold it."""
        assert hold() == []
        found = as_nobody(lambda: os.open(shared[0] / OURS / "sim-0.lock", os.O_RDONLY))
        assert str(found).startswith("PermissionError")


class TestUnusable:
    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777, 0o755, 0o710], ids=oct)
    def test_open_to_others(self, shared: tuple[Path, Path], mode: int) -> None:
        """A folder that others have access to is not used: whoever can open a lock file can hold it."""
        (shared[0] / OURS).mkdir()
        (shared[0] / OURS).chmod(mode)
        assert hold() == [f"{shared[0] / OURS}: others have access to it (mode {mode:o}): chmod 700, or remove it"]

    @pytest.mark.parametrize("target", ["target", "nothing"])
    def test_symlink(self, shared: tuple[Path, Path], target: str) -> None:
        """A symbolic link is not followed, not even to a folder of ours, and nothing is made where it points."""
        there = shared[0] / "target"
        there.mkdir(mode=0o700)
        (shared[0] / OURS).symlink_to(shared[0] / target)
        assert hold() == [f"{shared[0] / OURS}: it is a symbolic link"]
        assert (list(there.iterdir()), (shared[0] / "nothing").exists()) == ([], False)

    def test_file_in_the_way(self, shared: tuple[Path, Path]) -> None:
        """A file in its place stays as it was."""
        (shared[0] / OURS).write_text("mine")
        assert hold() == [f"{shared[0] / OURS}: it is not a folder"]
        assert (shared[0] / OURS).read_text() == "mine"

    def test_nowhere(self, shared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """Where no folder can be had at all, the error names each with its reason, and what to do."""
        gone = shared[0].parent / "gone"
        monkeypatch.setattr(where, "_SHARED", (gone / "a", gone / "b"))
        monkeypatch.setattr(where, "_own", lambda: [gone / "c"])
        with pytest.raises(DeviceError) as caught:
            hold()
        for name in ("a", "b"):
            assert f"{gone / name / OURS}: {gone / name} does not exist" in str(caught.value)
        assert f"name a folder in {VARIABLE}" in str(caught.value)

    def test_planted_lock_files(self, shared: tuple[Path, Path]) -> None:
        """What is no lock file in the place of one makes that place unusable, and is not touched."""
        folder = shared[0] / OURS
        folder.mkdir(mode=0o700)
        (folder / "victim").write_text("precious")
        (folder / "sim-0.lock").symlink_to("victim")
        (folder / "sim-1.lock").mkdir()
        (said,) = hold()
        assert said.startswith(str(folder))
        assert (folder / "victim").read_text() == "precious"
        assert (shared[1] / OURS / "sim-0.lock").exists()

    def test_hard_link_and_pipe(self, shared: tuple[Path, Path]) -> None:
        """A pipe in the place of a lock file blocks nobody."""
        folder = shared[0] / OURS
        folder.mkdir(mode=0o700)
        os.mkfifo(folder / "sim-0.lock")
        os.mkfifo(folder / "sim.mutex")
        os.mkfifo(folder / "1.ticket")
        assert hold() == []

    def test_planted_everywhere(self, shared: tuple[Path, Path]) -> None:
        """If no place can have a lock, the error names the files."""
        for folder in shared:
            (folder / OURS).mkdir(mode=0o700)
            (folder / OURS / "sim-0.lock").mkdir()
        with pytest.raises(DeviceError, match=r"can't be kept: .*sim-0\.lock: Is a directory"):
            hold()

    def test_deleted_meanwhile(self, shared: tuple[Path, Path]) -> None:
        """A folder that is deleted under a session is made again; whoever holds devices keeps them."""
        leases = Leases(SIM)
        with leases.hold(1) as ours:
            shutil.rmtree(shared[0] / OURS)
            with Leases(SIM).hold(1, timeout=10) as theirs:
                assert set(ours) != set(theirs)
            with pytest.raises(DeviceError, match="did not become free"):
                Leases(SIM).hold(2, timeout=0.1).__enter__()
            shutil.rmtree(shared[0] / OURS)
        assert hold() == []

    def test_deleted_while_waiting(self, shared: tuple[Path, Path]) -> None:
        """A session whose place in the queue was deleted still gets its devices."""
        leases = Leases(SIM)
        with Leases(SIM).hold(1):
            calls: list[float] = []

            def waiting(wait: object) -> None:
                if not calls:
                    shutil.rmtree(shared[0] / OURS)
                calls.append(0)

            with pytest.raises(DeviceError, match="did not become free"):
                leases.hold(2, timeout=0.6, waiting=waiting).__enter__()
        assert (len(calls) > 1, leases.broken) == (True, ())
        assert hold() == []
        assert list((shared[0] / OURS).glob("*.ticket")) == []

    def test_full_disk(self, shared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """On a full disk leases are held; only who holds them, and the order of the queue, may not be known."""
        assert hold() == []

        def full(*arguments: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with Leases(SIM).hold(1):
            assert (shared[0] / OURS / "sim-0.lock").read_bytes() == b""
            with pytest.raises(DeviceError, match="did not become free"):
                Leases(SIM).hold(2, timeout=0.1).__enter__()


MOUNTED = """
import json, os, sys
from pathlib import Path
import harness.leases.places as where
from harness.devices import Inventory
from harness.leases import Leases
where._SHARED = (Path(sys.argv[1]), Path(sys.argv[2]))
where._RUNTIME = Path("/nonexistent")
leases = Leases(Inventory("sim", ("sim:0",), ("sim-0",)))
with leases.hold(1, timeout=10):
    print(json.dumps([*leases.refused, *leases.broken]))
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("ro,mode=1777", "it can't be made: Read-only file system"),
        ("mode=1777,nr_inodes=1", "it can't be made: No space left on device"),
    ],
)
def test_mounted(tmp_path: Path, options: str, expected: str) -> None:
    """A read-only and a full file system are two more places that can't be used, for a reason that is said."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shm").mkdir()
    unshare = ["unshare", "-m"] if ROOT else ["unshare", "-Urm"]
    script = f'mount -t tmpfs -o {options} none "$1/tmp" && exec "$2" -c "$3" "$1/tmp" "$1/shm"'
    command = [*unshare, "sh", "-c", script, "sh", str(tmp_path), sys.executable, MOUNTED]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=Path(where.__file__).parents[2]
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [f"{tmp_path / 'tmp' / OURS}: {expected}"]


class TestVariable:
    def test_that_folder_alone(self, shared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """A folder that the user names is made, and the only one that is used."""
        mine = shared[0].parent / "mine"
        monkeypatch.setenv(VARIABLE, str(mine))
        assert hold() == []
        assert (survey().folders, mine.stat().st_mode & 0o777) == ((mine,), 0o700)
        assert [list(folder.iterdir()) for folder in shared] == [[], []]

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("relative", "not an absolute path"),
            ("/dev/null", "it is not a folder"),
            ("/proc/self/cwd", "it is a symbolic link"),
            ("/dev", "it belongs to user root" if not ROOT else r"others have access to it \(mode 755\)"),
            ("/nonexistent/a", "/nonexistent does not exist"),
        ],
    )
    def test_unusable(self, monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
        """A folder that can't be used is refused with its reason; no other is taken in its stead."""
        monkeypatch.setenv(VARIABLE, name)
        with pytest.raises(DeviceError, match=rf"^{VARIABLE}={name}: {why}"):
            survey()

    def test_empty(self, shared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """An empty variable is none."""
        monkeypatch.setenv(VARIABLE, "")
        assert survey().folders == tuple(folder / OURS for folder in shared)


def test_own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user's own folder is in the home that the system knows, by the machine's boot; then where TMPDIR points."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(where.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir="/homes/of"))
    first, second = where._own()
    assert (first.parent, second) == (Path("/homes/of"), tmp_path / OURS)
    assert first.name.startswith(".concord-leases-")
