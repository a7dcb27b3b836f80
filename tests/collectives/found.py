"""Which test of the suite finds which damage, and how it fails."""

from __future__ import annotations

import torch

from suites.collectives.operations import test_all_gather as all_gather
from suites.collectives.operations import test_all_reduce as all_reduce
from suites.collectives.operations import test_all_to_all as all_to_all
from suites.collectives.operations import test_barriers as barriers
from suites.collectives.operations import test_broadcast as broadcast
from suites.collectives.arguments import test_crossings as crossings
from suites.collectives.arguments import test_forms as forms
from suites.collectives.functional import test_functional as functional
from suites.collectives.operations import test_gather_scatter as gather_scatter
from suites.collectives.gradients import test_gradients as gradients
from suites.collectives.groups import test_groups as groups
from suites.collectives.arguments import test_layouts as layouts
from suites.collectives.groups import test_lifecycle as lifecycle
from suites.collectives.arguments import test_misuse as misuse
from suites.collectives.objects import test_objects as objects
from suites.collectives.operations import test_point_to_point as messages
from suites.collectives.operations import test_reduce as reduce
from suites.collectives.operations import test_reduce_scatter as reduce_scatter
from suites.collectives.groups import test_restarts as restarts
from suites.collectives.in_flight import test_waiting as waiting
from suites.collectives.cases import FUNCTIONAL
from tests.collectives.finding import ASSERTION, ERROR, HANG, SILENCE, Finding

SWEPT = {"thorough": False}

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
    Finding("empty tensors refused", 2, all_reduce.test_shapes, r"\[2, 0, 3\].* raised RuntimeError", kind=ERROR),
    Finding("no dimension refused", 2, all_to_all.test_of_lists, r"\[\].* raised Runtime", SWEPT, kind=ERROR),
    Finding("three dimensions refused", 2, all_reduce.test_shapes, r", \d+, \d+\].* raised", kind=ERROR),
    # dtypes and ops
    Finding(
        "first element wrong in half precision",
        2,
        all_reduce.test_every_rank_has_the_reduction,
        r"\((b?float16)\[",
        {"op": "MIN", **SWEPT},
    ),
    Finding(
        "complex numbers refused",
        2,
        broadcast.test_every_rank_has_the_source_tensor,
        r"complex.* raised",
        SWEPT,
        kind=ERROR,
    ),
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
    # two conditions together
    Finding(
        "MAX of bool is MIN on four ranks",
        4,
        all_reduce.test_every_rank_has_the_reduction,
        r"all_reduce\(bool.*, MAX",
        {"op": "MAX", **SWEPT},
    ),
    Finding(
        "MAX is MIN in subgroups", 3, crossings.test_dense, r", MAX.*, group \[", {"collective": "all_reduce", **SWEPT}
    ),
    Finding(
        "MAX is MIN if asynchronous",
        4,
        crossings.test_large_in_subgroups,
        r", MAX.*, async",
        {"collective": "reduce_scatter"},
    ),
    Finding(
        "strided int64 wrong",
        3,
        crossings.test_strided_input,
        r"int64.*, input column",
        {"collective": "all_gather", "layout": "column", **SWEPT},
    ),
    Finding(
        "strided int64 wrong in place",
        3,
        crossings.test_strided_in_place,
        r"int64.*, input transposed",
        {"collective": "broadcast", "layout": "transposed", **SWEPT},
    ),
    Finding(
        "strided output wrong in subgroups",
        3,
        crossings.test_strided_output,
        r"group.*, output transposed",
        {"collective": "gather", "layout": "transposed", **SWEPT},
    ),
    Finding(
        "functional forms wrong in subgroups",
        3,
        crossings.test_functional,
        r"group \[",
        {"collective": "all_gather_into_tensor", **SWEPT},
    ),
    Finding(
        "functional forms wrong in subgroups",
        3,
        crossings.test_functional,
        r"group \[",
        {"collective": "reduce_scatter_tensor", **SWEPT},
    ),
    Finding(
        "large tensors wrong in subgroups",
        4,
        crossings.test_large_in_subgroups,
        r"group \[.* 1 of",
        {"collective": "all_reduce"},
    ),
    Finding(
        "large tensors wrong in subgroups",
        4,
        crossings.test_large_in_subgroups,
        r"group \[.* 1 of",
        {"collective": "all_to_all_single"},
    ),
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
    Finding(
        "expanded inputs refused",
        2,
        layouts.test_input,
        "raised",
        {"collective": "gather", "layout": "expanded"},
        kind=ERROR,
    ),
    Finding("requires_grad lost", 2, layouts.test_requires_grad_stays, "requires_grad was lost"),
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
        for name in FUNCTIONAL
    ),
    Finding("wrong after another collective", 2, forms.test_pairs, r"^all_gather\("),
    Finding("last of a list not reduced", 2, forms.test_all_reduce_coalesced, r"all_reduce\(float32\[33\]"),
    Finding("last of a list not gathered", 2, forms.test_all_gather_coalesced, r"all_gather\(float32\[33\]"),
    # groups
    Finding(
        "order given to new_group kept", 3, groups.test_every_collective_in_subgroups, r"all_gather\(.*, group \[2, 1"
    ),
    Finding(
        "destroying a group does nothing", 2, lifecycle.test_destroy_and_start_again, "is_initialized", kind=ASSERTION
    ),
    Finding("timeouts halved", 2, lifecycle.test_timeout_is_honoured, "assert", {"what": "all_reduce"}, kind=ASSERTION),
    # barriers
    Finding("barrier does not block", 2, barriers.test_waits_for_the_last, "done", kind=ASSERTION),
    Finding(
        "barrier does not block",
        3,
        barriers.test_nobody_leaves_early,
        "another result than",
        {"barrier": "barrier"},
        kind=ASSERTION,
    ),
    Finding(
        "monitored_barrier does not block",
        3,
        barriers.test_missing_rank_is_named,
        "DID NOT RAISE",
        {"missing": 2},
        kind=SILENCE,
    ),
    Finding(
        "monitored_barrier does not block",
        3,
        barriers.test_nobody_leaves_early,
        "another result than expected",
        {"barrier": "monitored_barrier"},
        kind=ASSERTION,
    ),
    # messages
    Finding("tags ignored", 2, messages.test_tags_in_reverse, "tag 3: 7 of 7 elements"),
    Finding("wrong sender named", 3, messages.test_any_source, "from rank [012]"),
    Finding("last element of a large message lost", 2, messages.test_order, r"message 1: 1 of 5000"),
    Finding("last element lost in a batch", 2, messages.test_ring, "round 0: 1 of 7", {"count": 7}),
    # objects
    Finding("one object for all", 2, objects.test_all_gather_object, "gathered == ", kind=ASSERTION),
    Finding("first object twice", 2, objects.test_gather_object, "gathered == ", kind=ASSERTION),
    Finding("only the first object sent", 2, objects.test_broadcast_object_list, "objects == ", kind=ASSERTION),
    Finding("only the first object received", 2, objects.test_send_recv_object_list, "received == ", kind=ASSERTION),
    Finding("the neighbour's object", 2, objects.test_scatter_object_list, "received == ", kind=ASSERTION),
    # what other damages leave out
    Finding("last element wrong in a large float16 tensor", 2, reduce.test_shapes_and_sizes, r"float16.* 1 of", SWEPT),
    Finding(
        "last element wrong in a large float16 tensor",
        2,
        gather_scatter.test_gather_roots_and_shapes,
        r"float16.* 1 of",
        SWEPT,
    ),
    Finding(
        "last element wrong in a large float16 tensor",
        2,
        gather_scatter.test_scatter_roots_and_shapes,
        r"float16.* 1 of",
        SWEPT,
    ),
    Finding(
        "last element wrong in a large float16 tensor", 2, all_gather.test_shapes_and_sizes, r"float16.* 1 of", SWEPT
    ),
    Finding("complex exchange incomplete", 2, all_to_all.test_uneven_complex, "complex64.* uneven"),
    Finding(
        "minus of a lazily negated tensor lost",
        2,
        layouts.test_negative_bit,
        "input negative",
        {"collective": "all_gather"},
    ),
    Finding(
        "lazily conjugated tensor not conjugated",
        2,
        layouts.test_conjugate_bit,
        "'wrong', 'output 0: ",
        {"collective": "all_gather"},
        kind=ASSERTION,
    ),
    Finding(
        "work is never completed",
        2,
        forms.test_completed_after_wait,
        "is_completed",
        {"collective": "all_reduce"},
        kind=ASSERTION,
    ),
    Finding("coalesced sums are maxima", 2, forms.test_coalesced, r"all_reduce\(float32\[1\]"),
    Finding(
        "functional forms wrong with strides",
        2,
        forms.test_functional_layouts,
        "input column",
        {"collective": "all_gather_into_tensor", "layout": "column"},
    ),
    Finding(
        "functional forms wrong with strides",
        2,
        forms.test_functional_in_place_layouts,
        "input transposed",
        {"collective": "all_reduce", "layout": "transposed"},
    ),
    Finding("functional splits in reverse", 2, forms.test_functional_uneven, "uneven"),
    Finding(
        "dimension to gather along ignored", 2, forms.test_functional_dimensions, r"gathered: expected float32\[2, 6\]"
    ),
    Finding("use does not wait", 2, forms.test_functional_waits_when_used, "sum: 262144 of 262144"),
    Finding("own gradient only", 2, forms.test_functional_gradients, "all_gather: "),
    Finding(
        "functional complex exchange incomplete",
        2,
        forms.test_functional_complex_exchange,
        "output: 1 of",
        repair="functional complex exchange",
    ),
    Finding("last element dropped", 2, all_gather.test_stacked, "output: 1 of", repair="stacks of tensors"),
    Finding(
        "reduce_scatter_tensor gives the neighbour's",
        2,
        reduce_scatter.test_stacked,
        "stacked",
        {"shape": (3, 5)},
        repair="stacks of tensors",
    ),
    Finding("last element dropped", 2, all_gather.test_uneven, "from rank 1: 1 of 2", repair="uneven all_gather"),
    Finding(
        "gather permuted",
        2,
        gather_scatter.test_gather_complex,
        "complex64",
        {"dtype": torch.complex64},
        repair="complex gather",
    ),
    Finding("ranks of a group not in order", 3, groups.test_order_of_ranks, "assert", kind=ASSERTION),
    Finding("use_local_synchronization ignored", 3, groups.test_local_synchronization, "barrier", kind=HANG),
    Finding("new_subgroups deals ranks out", 4, groups.test_new_subgroups, "assert", kind=ASSERTION),
    Finding(
        "errors of collectives swallowed",
        3,
        groups.test_not_a_member,
        "DID NOT RAISE",
        {"collective": "all_reduce"},
        kind=SILENCE,
        repair="no collective without the caller",
    ),
    Finding(
        "gradient stays where the tensor was used",
        3,
        groups.test_broadcast_gradient,
        "gradient of the source: 3 of 3",
        {"ranks": (1, 2)},
        repair="gradient of broadcast to the source",
    ),
    Finding("dimensions of a mesh in reverse", 4, groups.test_mesh_groups, "assert", {"shape": (2, 2)}, kind=ASSERTION),
    Finding(
        "local ranks of a mesh in reverse",
        3,
        groups.test_mesh_order,
        "assert",
        {"order": (2, 0, 1)},
        kind=ASSERTION,
        repair="local rank is the coordinate",
    ),
    Finding("last element wrong in odd worlds", 3, groups.test_any_sequence, r"all_reduce\(.* output: 1 of"),
    Finding(
        "starting again with the ranks in reverse", 3, lifecycle.test_start_again_smaller, "assert", kind=ASSERTION
    ),
    Finding("errors at the start swallowed", 2, lifecycle.test_started_twice, "DID NOT RAISE", kind=SILENCE),
    Finding(
        "errors of collectives swallowed",
        2,
        lifecycle.test_destroyed_group,
        "DID NOT RAISE",
        kind=SILENCE,
        repair="no collective on a destroyed group",
    ),
    Finding(
        "monitored_barrier names one rank only",
        3,
        barriers.test_all_missing_ranks_are_named,
        "Ranks 1, 2 failed",
        kind=ASSERTION,
    ),
    Finding("barrier of a group is one of the world", 3, barriers.test_subgroup, "barrier", kind=HANG, timeout=2),
    Finding("complex message incomplete", 2, messages.test_send_recv, "torch.complex64 of 1: 1 of 1"),
    Finding("message by rank in the group wrong", 3, messages.test_in_a_subgroup, "group_src': 0}: 1 of 7"),
    Finding("errors of messages swallowed", 2, messages.test_strided, "what lies between: 2 of 6 elements"),
    Finding("errors of messages swallowed", 2, messages.test_to_itself, "DID NOT RAISE", kind=SILENCE),
    Finding("objects by rank in the group lost", 3, objects.test_in_a_subgroup, "(gathered|mine) == ", kind=ASSERTION),
    Finding("errors of objects swallowed", 2, objects.test_unpicklable, "DID NOT RAISE", kind=SILENCE),
    Finding(
        "int16 not refused on the last rank",
        2,
        misuse.test_refusals_are_clean,
        r"int16.*refused.*wrong",
        kind=ASSERTION,
    ),
    Finding("errors of collectives swallowed", 2, misuse.test_wrong_arguments, "DID NOT RAISE", kind=SILENCE),
    Finding(
        "errors of collectives swallowed",
        2,
        misuse.test_indivisible_exchange,
        "DID NOT RAISE",
        kind=SILENCE,
        repair="only what can be divided",
    ),
    Finding(
        "errors of collectives swallowed",
        2,
        misuse.test_mismatch_raises,
        "took it for a success",
        {"what": "all_reduce-dtype"},
        kind=ASSERTION,
        repair="only tensors of one kind",
    ),
    Finding(
        "errors of collectives swallowed",
        2,
        misuse.test_mismatch_raises,
        "took it for a success",
        {"what": "broadcast-size"},
        kind=ASSERTION,
        repair="only tensors of one kind",
    ),
    # what has newer names, is functional, is waited for again
    Finding("newer name of all_gather incomplete", 3, all_gather.test_newer_name, "1 of", {"ranks": (1, 2)}),
    Finding(
        "newer name of reduce_scatter incomplete",
        3,
        reduce_scatter.test_newer_name,
        "float32.* 1 of",
        {"ranks": (1, 2)},
    ),
    Finding(
        "last of a functional list incomplete",
        3,
        functional.test_of_lists,
        r"float32\[33\].* 1 of",
        {"name": "all_reduce_coalesced", "ranks": (1, 2)},
    ),
    Finding(
        "shorter functional name incomplete",
        3,
        functional.test_other_names,
        "1 of",
        {"name": "all_gather_single", "ranks": (1, 2)},
    ),
    Finding(
        "functional form in place does nothing",
        3,
        functional.test_in_place,
        "call 0: ",
        {"name": "all_reduce_inplace", "ranks": (1, 2)},
    ),
    Finding(
        "permutation the other way round", 3, functional.test_permutation, r"\[1, 2, 0\]: 7 of 7", {"ranks": (0, 1, 2)}
    ),
    Finding(
        "functional message incomplete",
        3,
        functional.test_messages,
        "received: 1 of 7",
        {"name": "batch_p2p_ops_inplace", "ranks": (0, 1, 2)},
    ),
    Finding(
        "dimension of a mesh ignored",
        4,
        functional.test_ways_to_name_a_group,
        "assert",
        {"given": "dimension"},
        kind=ASSERTION,
    ),
    Finding(
        "gradient stays where the tensor was used",
        3,
        gradients.test_differentiable,
        "gradient: 2 of 2",
        {"name": "broadcast", "ranks": (0, 1, 2)},
    ),
    Finding(
        "own gradient of a functional all_reduce",
        3,
        gradients.test_functional,
        "gradient: 2 of 2",
        {"name": "all_reduce-sum", "ranks": (1, 2)},
    ),
    Finding(
        "second wait overwrites", 2, waiting.test_second_wait, "assert", {"collective": "all_reduce"}, kind=ASSERTION
    ),
    Finding(
        "second wait fails",
        2,
        waiting.test_second_wait_for_a_message,
        "invalid tensor size",
        {"side": "isend"},
        kind=ERROR,
        repair="second wait returns",
    ),
    Finding(
        "nothing done",
        2,
        waiting.test_after_an_error_in_a_manager,
        "assert",
        kind=ASSERTION,
        repair="no manager after an error",
    ),
    Finding(
        "starting again with the ranks in reverse", 3, restarts.test_start_again_out_of_step, "assert", kind=ASSERTION
    ),
    Finding(
        "destroying a group does nothing",
        2,
        restarts.test_nothing_is_kept,
        "assert",
        {"what": "subgroup"},
        kind=ASSERTION,
    ),
    Finding("split_group gives nothing on the last rank", 3, restarts.test_split, "assert", kind=ASSERTION),
    Finding("nothing is shrunk", 3, restarts.test_shrink, "assert", kind=ASSERTION),
)
