"""Local state dicts of FSDP1, with flat and with original parameters."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from fixtures.wrapped import Weight, wrapped
from harness import Rank, World, requirement


@requirement(
    "TP-DICT-5613",
    "A model loads its own local state dict, with flat or original parameters.",
    source="torch.distributed.fsdp.StateDictType: LOCAL_STATE_DICT",
)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.world(2)
def test_loaded(world: World, original: bool) -> None:
    """Save a model, double its parameters, and load it again."""

    def body(rank: Rank) -> None:
        model = wrapped(rank, Weight(4, 1.0), use_orig_params=original)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = model.state_dict()
            saved = {name: shard.clone() for name, shard in state.items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
            model.load_state_dict(saved)
        x = torch.ones(2, device=rank.device)
        assert model(x).tolist() == [4.0, 4.0]

    world.run(body)
