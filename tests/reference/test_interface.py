"""The references have what users of PyTorch's call."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from harness import Pool, Rank, WorldSpec
from harness.reference import replicate as ddp
from harness.reference import replicate_fsdp as fsdp
from harness.reference import tp_extension as tp
from harness.stacks import replicate as torchs_ddp
from harness.stacks import replicate_fsdp as torchs_fsdp
from harness.stacks import tp_extension as torchs_tp


def public(owner: type) -> list[str]:
    return [name for name, value in vars(owner).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("method", public(FSDPModule))
def test_methods_of_fsdp(method: str) -> None:
    """Each of FSDPModule's methods is the reference's own: PyTorch's would look for PyTorch's state."""
    assert method in vars(fsdp.ReplicateModule)


@pytest.mark.parametrize("method", public(torchs_ddp.DDP))
def test_methods_of_ddp(method: str) -> None:
    """Each of the mixin's methods is there."""
    assert method in vars(ddp.DDP)


def test_arguments() -> None:
    """FSDP-replicate takes PyTorch's arguments, by the same names."""
    theirs = inspect.signature(torchs_fsdp.replicate).parameters
    assert list(inspect.signature(fsdp.replicate).parameters) == list(theirs)


@pytest.mark.parametrize("method", public(torchs_tp.DTensorExtensions))
def test_methods_of_the_tp_extension(method: str) -> None:
    """Each of the methods that FSDP1 calls is there, and takes as much."""
    theirs = inspect.signature(getattr(torchs_tp.DTensorExtensions, method)).parameters
    ours = inspect.signature(getattr(tp.DTensorExtensions, method)).parameters
    assert len(ours) == len(theirs)
    keywords = ("tensor", "rank", "world_size", "num_devices_per_node", "pg", "device_mesh", "device")
    assert [name for name in ours if name in keywords] == [name for name in theirs if name in keywords]


def mesh_without_device(rank: Rank) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False: None if check_available else torch.device("cuda"),
        )
        return fsdp.mesh_of(None, None).device_type


def test_build_for_accelerators() -> None:
    """Where PyTorch is built for an accelerator that the machine does not have, FSDP-replicate is on the CPU."""
    pool = Pool()
    try:
        world = pool.acquire(WorldSpec(1))
        assert world.run(mesh_without_device) == ["cpu"]
    finally:
        pool.close()
