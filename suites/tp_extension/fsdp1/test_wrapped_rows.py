"""State dicts under FSDP1 of parameters with fewer rows than there are ranks, in each dtype."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from fixtures.wrapped import STRATEGIES, whole, wrapped
from harness import Rank, World, requirement

DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16
SHAPES = (1,), (1, 5), (2, 3), (3, 1), (4, 2)


@requirement(
    "TP-DICT-4969",
    "A state dict is saved and loaded in the dtype of its parameters, though some ranks may have no rows of them.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: state_dict_type, load_state_dict",
)
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.world(2, 3)
def test_rows(world: World, kind: str) -> None:
    """Load the state of a model into another one, whose values were others, on a mesh or in a group."""

    def body(rank: Rank) -> None:
        ways = itertools.product((False, True), DTYPES)
        for (meshed, dtype), original in zip(ways, itertools.cycle((True, True, False)), strict=False):
            options: dict[str, Any] = {"use_orig_params": original, "sharding_strategy": STRATEGIES[int(original)]}
            if meshed:
                options["device_mesh"] = rank.mesh()
            modules = []
            for start in (1, 50):
                module = nn.Module()
                for i, shape in enumerate(SHAPES):
                    values = torch.arange(start, start + torch.Size(shape).numel()).view(shape)
                    module.register_parameter(f"p{i}", nn.Parameter(values.to(dtype)))
                modules.append(wrapped(rank, module, **options))
            first, second = modules
            right = {name: p.tolist() for name, p in whole(first).items()}
            for model in modules:
                FullyShardedDataParallel.set_state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"])
            state = first.state_dict()
            what = f"{dtype}, {meshed=}, {original=}"
            assert {value.dtype for value in state.values()} == {dtype}, what
            second.load_state_dict(state)
            found = whole(second)
            assert {p.dtype for p in found.values()} == {dtype}, what
            assert {name: p.tolist() for name, p in found.items()} == right, what

    world.run(body)
