"""Full states that have other dtypes than the model or the optimizer that they are loaded into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.distributed.checkpoint.state_dict"
FLOATING = (torch.bfloat16, torch.float16, torch.float64, torch.float32)
BUFFERS = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float64, torch.complex64)
NUMBERS = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


class Net(nn.Module):
    """A layer and a buffer of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))
        for number, dtype in enumerate(BUFFERS):
            self.register_buffer(f"buffer_{number}", torch.zeros(2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@requirement(
    "RFSDP-DICT-5300",
    "A full state of any dtypes gives a model and an optimizer its values, in their own dtypes.",
    source=f"{SOURCE}: set_model_state_dict, set_optimizer_state_dict, StateDictOptions.full_state_dict, "
    "broadcast_from_rank0",
)
@pytest.mark.parametrize("how", ["every-rank", "rank-0"])
@pytest.mark.world(2)
def test_other_dtypes(world: World, how: str) -> None:
    """Load a sharded weight and momentum from four dtypes, with whole buffers of six; rank 0 may have them alone."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "rank-0")

    def body(rank: Rank) -> list[Any]:
        found: list[Any] = []
        for dtype in FLOATING:
            model: Any = fully_shard(Net().to(rank.device), mesh=rank.mesh())
            sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
            model(torch.ones(2, device=rank.device)).backward()
            sgd.step()
            numbers = torch.tensor(NUMBERS, dtype=dtype, device=rank.device)
            buffers = {f"buffer_{i}": torch.ones(2, dtype=d, device=rank.device) for i, d in enumerate(BUFFERS)}
            momenta: Any = get_optimizer_state_dict(model, sgd, options=StateDictOptions(full_state_dict=True))
            momenta["state"]["weight"]["momentum_buffer"] = 2 * numbers
            alone = how == "rank-0" and rank.index > 0
            set_model_state_dict(model, {} if alone else {"weight": numbers, **buffers}, options=options)
            set_optimizer_state_dict(model, sgd, {} if alone else momenta, options=options)
            momentum = sgd.state[model.weight]["momentum_buffer"]
            assert [b.dtype for b in model.buffers()] == list(BUFFERS), dtype
            assert (model.weight.dtype, momentum.dtype) == (torch.float32, torch.float32), dtype
            values = [model.weight.full_tensor(), momentum.full_tensor() / 2]
            found += [v.tolist() for v in values] + [[bool(b.all()) for b in model.buffers()]]
        return found

    assert_on_ranks([[NUMBERS, NUMBERS, [True] * len(BUFFERS)] * len(FLOATING)] * 2, world.run(body))
