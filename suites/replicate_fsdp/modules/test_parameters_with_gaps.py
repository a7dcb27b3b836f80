"""Parameters whose elements do not lie side by side in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "every second": lambda: torch.arange(8.0)[1::2],
    "column": lambda: torch.arange(8.0).view(4, 2)[:, 1:],
    "columns": lambda: torch.arange(12.0).view(4, 3)[:, :2],
    "rows": lambda: torch.arange(12.0).view(4, 3)[::2],
    "turned columns": lambda: torch.arange(12.0).view(4, 3)[:, 1:].t(),
}


class Layered(nn.Module):
    """The sum of a parameter with gaps, and of another, each element times its number."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.gaps, self.other = nn.Parameter(LAYOUTS[layout]()), nn.Parameter(torch.full((8,), 50.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        slopes = torch.arange(1.0, self.gaps.numel() + 1, device=x.device).view(self.gaps.shape)
        return x * ((self.gaps * slopes).sum() + self.other.sum())


@requirement(
    "RFSDP-GAPS-9462",
    "A parameter with gaps between its elements trains as on one device, and what is in the gaps stays, or the model "
    "is refused on every rank.",
    source="torch.nn.parallel.DistributedDataParallel; torch.distributed.fsdp.fully_shard",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stack", ["DDP", "views", "replicated", "sharded", "hybrid"])
@pytest.mark.world(2)
def test_trained(world: World, stack: str, layout: str) -> None:
    """Take two steps of SGD with momentum."""

    def body(rank: Rank) -> str:
        manage: Callable[..., Any] = {
            "DDP": DistributedDataParallel,
            "views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
            **ways(rank),
        }[stack]
        plain, module = Layered(layout), Layered(layout).to(rank.device)
        between = module.gaps.detach().untyped_storage()
        before = torch.tensor([], device=rank.device).set_(between).clone()
        try:
            model = manage(module)
        except NotImplementedError as error:
            return str(error).split(":")[0]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.25, momentum=0.5) for each in (model, plain)]
        for step in range(2):
            for each, optimizer, x in zip(
                (model, plain), optimizers, (2.0 * rank.index + step, 1.0 + step), strict=True
            ):
                optimizer.zero_grad()
                each(torch.tensor(x, device=next(each.parameters()).device)).backward()
                optimizer.step()
        for found, right in zip(replicate_fsdp.parameters(module).values(), plain.parameters(), strict=True):
            assert torch.equal(found.cpu(), right.detach())
        after = torch.tensor([], device=rank.device).set_(between)
        mine = torch.zeros_like(before, dtype=torch.bool)
        mine.as_strided(module.gaps.shape, module.gaps.stride(), module.gaps.storage_offset()).fill_(True)
        assert torch.equal(after[~mine], before[~mine])
        return "trained"

    (found,) = set(world.run(body))
    assert found == "trained" or "contiguous" in found
