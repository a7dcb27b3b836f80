"""Uses of functional collectives' results and arguments: saved, changed in shape, permuted, by lists of ranks."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.collectives import functional


def saved(t: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(t, file)
    return file


def loaded(file: Any) -> Any:
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]] = {
    "clone": (torch.clone, lambda t: t),
    "save": (saved, loaded),
    "pickle": (pickle.dumps, pickle.loads),
}


@requirement(
    "COLL-FUNC-409",
    "A functional collective is waited for before its result is saved or pickled.",
    source="torch.distributed._functional_collectives: "
    "AsyncCollectiveTensor: 'trigger a call to wait prior to first use'",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.world(2)
def test_saved(world: World, way: str) -> None:
    """Rank 1 comes late."""

    def body(rank: Rank) -> list[float]:
        WAYS[way][0](functional.all_reduce(torch.ones(1, device=rank.device), "sum", dist.group.WORLD))  # imports
        dist.barrier()
        time.sleep(0.2 * rank.index)
        result = functional.all_reduce(torch.tensor([1.0 + rank.index], device=rank.device), "sum", dist.group.WORLD)
        kept = WAYS[way][0](result)
        functional.wait_tensor(result)  # type: ignore[no-untyped-call]
        return WAYS[way][1](kept).tolist()  # type: ignore[no-any-return]

    assert_on_ranks([[3.0], [3.0]], world.run(body))


SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda t: t,
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t.squeeze_(),
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
}


@requirement(
    "COLL-FUNC-410",
    "An operation that changes the shape of a functional collective's result in place changes what shape says.",
    source="torch.distributed._functional_collectives: "
    "AsyncCollectiveTensor; torch.Tensor: squeeze_, unsqueeze_, t_, transpose_",
)
@pytest.mark.parametrize("change", SHAPES)
@pytest.mark.world(2)
def test_shapes(world: World, change: str) -> None:
    """A result of one row and three columns."""

    def body(rank: Rank) -> Any:
        result = functional.all_reduce(torch.ones(1, 3, device=rank.device), "sum", dist.group.WORLD)
        SHAPES[change](result)
        return tuple(result.shape), tuple((result + 0).shape)

    right = torch.ones(1, 3)
    SHAPES[change](right)
    assert_on_ranks([(tuple(right.shape),) * 2] * 2, world.run(body))


@requirement(
    "COLL-FUNC-411",
    "permute_tensor sends tensors with any number of dimensions.",
    source="torch.distributed._functional_collectives: permute_tensor",
)
@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 3)], ids=["vector", "row", "matrix"])
@pytest.mark.world(2)
def test_permuted(world: World, shape: tuple[int, ...]) -> None:
    """Two ranks exchange their tensors."""

    def body(rank: Rank) -> Any:
        given = torch.full(shape, 1.0 + rank.index, device=rank.device)
        return functional.wait_tensor(functional.permute_tensor(given, [1, 0], dist.group.WORLD)).tolist()  # type: ignore[no-untyped-call]

    assert_on_ranks([torch.full(shape, 2.0 - rank).tolist() for rank in range(2)], world.run(body))


@requirement(
    "COLL-FUNC-412",
    "The group of a functional collective may be a list of ranks, or a list of such lists.",
    source="torch.distributed._functional_collectives: "
    "all_reduce: 'List[List[int]]: 2D mesh of ranks taking part of this collective in MPMD'",
)
@pytest.mark.filterwarnings("ignore:The combination of ranks")
@pytest.mark.parametrize("group", [[0, 1], [[0, 1]]], ids=["list", "lists"])
@pytest.mark.world(2)
def test_lists(world: World, group: Any) -> None:
    """All ranks of the world."""

    def body(rank: Rank) -> list[float]:
        given = torch.tensor([1.0 + rank.index], device=rank.device)
        return functional.all_reduce(given, "sum", group).tolist()  # type: ignore[no-any-return]

    assert_on_ranks([[3.0], [3.0]], world.run(body))
