"""Groups that only some ranks use in a backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fixtures.layers import layer
from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp


class Pair(nn.Module):
    """Two layers that get the same input, and give the first one's output plus three times the second one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x: torch.Tensor, without: str | None) -> torch.Tensor:
        """Call both layers, and leave the output of this one out."""
        outputs = {"first": self.first(x), "second": 3 * self.second(x)}
        result: torch.Tensor = sum(outputs[name] for name in outputs if name != without)  # type: ignore[assignment]
        return result


@requirement(
    "RFSDP-UNUSED-01",
    "With set_reduce_scatter_unused_params, a parameter that only some ranks use has the average over all ranks.",
    source="torch.distributed.fsdp.FSDPModule: set_reduce_scatter_unused_params",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params")
@pytest.mark.parametrize("unused", ["first", "second"])
@pytest.mark.world(2)
def test_groups(world: World, unused: str) -> None:
    """Each layer is a group, and one of them does not reach the output of one rank, which is another in each step."""

    def body(rank: Rank) -> dict[str, list[dict[str, float]]]:
        found: dict[str, list[dict[str, float]]] = {}
        for way, managed in ways(rank).items():
            model: Any = Pair().to(rank.device)
            for module in (model.first, model.second, model):
                managed(module, **({} if way == "replicated" else {"reshard_after_forward": False}))
            model.set_reduce_scatter_unused_params(True)
            found[way] = []
            for step in range(3):
                x = torch.ones(1, 2, device=rank.device, requires_grad=True)
                model(x, unused if (rank.index + step) % 2 else None).sum().backward()
                gradients = replicate_fsdp.gradients(model)
                found[way].append({name: gradient.mean().item() for name, gradient in gradients.items()})
                model.zero_grad()
        return found

    right = {"first.weight": 1.0, "second.weight": 3.0}
    right[f"{unused}.weight"] /= 2
    assert_on_ranks([{way: [right] * 3 for way in ("replicated", "sharded", "hybrid")}] * 2, world.run(body))
