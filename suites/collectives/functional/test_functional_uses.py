"""Arguments of functional collectives, as groups that are lists of ranks, and what takes their pending results."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.collectives import functional


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


def _set_data(t: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros_like(t))
    parameter.data = t
    return parameter + 0


def _loaded(t: torch.Tensor) -> torch.Tensor:
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.load_state_dict({"weight": t.view(1, 2)}, assign=True)
    return layer.weight[0] + 0


def _scattered(t: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(2, device=t.device)
    dist.scatter(out, [t, t] if dist.get_rank() == 0 else None)
    return out


def _reduced(t: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(2, device=t.device)
    dist.reduce_scatter(out, [t, t])
    return out / 2


def _checkpointed(t: torch.Tensor) -> torch.Tensor:
    state = {"t": torch.zeros(2, device=t.device)}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save({"t": t}, checkpoint_id=folder, no_dist=True)
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return state["t"]


TAKEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy.asarray": lambda t: numpy.asarray(t if t.is_cpu else t.cpu()),
    "torch.asarray": lambda t: torch.asarray(t) + 0,
    "from_dlpack": lambda t: torch.from_dlpack(t if t.is_cpu else t.cpu()) + 0,
    "load_state_dict": _loaded,
    "data": _set_data,
    "share_memory_": lambda t: (t if t.is_cpu else t.cpu()).share_memory_() + 0,
    "reduce_scatter": _reduced,
    "scatter": _scattered,
    "checkpoint": _checkpointed,
    "copy": lambda t: copy.copy(t) + 0,
    "deepcopy": lambda t: copy.deepcopy(t) + 0,
}
"""What copies a result of two numbers, saves it, gives its memory to something else, or sends it on."""


@requirement(
    "COLL-FUNC-20",
    "A functional collective is waited for before its result is read, in any way of reading it.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor: 'trigger a call to wait prior to first "
    "use of the underlying tensor'",
)
@pytest.mark.needs(collective="all_reduce")
@pytest.mark.parametrize("way", TAKEN)
@pytest.mark.world(2)
def test_waits_for_what_is_taken(world: World, way: str) -> None:
    """Rank 1 comes late; both ranks have the result copied, saved, sent or taken, as the first use of it."""

    def body(rank: Rank) -> list[float]:
        given = torch.tensor([1.0, 2.0], device=rank.device) * (1 + rank.index * 10)
        if rank.index == 1:
            rank.store.wait(["launched"])
            time.sleep(0.01)  # enough to see a rank that does not wait
        total = functional.all_reduce(given, "sum", dist.group.WORLD)
        if rank.index == 0:
            rank.store.set("launched", "")
        return TAKEN[way](total).tolist()  # type: ignore[no-any-return]

    assert_on_ranks([[12.0, 24.0]] * 2, world.run(body))
