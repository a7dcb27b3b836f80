"""Clipping of gradients whose elements are not finite, or are zeros with a sign."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from fixtures.managed import ways
from fixtures.special_numbers import CLIPPED, SHAPES, Products, clipped, factors, spelled
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp


@requirement(
    "RFSDP-SPECIAL-9451",
    "Gradients have one device's norm and are clipped as there, also if one element on one rank is not finite.",
    source="torch.nn.utils: clip_grad_norm_, error_if_nonfinite; torch.nn.utils.clip_grad_value_",
)
@pytest.mark.parametrize(("numbers", "norm"), CLIPPED)
@pytest.mark.world(2)
def test_clipped(world: World, numbers: str, norm: Any) -> None:
    """The element is in each of three parameters, of DDP and of FSDP2 in each way."""

    def body(rank: Rank) -> None:
        for stack, manage in {"DDP": DistributedDataParallel, **ways(rank)}.items():
            for name in SHAPES:
                model = manage(Products().to(rank.device))
                given = factors(numbers, name, rank.index)
                model({each: t.to(rank.device) for each, t in given.items()}).backward()
                right, rights = clipped(numbers, name, norm)
                what = f"{stack}, {name} has the number"
                if norm == "value":
                    clip_grad_value_(model.parameters(), 1.5)
                else:
                    with pytest.raises(RuntimeError, match="non-finite"):
                        clip_grad_norm_(model.parameters(), 1.0, norm, error_if_nonfinite=True)
                    total = replicate_fsdp.whole(clip_grad_norm_(model.parameters(), 1.0, norm))
                    assert spelled(total) == right, what
                assert [spelled(gradient) for gradient in replicate_fsdp.gradients(model).values()] == rights, what

    world.run(body)
