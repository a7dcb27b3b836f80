"""Modules that can't be compiled, or not under what they are given to: each is refused, and its relatives are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from fixtures.layers import layer
from harness import Rank, World, requirement
from harness.stacks import dynamo


class Block(nn.Module):
    """Two layers, in a forward that is not torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer(), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        result: torch.Tensor = self.second(self.first(x).relu())
        return result


def _root(rank: Rank, keeps: bool) -> nn.Module:
    return FullyShardedDataParallel(Block().to(rank.device), device_id=rank.device, use_orig_params=keeps)


def _inner(rank: Rank, keeps: bool) -> nn.Module:
    block = Block().to(rank.device)
    block.first = FullyShardedDataParallel(block.first, device_id=rank.device, use_orig_params=keeps)  # type: ignore[assignment]
    return FullyShardedDataParallel(block, device_id=rank.device, use_orig_params=keeps)


@requirement(
    "DYN-FLAT-51",
    "fullgraph=True refuses a model of which FSDP keeps no original parameters.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: use_orig_params; torch.compile: fullgraph",
)
@requirement(
    "DYN-FLAT-52",
    "Modules of which FSDP keeps no original parameters run uncompiled where graphs may break, and others compiled.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: use_orig_params; torch.compile: fullgraph",
)
@pytest.mark.world(2)
def test_flat_parameters(world: World) -> None:
    """Wrap the root, or one of two layers as well; compile the model whole or in parts."""

    def body(rank: Rank) -> None:
        x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
        for wrap in (_root, _inner):
            for keeps in (True, False):
                compiled, counter = dynamo.compiled(wrap(rank, keeps), backend="eager", fullgraph=False)
                for _ in range(2):
                    y = compiled(x)
                    assert y.tolist() == [[4.0 + 4.0 * rank.index] * 2], wrap.__name__
                    y.sum().backward()
                assert (counter.graphs > 0) == keeps, wrap.__name__
            compiled, counter = dynamo.compiled(wrap(rank, False), backend="eager", fullgraph=True)
            with pytest.raises(dynamo.REFUSED):
                compiled(x)
            assert counter.graphs == 0, wrap.__name__

    world.run(body)


def _whole(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def _first(module: nn.Module) -> nn.Module:
    module.first = _whole(module.first)
    return module


def _last(module: nn.Module) -> nn.Module:
    module.second = nn.Sequential(nn.ReLU(), nn.Sequential(_whole(module.second)))
    return module


SPLIT = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)
WHOLE = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)


@requirement(
    "DYN-PIPE-51",
    "A pipeline schedule that splits the backward refuses stages of which any module is compiled.",
    source="torch/distributed/pipelining/schedules.py: ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, "
    "ScheduleDualPipeV",
)
@requirement(
    "DYN-PIPE-52",
    "Pipeline schedules take uncompiled stages, and those that do not split the backward take compiled ones.",
    source="torch/distributed/pipelining/schedules.py: ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B",
)
@pytest.mark.world(2)
def test_stages(world: World) -> None:
    """Compile a stage, its first layer or a nested one, of both stages of each rank or of one of them."""

    def body(rank: Rank) -> None:
        ways: dict[str, Callable[[nn.Module], nn.Module] | None] = {
            "none": None,
            "whole": _whole,
            "first": _first,
            "last": _last,
        }
        for schedule in (*SPLIT, *WHOLE):
            single = schedule in (ScheduleGPipe, Schedule1F1B)
            v_shaped = schedule in (ScheduleZBVZeroBubble, ScheduleDualPipeV)
            for name, way in ways.items():
                for which in (0, 1):
                    stages = []
                    last = 2 * rank.size - 1 - rank.index if v_shaped else rank.index + rank.size
                    for number, index in enumerate((rank.index,) if single else (rank.index, last)):
                        module: nn.Module = Block().to(rank.device)
                        if way is not None and (number == which or single):
                            module = way(module)
                        count = rank.size if single else 2 * rank.size
                        stages.append(PipelineStage(module, index, count, rank.device))
                    given: Any = stages[0] if single else stages
                    what = (schedule.__name__, name, which)
                    if way is not None and schedule in SPLIT:
                        with pytest.raises(RuntimeError, match=r"torch\.compile"):
                            schedule(given, 4)
                    else:
                        assert schedule(given, 4) is not None, what

    world.run(body)
