"""Devices: what they are called, and which of them a world takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.devices import DeviceError, Inventory, accelerators, dealt, host_inventory, inventory, largest_first
from harness.entry_points import imported


def sim(count: int) -> Inventory:
    return Inventory("sim", tuple(f"sim:{i}" for i in range(count)), tuple(f"sim-{i}" for i in range(count)))


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
