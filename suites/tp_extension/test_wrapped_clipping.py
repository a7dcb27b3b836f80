"""Clipping of gradients under FSDP1 in each dtype."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fixtures.wrapped import STRATEGIES, Weight, wrapped
from harness import Rank, World, requirement

COUNT = 4000
"""Elements of a weight: as many ones times the largest gradient below have a norm that float16 does not hold."""


@requirement(
    "TP-CLIP-4967",
    "clip_grad_norm_ clips gradients of any dtype to the bound, even if that dtype does not hold their norm.",
    source="torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
)
@pytest.mark.world(2)
def test_dtypes(world: World) -> None:
    """Clip small and large gradients by each kind of norm, with sharded parameters of each dtype."""
    dtypes = torch.float16, torch.bfloat16, torch.float32

    def body(rank: Rank) -> None:
        for dtype, (strategy, original) in itertools.product(dtypes, zip(STRATEGIES[:2], (True, False), strict=True)):
            module = Weight(COUNT, 1.0).to(dtype)
            model = wrapped(rank, module, sharding_strategy=strategy, use_orig_params=original)
            for size, norm in itertools.product((1.0, 2048.0), (1.0, 2.0, 3.0, math.inf)):
                for p in model.parameters():
                    p.grad = torch.full_like(p, size)
                whole = size if norm == math.inf else size * COUNT ** (1 / norm)
                model.clip_grad_norm_(whole / 1024, norm)
                for p in model.parameters():
                    grad = p.grad.to(torch.float64)
                    what = f"{dtype}, {size}, norm {norm}, {strategy}, {original=}"
                    near = 4 * torch.finfo(dtype).eps + 1e-6  # of float32 in the norm
                    assert torch.allclose(grad, torch.full_like(grad, size / 1024), rtol=near), what

    world.run(body)
