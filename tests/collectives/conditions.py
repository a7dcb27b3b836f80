"""On which calls a process group is wrong: the conditions of the catalogue."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.collectives.broken import Call


def odd_world(call: Call) -> bool:
    return call.size % 2 == 1 and call.size > 1


def alone(call: Call) -> bool:
    return call.size == 1


def without_rank_0(call: Call) -> bool:
    return 0 not in call.ranks


def subgroup_with_gaps(call: Call) -> bool:
    return call.ranks != list(range(call.ranks[0], call.ranks[-1] + 1))


def in_subgroup(call: Call) -> bool:
    return call.size < dist.get_world_size()


def first_on_a_subgroup(call: Call) -> bool:
    return call.group is not None and call.count() == 1


def strided(call: Call) -> bool:
    return not call.inputs[0].is_contiguous() and call.inputs[0].stride()[0] != 0


def strided_output(call: Call) -> bool:
    return any(not tensor.is_contiguous() for tensor in call.outputs)


def expanded(call: Call) -> bool:
    return 0 in call.inputs[0].stride()


def half_precision(call: Call) -> bool:
    return call.dtype in (torch.bfloat16, torch.float16)


def complex_numbers(call: Call) -> bool:
    return call.dtype.is_complex


def complex_received(call: Call) -> bool:
    return call.outputs[0].is_complex()


def of_int16(call: Call) -> bool:
    return call.dtype == torch.int16


def empty(call: Call) -> bool:
    return all(tensor.numel() == 0 for tensor in call.inputs)


def no_dimension(call: Call) -> bool:
    return call.inputs[0].dim() == 0


def three_dimensions(call: Call) -> bool:
    return call.inputs[0].dim() == 3


def above_1_mb_on_rank_0(call: Call) -> bool:
    return sum(t.numel() * t.itemsize for t in call.inputs) > 1_000_000 and call.member == 0


def above_4_mib(call: Call) -> bool:
    return sum(t.numel() * t.itemsize for t in call.inputs) > 4 << 20


def every_third_large_one(call: Call) -> bool:
    return above_1_mb_on_rank_0(call) and call.count() % 3 == 0


def exactly_17(call: Call) -> bool:
    return call.inputs[0].numel() == 17


def six_or_32(call: Call) -> bool:
    return call.inputs[0].numel() in (6, 32)


def large_float16(call: Call) -> bool:
    return call.dtype == torch.float16 and call.first.numel() > 500_000


def more_than_32(call: Call) -> bool:
    return call.inputs[0].numel() > 32


def not_rank_0(call: Call) -> bool:
    return call.member > 0


def last_rank(call: Call) -> bool:
    return call.member == call.size - 1 > 0


def with_splits(call: Call) -> bool:
    return call.arguments["output_split_sizes"] is not None


def among_members_alone(call: Call) -> bool:
    """new_group of which only members know."""
    return bool(call.arguments["use_local_synchronization"])


def by_group_rank(call: Call) -> bool:
    return call.arguments["group_src"] is not None


def any_source(call: Call) -> bool:
    return call.arguments["src"] is None and call.arguments["group_src"] is None


def of_two_ranks(call: Call) -> bool:
    return bool(call.arguments["world_size"] == 2)


def coalescing(call: Call) -> bool:
    """Under a coalescing manager."""
    return bool(dist.distributed_c10d._world.pg_coalesce_state)


def above_4096(call: Call) -> bool:
    return call.outputs[0].numel() > 4096


def asynchronous(call: Call) -> bool:
    return bool(call.arguments.get("async_op"))


def of_int64(call: Call) -> bool:
    return call.dtype == torch.int64


def of_half_a_mb(call: Call) -> bool:
    return call.first.numel() * call.first.itemsize > 500_000


def in_world_of(size: int) -> Callable[[Call], bool]:
    """Calls on the whole of a world of a size."""
    return lambda call: call.size == dist.get_world_size() == size


def one_dimension_of_a_mesh(call: Call) -> bool:
    """Functional, with a mesh and the number of its dimension for a group."""
    return isinstance(call.arguments["group"], tuple)


def both(*conditions: Callable[[Call], bool]) -> Callable[[Call], bool]:
    """Calls that fulfil all conditions."""
    return lambda call: all(condition(call) for condition in conditions)


def op_is(name: str, *dtypes: torch.dtype) -> Callable[[Call], bool]:
    """Calls with an op, and of some dtypes only if any are given."""

    def when(call: Call) -> bool:
        return bool(call.op == getattr(dist.ReduceOp, name)) and (not dtypes or call.dtype in dtypes)

    return when
