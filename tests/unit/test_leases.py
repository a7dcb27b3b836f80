"""Leases on devices across processes: all or nothing, one queue, gone with their holder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from harness.devices import DeviceError, Inventory, accelerators, at_host
from harness.leases import Leases, Places, Wait, holding, records
from harness.placement import Need

HOLDER = Path(__file__).with_name("lease_holder.py")


def sim(count: int) -> Inventory:
    return Inventory("sim", tuple(f"sim:{i}" for i in range(count)), tuple(f"sim-{i}" for i in range(count)))


@contextlib.contextmanager
def holder(
    directory: Path, count: int, mode: str, argument: object, session: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """Another process that takes leases; it ends with the block."""
    command = [sys.executable, str(HOLDER), str(directory), str(count), mode, str(argument), session]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def queued(directory: Path, count: int) -> list[records.Waiter]:
    """Wait until so many stand in the queue; returns them."""
    deadline = time.monotonic() + 60
    while len(found := records.waiters(directory)) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} in the queue"
        time.sleep(0.005)
    return found


class TestLeases:
    def test_names(self, tmp_path: Path) -> None:
        """A lease names devices as this process sees them."""
        with Leases(accelerators("gpu", 2, {"CUDA_VISIBLE_DEVICES": "5,7"}), tmp_path).hold(2) as held:
            assert held == ("gpu:0", "gpu:1")

    def test_two_at_once(self, tmp_path: Path) -> None:
        """Leases held side by side share no device."""
        leases = Leases(sim(4), tmp_path)
        with leases.hold(1) as one, leases.hold(3) as other:
            assert set(sim(4).devices) == {*one, *other}

    @pytest.mark.parametrize(
        ("prefer", "expected"),
        [
            (("sim:2", "sim:3"), ("sim:2", "sim:3")),
            (("sim:3", "sim:1"), ("sim:0", "sim:3")),
            (("sim:1",), ("sim:0", "sim:2")),
            (("gpu:0",), ("sim:0", "sim:2")),
        ],
        ids=["both free", "one held", "none free", "none there"],
    )
    def test_preferred(self, tmp_path: Path, prefer: tuple[str, ...], expected: tuple[str, ...]) -> None:
        """Preferred devices are taken if they are free, and others for those that are not; their order is fixed."""
        leases = Leases(sim(4), tmp_path)
        with leases.hold(1, prefer=("sim:1",)) as held, leases.hold(2, prefer=prefer) as ours:
            assert (held, ours) == (("sim:1",), expected)

    def test_preferred_before_others(self, tmp_path: Path) -> None:
        """Preferred devices are also taken if others wait, whose turn comes later."""
        with holder(tmp_path, 4, "hold", 1, "other") as first:
            assert first_line(first) == "sim:0"
            with holder(tmp_path, 4, "hold", 4, "other"):
                queued(tmp_path, 1)
                with Leases(sim(4), tmp_path).hold(2, prefer=("sim:3",), timeout=10) as ours:
                    assert ours == ("sim:1", "sim:3")

    def test_preference_does_not_overtake(self, tmp_path: Path) -> None:
        """Who prefers devices that are free still waits behind a session that came first."""
        leases = Leases(sim(2), tmp_path)
        with leases.hold(1), holder(tmp_path, 2, "hold", 2):
            queued(tmp_path, 1)
            with pytest.raises(DeviceError, match="did not become free in time"):
                leases.hold(1, prefer=("sim:1",), timeout=0.05).__enter__()

    def test_chosen(self, tmp_path: Path) -> None:
        """Of the free devices those are taken that are chosen; if none fit, they are left to others."""
        devices = tuple(at_host(f"sim:{i}", host) for host in (0, 1) for i in (0, 1))
        there = Inventory("sim", devices, ("a", "b", "c", "d"), (0, 0, 1, 1))
        leases, one, two = Leases(there, tmp_path), Need(1), Need(2)
        with leases.hold(1, choose=partial(one.take, there)) as first:
            assert first == ("sim:0@0",)
            with leases.hold(2, choose=partial(two.take, there)) as both:
                assert both == ("sim:0@1", "sim:1@1")
                with leases.hold(1) as left:
                    assert left == ("sim:1@0",)
            with leases.hold(1, prefer=("sim:1@1",)), pytest.raises(DeviceError, match="did not become free in time"):
                leases.hold(2, choose=partial(two.take, there), timeout=0.05).__enter__()

    def test_chosen_behind_others(self, tmp_path: Path) -> None:
        """Who waits for devices of one host does not take the place of those that came first."""
        leases = Leases(sim(2), tmp_path)
        with leases.hold(1), holder(tmp_path, 2, "hold", 2):
            queued(tmp_path, 1)
            with pytest.raises(DeviceError, match="did not become free in time"):
                leases.hold(1, choose=partial(Need(1).take, sim(2)), timeout=0.05).__enter__()

    def test_given_back(self, tmp_path: Path) -> None:
        """Devices come free when the block ends."""
        leases = Leases(sim(2), tmp_path)
        for _ in range(3):
            with leases.hold(2, timeout=10) as held:
                assert held == ("sim:0", "sim:1")

    def test_given_back_after_an_error(self, tmp_path: Path) -> None:
        """Devices come free when the block raises."""
        leases = Leases(sim(2), tmp_path)
        with pytest.raises(KeyError), leases.hold(2):
            raise KeyError
        with leases.hold(2, timeout=10) as held:
            assert len(held) == 2

    def test_given_back_when_interrupted(self, tmp_path: Path) -> None:
        """Whoever is interrupted while waiting leaves the queue and holds nothing."""
        leases = Leases(sim(2), tmp_path)

        def interrupt(wait: Wait) -> None:
            raise KeyboardInterrupt

        with leases.hold(1), pytest.raises(KeyboardInterrupt), leases.hold(2, waiting=interrupt):
            pass
        with leases.hold(2, timeout=10) as held:
            assert len(held) == 2

    @pytest.mark.parametrize("count", [5, 0, -1])
    def test_count_that_cannot_be(self, tmp_path: Path, count: int) -> None:
        """Asking for more devices than there are, or none, fails at once and says how many there are."""
        with pytest.raises(DeviceError, match=f"{count} devices of kind sim asked for; there are 4"):
            Leases(sim(4), tmp_path).hold(count).__enter__()

    def test_no_devices(self, tmp_path: Path) -> None:
        """Where there are no devices at all, no lease can be had."""
        with pytest.raises(DeviceError, match="there are 0"), Leases(sim(0), tmp_path).hold(1):
            pass

    @pytest.mark.parametrize("timeout", [0, 0.05])
    def test_timeout(self, tmp_path: Path, timeout: float) -> None:
        """Devices that others hold for longer than one waits are an error that says so."""
        leases = Leases(sim(2), tmp_path)
        with leases.hold(1), pytest.raises(DeviceError, match="did not become free in time"):
            leases.hold(2, timeout=timeout).__enter__()

    def test_timeout_in_the_queue(self, tmp_path: Path) -> None:
        """The time limit holds behind others in the queue as well."""
        leases = Leases(sim(1), tmp_path)
        stop = threading.Event()

        def wait_in_front() -> None:
            with contextlib.suppress(DeviceError), leases.hold(1, timeout=30):
                stop.wait(30)

        with leases.hold(1):
            thread = threading.Thread(target=wait_in_front)
            thread.start()
            queued(tmp_path, 1)
            with pytest.raises(DeviceError, match="did not become free in time"):
                leases.hold(1, timeout=0.05).__enter__()
        stop.set()
        thread.join()

    def test_timeout_leaves_nothing(self, tmp_path: Path) -> None:
        """Who gave up holds nothing: what was free before is free again."""
        leases = Leases(sim(2), tmp_path)
        with leases.hold(1):
            with pytest.raises(DeviceError):
                leases.hold(2, timeout=0).__enter__()
            with leases.hold(1, timeout=10) as held:
                assert len(held) == 1

    def test_waiting_is_called(self, tmp_path: Path) -> None:
        """Whoever has to wait is called when the wait begins, and while it goes on."""
        leases = Leases(sim(1), tmp_path)
        seconds: list[float] = []
        with leases.hold(1), pytest.raises(DeviceError):
            leases.hold(1, timeout=1, waiting=lambda wait: seconds.append(wait.seconds)).__enter__()
        assert seconds[0] == 0
        assert seconds[-1] > 0
        assert seconds == sorted(seconds)

    def test_waiting_is_not_called_without_a_wait(self, tmp_path: Path) -> None:
        """Whoever gets devices at once is not told to wait."""
        calls: list[int] = []
        with Leases(sim(1), tmp_path).hold(1, waiting=lambda wait: calls.append(1)):
            assert calls == []

    @pytest.mark.parametrize("keys", [("a/b", "a_b"), ("..", "."), ("a b", "a%20b")], ids=str)
    def test_keys_that_are_no_file_names(self, tmp_path: Path, keys: tuple[str, str]) -> None:
        """Devices whose keys look alike as file names are still two, and stay in their folder."""
        folder = tmp_path / "leases"
        folder.mkdir()
        with Leases(Inventory("sim", ("sim:0", "sim:1"), keys), folder).hold(2, timeout=10) as held:
            assert (2, [folder]) == (len(held), list(tmp_path.iterdir()))


class TestShares:
    """Devices that several leases share."""

    def test_as_many_as_there_are(self, tmp_path: Path) -> None:
        """Each share of a device is leased once, the emptiest device comes first, and all are given back."""
        leases = Leases(sim(2), tmp_path)
        for _ in range(2):
            with contextlib.ExitStack() as stack:
                held = [stack.enter_context(leases.hold(1, timeout=0, shares=2)) for _ in range(4)]
                assert held == [("sim:0",), ("sim:1",), ("sim:0",), ("sim:1",)]
                with pytest.raises(DeviceError):
                    leases.hold(1, timeout=0, shares=2).__enter__()

    def test_preferred_even_if_not_the_emptiest(self, tmp_path: Path) -> None:
        """A device where a world waits is taken as long as it has a share, whoever else uses it."""
        leases = Leases(sim(2), tmp_path)
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(leases.hold(1, shares=2, prefer=("sim:1",))) for _ in range(3)]
            assert held == [("sim:1",), ("sim:1",), ("sim:0",)]

    def test_one_of_each_device(self, tmp_path: Path) -> None:
        """A lease of two devices has a share of two different ones."""
        leases = Leases(sim(2), tmp_path)
        with leases.hold(2, shares=2) as one, leases.hold(2, timeout=0, shares=2) as another:
            assert one == another == ("sim:0", "sim:1")
            with pytest.raises(DeviceError):
                leases.hold(2, timeout=0, shares=2).__enter__()

    @pytest.mark.parametrize("first", [1, 2])
    def test_not_beside_a_lease_of_the_whole(self, tmp_path: Path, first: int) -> None:
        """A device is shared only among leases that all ask for shares."""
        leases = Leases(sim(1), tmp_path)
        with leases.hold(1, shares=first), pytest.raises(DeviceError):
            leases.hold(1, timeout=0, shares=3 - first).__enter__()
        with leases.hold(1, timeout=0, shares=3 - first):
            pass

    def test_the_whole_is_not_starved(self, tmp_path: Path) -> None:
        """A lease of a whole device gets it although leases of shares keep coming."""
        with contextlib.ExitStack() as stack:
            small = [stack.enter_context(holder(tmp_path, 1, "stream-shares", 1)) for _ in range(4)]
            assert [first_line(process) for process in small] == ["streaming"] * 4
            for _ in range(3):
                with Leases(sim(1), tmp_path).hold(1, timeout=60) as held:
                    assert len(held) == 1
            assert [process.poll() for process in small] == [None] * 4

    def test_who_holds(self, tmp_path: Path) -> None:
        """Whoever waits sees the holder of each share, and not those that have gone."""
        with holder(tmp_path, 1, "share", 3) as gone, holder(tmp_path, 1, "share", 3, session="theirs") as other:
            first_line(gone)
            first_line(other)
            assert len(records.holders(tmp_path, ["sim-0"])) == 2
            gone.kill()
            gone.wait()
            (found,) = records.holders(tmp_path, ["sim-0"])
            assert found is not None
            assert (found.process.pid, found.session) == (other.pid, "theirs")

    def test_in_every_folder(self, tmp_path: Path) -> None:
        """A device that a session shares in one place of leases is not free in the other for one that needs it all."""
        first, second = (tmp_path / name for name in ("first", "second"))
        for folder in (first, second):
            folder.mkdir(mode=0o700)
        both = Leases(sim(1), first)
        both._places = lambda: Places((first, second))  # type: ignore[method-assign]
        with both.hold(1, shares=2):
            for folder in (first, second):
                with pytest.raises(DeviceError):
                    Leases(sim(1), folder).hold(1, timeout=0).__enter__()
                with Leases(sim(1), folder).hold(1, timeout=0, shares=2):
                    pass


class TestAcrossProcesses:
    def test_other_process_holds(self, tmp_path: Path) -> None:
        """What another process holds is not given out, and the rest is."""
        with holder(tmp_path, 4, "hold", 3) as other:
            theirs = first_line(other).split()
            with Leases(sim(4), tmp_path).hold(1, timeout=10) as ours:
                assert set(sim(4).devices) == {*theirs, *ours}

    def test_two_masks(self, tmp_path: Path) -> None:
        """Sessions that see one device under different numbers don't both get it."""
        one = Leases(accelerators("gpu", 2, {"CUDA_VISIBLE_DEVICES": "5,7"}), tmp_path)
        other = Leases(accelerators("gpu", 2, {"CUDA_VISIBLE_DEVICES": "7,8"}), tmp_path)
        with one.hold(2), other.hold(1) as held:
            assert held == ("gpu:1",)

    def test_lease_dies_with_its_holder(self, tmp_path: Path) -> None:
        """A holder that is killed leaves its devices free."""
        with holder(tmp_path, 2, "hold", 2) as other:
            first_line(other)
            other.kill()
            other.wait()
            with Leases(sim(2), tmp_path).hold(2, timeout=30) as held:
                assert len(held) == 2

    def test_place_in_the_queue_dies_with_its_owner(self, tmp_path: Path) -> None:
        """A process that is killed while it stands in the queue does not hold up those behind it."""
        leases = Leases(sim(2), tmp_path)
        with leases.hold(1):
            with holder(tmp_path, 2, "hold", 2) as other:
                queued(tmp_path, 1)
                other.kill()
                other.wait()
            with leases.hold(1, timeout=30) as held:
                assert len(held) == 1
        assert list(tmp_path.glob("*.ticket")) == []

    def test_child_of_a_holder(self, tmp_path: Path) -> None:
        """A program that a holder has started does not keep the lease."""
        leases = Leases(sim(1), tmp_path)
        with leases.hold(1):
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        with child, leases.hold(1, timeout=10) as held:
            child.kill()
            assert len(held) == 1

    def test_never_two_on_one_device(self, tmp_path: Path) -> None:
        """Eight processes with mixed demands on four devices all finish, and no device ever has two users."""
        demands = ["1,4,2,3", "4,1,1,2", "3,3,1,4", "2,2,2,2", "1,1,1,1", "4,4,4,4", "2,3,2,3", "1,2,3,4"]
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(holder(tmp_path, 4, "churn", ",".join([demand] * 4))) for demand in demands]
            codes = [worker.wait(60) for worker in workers]
        assert (codes, (tmp_path / "over-subscribed").exists()) == ([0] * 8, False)

    def test_large_demand_is_not_starved(self, tmp_path: Path) -> None:
        """A world of all devices gets them although small ones keep coming."""
        with contextlib.ExitStack() as stack:
            small = [stack.enter_context(holder(tmp_path, 3, "stream", 1)) for _ in range(4)]
            assert [first_line(process) for process in small] == ["streaming"] * 4
            for _ in range(3):
                with Leases(sim(3), tmp_path).hold(3, timeout=60) as held:
                    assert len(held) == 3
            assert [process.poll() for process in small] == [None] * 4

    def test_forked_child_of_a_holder(self, tmp_path: Path) -> None:
        """A child that a holder has forked does not keep the lease of a holder that was killed."""
        with holder(tmp_path, 1, "fork", 1) as other:
            child = int(first_line(other))
            try:
                other.kill()
                other.wait()
                with Leases(sim(1), tmp_path).hold(1, timeout=30) as held:
                    assert len(held) == 1
            finally:
                os.kill(child, signal.SIGKILL)


class TestQueue:
    def test_first_come_first_served(self, tmp_path: Path) -> None:
        """Sessions that hold nothing get devices in the order in which they came."""
        leases = Leases(sim(1), tmp_path)
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(contextlib.ExitStack())
            held.enter_context(leases.hold(1))
            waiting = []
            for number in range(3):
                waiting.append(stack.enter_context(holder(tmp_path, 1, "hold", 1, session=f"{number}")))
                queued(tmp_path, number + 1)
            held.close()
            for number, process in enumerate(waiting):
                assert first_line(process) == "sim:0"
                assert [w.holder.session for w in records.waiters(tmp_path)] == [str(n) for n in range(number + 1, 3)]
                assert process.stdin is not None
                process.stdin.close()

    @pytest.mark.parametrize(("devices", "mode", "shares"), [(2, "hold", 1), (1, "share", 2)])
    def test_fewest_first(self, tmp_path: Path, devices: int, mode: str, shares: int) -> None:
        """A session that holds nothing comes before one that holds a device or a share already, although later."""
        leases = Leases(sim(devices), tmp_path)

        def another(session: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
            return holder(tmp_path, devices, mode, shares, session=session)  # of one device, or one of two shares

        with contextlib.ExitStack() as stack:
            first = stack.enter_context(another("greedy"))
            first_line(first)
            held = stack.enter_context(contextlib.ExitStack())
            held.enter_context(leases.hold(1, shares=shares))
            greedy = stack.enter_context(another("greedy"))
            queued(tmp_path, 1)
            modest = stack.enter_context(another("modest"))
            queued(tmp_path, 2)
            held.close()
            assert first_line(modest).startswith("sim:")
            assert [w.holder.process.pid for w in records.waiters(tmp_path)] == [greedy.pid]

    def test_devices_are_kept_for_who_comes_back(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between two tests a session keeps its share: who holds more does not get in between."""
        monkeypatch.setattr(holding, "_RETURN", 4.0)
        leases = Leases(sim(2), tmp_path)
        with contextlib.ExitStack() as stack:
            first_line(stack.enter_context(holder(tmp_path, 2, "hold", 1, session="greedy")))
            with leases.hold(1, returns=lambda: True):
                stack.enter_context(holder(tmp_path, 2, "hold", 1, session="greedy"))
                queued(tmp_path, 1)
            time.sleep(0.5)  # the other looks 50 times meanwhile
            waits: list[float] = []
            with leases.hold(1, timeout=30, waiting=lambda wait: waits.append(wait.seconds)):
                assert (waits, len(records.waiters(tmp_path))) == ([], 1)

    def test_nothing_is_kept_for_who_does_not_come(self, tmp_path: Path) -> None:
        """What is kept for a test that never comes goes to whoever waits, after a moment."""
        leases = Leases(sim(2), tmp_path)
        with contextlib.ExitStack() as stack:
            first_line(stack.enter_context(holder(tmp_path, 2, "hold", 1, session="greedy")))
            with leases.hold(1, returns=lambda: True):
                greedy = stack.enter_context(holder(tmp_path, 2, "hold", 1, session="greedy"))
                queued(tmp_path, 1)
            assert first_line(greedy).startswith("sim:")

    def test_other_devices_do_not_compete(self, tmp_path: Path) -> None:
        """A session that sees other devices through its mask is not held up by the queue for these."""
        ours = Leases(accelerators("gpu", 1, {"CUDA_VISIBLE_DEVICES": "0"}), tmp_path)
        theirs = Leases(accelerators("gpu", 1, {"CUDA_VISIBLE_DEVICES": "1"}), tmp_path)
        stop = threading.Event()

        def wait_for_it() -> None:
            with contextlib.suppress(DeviceError), ours.hold(1, timeout=30):
                stop.wait(30)

        with ours.hold(1):
            thread = threading.Thread(target=wait_for_it)
            thread.start()
            queued(tmp_path, 1)
            with theirs.hold(1, timeout=30) as held:
                assert held == ("gpu:0",)
        stop.set()
        thread.join()

    @pytest.mark.parametrize("text", [b"", b"{", b"\xff" * 100, b"[" * 50_000, b'{"kind": "sim"}'], ids=range(5))
    def test_planted_in_the_queue(self, tmp_path: Path, text: bytes) -> None:
        """Files in the queue that no waiter wrote hold up nobody, and are removed."""
        (tmp_path / "1.ticket").write_bytes(text)
        (tmp_path / "1.claim").write_bytes(text)
        (tmp_path / "2.ticket").symlink_to("1.ticket")
        (tmp_path / "2.claim").mkdir()
        with Leases(sim(1), tmp_path).hold(1, timeout=30) as held:
            assert len(held) == 1
        assert [p.name for p in tmp_path.glob("*.[tc][il]*")] == ["2.claim"]

    def test_clock_that_was_set(self, tmp_path: Path) -> None:
        """A claim that is valid for hours, as after a clock was set back, keeps nobody waiting."""
        leases = Leases(sim(1), tmp_path)
        me = records.Waiter(holder=records.myself(), kind="sim", keys=("sim-0",), count=1, number=0, until=2e10)
        records.claim(tmp_path, me)
        (tmp_path / f"{os.getpid()}.claim").rename(tmp_path / "1.claim")
        waits: list[float] = []
        with leases.hold(1, timeout=30, waiting=lambda wait: waits.append(wait.seconds)):
            assert waits == []


class TestHolders:
    def test_who_holds(self, tmp_path: Path) -> None:
        """Whoever waits sees program, folder, test and process of who holds each device."""
        with holder(tmp_path, 2, "hold", 1, session="theirs") as other:
            first_line(other)
            seen: list[list[records.Holder | None]] = []
            with pytest.raises(DeviceError):
                Leases(sim(2), tmp_path).hold(2, 0, waiting=lambda wait: seen.append(wait.holders())).__enter__()
            (found,) = seen[0]
            assert found is not None
            assert (found.process.pid, found.session, found.what) == (other.pid, "theirs", "a test")
            assert (found.program, found.folder) == ("lease_holder.py", os.getcwd())

    def test_arguments_are_not_told(self, tmp_path: Path) -> None:
        """No argument of a command line, where a secret may be, is in any file of leases."""
        with holder(tmp_path, 2, "hold", 1, session="s") as other:
            first_line(other)
            assert b"lease_holder" in (tmp_path / "sim-0.lock").read_bytes()
            assert not [p for p in tmp_path.iterdir() if str(HOLDER).encode() in p.read_bytes()]
            assert {p.stat().st_mode & 0o077 for p in tmp_path.iterdir()} == {0}

    def test_holder_that_was_killed(self, tmp_path: Path) -> None:
        """A process that died is not called the holder, whatever its lock file says."""
        with holder(tmp_path, 1, "hold", 1) as other:
            first_line(other)
            other.kill()
            other.wait()
        assert (tmp_path / "sim-0.lock").read_bytes() != b""
        assert records.signed(records.lock_file(tmp_path, "sim-0")) is None
        assert records.holders(tmp_path, ["sim-0"]) == []

    def test_pid_of_another_process(self, tmp_path: Path) -> None:
        """A process that has got the number of one that died is not taken for it."""
        path = tmp_path / "sim-0.lock"
        with Leases(sim(1), tmp_path).hold(1):
            text = path.read_text()
            started = records.myself().process.started
            path.write_text(text.replace(f'"started":{started}', f'"started":{started - 1}'))
            assert records.holders(tmp_path, ["sim-0"]) == [None]

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        """A lease that was given back leaves empty lock files, and nothing in the queue."""
        with Leases(sim(2), tmp_path).hold(2):
            pass
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == dict.fromkeys(
            ("sim-0.lock", "sim-1.lock", "sim.mutex"), b""
        )
