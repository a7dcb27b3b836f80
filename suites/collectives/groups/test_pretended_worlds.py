"""The backend that pretends to have many ranks: what its collectives write, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from harness import Rank, World, assert_same, requirement
from harness.stacks.collectives import coalescing_manager, functional, set_timeout
from harness.stacks.limit import runs_with
from harness.stacks.pretended import options, pretended

SIZE = 3
RECORDED = ("all_gather_into_tensor", "all_to_all", "reduce_scatter_tensor")
"""Collectives whose output requires a gradient if the input does, in torch 2.13 and with this backend alone."""


def blank(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1.0)


@contextmanager
def must_refuse(what: str) -> Iterator[None]:
    """Assert that what is within raises an error."""
    try:
        yield
    except (RuntimeError, ValueError):
        return
    raise AssertionError(f"{what}: not refused")


def written(me: int, *, needs: bool) -> dict[str, tuple[Callable[[], Any], list[torch.Tensor], list[Any]]]:
    """Return a call of each collective, what it writes to, and the numbers that belong there."""

    def given(*shape: int, more: float = 0.0) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return (torch.arange(float(count)).view(shape) + more).requires_grad_(needs)

    one, rows, parts = given(2), given(SIZE, 2), [given(2, more=10.0 * i) for i in range(SIZE)]
    each = [blank(2) for _ in range(SIZE)]
    flat, mine = blank(2 * SIZE), blank(2)
    part, row, third = blank(2), blank(1, 2), [blank(2) for _ in range(SIZE)]
    swapped, coalesced = blank(SIZE, 2), blank(1, 2)

    lists = [[blank(2), blank(2)] for _ in range(SIZE)]

    def in_block() -> None:
        with coalescing_manager():
            dist.reduce_scatter_tensor(coalesced, rows)

    own = [0.0, 1.0]
    calls: dict[str, tuple[Callable[[], Any], list[torch.Tensor], list[Any]]] = {
        "all_gather": (lambda: dist.all_gather(each, one), each, [own] * SIZE),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(flat, one), [flat], [own * SIZE]),
        "all_gather_coalesced": (
            lambda: dist.all_gather_coalesced(lists, [one, parts[1]]),
            [tensor for pair in lists for tensor in pair],
            [own, [10.0, 11.0]] * SIZE,
        ),
        "reduce_scatter": (lambda: dist.reduce_scatter(part, parts), [part], [[10.0 * me, 10.0 * me + 1]]),
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(row, rows), [row], [[[2.0 * me, 2.0 * me + 1]]]),
        "coalesced": (in_block, [coalesced], [[[2.0 * me, 2.0 * me + 1]]]),
        "all_to_all": (lambda: dist.all_to_all(third, parts), third, [[10.0 * i, 10.0 * i + 1] for i in range(SIZE)]),
        "all_to_all_single": (lambda: dist.all_to_all_single(swapped, rows), [swapped], [rows.tolist()]),
        "scatter": (
            lambda: dist.scatter(mine, parts if me == 1 else None, src=1),
            [mine],
            [[10.0, 11.0] if me == 1 else [-1.0, -1.0]],
        ),
    }
    gathered = [blank(2) for _ in range(SIZE)] if me == 0 else []
    calls["gather"] = (lambda: dist.gather(one, gathered or None, dst=0), gathered, [own] * len(gathered))
    if not needs:
        left = blank(2)
        for name, call in {
            "all_reduce": lambda: dist.all_reduce(left),
            "broadcast": lambda: dist.broadcast(left, 1),
            "reduce": lambda: dist.reduce(left, 1),
            "send": lambda: dist.send(left, (me + 1) % SIZE),
            "recv": lambda: dist.recv(left, (me + 1) % SIZE),
            "barrier": lambda: dist.barrier(),
        }.items():
            calls[name] = (call, [left], [[-1.0, -1.0]])
    return calls


@requirement(
    "COLL-FAKE-01",
    "With the fake backend, each part of a result holds what the rank itself gives, also if that requires a gradient.",
    source="torch.distributed.Backend: FAKE; test_fake_pg.py: TestFakePG",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, the fake backend leaves some results unwritten")
@pytest.mark.world(1, keeps="results that nothing uses")
def test_own_data(world: World) -> None:
    """Call each collective as each of three ranks, with inputs that require gradients or not; then functional ones."""

    def body(rank: Rank) -> None:
        for me in range(SIZE):
            with pretended(me, SIZE):
                set_timeout(timedelta(seconds=30))
                for needs in (False, True):
                    for name, (call, outputs, right) in written(me, needs=needs).items():
                        call()
                        assert [output.tolist() for output in outputs] == right, f"{name} on rank {me}"
                        if name not in RECORDED:
                            assert not any(output.requires_grad for output in outputs), name
                x = torch.ones(3, 2)
                mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("a", "b"))
                for group, size in ((dist.group.WORLD, SIZE), ((mesh, 1), SIZE), ((mesh, 0), 1), (mesh["b"], SIZE)):
                    where: Any = group
                    whole = functional.wait_tensor(functional.all_gather_tensor(x, 0, where))
                    assert_same(torch.ones(3 * size, 2), whole, "gathered")
                    assert functional.all_gather_tensor(x, 1, where).shape == (3, 2 * size)
                    assert functional.reduce_scatter_tensor(x, "sum", 0, where).shape == (3 // size, 2)
                for kind in dist.Backend.default_device_backend_map:  # whether or not there is such a device
                    of_kind = init_device_mesh(kind, (SIZE,), mesh_dim_names=("a",))
                    assert (of_kind.device_type, of_kind.size(), of_kind.get_local_rank()) == (kind, SIZE, me)

    world.run(body)


@requirement(
    "COLL-FAKE-02",
    "As real backends do, the fake backend refuses sizes or lists that do not fit, and ranks that there are not.",
    source="torch.distributed.Backend: FAKE; test_fake_pg.py: test_invalid_rank, "
    "test_alltoall_base_split_size_validation",
)
@requirement(
    "COLL-FAKE-03",
    "With the option error_on_collective, each collective of a group of the fake backend raises an error.",
    source="torch.distributed.Backend: FAKE; test_fake_pg.py: test_error_on_collective",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, the fake backend refuses less")
@pytest.mark.world(1, keeps="results that nothing uses")
def test_what_is_refused(world: World) -> None:
    """Give lists that are too short, sizes that cannot be divided, and a rank that is too large; other groups work."""

    def body(rank: Rank) -> None:
        exchange = dist.all_to_all_single
        for me in range(2):
            with pretended(me, 2):
                wrong: dict[str, Callable[[], Any]] = {
                    "no multiple": lambda: exchange(blank(3), blank(3)),
                    "one split": lambda: exchange(blank(4), blank(4), [4], [4]),
                    "too few rows received": lambda: exchange(blank(4), blank(4), [1, 1], [2, 2]),
                    "too few rows sent": lambda: exchange(blank(4), blank(4), [2, 2], [1, 1]),
                    "lists of two lengths": lambda: dist.all_to_all([blank(2)], [blank(2), blank(2)]),
                    "short list": lambda: dist.reduce_scatter(blank(2), [blank(2)]),
                    "short list of lists": lambda: dist.all_gather_coalesced([[blank(2)], []], [blank(2)]),
                    "as large as the output": lambda: dist.reduce_scatter_tensor(blank(2), blank(2)),
                    "short list of the source": lambda me=me: dist.scatter(blank(2), [blank(2)], src=me),
                }
                for name, call in wrong.items():
                    with must_refuse(name):
                        call()
                strict: Any = dist.new_group([0, 1], pg_options=options(refuses=True))
                other: Any = dist.new_group([0, 1], pg_options=options())
                pair = [blank(2), blank(2)]
                calls: dict[str, Callable[[Any], Any]] = {
                    "all_reduce": lambda group: dist.all_reduce(blank(2), group=group),
                    "all_gather": lambda group, pair=pair: dist.all_gather(pair, blank(2), group=group),
                    "broadcast": lambda group: dist.broadcast(blank(2), 0, group=group),
                    "barrier": lambda group: dist.barrier(group),
                    "reduce_scatter": lambda group, pair=pair: dist.reduce_scatter(blank(2), pair, group=group),
                    "all_to_all_single": lambda group: exchange(blank(4), blank(4), group=group),
                    "functional": lambda group: functional.all_reduce(blank(2), "sum", group),
                }
                for name, call_in in calls.items():
                    call_in(other)
                    with must_refuse(name):
                        call_in(strict)
        for me in (2, 3):
            with must_refuse(f"rank {me} of 2"), pretended(me, 2):
                pass

    world.run(body)
