"""Inputs of each dtype under FSDP1's mixed precision: which ones are cast, by the root and by modules inside."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision

from fixtures.inputs import Handing, call, cast, check_gradients, each_dtype
from fixtures.wrapped import wrapped
from harness import Rank, World, assert_same, requirement


class Whole(Handing):
    """Such a module, which hands what it gets to another one."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: torch.Tensor, several: object) -> object:
        super().forward(*given, several=several)
        return self.inner(*given, several=several)


@requirement(
    "TP-CAST-8501",
    "MixedPrecision casts floating-point inputs of any dtype, while inputs of other dtypes, such as complex ones, stay "
    "as they are.",
    source="torch.distributed.fsdp.MixedPrecision: cast_forward_inputs, cast_root_forward_inputs; "
    "torch/distributed/utils.py: 'Cast floating point tensors'",
)
@pytest.mark.world(2)
def test_each_dtype(world: World) -> None:
    """Pass tensors of each dtype by position, in a list and in a dict; return them and take their gradients."""

    def body(rank: Rank) -> None:
        for root, inner in itertools.product((True, False), repeat=2):
            part = wrapped(rank, Handing(), mixed_precision=MixedPrecision(torch.bfloat16, cast_forward_inputs=inner))
            policy = MixedPrecision(torch.bfloat16, cast_root_forward_inputs=root)
            model = wrapped(rank, Whole(part), mixed_precision=policy)
            given = each_dtype(rank.device)
            weight, results = call(model, given)
            dtypes = {"root": torch.bfloat16 if root else None, "inner": torch.bfloat16 if root or inner else None}
            for x, first, second in zip(given, model.seen, part.seen, strict=True):
                what = f"{x.dtype}, {root=}, {inner=}"
                assert_same(cast(x, dtypes["root"]), first, f"{what}: of the root")
                assert_same(cast(x, dtypes["inner"]), second, f"{what}: of the module inside")
            check_gradients(given, weight, results, f"{root=}, {inner=}")
            model.seen = part.seen = []

    world.run(body)
