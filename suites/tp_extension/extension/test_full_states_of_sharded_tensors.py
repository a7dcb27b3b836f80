"""Full state dicts of modules that have ShardedTensors in their own ones, sharded by rows, by columns and otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fixtures.tensors import numbers
from harness import Rank, World, requirement
from harness.stacks.tp_extension import joined_shards

Box = tuple[int, int, int, int]
SPLITS: dict[str, dict[str, list[list[Box]]]] = {
    "rows": {
        "even": [[(0, 0, 2, 2)], [(2, 0, 2, 2)]],
        "uneven": [[(0, 0, 2, 2)], [(2, 0, 1, 2)]],
        "one row": [[(0, 0, 1, 2)], []],
    },
    "others": {
        "columns": [[(0, 0, 4, 1)], [(0, 1, 4, 1)]],
        "in another order": [[(2, 0, 2, 2)], [(0, 0, 2, 2)]],
        "two each": [[(0, 0, 1, 2), (2, 0, 1, 2)], [(1, 0, 1, 2), (3, 0, 1, 2)]],
    },
}
"""Each rank's shards: the first row and column, the numbers of rows and columns."""


@requirement(
    "TP-TENSOR-6700",
    "A full state dict has every element of a ShardedTensor at its place, however that is sharded.",
    source="torch.distributed.checkpoint.state_dict: StateDictOptions, 'all the tensors in the returned state_dict "
    "will be gathered'",
)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.world(2)
def test_gathered(world: World, splits: str) -> None:
    """Get it of a module whose hook puts a sharded table into its state dict."""

    def body(rank: Rank) -> None:
        wrong = []
        for name, every in SPLITS[splits].items():
            height = max(row + rows for boxes in every for row, _, rows, _ in boxes)
            values = numbers(height, 2).to(rank.device)
            shards = [
                (values[row : row + rows, column : column + columns].contiguous(), [row, column])
                for row, column, rows, columns in every[rank.index]
            ]

            def put(module: Any, state: Any, prefix: str, _: Any, shards: Any = shards, height: int = height) -> None:
                state[f"{prefix}weight"] = joined_shards(rank.index, shards, (height, 2))

            table = nn.Embedding(height, 2)
            table.register_state_dict_post_hook(put)
            found = get_model_state_dict(nn.Sequential(table), options=StateDictOptions(full_state_dict=True))
            if not torch.equal(found["0.weight"], values):
                wrong.append(name)
        assert not wrong, f"elements are at other places: {wrong}"

    world.run(body)
