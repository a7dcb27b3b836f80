"""Conversions of batch norms into synchronized ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"eps": 0.25, "momentum": 0.5},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
]


class Block(nn.Module):
    """Batch norms of every dimension and option within containers, and layers that are none."""

    def __init__(self, deep: bool = True) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3, **OPTIONS[1])
        self.pictures = nn.ModuleList(nn.BatchNorm2d(3, **options) for options in OPTIONS)
        self.volumes = nn.ModuleDict({"a": nn.BatchNorm3d(3, affine=False), "b": nn.Sequential(nn.BatchNorm3d(3))})
        self.others = nn.Sequential(nn.InstanceNorm1d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.Linear(3, 3))
        self.inner = Block(deep=False) if deep else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.others(self.first(x))
        for layer in self.pictures:
            x = layer(x[..., None, None])[..., 0, 0]
        for volume in self.volumes.values():
            x = volume(x[..., None, None, None])[..., 0, 0, 0]
        result: torch.Tensor = self.inner(x)
        return result


def norms(module: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


@requirement(
    "DDP-NORM-01",
    "Every batch norm of a model, however deep, is converted into a SyncBatchNorm of the given process group.",
    source=f"{SOURCE}: module, process_group",
)
@requirement(
    "DDP-NORM-02",
    "A converted batch norm keeps its options and mode, with the same objects as parameters or buffers.",
    source=SOURCE,
)
@requirement(
    "DDP-NORM-03",
    "A conversion to SyncBatchNorm returns the module itself, in which the other layers are those that it had.",
    source=SOURCE,
)
@requirement(
    "DDP-NORM-04",
    "A converted model evaluates as it did, and has the state dict that it had.",
    source="torch.nn.SyncBatchNorm: eval",
)
@pytest.mark.world(2)
def test_converted(world: World) -> None:
    """Convert a model, one again with another group, and a batch norm that is the whole module."""
    kept = ("num_features", "eps", "momentum", "affine", "track_running_stats", "training")
    values = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

    def body(rank: Rank) -> None:
        groups = [None, rank.group, rank.subgroup([rank.index], use_local_synchronization=True)]
        for group in groups:
            model = Block().to(rank.device)
            for number, parameter in enumerate(model.parameters()):
                nn.init.constant_(parameter, 1.0 + number)
            model(torch.arange(12.0, device=rank.device).reshape(4, 3))
            model.inner.first.eval()
            before, names = norms(model), list(model.state_dict())
            modes = {name: module.training for name, module in model.named_modules()}
            layers = {n: m for n, m in model.named_modules() if n not in before}
            assert len(before) == 16
            for again in (group, groups[2], group):
                assert nn.SyncBatchNorm.convert_sync_batchnorm(model, again) is model
                after = norms(model)
                assert list(after) == list(before)
                for name, layer in after.items():
                    assert type(layer) is nn.SyncBatchNorm, name
                    assert layer.process_group is again, name
                    old = before[name]
                    assert [getattr(layer, key) for key in kept] == [getattr(old, key) for key in kept], name
                    assert all(getattr(layer, key) is getattr(old, key) for key in values), name
                assert {n: m for n, m in model.named_modules() if n not in before} == layers
                assert {n: m.training for n, m in model.named_modules()} == modes
                assert list(model.state_dict()) == names
            plain = Block().to(rank.device)
            plain.load_state_dict(model.state_dict())
            # batch norms without running statistics use those of the rank's own batch in evaluation
            x = torch.arange(12.0, device=rank.device).reshape(4, 3).sin() * (1 + rank.index)
            assert torch.equal(model.eval()(x), plain.eval()(x))
            for options in OPTIONS:
                for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                    layer = kind(3, **options)
                    found = nn.SyncBatchNorm.convert_sync_batchnorm(layer, group)
                    assert (type(found), found.process_group) == (nn.SyncBatchNorm, group)
                    assert all(getattr(found, key) is getattr(layer, key) for key in values)
            for other in (nn.Linear(1, 1), nn.Identity(), nn.InstanceNorm2d(3)):
                assert nn.SyncBatchNorm.convert_sync_batchnorm(other, group) is other
        default = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
        assert default[0].process_group is None

    world.run(body)


SHARED: dict[str, Callable[[nn.Module], tuple[nn.Module, list[str]]]] = {
    "nothing": lambda norm: (nn.Sequential(norm, nn.ReLU(), nn.BatchNorm1d(1)), ["0", "2"]),
    "container": lambda norm: (nn.Sequential(*[nn.Sequential(norm)] * 2), ["0.0", "1.0"]),
    "between containers": lambda norm: (nn.Sequential(nn.Sequential(norm), nn.Sequential(norm)), ["0.0", "1.0"]),
    "in one container": lambda norm: (nn.Sequential(norm, nn.ReLU(), norm), ["0", "2"]),
}
"""Models that have a batch norm in several places, and the names of the places."""


@requirement(
    "DDP-NORM-8801",
    "A batch norm that a model has in several places is synchronized in all of them after the conversion.",
    source=SOURCE,
)
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.world(2)
def test_shared(world: World, shared: str) -> None:
    """Convert a model in which a layer or its container is there twice, and read what is at each place."""

    def body(rank: Rank) -> list[str]:
        model, places = SHARED[shared](nn.BatchNorm1d(1))
        found = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return [f"{place}: {type(found.get_submodule(place)).__name__}" for place in places]

    right = [f"{place}: SyncBatchNorm" for place in SHARED[shared](nn.BatchNorm1d(1))[1]]
    assert_on_ranks([right] * 2, world.run(body))
