"""What set_model_state_dict returns of a state that lacks keys of the model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from fixtures.layers import layers
from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement

OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "full": {"full_state_dict": True},
    "from-rank-0": {"full_state_dict": True, "broadcast_from_rank0": True},
}
"""Options of saving and loading."""


@requirement(
    "RFSDP-DICT-5243",
    "With strict=False, set_model_state_dict returns the keys of the model that the state lacks, on every rank.",
    source="torch.distributed.checkpoint.state_dict.set_model_state_dict: 'missing_keys is a list of str containing "
    "the missing keys'",
)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("lacking", [False, True], ids=["complete", "lacking"])
@pytest.mark.world(2)
def test_returned(world: World, lacking: bool, kind: str) -> None:
    """Save and load two layers, with the second weight or without it, which then stays."""

    def body(rank: Rank) -> dict[str, tuple[list[str], list[str], bool]]:
        found = {}
        for way, managed in ways(rank).items():
            saved, model = layers(rank.device), layers(rank.device)
            for each in (saved, model):
                managed(each)
            nn.init.zeros_(model[1].weight)  # type: ignore[arg-type]
            state: Any = get_model_state_dict(
                saved, options=StateDictOptions(full_state_dict="full_state_dict" in OPTIONS[kind])
            )
            if lacking:
                del state["1.weight"]
            given = {} if kind == "from-rank-0" and rank.index else state
            result = set_model_state_dict(model, given, options=StateDictOptions(**OPTIONS[kind], strict=False))
            stays = not model[1].weight.full_tensor().any().item()  # type: ignore[operator, union-attr]
            found[way] = (result.missing_keys, result.unexpected_keys, stays)
        return found

    right = (["1.weight"] if lacking else [], [], lacking)
    assert_on_ranks([dict.fromkeys(("replicated", "sharded", "hybrid"), right)] * 2, world.run(body))
