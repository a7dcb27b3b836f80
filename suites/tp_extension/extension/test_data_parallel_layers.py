"""DDP over tensor-parallel layers, which may be anywhere in a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fixtures.operators import close, floats
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.tp_extension import ready_for_ddp

SOURCE = (
    "torch.distributed.tensor.parallel.ddp: 'Enable the composability between Tensor Parallelism and Data Parallelism'"
)


def layers() -> nn.Sequential:
    """Return layers of whole numbers, the middle one without a bias."""
    made = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 6, bias=False), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(floats(*parameter.shape, start=i))
    return made


@requirement(
    "TP-LAYER-4929",
    "Under DDP, tensor-parallel layers train as on one device, however deep they are in the model.",
    source=SOURCE,
)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.world(4)
def test_trained(world: World, depth: int) -> None:
    """Each pair of ranks has half of a batch; some layers of two blocks are parallel, and others are not."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("dp", "tp"))
        plain: nn.Module = nn.Sequential(layers(), nn.Linear(2, 3, bias=False).double(), layers())
        with torch.no_grad():
            plain[1].weight.copy_(floats(3, 2))  # type: ignore[index, union-attr, operator]
        for _ in range(depth):
            plain = nn.Sequential(plain)
        plain.to(rank.device)
        within = "0." * depth
        plan: dict[str, ParallelStyle] = {
            f"{within}{block}.{layer}": style()
            for block in (0, 2)
            for layer, style in (("2", ColwiseParallel), ("3", RowwiseParallel))
        }
        model = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan)
        ready_for_ddp(model)
        trained = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        optimizers: list[Any] = [torch.optim.SGD(of.parameters(), lr=2**-20, momentum=0.5) for of in (plain, trained)]
        batch = floats(4, 3).to(rank.device)
        for step in range(3):
            expected = plain(batch + step)
            (expected.sum() / 2).backward()
            half = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
            found = trained(batch[half] + step)
            assert close(expected[half], found), (
                f"step {step}: expected {expected[half].tolist()}, found {found.tolist()}"
            )
            found.sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    world.run(body)


@requirement(
    "TP-LAYER-5380",
    "A frozen parameter is still frozen after its model was prepared for DDP, in tensor-parallel layers as in others.",
    source=SOURCE,
)
@pytest.mark.parametrize("layer", ["plain", "column-wise", "row-wise"])
@pytest.mark.world(2)
def test_frozen(world: World, layer: str) -> None:
    """Freeze the weight, the bias or both of one of three layers, of which two are parallel."""
    index = ["plain", "column-wise", "row-wise"].index(layer)
    choices = [["weight"], ["bias"], ["weight", "bias"]]

    def body(rank: Rank) -> list[list[str]]:
        found = []
        for names in choices:
            model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(rank.device)
            for name in names:
                getattr(model[index], name).requires_grad_(False)
            parallelize_module(model, rank.mesh(), {"1": ColwiseParallel(), "2": RowwiseParallel()})
            ready_for_ddp(model)
            found.append([name for name, parameter in model[index].named_parameters() if not parameter.requires_grad])
        return found

    assert_on_ranks([choices] * 2, world.run(body))
