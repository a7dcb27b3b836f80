"""Inputs and outputs of each dtype under mixed precision: which ones are cast."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fixtures.inputs import Handing, call, cast, check_gradients, each_dtype
from fixtures.managed import ways
from harness import Rank, World, assert_same, requirement


@requirement(
    "RFSDP-MIX-8500",
    "Mixed precision casts floating-point inputs and outputs of any dtype, while tensors of other dtypes, such as "
    "complex ones, stay as they are.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: cast_forward_inputs: 'the forward's floating-point input "
    "tensors'; output_dtype: 'casting floating-point forward outputs'",
)
@pytest.mark.parametrize("inputs", [True, False], ids=["inputs", "not-inputs"])
@pytest.mark.world(2)
def test_each_dtype(world: World, inputs: bool) -> None:
    """Pass tensors of each dtype by position, in a list and in a dict; return them and take their gradients."""
    narrow = torch.bfloat16 if inputs else None

    def body(rank: Rank) -> None:
        for (way, managed), output in itertools.product(ways(rank).items(), (None, torch.float64)):
            policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=output, cast_forward_inputs=inputs)
            model = managed(Handing().to(rank.device), mp_policy=policy)
            given = each_dtype(rank.device)
            weight, results = call(model, given)
            for x, seen, result in zip(given, model.seen, results, strict=True):
                what = f"{way}, {x.dtype}, {output=}"
                assert_same(cast(x, narrow), seen, f"{what}: input")
                assert_same(cast(cast(x, narrow), output), result, f"{what}: output")
            check_gradients(given, weight, results, f"{way}, {output=}")
            model.seen = []

    world.run(body)
