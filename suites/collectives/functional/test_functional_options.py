"""Options of functional collectives and messages: tags, no group, ranks in a group, dimensions, splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement, spmd
from harness.stacks.collectives import functional

Call = Callable[[torch.Tensor, Any, str], Any]
Named = tuple[dict[str, Any], dict[str, Any]]
"""How a message's receiver names its sender, and how its sender names its receiver."""

TAGGED: dict[str, Call] = {
    "all_reduce": lambda t, group, tag: functional.all_reduce(t, "sum", group, tag),
    "broadcast": lambda t, group, tag: functional.broadcast(t, 1, group, tag),
    "permute_tensor": lambda t, group, tag: functional.permute_tensor(t, [1, 0], group, tag),
    "all_reduce_coalesced": lambda t, group, tag: functional.all_reduce_coalesced([t], "sum", group, tag)[0],
    "all_reduce_inplace": lambda t, group, tag: functional.all_reduce_inplace(t.clone(), "sum", group, tag=tag),
    "all_gather_inplace": lambda t, group, tag: torch.cat(
        functional.all_gather_inplace([torch.zeros_like(t) for _ in range(2)], t, group, tag=tag)
    ),
    "all_gather_tensor_inplace": lambda t, group, tag: functional.all_gather_tensor_inplace(
        torch.zeros_like(t.repeat(2)), t, group, tag=tag
    ),
    "reduce_scatter_tensor_inplace": lambda t, group, tag: functional.reduce_scatter_tensor_inplace(
        torch.zeros_like(t[:2]), t, "sum", group, tag=tag
    ),
    "reduce_scatter_inplace": lambda t, group, tag: functional.reduce_scatter_inplace(
        torch.zeros_like(t[:2]), list(t.split(2)), "sum", group, tag=tag
    ),
    "all_to_all_inplace": lambda t, group, tag: functional.all_to_all_inplace(
        torch.zeros_like(t), t, group=group, tag=tag
    ),
}
for _name in ("all_gather_tensor", "all_gather_single", "all_gather_tensor_autograd", "all_gather_single_autograd"):
    TAGGED[_name] = lambda t, group, tag, name=_name: getattr(functional, name)(t, 0, group, tag)
for _name in ("all_gather_into_tensor_coalesced", "all_gather_single_coalesced"):
    TAGGED[_name] = lambda t, group, tag, name=_name: getattr(functional, name)([t], group, tag)[0]
for _name in (
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_single_autograd",
):
    TAGGED[_name] = lambda t, group, tag, name=_name: getattr(functional, name)(t, "sum", 0, group, tag)
for _name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
    TAGGED[_name] = lambda t, group, tag, name=_name: getattr(functional, name)([t], "sum", [0], group, tag)[0]
for _name in ("all_to_all_single", "all_to_all_single_autograd"):
    TAGGED[_name] = lambda t, group, tag, name=_name: getattr(functional, name)(t, [2, 2], [2, 2], group, tag)


def right(name: str, rank: int) -> torch.Tensor:
    """Return what a collective of :data:`TAGGED` gives a rank, if ranks give 1, 2, 3, 4 and ten times as much."""
    mine, other = (torch.arange(1.0, 5.0) * scale for scale in ((1, 10) if rank == 0 else (10, 1)))
    both = [mine, other] if rank == 0 else [other, mine]
    if "all_reduce" in name:
        return mine + other
    if "reduce_scatter" in name:
        return (mine + other).view(2, 2)[rank]
    if "all_gather" in name:
        return torch.cat(both)
    if "all_to_all" in name:
        return torch.cat([each.view(2, 2)[rank] for each in both])
    return other if name == "permute_tensor" else both[1]


@requirement(
    "COLL-FUNC-5440",
    "A functional collective takes a tag beside its group, and refuses ranks with a tag that no group of theirs has.",
    source="torch.distributed._functional_collectives: its functions: 'tag: A unique identifier for the collective'",
)
@pytest.mark.filterwarnings("ignore")  # of what is deprecated
@spmd(2)
def test_tags(rank: Rank) -> None:
    """Give every collective a group with and without a tag, and then its ranks with the tag."""
    given = torch.arange(1.0, 5.0, device=rank.device) * (1, 10)[rank.index]
    for name, call in TAGGED.items():
        if not hasattr(functional, name):
            continue
        for tag in ("", "mine"):
            assert_same(right(name, rank.index), functional.wait_tensor(call(given, rank.group, tag)), f"{name}, {tag}")
        if name != "permute_tensor":  # which makes a group with the tag
            with pytest.raises((ValueError, RuntimeError)):
                call(given, [0, 1], "other")


@requirement(
    "COLL-FUNC-5441",
    "The in-place forms of functional collectives use the default group unless one is given, and are not asynchronous.",
    source="torch.distributed._functional_collectives: all_reduce_inplace, all_gather_tensor_inplace, "
    "reduce_scatter_tensor_inplace, all_to_all_inplace, all_gather_inplace, reduce_scatter_inplace: group, async_op",
)
@requirement(
    "COLL-FUNC-5442",
    "The in-place forms of functional collectives take the dimensions and splits that the others take.",
    source="torch.distributed._functional_collectives: all_gather_tensor_inplace: gather_dim; "
    "reduce_scatter_tensor_inplace: scatter_dim; all_to_all_inplace: output_split_sizes, input_split_sizes",
)
@spmd(2)
def test_in_place_options(rank: Rank) -> None:
    """Call without a group, with and without async_op, along the second dimension, and with uneven splits."""
    me, device = rank.index, rank.device
    scale = (1, 10)[me]
    matrix = torch.arange(1.0, 5.0, device=device).view(2, 2) * scale
    columns = torch.full((2, 4), -1.0, device=device)
    column, three = torch.full((2, 1), -1.0, device=device), torch.arange(1.0, 4.0, device=device) * scale
    sent = [1, 2] if me == 0 else [2, 1]
    received = [1, 2] if me == 0 else [2, 1]
    exchanged = [1, 10, 20] if me == 0 else [2, 3, 30]
    calls: dict[str, tuple[Callable[..., Any], torch.Tensor, list[Any]]] = {
        "all_reduce_inplace": (
            lambda **how: functional.all_reduce_inplace(matrix, **how),
            matrix,
            [[11, 22], [33, 44]],
        ),
        "all_gather_tensor_inplace": (
            lambda **how: functional.all_gather_tensor_inplace(
                columns, three[:2].view(2, 1).repeat(1, 2), gather_dim=1, **how
            ),
            columns,
            [[1, 1, 10, 10], [2, 2, 20, 20]],
        ),
        "reduce_scatter_tensor_inplace": (
            lambda **how: functional.reduce_scatter_tensor_inplace(
                column, torch.arange(1.0, 5.0, device=device).view(2, 2) * scale, scatter_dim=1, **how
            ),
            column,
            [[[11], [33]], [[22], [44]]][me],
        ),
        "all_to_all_inplace": (
            lambda **how: functional.all_to_all_inplace(three, three.clone(), received, sent, **how),
            three,
            exchanged,
        ),
    }
    parts = [torch.full((2,), -1.0, device=device) for _ in range(2)]
    calls["all_gather_inplace"] = (
        lambda **how: functional.all_gather_inplace(parts, torch.ones(2, device=device) * scale, **how),
        parts[1],
        [10, 10],
    )
    if hasattr(functional, "reduce_scatter_inplace"):
        out = torch.full((2,), -1.0, device=device)
        calls["reduce_scatter_inplace"] = (
            lambda **how: functional.reduce_scatter_inplace(
                out, [torch.ones(2, device=device) * i for i in (1, 2)], **how
            ),
            out,
            [2.0 * (me + 1)] * 2,
        )
    for name, (call, result, expected) in calls.items():
        before = result.tolist()
        with pytest.raises((AssertionError, ValueError, RuntimeError, NotImplementedError)):
            call(async_op=True)
        assert result.tolist() == before, name
        call()
        assert result.tolist() == expected, name


@requirement(
    "COLL-FUNC-5443",
    "Functional messages are received by their tags, whether their peers are named by global rank or by rank in the "
    "group.",
    source="torch.distributed._functional_collectives: isend_inplace, irecv_inplace: dst, src, tag, group, group_dst, "
    "group_src",
)
@pytest.mark.needs(torch=f"{functional.__name__}.isend_inplace")
@pytest.mark.needs(features=["messages", "tags"])
@pytest.mark.parametrize("ranks", [None, (1, 2)], ids=["default", "without-rank-0"])
@pytest.mark.world(3, keeps="messages that nothing waits for")
def test_tags_of_messages(world: World, ranks: tuple[int, ...] | None) -> None:
    """Rank 1 sends two messages to rank 2, which receives them in the other order; in the world, they do so twice."""
    named: list[Named] = [({"src": None, "group_src": 0}, {"dst": None, "group_dst": 1})]
    if ranks is None:
        named = [({"src": 1}, {"dst": 2}), ({"src": None, "group_src": 1}, {"dst": None, "group_dst": 2})]

    def body(rank: Rank) -> list[list[float]]:
        group = dist.new_group(list(ranks)) if ranks else None
        found = []
        for sender, receiver in named:
            if rank.index == 1:
                given = {tag: torch.full((2,), float(tag), device=rank.device) for tag in (3, 5)}
                sent = [functional.isend_inplace(t, tag=tag, group=group, **receiver) for tag, t in given.items()]
                for each in sent:
                    functional.wait_tensor(each)
            if rank.index == 2:
                for tag in (5, 3):
                    into = torch.zeros(2, device=rank.device)
                    functional.wait_tensor(functional.irecv_inplace(into, tag=tag, group=group, **sender))
                    found.append(into.tolist())
        return found

    assert world.run(body) == [[], [], [[5, 5], [3, 3]] * len(named)]
