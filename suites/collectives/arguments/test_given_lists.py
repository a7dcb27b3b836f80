"""Lists that collectives and groups are given: of tensors, of sizes or of ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with


@requirement(
    "COLL-CALL-5520",
    "A call leaves the lists that it is given, of tensors, sizes or ranks, as they are for the next call.",
    source="torch.distributed: all_gather, scatter, reduce_scatter, all_to_all, all_to_all_single, new_group, "
    "new_subgroups_by_enumeration",
)
@pytest.mark.world(3, keeps="results that nothing uses")
def test_given_again(world: World) -> None:
    """Real and complex tensors, sizes that are equal or differ, ranks that are not in order; use each list twice."""

    def body(rank: Rank) -> None:
        size, at = rank.size, rank.index
        for dtype, asynchronous in itertools.product((torch.float32, torch.complex64), (False, True)):
            own, rows, outputs = (
                [torch.full((2,), 10.0 * at + i, dtype=dtype, device=rank.device) for i in range(size)]
                for _ in range(3)
            )
            flat, found = torch.cat(own), torch.empty(2 * size, dtype=dtype, device=rank.device)
            equal, other = [2] * size, [2] * size
            few, most = [[1, 2, 3][(i + at) % 3] for i in range(size)], [[1, 2, 3][(i + at) % 3] for i in range(size)]
            root = at == 1
            calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
                "all_gather": (dist.all_gather, (outputs, own[0]), {}),
                "scatter": (dist.scatter, (own[0], rows if root else None, 1), {}),
                "equal sizes": (dist.all_to_all_single, (found, flat, equal, other), {}),
                "other sizes": (dist.all_to_all_single, (found, flat, few, most), {}),
            }
            if runs_with(">=2.12"):  # before, a backend may lack it
                calls["all_to_all"] = dist.all_to_all, (outputs, rows), {}
            if not dtype.is_complex:
                calls["gather"] = dist.gather, (own[0], outputs if root else None, 1), {}
                calls["reduce_scatter"] = dist.reduce_scatter, (own[0], rows), {}
            lists = [outputs, rows, equal, other, few, most]
            for (name, (function, arguments, options)), _ in itertools.product(calls.items(), range(2)):
                before = [list(each) for each in lists]
                work = function(*arguments, async_op=asynchronous, **options)
                if work is not None:
                    work.wait()
                for given, right in zip(lists, before, strict=True):
                    same = len(given) == len(right) and all(map(_is, given, right))
                    assert same, f"{name}, {dtype}, {asynchronous=}: {given} was {right}"
            for sizes in (equal, other), (few, most):
                before = [list(each) for each in sizes]
                functional.all_to_all_single(flat, *sizes, dist.group.WORLD)
                assert [*sizes] == before, f"functional all_to_all_single, {dtype}"
        ranks, parts = [2, 0, 1], [[1, 0], [2]]
        for _ in range(2):
            for options in ({}, {"sort_ranks": False})[: 1 + runs_with(">=2.12")]:
                group = dist.new_group(ranks, **options)
                assert dist.get_world_size(group) == size, f"{options}"
                assert ranks == [2, 0, 1], f"{options}: {ranks}"
            dist.new_subgroups_by_enumeration(parts)
            assert parts == [[1, 0], [2]], f"{parts}"

    world.run(body)


def _is(given: Any, right: Any) -> bool:
    return given is right if isinstance(right, torch.Tensor) else given == right
