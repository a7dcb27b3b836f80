"""Gradients through norms of DTensors that are pending sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate
from torch.nn import functional

from fixtures.operators import close, distributed, floats
from fixtures.placements import MORE_OPERATORS
from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"
NORMS: dict[str, Callable[[Any, Any], Any]] = {
    "norm": lambda x, y: x.norm(),
    "norm of rows": lambda x, y: torch.linalg.vector_norm(x, dim=1),
    "matrix_norm": lambda x, y: torch.linalg.matrix_norm(x),
    "norm of order 3": lambda x, y: torch.linalg.vector_norm(x, 3),
    "normalize": lambda x, y: functional.normalize(x, dim=1) * y,
    "cosine_similarity": lambda x, y: functional.cosine_similarity(x, y),
    "dist": torch.dist,
    "pairwise_distance": lambda x, y: functional.pairwise_distance(x, y),
}
"""Functions of two matrices that take a norm of the first one or of their difference."""


@requirement(
    "TP-MODEL-02",
    "An operator gives each DTensor that requires a gradient, alone or with others, the plain tensor's gradient.",
    source=SOURCE,
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2)
def test_gradients_of_pending(world: World) -> None:
    """The first matrix is a pending sum, and the second one is replicated."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, function in NORMS.items():
            x, y = floats(4, 3).to(rank.device) + 7, floats(4, 3, start=3).to(rank.device)
            x.requires_grad_()
            function(x, y).sum().backward()
            own: Any = distributed(x.detach(), Partial(), rank, rank.mesh()).requires_grad_()
            try:
                function(own, distributed(y, Replicate(), rank, rank.mesh())).sum().full_tensor().backward()
            except RuntimeError as error:
                wrong.append(f"{name}: {str(error).splitlines()[0]:.60}")
                continue
            assert x.grad is not None
            if own.grad is None or not close(x.grad, own.grad.full_tensor()):
                wrong.append(f"{name}: another gradient")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
