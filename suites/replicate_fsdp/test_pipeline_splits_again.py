"""Models that pipeline() splits several times, at the same submodules or at others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline

from harness import Rank, World, requirement

SOURCE = "torch.distributed.pipelining"
TIMES: dict[str, tuple[str, str]] = {"once": ("1", ""), "same": ("1", "1"), "elsewhere": ("1", "2")}
"""Submodules before which a model is split at first and then, if it is."""


@requirement(
    "RFSDP-PIPE-5631",
    "A model that was split by pipeline() can be split again, at the submodules of the second specification alone.",
    source=f"{SOURCE}.pipeline: split_spec: 'A dictionary using submodule names as split marker'",
)
@requirement(
    "RFSDP-PIPE-5499",
    "Splitting a model leaves it as it was, with pipe_split as a no-op in its own forwards.",
    source=f"{SOURCE}.pipeline; pipe_split: 'It is a no-op if your annotated module is run eagerly'",
)
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.world(1, keeps="fake tensors of torch.export")
def test_split_again(world: World, times: str) -> None:
    """Split three layers before one of them, and then before the same or another one; each stage has its layers."""

    def body(rank: Rank) -> None:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))).to(rank.device)
        x = torch.ones(2, 2, device=rank.device)
        right = model(x)
        for name in filter(None, TIMES[times]):
            pipe = pipeline(model, (x,), split_spec={name: SplitPoint.BEGINNING})
            found = [sorted({n[0] for n in pipe.get_stage_module(i).state_dict()}) for i in range(pipe.num_stages)]
            at = int(name)
            due = [[str(i) for i in range(at)], [str(i) for i in range(at, 3)]]
            assert found == due, f"split before {name}: {len(found)} stages, with layers {found}"
            assert torch.equal(model(x), right), f"split before {name}: the model itself"

    world.run(body)
