"""Every requirement of the collectives suite has a test that fails when the behaviour is broken."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import RanksFailed, World, WorldSpec
from harness.oracles.collectives import COLLECTIVES
from tests.collectives import defects as d

pytestmark = pytest.mark.slow

SUITE = Path(__file__).parents[2] / "suites" / "collectives"

FAILS_ALREADY = {
    "COLL-ALLGATHER-04",
    "COLL-ALLGATHER-05",
    "COLL-FUNC-08",
    "COLL-GATHER-02",
    "COLL-GROUP-06",
    "COLL-LIFE-01",
    "COLL-MISUSE-02",
    "COLL-MISUSE-03",
    "COLL-REDUCESCATTER-04",
}
"""Requirements whose tests fail on gloo as it is: docs/findings.md."""

PROPERTIES = {"COLL-MIX-01"}
"""Requirements whose test is a Hypothesis property; test_groups' other tests share its runner."""

LEAN: dict[str, Any] = {"thorough": False}
EVERY = {name: d.wrong(d.second_call, output=1 if name == "gather" else 0) for name in COLLECTIVES}


def _no_grad(original: Any, rank: Any) -> Any:
    def replacement(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        for tensor in d.tensors(args[0]):
            tensor.requires_grad_(False)
        return result

    return replacement


def _shuffled(original: Any, rank: Any) -> Any:
    return lambda *args, **options: original(*args, **options)[::-1]


CASES: list[tuple[str, str, int, dict[str, Any], dict[str, Any]]] = [
    # requirement, test, world size, its arguments, what is broken
    (
        "COLL-ALLREDUCE-01",
        "test_all_reduce::test_every_rank_has_the_reduction",
        3,
        {"op": "SUM", **LEAN},
        {"all_reduce": d.wrong(d.odd_world)},
    ),
    (
        "COLL-ALLREDUCE-01",
        "test_all_reduce::test_every_rank_has_the_reduction",
        2,
        {"op": "BXOR", **LEAN},
        {"all_reduce": d.nothing},
    ),
    (
        "COLL-ALLREDUCE-01",
        "test_all_reduce::test_every_rank_has_the_reduction",
        2,
        {"op": "MAX", **LEAN},
        {"all_reduce": d.without("op")},
    ),
    ("COLL-ALLREDUCE-02", "test_all_reduce::test_shapes", 2, {}, {"all_reduce": d.wrong(d.second_call)}),
    ("COLL-ALLREDUCE-03", "test_all_reduce::test_large_and_repeated", 2, LEAN, {"all_reduce": d.wrong(d.large)}),
    (
        "COLL-REDUCE-01",
        "test_reduce::test_destination_has_the_reduction",
        2,
        {"op": "SUM", **LEAN},
        {"reduce": d.wrong()},
    ),
    ("COLL-REDUCE-02", "test_reduce::test_every_destination", 2, {}, {"reduce": d.nothing}),
    ("COLL-REDUCE-03", "test_reduce::test_shapes_and_sizes", 2, LEAN, {"reduce": d.wrong(d.large)}),
    (
        "COLL-BROADCAST-01",
        "test_broadcast::test_every_rank_has_the_source_tensor",
        3,
        LEAN,
        {"broadcast": d.wrong(d.odd_world)},
    ),
    ("COLL-BROADCAST-02", "test_broadcast::test_every_source", 2, {}, {"broadcast": d.wrong(d.second_call)}),
    ("COLL-BROADCAST-03", "test_broadcast::test_shapes_and_sizes", 2, LEAN, {"broadcast": d.wrong(d.large)}),
    ("COLL-GATHER-01", "test_gather_scatter::test_gather", 3, LEAN, {"gather": d.reversed_list(1)}),
    ("COLL-GATHER-03", "test_gather_scatter::test_gather_roots_and_shapes", 2, LEAN, {"gather": d.touches_input(0)}),
    ("COLL-SCATTER-01", "test_gather_scatter::test_scatter", 2, LEAN, {"scatter": d.wrong(d.complex_only)}),
    (
        "COLL-SCATTER-02",
        "test_gather_scatter::test_scatter_roots_and_shapes",
        2,
        LEAN,
        {"scatter": d.wrong(d.second_call)},
    ),
    ("COLL-ALLGATHER-01", "test_all_gather::test_into_a_list", 2, LEAN, {"all_gather": d.reversed_list(0)}),
    (
        "COLL-ALLGATHER-02",
        "test_all_gather::test_into_a_tensor",
        2,
        LEAN,
        {"all_gather_into_tensor": d.touches_input(1)},
    ),
    ("COLL-ALLGATHER-03", "test_all_gather::test_shapes_and_sizes", 2, LEAN, {"all_gather": d.wrong(d.second_call)}),
    (
        "COLL-REDUCESCATTER-01",
        "test_reduce_scatter::test_of_lists",
        2,
        {"op": "SUM", **LEAN},
        {"reduce_scatter": d.wrong()},
    ),
    (
        "COLL-REDUCESCATTER-02",
        "test_reduce_scatter::test_of_tensors",
        2,
        {"op": "MIN", **LEAN},
        {"reduce_scatter_tensor": d.without("op")},
    ),
    (
        "COLL-REDUCESCATTER-03",
        "test_reduce_scatter::test_shapes_and_sizes",
        2,
        LEAN,
        {"reduce_scatter_tensor": d.wrong(d.second_call)},
    ),
    ("COLL-ALLTOALL-01", "test_all_to_all::test_of_lists", 3, LEAN, {"all_to_all": d.reversed_list(0)}),
    ("COLL-ALLTOALL-02", "test_all_to_all::test_of_tensors", 2, LEAN, {"all_to_all_single": d.wrong(d.complex_only)}),
    (
        "COLL-ALLTOALL-03",
        "test_all_to_all::test_uneven",
        2,
        {"collective": "all_to_all_single"},
        {"all_to_all_single": d.wrong(d.second_call)},
    ),
    ("COLL-ALLTOALL-04", "test_all_to_all::test_large_and_repeated", 2, LEAN, {"all_to_all": d.wrong(d.large)}),
    ("COLL-ALLTOALL-05", "test_all_to_all::test_uneven_complex", 2, {}, {"all_to_all_single": d.wrong()}),
    (
        "COLL-LAYOUT-01",
        "test_layouts::test_input",
        2,
        {"collective": "all_gather", "layout": "column"},
        {"all_gather": d.wrong(d.strided)},
    ),
    (
        "COLL-LAYOUT-02",
        "test_layouts::test_output",
        2,
        {"collective": "all_gather", "layout": "column"},
        {"all_gather": d.wrong(d.strided)},
    ),
    (
        "COLL-LAYOUT-03",
        "test_layouts::test_in_place",
        2,
        {"collective": "all_reduce", "layout": "transposed"},
        {"all_reduce": d.wrong(d.strided)},
    ),
    ("COLL-LAYOUT-04", "test_layouts::test_negative_bit", 2, {"collective": "all_gather"}, {"all_gather": d.wrong()}),
    ("COLL-LAYOUT-05", "test_layouts::test_conjugate_bit", 2, {"collective": "all_gather"}, {"all_gather": d.nothing}),
    ("COLL-PURE-01", "test_layouts::test_requires_grad_stays", 2, {}, {"all_reduce": _no_grad}),
    ("COLL-ASYNC-01", "test_forms::test_asynchronous", 2, {}, {"all_gather": d.nothing}),
    ("COLL-ASYNC-02", "test_forms::test_many_in_flight", 2, {}, {"all_reduce": d.wrong(d.second_call)}),
    (
        "COLL-ASYNC-03",
        "test_forms::test_completed_after_wait",
        2,
        {"collective": "all_reduce"},
        {"Work.is_completed": d.instead(False)},
    ),
    ("COLL-COALESCED-01", "test_forms::test_coalesced", 2, {}, {"all_reduce": d.nothing}),
    ("COLL-COALESCED-02", "test_forms::test_all_reduce_coalesced", 2, {}, {"all_reduce_coalesced": d.wrong()}),
    ("COLL-COALESCED-03", "test_forms::test_all_gather_coalesced", 2, {}, {"all_gather_coalesced": d.reversed_list(0)}),
    (
        "COLL-FUNC-01",
        "test_forms::test_functional",
        2,
        {"collective": "all_reduce", **LEAN},
        {"functional.all_reduce": d.returns_wrong},
    ),
    (
        "COLL-FUNC-02",
        "test_forms::test_functional_layouts",
        2,
        {"collective": "all_gather_into_tensor", "layout": "column"},
        {"functional.all_gather_tensor": d.returns_wrong},
    ),
    (
        "COLL-FUNC-03",
        "test_forms::test_functional_in_place_layouts",
        2,
        {"collective": "all_reduce", "layout": "column"},
        {"functional.all_reduce": d.touches_input(0)},
    ),
    ("COLL-FUNC-04", "test_forms::test_functional_uneven", 2, {}, {"functional.all_to_all_single": d.returns_wrong}),
    (
        "COLL-FUNC-05",
        "test_forms::test_functional_dimensions",
        2,
        {},
        {"functional.reduce_scatter_tensor": d.returns_wrong},
    ),
    ("COLL-FUNC-06", "test_forms::test_functional_waits_when_used", 2, {}, {"functional.all_reduce": d.returns_wrong}),
    (
        "COLL-FUNC-07",
        "test_forms::test_functional_gradients",
        2,
        {},
        {
            "functional.all_gather_tensor_autograd": lambda original, rank: (
                lambda x, *rest: original(x, *rest).detach() + x.sum()
            )
        },
    ),
    (
        "COLL-GROUP-01",
        "test_groups::test_every_collective_in_subgroups",
        3,
        {},
        {"all_reduce": d.wrong(d.without_rank_0)},
    ),
    ("COLL-GROUP-02", "test_groups::test_first_on_a_fresh_group", 3, {}, {"scatter": d.wrong(d.without_rank_0)}),
    ("COLL-GROUP-03", "test_groups::test_order_of_ranks", 3, {}, {"get_process_group_ranks": _shuffled}),
    (
        "COLL-GROUP-04",
        "test_groups::test_local_synchronization",
        3,
        {},
        {"all_reduce": d.nothing},
    ),
    (
        "COLL-GROUP-05",
        "test_groups::test_new_subgroups",
        4,
        {},
        {"new_subgroups": lambda original, rank: lambda size: (original(size)[0], [])},
    ),
    ("COLL-GROUP-07", "test_groups::test_broadcast_gradient", 3, {"ranks": (1, 2)}, {}),
    ("COLL-MESH-01", "test_groups::test_mesh_groups", 4, {"shape": (2, 2)}, {"all_reduce": d.without("group")}),
    ("COLL-MESH-02", "test_groups::test_mesh_order", 3, {"order": (2, 0, 1)}, {}),
    ("COLL-P2P-01", "test_point_to_point::test_send_recv", 2, {}, {"recv": d.wrong(d.complex_only)}),
    (
        "COLL-P2P-02",
        "test_point_to_point::test_any_source",
        3,
        {},
        {"recv": lambda original, rank: lambda t: (original(t), 1)[1]},
    ),
    (
        "COLL-P2P-03",
        "test_point_to_point::test_tags_in_reverse",
        2,
        {},
        {"isend": d.without("tag"), "irecv": d.without("tag")},
    ),
    ("COLL-P2P-04", "test_point_to_point::test_order", 2, {}, {"recv": d.wrong(d.second_call)}),
    ("COLL-P2P-06", "test_point_to_point::test_in_a_subgroup", 3, {}, {"recv": d.wrong(d.second_call)}),
    ("COLL-P2P-07", "test_point_to_point::test_strided", 2, {}, {"send": d.never_raises}),
    ("COLL-P2P-08", "test_point_to_point::test_to_itself", 2, {}, {"send": d.never_raises}),
    ("COLL-BARRIER-01", "test_barriers::test_nobody_leaves_early", 3, {"barrier": "barrier"}, {"barrier": d.nothing}),
    ("COLL-BARRIER-02", "test_barriers::test_waits_for_the_last", 2, {}, {"barrier": d.nothing}),
    (
        "COLL-BARRIER-03",
        "test_barriers::test_missing_rank_is_named",
        3,
        {"missing": 1},
        {"monitored_barrier": d.nothing},
    ),
    (
        "COLL-BARRIER-04",
        "test_barriers::test_all_missing_ranks_are_named",
        3,
        {},
        {"monitored_barrier": d.without("wait_all_ranks")},
    ),
    (
        "COLL-BARRIER-05",
        "test_barriers::test_subgroup",
        3,
        {},
        {"barrier": lambda original, rank: lambda group: original()},
    ),
    ("COLL-OBJECT-01", "test_objects::test_all_gather_object", 2, {}, {"all_gather_object": d.reversed_list(0)}),
    ("COLL-OBJECT-02", "test_objects::test_gather_object", 2, {}, {"gather_object": d.reversed_list(1)}),
    ("COLL-OBJECT-03", "test_objects::test_broadcast_object_list", 2, {}, {"broadcast_object_list": d.nothing}),
    ("COLL-OBJECT-04", "test_objects::test_scatter_object_list", 2, {}, {"scatter_object_list": d.nothing}),
    ("COLL-OBJECT-05", "test_objects::test_send_recv_object_list", 2, {}, {"recv_object_list": d.reversed_list(0)}),
    ("COLL-OBJECT-06", "test_objects::test_in_a_subgroup", 3, {}, {"broadcast_object_list": d.nothing}),
    ("COLL-OBJECT-07", "test_objects::test_unpicklable", 2, {}, {"all_gather_object": d.never_raises}),
    ("COLL-REFUSE-01", "test_misuse::test_refusals_are_clean", 2, {}, {"all_gather": d.always_raises}),
    ("COLL-MISUSE-01", "test_misuse::test_wrong_arguments", 2, {}, {"all_reduce": d.never_raises}),
    (
        "COLL-TIMEOUT-01",
        "test_lifecycle::test_timeout_is_honoured",
        2,
        {"what": "all_reduce"},
        {"all_reduce": d.nothing},
    ),
    ("COLL-LIFE-02", "test_lifecycle::test_destroy_and_start_again", 2, {}, {"destroy_process_group": d.nothing}),
    ("COLL-LIFE-03", "test_lifecycle::test_start_again_smaller", 3, {}, {"broadcast": d.nothing}),
    ("COLL-LIFE-04", "test_lifecycle::test_started_twice", 2, {}, {"init_process_group": d.never_raises}),
    ("COLL-PAIR-01", "test_forms::test_pairs", 2, {}, EVERY),
    ("COLL-P2P-05", "test_point_to_point::test_ring", 2, {"count": 7}, {"batch_isend_irecv": d.instead([])}),
]


def test_of(name: str) -> Any:
    """A suite's test function, without Hypothesis or pytest around it."""
    module, _, function = name.partition("::")
    return getattr(importlib.import_module(f"suites.collectives.{module}"), function)


test_of.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "arguments", "patches", "fresh"),
    [
        pytest.param(name, arguments, patches, size, id=f"{requirement}-{name.partition('::')[2]}-{number}")
        for number, (requirement, name, size, arguments, patches) in enumerate(CASES)
    ],
    indirect=["fresh"],
)
def test_fails_when_broken(fresh: World, name: str, arguments: dict[str, Any], patches: dict[str, Any]) -> None:
    """The suite's own test, run on ranks whose collectives are broken."""
    with pytest.raises((AssertionError, RanksFailed)):
        test_of(name)(world=d.BrokenWorld(fresh, patches), **arguments)


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world of the size that a case asks for."""
    pool = request.config.pluginmanager.get_plugin("concord-worlds").pool
    found = pool.acquire(WorldSpec(size=request.param, timeout=20))
    yield found
    found.kill()


def test_every_requirement_is_here() -> None:
    """No requirement of the suite without a case."""
    known = {requirement for requirement, *_ in CASES} | FAILS_ALREADY | PROPERTIES
    found = set()
    for file in SUITE.glob("test_*.py"):
        module = importlib.import_module(f"suites.collectives.{file.stem}")
        for value in vars(module).values():
            marks = getattr(value, "pytestmark", []) if callable(value) else []
            found |= {mark.args[0].id for mark in marks if mark.name == "requirement"}
    assert found == known


def test_healthy_ranks_have_no_defect() -> None:
    """Patches are undone: the functions are torch's own in this process."""
    assert dist.all_reduce.__module__.startswith("torch")
    assert torch.distributed.all_reduce is dist.all_reduce
