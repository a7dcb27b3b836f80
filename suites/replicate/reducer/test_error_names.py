"""The parameters that DistributedDataParallel's errors name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness import Rank, World, requirement
from harness.stacks import replicate

pytestmark = pytest.mark.usefixtures("with_buckets")


class Parts(nn.Module):
    """Parameters of its own, in layers and in an inner module; a forward uses those whose names it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = (nn.Parameter(torch.ones(1)) for _ in range(2))
        self.first, self.frozen = nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)
        self.inner = nn.ModuleDict({"deep": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), "left": nn.Linear(1, 1)})
        self.inner["deep"][0].weight.requires_grad_(False)  # type: ignore[index]

    def forward(self, x: torch.Tensor, used: Iterable[str]) -> torch.Tensor:
        return torch.stack([self.get_parameter(name).sum() for name in used]).sum() * x


NAMES = ["gain", "shift", "first.weight", "first.bias", "inner.deep.0.bias", "inner.deep.1.weight", "inner.deep.1.bias"]
"""The parameters that are trained and not ignored."""
USED = (
    [["gain"], ["inner.deep.1.bias", "first.weight"]],
    [NAMES[1:], NAMES[:-1]],
    [["first.bias", "shift"], NAMES[2:5]],
)
"""The parameters that each of two ranks uses, in turn."""


def named(message: str, model: nn.Module) -> list[str]:
    """Return the parameters whose names are words of a message; those of the root may begin with a dot."""
    words = {word.strip(".") for word in re.split(r"[\s,:]+", message)}
    return [name for name, _ in model.named_parameters() if name in words]


@requirement(
    "DDP-NAMES-62",
    "The error about parameters without gradients has the indices of those of its rank among all that are averaged.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters",
)
@requirement(
    "DDP-NAMES-01",
    "At debug level INFO or DETAIL, the error about parameters without gradients names those of its rank, and no "
    "others.",
    source="torch.distributed: TORCH_DISTRIBUTED_DEBUG, 'the fully qualified name of all parameters that went unused'",
)
@pytest.mark.world(2, keeps="the debug level")
def test_unused(world: World) -> None:
    """Ranks use different parameters of a model, or of its copies, at every level; some are frozen or ignored."""

    def body(rank: Rank) -> None:
        copies: list[Callable[[Any], Any]] = [lambda model: model, copy.deepcopy, lambda m: copy.deepcopy(copy.copy(m))]
        x = torch.ones(1, device=rank.device)
        for level in (dist.DebugLevel.OFF, dist.DebugLevel.INFO, dist.DebugLevel.DETAIL):
            dist.set_debug_level(level)
            for copied, used in zip(copies, USED, strict=True):
                module = Parts().to(rank.device)
                replicate.leave_alone(module, ["inner.left.weight", "inner.left.bias"])
                model: Any = copied(DistributedDataParallel(module))
                model(x, used[rank.index]).sum().backward()
                with pytest.raises(RuntimeError, match="did not receive grad") as e:
                    model(x, used[rank.index])
                left = [name for name in NAMES if name not in used[rank.index]]
                numbers = re.findall(r"(?<![\w.])\d+(?![\w.])", str(e.value).rpartition(f"rank {rank.index}: ")[2])
                assert [NAMES[int(number)] for number in numbers] == left, f"{level}, {used}"
                assert named(str(e.value), module) == ([] if level is dist.DebugLevel.OFF else left), f"{level}, {used}"

    world.run(body)


@requirement(
    "DDP-NAMES-02",
    "The error about a parameter whose gradient a backward computes twice names it, and no other.",
    source="torch.nn.parallel.DistributedDataParallel: 'marked as ready twice'",
)
@pytest.mark.world(2, keeps="the debug level")
def test_ready_twice(world: World) -> None:
    """Each layer but the last in the backward is checkpointed twice by a reentrant checkpoint, at every level."""

    class Model(nn.Module):
        def __init__(self, twice: str) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(1, 1, bias=False) for _ in range(3))
            self.twice = twice

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for name, layer in self.named_children():
                y = checkpoint(layer, x, use_reentrant=True)
                x = y + checkpoint(layer, x, use_reentrant=True) if name == self.twice else y
            return x

    def body(rank: Rank) -> None:
        for level in (dist.DebugLevel.OFF, dist.DebugLevel.INFO, dist.DebugLevel.DETAIL):
            dist.set_debug_level(level)
            for twice in ("second", "third"):
                model = DistributedDataParallel(Model(twice).to(rank.device))
                x = torch.ones(1, 1, device=rank.device, requires_grad=True)
                with pytest.raises(RuntimeError, match="twice") as e:
                    model(x).sum().backward()
                assert named(str(e.value), model.module) == [f"{twice}.weight"], level

    world.run(body)
