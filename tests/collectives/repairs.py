"""What gloo does wrong (docs/findings.md), done right: so that a test which fails on it can be seen to pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fixtures.faults.collectives.calls import EVERY, INPUT, OUTPUT, Call, DifferentWhenAgain
from fixtures.faults.collectives.conditions import coalescing, complex_numbers, op_is
from tests.collectives.broken import Repair

DONE = {name: getattr(dist, name) for name in ("broadcast", "all_gather_object", "all_to_all_single", "all_reduce")}
"""Collectives as they are where none is changed."""


def one_by_one(call: Call) -> Any:
    """all_gather of tensors of different sizes: each is broadcast."""
    for member, out in enumerate(call.outputs):
        if member == call.member:
            out.copy_(call.first)
        DONE["broadcast"](out, group=call.group, group_src=member)


def joined(call: Call) -> Any:
    """A stack of one tensor for each rank, given as the tensor that joins them."""
    return call.proceed(
        **{
            name: call.arguments[name].view(-1, *call.arguments[name].shape[2:])
            for name in (INPUT[call.collective], OUTPUT[call.collective])
            if call.arguments[name].dim() == max(call.inputs[0].dim(), call.outputs[0].dim())
        }
    )


def stacked(call: Call) -> bool:
    return call.inputs[0].dim() != call.outputs[0].dim()


def as_pairs_of_numbers(call: Call) -> Any:
    """Complex tensors are sent as pairs of real ones."""
    return call.proceed(
        tensor=torch.view_as_real(call.first),
        gather_list=[torch.view_as_real(out) for out in call.outputs] or None,
    )


def with_the_plain_one(call: Call) -> Any:
    """The functional exchange of equal parts is done with torch.distributed.all_to_all_single."""
    (given,) = call.inputs
    found = torch.empty_like(given)
    DONE["all_to_all_single"](found, given, group=call.group)
    return found


def refused_to_others(call: Call) -> Any:
    if dist.get_rank(call.group) == -1:
        raise ValueError("the caller is not a member of the group")
    return call.proceed()


def refused_once_destroyed(call: Call) -> Any:
    destroyed = call.memory.setdefault("destroyed", [])
    if any(group is call.group for group in destroyed):
        raise ValueError("the group was destroyed")
    if call.collective == "destroy_process_group":
        destroyed.append(call.group)
    return call.proceed()


def refused_unless_divisible(call: Call) -> Any:
    if call.arguments["input_split_sizes"] is None and call.inputs[0].shape[0] % call.size:
        raise ValueError("dimension 0 of the input must be divisible by the size of the group")
    return call.proceed()


def refused_unless_alike(call: Call) -> Any:
    """Ranks say to each other what they give before they give it."""
    kinds: list[Any] = [None] * call.size
    DONE["all_gather_object"](kinds, (call.dtype, call.first.shape), group=call.group)
    if len(set(kinds)) > 1:
        raise ValueError(f"ranks give tensors of different kinds: {kinds}")
    return call.proceed()


class Broadcast(torch.autograd.Function):
    """Broadcast whose gradient is summed over the group, and reaches the source."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, src: int, group: Any) -> torch.Tensor:
        ctx.src, ctx.group = src, group
        found = tensor.clone()
        DONE["broadcast"](found, src, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = gradient.contiguous().clone()
        DONE["all_reduce"](total, group=ctx.group)
        return (total if dist.get_rank() == ctx.src else torch.zeros_like(total)), None, None


def gradient_to_the_source(call: Call) -> Any:
    with torch.enable_grad():
        return Broadcast.apply(call.arguments["tensor"], call.arguments["src"], call.group)


def coordinate(call: Call) -> Any:
    found = call.arguments["self"].get_coordinate()
    return found[call.arguments["mesh_dim"] or 0]


def no_longer_coalescing(call: Call) -> Any:
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    return call.proceed()


def waited_for_once(call: Call) -> Any:
    """A second wait does nothing."""
    return DifferentWhenAgain(call.right(**call.arguments), lambda: None)


def with_not_a_numbers(call: Call) -> Any:
    """Where somebody has NaN, the result is NaN."""
    lost = call.first.isnan().float()
    work = call.proceed()
    DONE["all_reduce"](lost, group=call.group)
    call.first[lost > 0] = float("nan")
    return work


REPAIRS = {
    repair.name: repair
    for repair in (
        Repair("uneven all_gather", ("all_gather",), one_by_one),
        Repair("stacks of tensors", ("all_gather_into_tensor", "reduce_scatter_tensor"), joined, stacked),
        Repair("complex gather", ("gather",), as_pairs_of_numbers, complex_numbers),
        Repair("functional complex exchange", ("functional.all_to_all_single",), with_the_plain_one, complex_numbers),
        Repair("no collective without the caller", (*EVERY, "barrier"), refused_to_others),
        Repair("no collective on a destroyed group", (*EVERY, "destroy_process_group"), refused_once_destroyed),
        Repair("only what can be divided", ("all_to_all_single",), refused_unless_divisible),
        Repair("only tensors of one kind", ("all_reduce", "broadcast"), refused_unless_alike),
        Repair("no manager after an error", ("all_reduce",), no_longer_coalescing, coalescing),
        Repair("a maximum with NaN is NaN", ("all_reduce",), with_not_a_numbers, op_is("MAX")),
        Repair("second wait returns", ("isend", "irecv"), waited_for_once),
        Repair("gradient of broadcast to the source", ("differentiable.broadcast",), gradient_to_the_source),
        Repair("local rank is the coordinate", ("DeviceMesh.get_local_rank",), coordinate),
    )
}
