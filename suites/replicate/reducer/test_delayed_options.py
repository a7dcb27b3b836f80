"""Delayed parameters of DistributedDataParallel: of which dtypes, all of them, and when they are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.delayed import waited
from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.nn.parallel.DistributedDataParallel: delay_all_reduce_named_params, param_to_hook_all_reduce"
pytestmark = pytest.mark.usefixtures("with_buckets")


def delayed(rank: Rank, names: list[str], dtype: torch.dtype = torch.float32) -> Any:
    module = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2))).to(rank.device, dtype)
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[(name, p) for name, p in module.named_parameters() if name in names],
        param_to_hook_all_reduce=module[0].weight,
    )


def backward(rank: Rank, model: Any, dtype: torch.dtype = torch.float32) -> None:
    model(torch.full((1, 1), 1.0 + rank.index, dtype=dtype, device=rank.device)).sum().backward()


def gradients(model: Any) -> list[float]:
    return [float(p.grad) for p in model.parameters()]


@requirement("DDP-DELAY-333", "Delayed parameters may have any floating-point dtype.", source=SOURCE)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.world(2, keeps="DDP with delayed gradients: the finding ddp_delayed_memory")
def test_dtypes(world: World, dtype: str) -> None:
    """The second of two layers is delayed."""

    def body(rank: Rank) -> list[float]:
        of = getattr(torch, dtype)
        model = delayed(rank, ["1.weight"], of)
        with waited():
            backward(rank, model, of)
        return gradients(model)

    assert_on_ranks([[1.5, 1.5]] * 2, world.run(body))


@requirement("DDP-DELAY-334", "The all-reduces of all parameters may be delayed.", source=SOURCE)
@pytest.mark.parametrize("names", [["1.weight"], ["0.weight", "1.weight"]], ids=["one", "all"])
@pytest.mark.world(2, keeps="DDP with delayed gradients: the finding ddp_delayed_memory")
def test_all(world: World, names: list[str]) -> None:
    """The hooked parameter may be delayed itself; then it is in the buffer after its all-reduce, so only made."""

    def body(rank: Rank) -> int:
        return len(list(delayed(rank, names).parameters()))

    assert_on_ranks([2, 2], world.run(body))


@requirement(
    "DDP-DELAY-3006",
    "A module with frozen parameters computes as without DDP, whichever of the others are delayed.",
    source=SOURCE,
)
@pytest.mark.parametrize("names", [["2.weight"], ["1.weight", "2.weight"]], ids=["one", "all"])
@pytest.mark.world(2, keeps="DDP with delayed gradients: the finding ddp_delayed_memory")
def test_beside_frozen(world: World, names: list[str]) -> None:
    """The first of three layers is frozen."""

    def body(rank: Rank) -> list[float] | str:
        module = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))).to(rank.device)
        for parameter in module.parameters():
            nn.init.constant_(parameter, 2.0)
        module[0].requires_grad_(False)
        model = DistributedDataParallel(
            module,
            delay_all_reduce_named_params=[(name, p) for name, p in module.named_parameters() if name in names],
            param_to_hook_all_reduce=module[1].weight,
        )
        try:
            return model(torch.ones(1, 1, device=rank.device)).flatten().tolist()
        except AttributeError as e:
            return str(e)

    assert_on_ranks([[8.0]] * 2, world.run(body))


class Pending:
    """An all-reduce that is done as late as it may be: when it is waited for."""

    def __init__(self, reduce: Any, *given: Any) -> None:
        self.reduce, self.given = reduce, given

    def wait(self) -> None:
        """Do it."""
        self.reduce(*self.given)


@requirement(
    "DDP-DELAY-335",
    "After a backward, delayed parameters have averaged gradients, as the others have.",
    source=SOURCE,
)
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "late"])
@pytest.mark.world(2, keeps="DDP with delayed gradients: the finding ddp_delayed_memory")
def test_finished(world: World, late: bool) -> None:
    """Asynchronous all-reduces are done at once, or only when they are waited for."""

    def body(rank: Rank) -> list[float]:
        model = delayed(rank, ["1.weight"])
        reduce = dist.all_reduce

        def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            pending = Pending(reduce, tensor, op, group)
            if not (async_op and late):
                pending.wait()
            return pending if async_op else None

        dist.all_reduce = all_reduce  # type: ignore[assignment]
        try:
            backward(rank, model)
            return gradients(model)
        finally:
            dist.all_reduce = reduce

    assert_on_ranks([[1.5, 1.5]] * 2, world.run(body))
