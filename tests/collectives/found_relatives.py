"""Which test finds which of the narrow relatives of damages: one at least for each requirement that they led to."""

from __future__ import annotations

from suites.collectives.arguments import test_buffers as buffers
from suites.collectives.arguments import test_sizes as sizes
from suites.collectives.arguments import test_values as values
from suites.collectives.gradients import test_gradients as gradients
from suites.collectives.groups import test_lifecycle as lifecycle
from suites.collectives.groups import test_naming as naming
from suites.collectives.groups import test_restarts as restarts
from suites.collectives.in_flight import test_flight as flight
from suites.collectives.objects import test_objects as objects
from suites.collectives.operations import test_point_to_point as messages
from tests.collectives.finding import ASSERTION, ERROR, HANG, Finding

FOUND = (
    # sizes, values, memory
    Finding(
        "last element wrong in whole pages", 2, sizes.test_every_band, "output: 1 of", {"collective": "all_reduce"}
    ),
    Finding(
        "two chunks of four dimensions swapped", 2, sizes.test_many_dimensions, r"all_to_all_single.*\[2, 1, 3, 2\]"
    ),
    Finding(
        "channels-last tensors read as they lie",
        2,
        sizes.test_channels_last,
        r"all_gather.* elements differ",
        {"collective": "all_gather"},
    ),
    Finding(
        "subnormal numbers lost on the way",
        2,
        values.test_moved,
        "torch.float16",
        {"collective": "broadcast"},
        kind=ASSERTION,
    ),
    Finding(
        "infinities and not-a-numbers lost in sums",
        2,
        values.test_not_finite,
        "torch.float16",
        {"collective": "all_reduce", "op": "SUM"},
        kind=ASSERTION,
    ),
    Finding(
        "not-a-numbers lost in every third maximum",
        3,
        values.test_extremes_beside_nan,
        "torch.float32: MAX with NaN on rank 0 is 0.0, where NaN or 3.0 is right",
        {"collective": "all_reduce", "op": "MAX", "who": "first"},
        kind=ASSERTION,
    ),
    Finding(
        "not-a-numbers lost in every third maximum",
        2,
        values.test_nan_of_each_rank,
        "torch.bfloat16: MAX is NaN with that of ranks: ..False., .True..",
        {"collective": "all_reduce", "op": "MAX"},
        kind=ASSERTION,
        repair="a maximum with NaN is NaN",
    ),
    Finding(
        "bfloat16 summed as float16",
        2,
        values.test_range,
        "torch.bfloat16, times",
        {"collective": "all_reduce"},
        kind=ASSERTION,
    ),
    Finding(
        "parts of one buffer permuted",
        2,
        buffers.test_lists_of_parts,
        r"0 elements around, 0 between, \(0, 1\) in memory: 10 of 10",
        {"collective": "all_gather"},
    ),
    Finding("gathering in place wrong", 2, buffers.test_gathering_in_place, "call 0: 1 of 10"),
    Finding("scattering in place wrong", 2, buffers.test_scattering_in_place, "call 0: 1 of 5"),
    Finding("no dimension wrong in subgroups", 3, sizes.test_dimensions_in_subgroups, r"\[\]", {"group": (1, 2)}),
    # works
    Finding(
        "the work in flight after 64 does nothing", 2, flight.test_a_hundred, "call 64", {"collective": "all_reduce"}
    ),
    Finding(
        "work says too early that it is done",
        2,
        flight.test_not_completed_alone,
        "assert not",
        {"collective": "all_reduce"},
        kind=ASSERTION,
    ),
    Finding("future has what was before", 2, flight.test_future, "future, call 0", {"collective": "all_reduce"}),
    Finding(
        "tensors not ready beside other work",
        2,
        flight.test_beside_other_work,
        "all_gather.* call 0: 1 of 33",
        {"collective": "all_gather"},
    ),
    Finding("objects not ready beside other work", 2, flight.test_objects_beside_other_work, "object", kind=ASSERTION),
    Finding(
        "timeout of a subgroup ignored",
        3,
        lifecycle.test_timeout_of_a_group,
        "not finished",
        {"how": "subgroup"},
        kind=HANG,
        timeout=3,
    ),
    Finding(
        "groups connect lazily",
        3,
        lifecycle.test_peer_has_left,
        "assert",
        {"connecting": "at-once"},
        kind=ASSERTION,
    ),
    # groups
    Finding(
        "starting again on the same keys",
        2,
        restarts.test_start_again_in_the_same_place,
        "onnect",
        {"place": "fresh-keys"},
        kind=ERROR,
    ),
    Finding(
        "global rank counted from the first", 4, naming.test_translation, "0, 1", {"ranks": (0, 2)}, kind=ASSERTION
    ),
    Finding(
        "new_subgroups looks for the rank in the group",
        4,
        naming.test_parts_of_a_group,
        "assert",
        {"ranks": (2, 3)},
        kind=ASSERTION,
    ),
    Finding(
        "the default backend is the host's",
        1,
        lifecycle.test_registered_for_devices,
        "another result than expected",
        {"devices": ["fpga", "ve"]},
        kind=ASSERTION,
    ),
    Finding("the 33rd group is the world", 3, naming.test_many_groups, "0, 1, 2", kind=ASSERTION),
    Finding("destroying a group destroys its twin", 2, naming.test_twins, "group", kind=ERROR),
    Finding(
        "slice of a mesh is another dimension",
        4,
        naming.test_named_dimensions,
        "assert",
        {"shape": (2, 2)},
        kind=ASSERTION,
    ),
    Finding(
        "barrier of a subgroup does not block",
        3,
        naming.test_barrier_of_a_group,
        "check",
        {"ranks": (0, 1), "barrier": "barrier"},
        kind=ASSERTION,
    ),
    # messages, objects
    Finding(
        "sender named by its rank in the group", 4, messages.test_any_source_in_a_subgroup, "from", {"ranks": (0, 3)}
    ),
    Finding("tags of one byte", 2, messages.test_large_tags, "tag"),
    Finding(
        "last of a longer batch not received",
        3,
        messages.test_larger_batches,
        "message 1 from rank",
        {"ranks": (1, 2), "named": "peer"},
    ),
    Finding("last element of a large message lost", 2, messages.test_every_size, "4097 elements: 1 of"),
    Finding(
        "gathered objects lost by rank in the group",
        4,
        objects.test_roots_in_subgroups,
        "None",
        {"ranks": (1, 2, 3), "named": "group"},
        kind=ASSERTION,
    ),
    Finding(
        "objects beyond 64 KiB cut",
        2,
        objects.test_large_objects,
        "assert",
        {"large": 0, "collective": "broadcast"},
        kind=ASSERTION,
    ),
    Finding("tensors among objects become float32", 2, objects.test_tensors_among_objects, "float32", kind=ASSERTION),
    # gradients
    Finding(
        "gradient of an uneven exchange in reverse",
        3,
        gradients.test_uneven_exchange,
        "gradient: ",
        {"through": "module", "ranks": (0, 1, 2)},
    ),
    Finding(
        "gradient along another dimension without its last",
        2,
        gradients.test_along_dimensions,
        "gradient of the gathering: 1 of",
        {"dimension": 1},
    ),
    Finding(
        "expanded gradient of all_reduce read as it lies",
        2,
        gradients.test_expanded,
        "gradient: ",
        {"name": "all_reduce"},
    ),
    Finding(
        "uneven exchange without elements has the shape of an even one",
        2,
        gradients.test_rows_received,
        "received",
        {"width": 0},
    ),
    # what is called often, by others, with other kinds of tensors
    Finding("last element wrong among six", 6, sizes.test_more_ranks, r"all_reduce.* output: 1 of (7|25)"),
    Finding("own slot of a list wrong in place", 2, buffers.test_own_slot, "from rank 0, call 0: 1 of 5"),
    Finding(
        "tensors of inference mode refused",
        2,
        buffers.test_kinds_of_tensors,
        "invalid tensor size",
        {"collective": "all_reduce", "kind": "inference"},
        kind=ERROR,
    ),
    Finding(
        "tensors are never freed",
        2,
        buffers.test_tensors_are_freed,
        "of 12 calls, these",
        {"collective": "all_reduce"},
        kind=ASSERTION,
    ),
    Finding(
        "tensors of functional calls are never freed",
        2,
        buffers.test_functional_results_are_freed,
        "of 12 calls, these",
        {"way": "waited-for"},
        kind=ASSERTION,
    ),
    Finding("message lost beside other work", 2, flight.test_messages_beside_other_work, "message 0: 7 of 7"),
    Finding("calls from another thread do nothing", 2, flight.test_from_another_thread, "assert", kind=ASSERTION),
    Finding(
        "every call after 256 wrong",
        2,
        flight.test_again_and_again,
        "256",
        {"collective": "all_reduce"},
        kind=ASSERTION,
    ),
)
