"""Devices, and leases on them across processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import devices
from harness.devices import (
    DeviceError,
    Inventory,
    Leases,
    accelerators,
    dealt,
    host_inventory,
    inventory,
    largest_first,
)

HOLDER = Path(__file__).with_name("lease_holder.py")


def sim(count: int) -> Inventory:
    return Inventory("sim", tuple(f"sim:{i}" for i in range(count)), tuple(f"sim-{i}" for i in range(count)))


@contextlib.contextmanager
def holder(directory: Path, count: int, mode: str, argument: object) -> Iterator[subprocess.Popen[str]]:
    """Another process that takes leases; it ends with the block."""
    command = [sys.executable, str(HOLDER), str(directory), str(count), mode, str(argument)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class TestMasks:
    def test_no_mask(self) -> None:
        """Without a mask a device's key is its own number."""
        found = accelerators("cuda", 2, {})
        assert (found.devices, found.keys) == (("cuda:0", "cuda:1"), ("cuda-0", "cuda-1"))

    @pytest.mark.parametrize(
        ("variable", "mask", "keys"),
        [
            ("CUDA_VISIBLE_DEVICES", "5,7", ("gpu-5", "gpu-7")),
            ("CUDA_VISIBLE_DEVICES", " 7 , 5 ", ("gpu-7", "gpu-5")),
            ("CUDA_VISIBLE_DEVICES", "GPU-8932f937,MIG-1/2", ("gpu-GPU-8932f937", "gpu-MIG-1/2")),
            ("HIP_VISIBLE_DEVICES", "1,0", ("gpu-1", "gpu-0")),
            ("ZE_AFFINITY_MASK", "0.1,1.0", ("gpu-0.1", "gpu-1.0")),
            ("VENDOR_VISIBLE_DEVICES", "a,b", ("gpu-a", "gpu-b")),
        ],
    )
    def test_mask(self, variable: str, mask: str, keys: tuple[str, ...]) -> None:
        """A device is numbered as this process sees it, and has the key that the mask names it by."""
        found = accelerators("gpu", 2, {variable: mask})
        assert (("gpu:0", "gpu:1"), keys) == (found.devices, found.keys)

    @pytest.mark.parametrize("mask", ["", ",", "5", "all", "void", "5,5"])
    def test_mask_that_names_other_devices(self, mask: str) -> None:
        """A mask that does not name as many different devices as there are says nothing."""
        assert accelerators("gpu", 2, {"CUDA_VISIBLE_DEVICES": mask}).keys == ("gpu-0", "gpu-1")

    def test_mask_cut_short(self) -> None:
        """Of a mask that names more than there are, the first ones count: the runtime stops at one it lacks."""
        assert accelerators("gpu", 1, {"CUDA_VISIBLE_DEVICES": "5,-1,7"}).keys == ("gpu-5",)

    def test_empty_mask(self) -> None:
        """A mask that hides everything leaves nothing."""
        assert accelerators("gpu", 0, {"CUDA_VISIBLE_DEVICES": ""}).devices == ()

    def test_two_masks_for_one_device(self) -> None:
        """Processes that see one device under different numbers have the same key for it."""
        one = accelerators("gpu", 2, {"CUDA_VISIBLE_DEVICES": "5,7"})
        other = accelerators("gpu", 1, {"CUDA_VISIBLE_DEVICES": "7"})
        assert one.keys[1] == other.keys[0]

    @settings(deadline=None)
    @given(count=st.integers(0, 5), environ=st.dictionaries(st.sampled_from(["A_VISIBLE_DEVICES", "B"]), st.text()))
    def test_any_mask(self, count: int, environ: dict[str, str]) -> None:
        """Whatever the environment holds, each device has a key of its own."""
        assert count == len(set(accelerators("gpu", count, environ).keys))


class TestInventory:
    def test_keys_must_differ(self) -> None:
        """Two devices with one key are refused."""
        with pytest.raises(ValueError, match="key of its own"):
            Inventory("sim", ("sim:0", "sim:1"), ("a", "a"))

    def test_every_device_needs_a_key(self) -> None:
        """A device without a key is refused."""
        with pytest.raises(ValueError, match="key of its own"):
            Inventory("sim", ("sim:0", "sim:1"), ("a",))

    def test_host(self) -> None:
        """The host has a slot for each core that this process may use."""
        assert (True, os.sched_getaffinity(0)) == (
            host_inventory().on_host,
            {int(key.removeprefix("cpu-")) for key in host_inventory().keys},
        )

    def test_cpu_asked_for(self) -> None:
        """Who asks for the host gets it, whatever accelerators there are."""
        assert host_inventory() == inventory("cpu")

    def test_kind_that_is_not_there(self) -> None:
        """Asking for an accelerator that is not there says what is."""
        with pytest.raises(DeviceError, match=r"no hologram device: .*torch"):
            inventory("hologram")

    def test_no_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without an accelerator the default is the host."""
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        assert host_inventory() == inventory()

    def test_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With accelerators the default is those."""
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
        assert inventory().devices == ("cuda:0", "cuda:1", "cuda:2")

    @pytest.mark.parametrize(("ranks", "each", "expected"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (5, 2, 3), (1, 8, 1)])
    def test_demand(self, ranks: int, each: int, expected: int) -> None:
        """A world takes as many devices as its ranks need."""
        assert expected == sim(8).demand(ranks, each)

    @pytest.mark.parametrize("ranks", [1, 2, 100])
    def test_demand_on_host(self, ranks: int) -> None:
        """A world on the host takes one slot, whatever its size."""
        assert host_inventory().demand(ranks) == 1

    @pytest.mark.parametrize(
        ("ranks", "each", "whole", "expected"),
        [
            (3, 1, False, "abc"),
            (3, 1, True, "abc"),
            (5, 2, False, "aabbc"),
            (5, 2, True, "abcab"),
            (2, 2, True, "ab"),
            (1, 2, False, "a"),
        ],
    )
    def test_dealt(self, ranks: int, each: int, whole: bool, expected: str) -> None:
        """Neighbours share a device, but where ranks have all of the machine's."""
        assert dealt("abc", ranks, each, whole=whole) == tuple(expected)

    def test_largest_first(self) -> None:
        """Larger worlds come first; equal ones stay as they were."""
        assert largest_first([2, 4, 1, 2, 4]) == [1, 4, 0, 3, 2]

    def test_largest_first_of_nothing(self) -> None:
        """Nothing to order is no error."""
        assert largest_first([]) == []


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

        def interrupt() -> None:
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
        queued, stop = threading.Event(), threading.Event()

        def wait_in_front() -> None:
            def waiting() -> None:
                queued.set()

            with contextlib.suppress(DeviceError), leases.hold(1, timeout=30, waiting=waiting):
                stop.wait(30)

        with leases.hold(1):
            thread = threading.Thread(target=wait_in_front)
            thread.start()
            assert queued.wait(30)
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

    def test_waiting_is_called_once(self, tmp_path: Path) -> None:
        """Whoever has to wait is told so, once, wherever the wait begins."""
        leases = Leases(sim(1), tmp_path)
        queued, calls = threading.Event(), []

        def wait_in_front() -> None:
            with contextlib.suppress(DeviceError), leases.hold(1, timeout=0.1, waiting=queued.set):
                pass

        with leases.hold(1):
            front = threading.Thread(target=wait_in_front)
            front.start()
            assert queued.wait(30)
            with pytest.raises(DeviceError):
                leases.hold(1, timeout=0.4, waiting=lambda: calls.append(1)).__enter__()
            front.join()
        assert calls == [1]

    def test_waiting_is_not_called_without_a_wait(self, tmp_path: Path) -> None:
        """Whoever gets devices at once is not told to wait."""
        calls: list[int] = []
        with Leases(sim(1), tmp_path).hold(1, waiting=lambda: calls.append(1)):
            assert calls == []

    @pytest.mark.parametrize("keys", [("a/b", "a_b"), ("..", "."), ("a b", "a%20b")], ids=str)
    def test_keys_that_are_no_file_names(self, tmp_path: Path, keys: tuple[str, str]) -> None:
        """Devices whose keys look alike as file names are still two, and stay in their folder."""
        folder = tmp_path / "leases"
        folder.mkdir()
        with Leases(Inventory("sim", ("sim:0", "sim:1"), keys), folder).hold(2, timeout=10) as held:
            assert (2, [folder]) == (len(held), list(tmp_path.iterdir()))


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
                while Path(tmp_path / "sim.queue").stat().st_ino not in _locked_by(other.pid):
                    os.sched_yield()
                other.kill()
                other.wait()
            with leases.hold(1, timeout=30) as held:
                assert len(held) == 1

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


def _locked_by(pid: int) -> set[int]:
    """Inodes of the files that a process has locked."""
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {int(row[5].split(":")[2]) for row in rows if row[1] != "->" and row[4] == str(pid)}


class TestLeaseDirectory:
    @pytest.fixture(autouse=True)
    def temporary(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        return tmp_path / f"concord-leases-{os.getuid()}"

    def test_made(self, temporary: Path) -> None:
        """The directory is made for this user alone."""
        assert (temporary, 0o700) == (devices.lease_directory(), temporary.stat().st_mode & 0o777)

    def test_found(self, temporary: Path) -> None:
        """The directory of an earlier session is used again."""
        assert devices.lease_directory() == devices.lease_directory() == temporary

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777], ids=oct)
    def test_writable_by_others(self, temporary: Path, mode: int) -> None:
        """A directory that others can write to is refused."""
        temporary.mkdir()
        temporary.chmod(mode)
        with pytest.raises(DeviceError, match="remove it"):
            devices.lease_directory()

    def test_of_another_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A directory that belongs to someone else is refused."""
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        with pytest.raises(DeviceError, match="must be a directory of this user"):
            devices.lease_directory()

    def test_symlink(self, temporary: Path, tmp_path: Path) -> None:
        """A symbolic link is refused, also one to a directory of ours."""
        target = tmp_path / "target"
        target.mkdir(mode=0o700)
        temporary.symlink_to(target)
        with pytest.raises(DeviceError, match="remove it"):
            devices.lease_directory()

    def test_dangling_symlink(self, temporary: Path, tmp_path: Path) -> None:
        """A symbolic link to nothing is refused, and nothing is made where it points."""
        temporary.symlink_to(tmp_path / "nothing")
        with pytest.raises(DeviceError, match="remove it"):
            devices.lease_directory()
        assert not (tmp_path / "nothing").exists()

    def test_file_in_the_way(self, temporary: Path) -> None:
        """A file in its place is refused, and stays as it was."""
        temporary.write_text("mine")
        with pytest.raises(DeviceError, match="remove it"):
            devices.lease_directory()
        assert temporary.read_text() == "mine"

    def test_nowhere_to_make_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where no directory can be made, the error says which and why."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        with pytest.raises(DeviceError, match="can't be made: No such file"):
            devices.lease_directory()
