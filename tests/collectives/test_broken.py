"""A process group that is wrong in one narrow way is found by the suite's own tests, which say where."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness import RanksFailed, World
from harness.stacks.collectives import assert_right
from suites.collectives import test_all_gather as all_gather
from suites.collectives import test_all_reduce as all_reduce
from suites.collectives import test_all_to_all as all_to_all
from suites.collectives import test_barriers as barriers
from suites.collectives import test_broadcast as broadcast
from suites.collectives import test_forms as forms
from suites.collectives import test_gather_scatter as gather_scatter
from suites.collectives import test_groups as groups
from suites.collectives import test_layouts as layouts
from suites.collectives import test_lifecycle as lifecycle
from suites.collectives import test_objects as objects
from suites.collectives import test_point_to_point as messages
from suites.collectives import test_reduce as reduce
from suites.collectives import test_reduce_scatter as reduce_scatter
from suites.collectives.cases import every_collective
from tests.collectives.broken import BrokenWorld
from tests.collectives.catalogue import CATALOGUE, NONE

HEADER = re.compile(r"^\w+\(.*\), call \d+, rank \d+: .*$", re.MULTILINE)
ELEMENT = re.compile(r"^  \[[\d, ]*\] expected .*, found ", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """A damage, and a test of the suite that finds it."""

    damage: str
    size: int
    """Of the world."""
    test: Callable[..., None]
    says: str
    """Matches every wrong answer's headline, or somewhere what a test says that has none."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.damage in CATALOGUE

    def run(self, world: World) -> None:
        self.test(BrokenWorld(world, CATALOGUE[self.damage]), **self.arguments)


SWEPT = {"thorough": False}


def requires_grad(world: World) -> None:
    """The cases of test_requires_grad_stays for the collectives that gloo gets right."""
    cases = every_collective(requires_grad=True, repeats=2)
    assert_right(world, [case for case in cases if case.collective in ("broadcast", "all_gather")])


FOUND = (
    # sizes of worlds, groups, calls
    Finding("last element wrong in odd worlds", 3, all_reduce.test_shapes, r"rank [012]: output: 1 of"),
    Finding("nothing done for a rank alone", 1, all_gather.test_into_a_list, "rank 0: output", SWEPT),
    Finding(
        "first element wrong in groups without rank 0",
        3,
        groups.test_every_collective_in_subgroups,
        r"group \[(1|2|1, 2|2, 1)\].* rank [12]: output",
    ),
    Finding(
        "last element wrong in groups with gaps",
        3,
        groups.test_every_collective_in_subgroups,
        r"all_gather\(.*group \[0, 2\].* rank [02]: ",
    ),
    Finding("first call on a group does nothing", 3, groups.test_first_on_a_fresh_group, r"broadcast\(.* rank 1: "),
    Finding("a repeated call gets stale data", 2, all_reduce.test_shapes, r"call 2, rank [01]: "),
    Finding("a repeated call gets stale data", 2, forms.test_many_in_flight, r"call [1-7]: 1000 of 1000"),
    Finding("a repeated exchange gets stale data", 2, all_to_all.test_of_lists, "call 2, ", SWEPT),
    # elements
    Finding("last element dropped", 2, all_gather.test_into_a_tensor, "output: 1 of", SWEPT),
    Finding("only the first element wrong", 2, gather_scatter.test_scatter, r"output: 1 of \d+ elements", SWEPT),
    Finding(
        "one element off by one ulp",
        2,
        all_reduce.test_every_rank_has_the_reduction,
        "float.* 1 of",
        {"op": "SUM", **SWEPT},
    ),
    Finding(
        "17 elements are one too few",
        2,
        reduce_scatter.test_of_lists,
        r"\[17\].* 1 of 17 elements",
        {"op": "SUM", **SWEPT},
    ),
    Finding(
        "6 and 32 elements are one too few",
        2,
        all_reduce.test_every_rank_has_the_reduction,
        r"\[(6|32)\].* output: 1 of",
        {"op": "SUM", **SWEPT},
    ),
    Finding(
        "last element wrong in a large float16 tensor", 2, all_reduce.test_large_and_repeated, r"float16.* 1 of", SWEPT
    ),
    Finding(
        "last element wrong in a large float16 tensor", 2, broadcast.test_shapes_and_sizes, r"float16.* 1 of", SWEPT
    ),
    Finding("elements from 32 on lost", 2, all_to_all.test_of_lists, r"\[(33|63|64|65|66)\]", SWEPT),
    Finding("rank 0 wrong above 1 MB", 2, reduce_scatter.test_shapes_and_sizes, r"\d{6,}\].* rank 0: ", SWEPT),
    Finding("last element wrong above 4 MiB", 2, broadcast.test_shapes_and_sizes, r"\[1048579\].* 1 of 1048579", SWEPT),
    Finding("every third large call wrong on rank 0", 2, all_to_all.test_large_and_repeated, "call 3, rank 0: ", SWEPT),
    # shapes
    Finding("empty tensors refused", 2, all_reduce.test_shapes, r"\[2, 0, 3\].* raised RuntimeError"),
    Finding("no dimension refused", 2, all_to_all.test_of_lists, r"\[\].* raised Runtime", SWEPT),
    Finding("three dimensions refused", 2, all_reduce.test_shapes, r", \d+, \d+\].* raised"),
    # dtypes and ops
    Finding(
        "first element wrong in half precision",
        2,
        all_reduce.test_every_rank_has_the_reduction,
        r"\((b?float16)\[",
        {"op": "MIN", **SWEPT},
    ),
    Finding("complex numbers refused", 2, broadcast.test_every_rank_has_the_source_tensor, r"complex.* raised", SWEPT),
    Finding(
        "MAX of int64 unsigned", 2, all_reduce.test_every_rank_has_the_reduction, r"int64\[", {"op": "MAX", **SWEPT}
    ),
    Finding("AVG does not divide", 2, all_reduce.test_every_rank_has_the_reduction, "AVG", {"op": "AVG", **SWEPT}),
    Finding(
        "AVG divides by the number of elements",
        2,
        all_reduce.test_every_rank_has_the_reduction,
        "AVG",
        {"op": "AVG", **SWEPT},
    ),
    Finding(
        "float32 summed as bfloat16",
        2,
        all_reduce.test_every_rank_has_the_reduction,
        r"float32\[",
        {"op": "SUM", **SWEPT},
    ),
    Finding(
        "int64 summed as float64", 2, all_reduce.test_every_rank_has_the_reduction, r"int64\[", {"op": "SUM", **SWEPT}
    ),
    Finding(
        "complex128 as complex64", 2, all_reduce.test_every_rank_has_the_reduction, "complex128", {"op": "SUM", **SWEPT}
    ),
    Finding("PRODUCT sums", 2, reduce.test_destination_has_the_reduction, "PRODUCT", {"op": "PRODUCT", **SWEPT}),
    Finding("BXOR is BOR", 2, reduce_scatter.test_of_lists, "BXOR", {"op": "BXOR", **SWEPT}),
    Finding("MIN is MAX", 2, reduce_scatter.test_of_tensors, "uint8.*MIN", {"op": "MIN", **SWEPT}),
    # ranks, roots, chunks
    Finding("right only on rank 0", 3, all_reduce.test_shapes, "rank [12]: "),
    Finding("wrong only on the last rank", 3, broadcast.test_every_source, "rank 2: "),
    Finding("root off by one", 3, broadcast.test_every_source, r"root [012] \((global|group)\)"),
    Finding("destination off by one", 3, reduce.test_every_destination, r"root ([012]) .* rank \1: "),
    Finding(
        "root in the group taken as global",
        3,
        groups.test_every_collective_in_subgroups,
        r"broadcast\(.*\(group\), group \[[^0]*\]",
    ),
    Finding("all_gather permuted", 2, all_gather.test_into_a_list, "output [01]: ", SWEPT),
    Finding("gather permuted", 2, gather_scatter.test_gather, "rank 1: output [01]: ", SWEPT),
    Finding("all_gather_into_tensor transposed", 2, all_gather.test_into_a_tensor, "all_gather_into_tensor", SWEPT),
    Finding("scatter gives the neighbour's", 2, gather_scatter.test_scatter, "scatter", SWEPT),
    Finding(
        "reduce_scatter gives the neighbour's", 2, reduce_scatter.test_of_lists, r"scatter\(", {"op": "SUM", **SWEPT}
    ),
    Finding(
        "reduce_scatter_tensor gives the neighbour's",
        3,
        reduce_scatter.test_of_tensors,
        "tensor",
        {"op": "SUM", **SWEPT},
    ),
    Finding("two tensors swapped", 2, all_to_all.test_of_lists, "output [01]: ", SWEPT),
    Finding("two chunks swapped", 2, all_to_all.test_of_tensors, "single", SWEPT),
    Finding("splits in reverse", 2, all_to_all.test_uneven, "uneven", {"collective": "all_to_all_single"}),
    # memory
    Finding(
        "strides ignored in what is gathered",
        2,
        layouts.test_input,
        "input column",
        {"collective": "gather", "layout": "column"},
    ),
    Finding(
        "strides ignored in what is gathered",
        2,
        layouts.test_input,
        "input transp",
        {"collective": "all_gather", "layout": "transposed"},
    ),
    Finding(
        "writes between strides",
        2,
        layouts.test_output,
        "memory outside",
        {"collective": "all_gather", "layout": "column"},
    ),
    Finding(
        "writes between strides",
        2,
        layouts.test_output,
        "memory outside",
        {"collective": "all_gather_into_tensor", "layout": "column"},
    ),
    Finding(
        "writes in front of an offset view",
        2,
        layouts.test_in_place,
        "memory outside",
        {"collective": "all_reduce", "layout": "offset"},
    ),
    Finding(
        "writes in front of an offset view",
        2,
        layouts.test_output,
        "memory outside",
        {"collective": "scatter", "layout": "offset"},
    ),
    Finding("input changed", 2, all_gather.test_into_a_list, "input 0, which must stay", SWEPT),
    Finding("input changed", 2, all_to_all.test_of_lists, "input 0, which must stay", SWEPT),
    Finding("expanded inputs refused", 2, layouts.test_input, "raised", {"collective": "gather", "layout": "expanded"}),
    Finding("requires_grad lost", 2, requires_grad, "requires_grad was lost"),
    # forms
    Finding("wait does not wait", 2, forms.test_asynchronous, r"async\), call \d, rank \d: output"),
    Finding(
        "functional all_reduce works in place",
        2,
        forms.test_functional,
        "input 0, which",
        {"collective": "all_reduce", **SWEPT},
    ),
    *(
        Finding(
            "functional forms lose the last element",
            2,
            forms.test_functional,
            "functional",
            {"collective": name, **SWEPT},
        )
        for name in forms.FUNCTIONAL
    ),
    Finding("wrong after another collective", 2, forms.test_pairs, r"^all_gather\("),
    Finding("last of a list not reduced", 2, forms.test_all_reduce_coalesced, r"all_reduce\(float32\[33\]"),
    Finding("last of a list not gathered", 2, forms.test_all_gather_coalesced, r"all_gather\(float32\[33\]"),
    # groups
    Finding(
        "order given to new_group kept", 3, groups.test_every_collective_in_subgroups, r"all_gather\(.*, group \[2, 1"
    ),
    Finding("destroying a group does nothing", 2, lifecycle.test_destroy_and_start_again, "is_initialized"),
    Finding("timeouts halved", 2, lifecycle.test_timeout_is_honoured, "assert", {"what": "all_reduce"}),
    # barriers
    Finding("barrier does not block", 2, barriers.test_waits_for_the_last, "done"),
    Finding("barrier does not block", 3, barriers.test_nobody_leaves_early, "assert", {"barrier": "barrier"}),
    Finding(
        "monitored_barrier does not block", 3, barriers.test_missing_rank_is_named, "DID NOT RAISE", {"missing": 2}
    ),
    Finding(
        "monitored_barrier does not block",
        3,
        barriers.test_nobody_leaves_early,
        "assert",
        {"barrier": "monitored_barrier"},
    ),
    # messages
    Finding("tags ignored", 2, messages.test_tags_in_reverse, "tag 3: 7 of 7 elements"),
    Finding("wrong sender named", 3, messages.test_any_source, "from rank [012]"),
    Finding("last element of a large message lost", 2, messages.test_order, r"message 1: 1 of 5000"),
    Finding("last element lost in a batch", 2, messages.test_ring, "round 0: 1 of 7", {"count": 7}),
    # objects
    Finding("one object for all", 2, objects.test_all_gather_object, "found == "),
    Finding("first object twice", 2, objects.test_gather_object, "found == "),
    Finding("only the first object sent", 2, objects.test_broadcast_object_list, "found == "),
    Finding("only the first object received", 2, objects.test_send_recv_object_list, "found == "),
    Finding("the neighbour's object", 2, objects.test_scatter_object_list, "found == "),
)


def of_size(size: int) -> pytest.MarkDecorator:
    """A parameter for every finding in a world of a size."""
    found = [finding for finding in FOUND if finding.size == size]
    names = [f"{f.damage} - {f.test.__name__}-{'-'.join(map(str, f.arguments.values()))}" for f in found]
    return pytest.mark.parametrize("finding", found, ids=[name.replace(" ", "_") for name in names])


@pytest.mark.world(1)
@of_size(1)
def test_alone(world: World, finding: Finding) -> None:
    """Found with one rank."""
    check(world, finding)


@pytest.mark.world(2)
@of_size(2)
def test_two(world: World, finding: Finding) -> None:
    """Found with two ranks."""
    check(world, finding)


@pytest.mark.world(3)
@of_size(3)
def test_three(world: World, finding: Finding) -> None:
    """Found with three ranks."""
    check(world, finding)


def check(world: World, finding: Finding) -> None:
    """The test fails, for the reason that it should; of wrong answers, it names case, call, rank and elements."""
    with pytest.raises((AssertionError, RanksFailed)) as caught:
        finding.run(world)
    text = str(caught.value)
    headers = HEADER.findall(text)
    assert [h for h in headers or [text] if not re.search(finding.says, h)] == []
    if any(" elements differ" in header for header in headers):
        assert ELEMENT.search(text)


def test_every_damage_is_looked_for() -> None:
    """No damage of the catalogue is without a test that finds it."""
    assert {name for name in CATALOGUE if name != NONE.name} == {finding.damage for finding in FOUND}


QUIET = list({f"{f.test.__module__}.{f.test.__name__}{f.size}{f.arguments}": f for f in FOUND}.values())


@pytest.mark.parametrize("finding", [f for f in QUIET if f.size == 2], ids=lambda f: f.test.__name__)
@pytest.mark.world(2)
def test_quiet_two(world: World, finding: Finding) -> None:
    """Wrapped but not damaged, collectives pass the tests that find damages."""
    finding.test(BrokenWorld(world, NONE), **finding.arguments)


@pytest.mark.parametrize("finding", [f for f in QUIET if f.size == 3], ids=lambda f: f.test.__name__)
@pytest.mark.world(3)
def test_quiet_three(world: World, finding: Finding) -> None:
    """Wrapped but not damaged, collectives pass the tests that find damages."""
    finding.test(BrokenWorld(world, NONE), **finding.arguments)
