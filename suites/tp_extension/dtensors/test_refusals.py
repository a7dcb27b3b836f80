"""What redistribute, distribute_tensor, parallel styles and loss_parallel refuse before they communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from harness import Rank, World, requirement
from harness.stacks import messages

Refused = tuple[Callable[[Any], object], type[Exception]]


def rows(mesh: Any) -> DTensor:
    return distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None).to(mesh.device_type)


def other(mesh: Any) -> DeviceMesh:
    return DeviceMesh(mesh.device_type, mesh.mesh.flip(0))


def styled(mesh: Any, module: nn.Module, style: Any) -> Any:
    return parallelize_module(module.to(mesh.device_type), mesh, style)


def softmax(mesh: Any, layout: Placement, dim: int) -> object:
    with loss_parallel():
        return distribute_tensor(torch.ones(2, 4), mesh, [layout], src_data_rank=None).log_softmax(dim)


def loss(mesh: Any, target: Any, **options: Any) -> object:
    logarithms = distribute_tensor(torch.ones(2, 4, device=mesh.device_type), mesh, [Shard(1)], src_data_rank=None)
    with loss_parallel():
        return functional.nll_loss(logarithms, target, **options)


def classes(mesh: Any, layout: Placement | None = None, count: int = 2) -> Any:
    plain = torch.ones(count, dtype=torch.int64 if count == 2 else torch.float32, device=mesh.device_type)
    return plain if layout is None else distribute_tensor(plain, mesh, [layout], src_data_rank=None)


KINDS: dict[str, dict[str, Refused]] = {
    "redistribute": {
        "another mesh": (lambda m: rows(m).redistribute(other(m), [Replicate()]), NotImplementedError),
        "an operator on two meshes": (lambda m: rows(m) + rows(other(m)), RuntimeError),
    },
    "distribute_tensor": {
        "text": (lambda m: distribute_tensor(torch.ones(2, 2), m, ["S(0)"]), RuntimeError),  # type: ignore[list-item]
    },
    "styles": {
        "columns of a convolution": (lambda m: styled(m, nn.Conv1d(2, 2, 1), ColwiseParallel()), NotImplementedError),
        "rows of a norm": (lambda m: styled(m, nn.LayerNorm(4), RowwiseParallel()), NotImplementedError),
        "a sequence of tensors": (
            lambda m: styled(m, nn.LayerNorm(4), SequenceParallel())([torch.ones(2, 4)]),
            ValueError,
        ),
        "more inputs than layouts": (
            lambda m: styled(
                m, nn.Linear(2, 2), PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
            )(torch.ones(2, 2), 3),
            ValueError,
        ),
        "fewer outputs than layouts": (
            lambda m: styled(
                m,
                nn.Identity(),
                PrepareModuleOutput(output_layouts=(Shard(0),) * 2, desired_output_layouts=(Shard(0),) * 2),
            )(torch.ones(2, 2)),
            ValueError,
        ),
    },
    "loss_parallel": {
        "sharded classes": (lambda m: loss(m, classes(m, Shard(0))), RuntimeError),
        "sharded weights": (lambda m: loss(m, classes(m), weight=classes(m, Shard(0), 4)), RuntimeError),
        "replicated logits": (lambda m: softmax(m, Replicate(), 1), ValueError),
        "another dimension": (lambda m: softmax(m, Shard(1), 0), ValueError),
    },
}
"""What is refused, with the class of the error."""


@requirement(
    "TP-REFUSE-4500",
    "Redistribution, distribute_tensor, parallel styles and loss_parallel raise an error on every rank for what they "
    "do not support, before anything is sent.",
    source="torch.distributed.tensor: DTensor.redistribute, distribute_tensor; tensor.parallel: 'Currently supports "
    "nn.Linear and nn.Embedding', loss_parallel: 'sharded on the class dimension'",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(2)
def test_refused(world: World, kind: str) -> None:
    """Give another mesh, a module, placements or classes that are not supported; each error has its class."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh()
        other(mesh)
        for name, (call, error) in KINDS[kind].items():
            at = messages.mark()
            with pytest.raises(error):
                call(mesh)
            assert not messages.since(at), name

    world.run(body)
