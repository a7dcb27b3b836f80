"""The backward of DTensors under anomaly detection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from fixtures.operators import close, distributed, floats
from harness import Rank, World, assert_on_ranks, requirement


@requirement(
    "TP-GRAD-6651",
    "Under anomaly detection a backward through DTensors gives the gradients of plain tensors, and nan raises an error "
    "where it is checked for.",
    source="torch.autograd.detect_anomaly: 'If check_nan is True, any backward computation that generate nan value "
    "will raise an error.'",
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.world(2)
def test_anomalies(world: World, check: bool) -> None:
    """Multiply a replicated matrix, or one in shards, by a replicated one; then take the root of a negative number."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        plain, weight = floats(4, 3).to(rank.device), floats(3, 2, start=1).to(rank.device)
        expected = plain.clone().requires_grad_()
        (expected @ weight).square().sum().backward()
        assert expected.grad is not None
        for layout in (Replicate(), Shard(0), Shard(1)):
            own: Any = distributed(plain, layout, rank, rank.mesh()).requires_grad_()
            with torch.autograd.set_detect_anomaly(True, check_nan=check):
                (own @ distributed(weight, Replicate(), rank, rank.mesh())).square().sum().full_tensor().backward()
            if not close(expected.grad, own.grad.full_tensor()):
                wrong.append(f"{layout}: another gradient")
        negative: Any = distributed(plain - 9, Replicate(), rank, rank.mesh()).requires_grad_()
        with torch.autograd.set_detect_anomaly(True, check_nan=check):
            y = negative.sqrt().sum().full_tensor()
            try:
                y.backward()
                raised = False
            except RuntimeError as error:
                raised = "returned nan values" in str(error)
        if raised != check:
            wrong.append(f"nan raised an error: {raised}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
