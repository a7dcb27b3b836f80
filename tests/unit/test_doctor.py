"""``concord doctor``: what a machine offers, and the remedy for what is in the way."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.commands import machine
from harness.devices import Inventory
from harness.worlds.launch import LaunchError

HOST = Inventory("cpu", ("cpu", "cpu"), ("cpu-0", "cpu-1"))
GPUS = Inventory("gpu", ("gpu:0", "gpu:1"), ("gpu-GPU-a", "gpu-GPU-b"))


def test_devices() -> None:
    """Devices have their names, counted, and the keys that leases know them by."""
    found = machine.devices(GPUS, lambda kind, index: "H200")
    assert (found.found, found.remedy) == ("2 H200 (gpu); leases know them as gpu-GPU-a, gpu-GPU-b", "")


@pytest.mark.parametrize(("built_for", "says"), [("cuda", "driver"), (None, "a build for the accelerator")])
def test_no_devices(monkeypatch: pytest.MonkeyPatch, built_for: str | None, says: str) -> None:
    """A build for the host and a missing driver have remedies of their own."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: built_for and torch.device(built_for))
    found = machine.devices(HOST)
    assert found.found.startswith("none: ")
    assert says in found.remedy


@pytest.mark.parametrize(
    ("allowed", "quota", "found", "remedy"),
    [(8, None, "8", ""), (8, 8.0, "8", ""), (64, 4.0, "4 of 64, by the quota of the control group", "--cpus")],
)
def test_cores(allowed: int, quota: float | None, found: str, remedy: str) -> None:
    """A quota below the number of cores is in the way."""
    row = machine.processors(allowed, quota)
    assert row.found == found
    assert remedy in row.remedy
    assert bool(remedy) == bool(row.remedy)


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """64 MB, as containers have by default, is little; a folder that is not there says so."""
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20, total=64 << 20))
    assert "--shm-size" in machine.shared_memory(tmp_path).remedy
    monkeypatch.undo()
    assert "No such file" in machine.shared_memory(tmp_path / "nowhere").found


def test_limits() -> None:
    """A low limit has a command that raises it as far as it goes; memory is locked for accelerators alone."""

    def low(which: int) -> tuple[int, int]:
        return {resource.RLIMIT_NOFILE: (1024, 2048), resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20)}.get(which, (-1, -1))

    rows = {row.what: row for row in machine.limits(low, accelerators=True)}
    assert rows["open files"].remedy == "ulimit -n 2048"
    assert rows["locked memory"].found == "8 MiB"
    assert rows["locked memory"].remedy
    assert rows["processes and threads"].found == "unlimited"
    unlimited = {row.what: row for row in machine.limits(lambda which: (-1, -1), accelerators=False)}
    assert "locked memory" not in unlimited
    assert not any(row.remedy for row in unlimited.values())


def test_interfaces() -> None:
    """Several interfaces beside loopback are a choice that may go wrong."""
    assert machine.interfaces(["lo", "eth0"]).remedy == ""
    assert "GLOO_SOCKET_IFNAME" in machine.interfaces(["lo", "eth0", "ib0"]).remedy


@pytest.mark.parametrize(
    ("there", "says", "remedy"),
    [
        (HOST, "gloo on the host, 2 worlds side by side", ""),
        (GPUS, "2 pytest workers on gpu, worlds of up to 2 ranks", "--ranks-per-device"),
    ],
)
def test_plan(there: Inventory, says: str, remedy: str) -> None:
    """It says how many workers there would be, and which worlds they can have."""
    row = machine.plan(there, 2)
    assert says in row.found
    assert remedy in row.remedy


@pytest.mark.parametrize(("usable", "says"), [(1, "30 minutes"), (2, "15 minutes"), (64, "4 minutes")])
def test_how_long(usable: int, says: str) -> None:
    """More cores make a run on the host shorter, up to the time that some tests take alone."""
    assert machine.plan(HOST, usable).found.endswith(f"in about {says}")


def test_server_that_can_not_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is the launcher's, and the remedy another way to start ranks."""

    class Refused:
        def wait_ready(self) -> None:
            raise LaunchError("it has 1 thread beside its own: 'ticker'")

        def close(self) -> None:
            pass

    monkeypatch.setattr("harness.worlds.local.LocalLauncher", Refused)
    row = machine.forking()
    assert "'ticker'" in row.found
    assert "spawn" in row.remedy


def test_this_machine() -> None:
    """Every row is there on a real machine, with a server that is really started."""
    rows = {row.what: row for row in machine.machine()}
    assert list(rows)[:4] == ["PyTorch", "devices", "start of ranks", "cores"]
    assert "ready in" in rows["start of ranks"].found
    assert torch.__version__ in rows["PyTorch"].found
