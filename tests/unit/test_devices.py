"""Devices: what they are called, and which of them a world takes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import devices
from harness.devices import (
    DeviceError,
    Inventory,
    accelerators,
    cores,
    cpu_quota,
    host_inventory,
    identities,
    inventory,
    largest_first,
)
from harness.entry_points import imported


class TestIdentities:
    """Every process of a machine has the same name for a device."""

    @staticmethod
    def driver(monkeypatch: pytest.MonkeyPatch, *properties: dict[str, Any]) -> None:
        found = SimpleNamespace(get_device_properties=lambda i: SimpleNamespace(**properties[i]))
        monkeypatch.setattr(torch, "get_device_module", lambda kind: found)

    def test_uuid(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A UUID goes before the PCI address, which parts of a device share."""
        same = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0}
        self.driver(monkeypatch, {"uuid": "MIG-1", **same}, {"uuid": "MIG-2", **same})
        assert identities("gpu", 2) == ("MIG-1", "MIG-2")

    def test_pci_address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver(monkeypatch, {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0})
        assert identities("gpu", 1) == ("0:1b:0",)

    @pytest.mark.parametrize(
        "properties", [[{}, {}], [{"uuid": "A"}, {"uuid": "A"}], [{"uuid": "A"}, {}], [{"uuid": "A"}]]
    )
    def test_none(self, monkeypatch: pytest.MonkeyPatch, properties: list[dict[str, Any]]) -> None:
        """A driver that says nothing, the same of two devices, or fails (there is one too few), identifies none."""
        self.driver(monkeypatch, *properties)
        assert identities("gpu", 2) == ()

    def test_module_without_properties(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace())
        assert identities("gpu", 2) == ()

    def test_number_and_uuid(self) -> None:
        """One device under a number, under its UUID, and under two kinds of masks, has one key."""
        by_number = accelerators("gpu", 2, {"CUDA_VISIBLE_DEVICES": "0,1"}, identities=("GPU-a", "GPU-b"))
        by_uuid = accelerators("gpu", 1, {"CUDA_VISIBLE_DEVICES": "GPU-b"}, identities=("GPU-b",))
        other = accelerators("gpu", 1, {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "7"}, identities=("GPU-b",))
        assert by_number.keys[1] == by_uuid.keys[0] == other.keys[0]


class TestCores:
    """Cores that a quota leaves."""

    @staticmethod
    def groups(folder: Path, membership: str, files: dict[str, str]) -> float | None:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "membership").write_text(membership)
        return cpu_quota(folder / "membership", folder)

    @pytest.mark.parametrize(
        ("membership", "files", "quota"),
        [
            ("0::/\n", {"cpu.max": "400000 100000\n"}, 4.0),
            ("0::/pod/c\n", {"pod/cpu.max": "150000 100000\n", "pod/c/cpu.max": "max 100000\n"}, 1.5),
            ("0::/pod\n", {"cpu.max": "200000 100000\n", "pod/cpu.max": "300000 100000\n"}, 2.0),
            ("0::/pod\n", {"pod/cpu.max": "max 100000\n"}, None),
            (
                "4:cpu,cpuacct:/p\n0::/\n",
                {"cpu,cpuacct/p/cpu.cfs_quota_us": "250000", "cpu,cpuacct/p/cpu.cfs_period_us": "100000"},
                2.5,
            ),
            ("4:cpu:/of/the/host\n", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
            ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
            ("0::/\n", {"cpu.max": "garbage\n"}, None),
            ("0::/\n", {"cpu.max": "1 0\n"}, None),
            ("no groups here", {}, None),
        ],
    )
    def test_quota(self, tmp_path: Path, membership: str, files: dict[str, str], quota: float | None) -> None:
        """The smallest quota counts, of the group and those above it, in both versions; garbage is none."""
        assert self.groups(tmp_path, membership, files) == quota

    def test_no_groups(self, tmp_path: Path) -> None:
        assert cpu_quota(tmp_path / "nowhere") is None

    @pytest.mark.parametrize(("quota", "usable"), [(None, 8), (2.0, 2), (1.5, 2), (0.1, 1), (100.0, 8)])
    def test_cores(self, monkeypatch: pytest.MonkeyPatch, quota: float | None, usable: int) -> None:
        """A quota of 2 of 8 cores leaves two slots for worlds, and a fraction of a core counts as one."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setattr(devices, "cpu_quota", lambda: quota)
        assert (cores(), len(host_inventory().keys)) == (usable, usable)


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
        slots = {int(key.removeprefix("cpu-")) for key in host_inventory().keys}
        assert (True, cores()) == (host_inventory().on_host, len(slots))
        assert slots <= os.sched_getaffinity(0)

    def test_cpu_asked_for(self) -> None:
        """Who asks for the host gets it, whatever accelerators there are."""
        assert host_inventory() == inventory("cpu")

    def test_kind_that_is_not_there(self) -> None:
        """Asking for an accelerator that is not there says what is."""
        with pytest.raises(DeviceError, match=r"no hologram device: .*torch"):
            inventory("hologram")

    def test_modules_that_register_a_type_are_noted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A module that is imported here for a type of device is one that results name, also where it fails."""
        (tmp_path / "no_hologram.py").write_text("raise RuntimeError('out of light')\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(DeviceError, match="importing no_hologram: RuntimeError: out of light"):
            inventory("hologram", imports=["no_hologram"])
        assert imported()["no_hologram"] == str(tmp_path / "no_hologram.py")

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

    def test_largest_first(self) -> None:
        """Larger worlds come first; equal ones stay as they were."""
        assert largest_first([2, 4, 1, 2, 4]) == [1, 4, 0, 3, 2]

    def test_largest_first_of_nothing(self) -> None:
        """Nothing to order is no error."""
        assert largest_first([]) == []
