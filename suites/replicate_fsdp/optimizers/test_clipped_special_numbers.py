"""Clipping of gradients whose elements are not finite, or are zeros with a sign."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from fixtures.managed import ways
from fixtures.special_numbers import CLIPPED, SHAPES, Products, averages, factors, spelled
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
                model, plain = manage(Products().to(rank.device)), Products()
                given = factors(numbers, name, rank.index)
                model({each: t.to(rank.device) for each, t in given.items()}).backward()
                for parameter, gradient in zip(plain.parameters(), averages(numbers, name).values(), strict=True):
                    parameter.grad = gradient
                totals = []
                for module in model, plain:
                    if norm == "value":
                        clip_grad_value_(module.parameters(), 1.5)
                        continue
                    if not plain.first.grad.isfinite().all():  # type: ignore[union-attr, operator]
                        with pytest.raises(RuntimeError, match="non-finite"):
                            clip_grad_norm_(module.parameters(), 1.0, norm, error_if_nonfinite=True)
                    totals.append(float(replicate_fsdp.whole(clip_grad_norm_(module.parameters(), 1.0, norm))))
                what = f"{stack}, {name} has the number"
                assert spelled(torch.tensor(totals[:1])) == spelled(torch.tensor(totals[1:])), what
                rights = [parameter.grad for parameter in plain.parameters()]
                for gradient, right in zip(replicate_fsdp.gradients(model).values(), rights, strict=True):
                    assert right is not None
                    assert spelled(gradient.cpu()) == spelled(right), what

    world.run(body)
