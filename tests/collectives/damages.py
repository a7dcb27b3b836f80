"""What a process group may do wrong: the verbs of the catalogue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.collectives.broken import INPUT, SAME, Call, DifferentWhenAgain, Finished, NeverCompleted

EVERY = tuple(name for name in INPUT if name not in SAME)


def afterwards(change: Callable[[torch.Tensor], None]) -> Callable[[Call], Any]:
    """The collective is right, then each of its outputs is changed."""

    def wrong(call: Call) -> Any:
        work = call.proceed()
        for tensor in call.outputs:
            change(tensor)
        return work

    return wrong


def element(index: int, value: float = 0) -> Callable[[torch.Tensor], None]:
    """One element gets a value."""

    def change(tensor: torch.Tensor) -> None:
        if tensor.numel():
            tensor[_index(index % tensor.numel(), tensor.shape)] = value

    return change


def one_ulp(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and tensor.numel() > 2:
        tensor[2] = torch.nextafter(tensor[2], torch.tensor(1.0, dtype=tensor.dtype))


def second_half(tensor: torch.Tensor) -> None:
    tensor[tensor.numel() // 2 :] = 0


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))


def instead(**changes: Any) -> Callable[[Call], Any]:
    """The collective is done with other arguments."""
    return lambda call: call.proceed(**changes)


def nothing(call: Call) -> Any:
    return Finished() if call.arguments.get("async_op") else None


def swallowed(call: Call) -> Any:
    """Errors do not reach the caller."""
    try:
        return call.proceed()
    except Exception:
        return Finished() if call.arguments.get("async_op") else None


def accepted_on_the_last_rank(call: Call) -> Any:
    """What every rank refuses the last one takes for done."""
    return swallowed(call) if call.member == call.size - 1 else call.proceed()


def refusing(call: Call) -> Any:
    raise RuntimeError("invalid tensor size")


def unsigned(call: Call) -> Any:
    """Values are compared as if the highest bit were no sign."""
    lowest = torch.iinfo(torch.int64).min
    found = (torch.stack(call.from_everyone()) ^ lowest).max(0).values ^ lowest
    work = call.proceed()
    call.outputs[0].copy_(found)
    return work


def divided_by_numel(call: Call) -> Any:
    work = call.proceed(op=dist.ReduceOp.SUM)
    call.outputs[0].div_(call.outputs[0].numel())
    return work


def rounded_to(dtype: torch.dtype) -> Callable[[Call], Any]:
    """Contributions go through another dtype."""

    def wrong(call: Call) -> Any:
        call.outputs[0].copy_(call.inputs[0].to(dtype))
        return call.proceed()

    return wrong


def raw(call: Call) -> Any:
    """Reads memory as if the input were contiguous."""
    (given,) = call.inputs
    return call.proceed(**{INPUT[call.collective]: given.as_strided(given.shape, _dense(given.shape))})


def _dense(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def without_its_minus(call: Call) -> Any:
    """A lazily negated tensor is sent as it is in memory."""
    return call.proceed(**{INPUT[call.collective]: -call.first if call.first.is_neg() else call.first})


def not_conjugated(call: Call) -> Any:
    """A lazily conjugated tensor is sent as it is in memory."""
    return call.proceed(**{INPUT[call.collective]: call.first.conj() if call.first.is_conj() else call.first})


def into_gaps(call: Call) -> Any:
    """Writes the elements between an output's as well."""
    work = call.proceed()
    for out in call.outputs:
        if not out.is_contiguous():
            out.as_strided(out.shape, out.stride(), out.storage_offset() + 1).zero_()
    return work


def before_the_view(call: Call) -> Any:
    """Writes one element in front of an output that is in the middle of a buffer."""
    work = call.proceed()
    for out in call.outputs:
        if out.storage_offset():
            out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()
    return work


def from_another_root(call: Call) -> Any:
    name = "src" if "src" in call.arguments else "dst"
    named, by_group = call.arguments[name], call.arguments[f"group_{name}"]
    if by_group is not None:
        return call.proceed(**{f"group_{name}": (by_group + 1) % call.size})
    root = call.ranks.index(named or 0)
    return call.proceed(**{name: call.ranks[(root + 1) % call.size]})


def root_taken_as_global(call: Call) -> Any:
    """A source that is named by its rank in the group is looked up in the world."""
    root = call.arguments["group_src"]
    return call.proceed(group_src=None, src=root if root in call.ranks else call.ranks[root])


def rotated_inputs(call: Call) -> Any:
    given = call.inputs
    return call.proceed(**{INPUT[call.collective]: given[1:] + given[:1]})


def rotated_chunks(call: Call) -> Any:
    (given,) = call.inputs
    rows = given.shape[0] // call.size
    return call.proceed(**{INPUT[call.collective]: given.roll(-rows, 0)})


def permuted_outputs(call: Call) -> Any:
    work = call.proceed()
    found = [out.clone() for out in call.outputs]
    for out, value in zip(call.outputs, found[1:] + found[:1], strict=True):
        out.copy_(value)
    return work


def first_two_swapped(call: Call) -> Any:
    work = call.proceed()
    first, second = call.outputs[:2]
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    return work


def first_two_chunks_swapped(call: Call) -> Any:
    work = call.proceed()
    (out,) = call.outputs
    rows = out.shape[0] // call.size
    out[: 2 * rows] = out[: 2 * rows].roll(rows, 0)
    return work


def chunks_in_reverse(call: Call) -> Any:
    """Parts of different sizes are put together from the last sender to the first."""
    work = call.proceed()
    (out,) = call.outputs
    sizes = call.arguments["output_split_sizes"] or [out.shape[0] // call.size] * call.size
    out.copy_(torch.cat([*out.clone().split(sizes)][::-1]))
    return work


def transposed(call: Call) -> Any:
    """The joined output is laid out element by element, not rank by rank."""
    work = call.proceed()
    (out,) = call.outputs
    out.copy_(out.clone().view(call.size, -1).t().reshape(out.shape))
    return work


def input_changed(call: Call) -> Any:
    work = call.proceed()
    for tensor in call.inputs[:1]:
        element(0, 1)(tensor)
    return work


def gradient_flag_lost(call: Call) -> Any:
    work = call.proceed()
    for tensor in call.outputs:
        tensor.detach_()
        tensor.requires_grad_(False)
    return work


def not_waited_for(call: Call) -> Any:
    """wait() returns at once; the data comes later."""
    before = [out.detach().clone() for out in call.outputs]
    call.proceed()
    after = [out.detach().clone() for out in call.outputs]
    pairs = list(zip(call.outputs, before, after, strict=True))
    for out, old, _ in pairs:
        out.data.copy_(old)
    later(call, lambda: [out.data.copy_(new) for out, _, new in pairs])
    return Finished()


def later(call: Call, what: Callable[[], Any]) -> None:
    """Do something in 0.05 s, and before the test's next run of the ranks."""
    timer = threading.Timer(0.05, what)
    call.memory.setdefault("timers", []).append(timer)
    timer.start()


def stale(call: Call) -> Any:
    """A call that looks like the one before it gets what that one got."""
    key = (call.collective, tuple(call.ranks), call.dtype, tuple(t.shape for t in call.inputs + call.outputs))
    work = call.proceed()
    known = call.memory.get("last")
    call.memory["last"] = (key, [out.clone() for out in call.outputs])
    if known is not None and known[0] == key:
        for out, old in zip(call.outputs, known[1], strict=True):
            out.copy_(old)
    return work


def wrong_after(first: str, second: str) -> Callable[[Call], Any]:
    """The second of two collectives is wrong right after the first."""

    def wrong(call: Call) -> Any:
        previous, call.memory["previous"] = call.memory.get("previous"), call.collective
        return afterwards(element(0))(call) if (previous, call.collective) == (first, second) else call.proceed()

    return wrong


def in_the_order_given(call: Call) -> Any:
    """A group's tensors come in the order in which new_group was given its ranks."""
    given = call.memory.setdefault("given", {})
    if call.collective == "new_group":
        group = call.right(**call.arguments)
        given[id(group)] = call.arguments["ranks"]
        return group
    order = given.get(id(call.group)) or call.ranks
    work = call.proceed()
    found = [out.clone() for out in call.outputs]
    for out, ranked in zip(call.outputs, order, strict=True):
        out.copy_(found[call.ranks.index(ranked)])
    return work


def in_place(call: Call) -> Any:
    """Functional: the result is right, and its argument is overwritten with it."""
    (tensor,) = call.inputs
    found = functional.wait_tensor(call.right(**call.arguments)).clone()
    tensor.copy_(found)
    return found


def result_changed(call: Call) -> Any:
    found = functional.wait_tensor(call.right(**call.arguments)).clone()
    element(-1)(found)
    return found


def not_waited_for_when_used(call: Call) -> Any:
    """Functional: who uses the result at once finds the argument in it; the data comes later."""
    found = functional.wait_tensor(call.right(**call.arguments)).clone()
    early = call.inputs[0].clone()
    later(call, lambda: early.copy_(found))
    return early


def own_gradient_of_chunks(call: Call) -> Any:
    """all_gather_tensor_autograd: the gradient that a rank gets is its own, not the sum of all ranks'."""
    with torch.enable_grad():
        (given,) = call.inputs
        mine = torch.cat([given] * call.size)
        return call.right(**call.arguments).detach() + mine - mine.detach()


def own_gradient(call: Call) -> Any:
    """The gradient that a rank gets is that of its own use alone."""
    with torch.enable_grad():
        given = call.arguments["tensor"] if "tensor" in call.arguments else call.arguments["self"]
        return call.right(**call.arguments).detach() + given - given.detach()


def never_completed(call: Call) -> Any:
    return NeverCompleted(call.proceed())


def parts_in_reverse(call: Call) -> Any:
    """Functional: parts of different sizes are put together from the last sender to the first."""
    found = functional.wait_tensor(call.right(**call.arguments))
    return torch.cat([*found.split(call.arguments["output_split_sizes"])][::-1])


def overwritten_when_waited_for_again(call: Call) -> Any:
    work = call.proceed()
    (out,) = call.outputs
    found = out.clone()
    return DifferentWhenAgain(work, lambda: out.copy_(found))


def lost_when_waited_for_again(call: Call) -> Any:
    return DifferentWhenAgain(call.right(**call.arguments), lambda: refusing(call))


def last_of_a_list_changed(call: Call) -> Any:
    found = [functional.wait_tensor(tensor).clone() for tensor in call.right(**call.arguments)]
    element(-1)(found[-1])
    return found


def the_other_way_round(call: Call) -> Any:
    """permute_tensor: a member gets the tensor of the one that it should send to."""
    order = call.arguments["src_dst"]
    return call.proceed(src_dst=[order.index(member) for member in range(len(order))])


def last_tensor_changed(call: Call) -> Any:
    """Functional messages: what came last is incomplete."""
    works = call.proceed()
    for work in works:
        functional.wait_tensor(work)
    element(-1)(call.arguments["tensors"][-1])
    return works


def in_the_world(call: Call) -> Any:
    return call.proceed(group=dist.group.WORLD)


def not_shrunk(call: Call) -> Any:
    return dist.group.WORLD


def last_dropped(call: Call) -> Any:
    """The last tensor of a list takes no part."""
    name = "tensors" if "tensors" in call.arguments else "input_tensor_list"
    changes = {name: call.arguments[name][:-1]}
    if "output_tensor_lists" in call.arguments:
        changes["output_tensor_lists"] = [outs[:-1] for outs in call.arguments["output_tensor_lists"]]
    return call.proceed(**changes)


def received_changed(call: Call) -> Any:
    """The last element of everything that a batch receives is lost."""
    works = call.right(**call.arguments)
    for work in works:
        work.wait()
    for op in call.arguments["p2p_op_list"]:
        if op.op is dist.irecv:
            element(-1)(op.tensor)
    return [Finished()]


def another_sender(call: Call) -> Any:
    return (call.proceed() + 1) % dist.get_world_size()


def same_for_all(call: Call) -> Any:
    call.proceed()
    found = call.arguments["object_list"]
    found[:] = [found[0]] * len(found)


def last_is_first(call: Call) -> Any:
    """Objects come in order, but the first takes the place of the last as well."""
    call.proceed()
    found = call.arguments["object_gather_list"]
    if found:
        found[-1] = found[0]


def only_the_first_object(call: Call) -> Any:
    name = "object_list"
    found = call.arguments[name]
    before = list(found)
    result = call.proceed()
    found[1:] = before[1:]
    return result


def neighbours_object(call: Call) -> Any:
    name = "scatter_object_input_list"
    given = call.arguments[name]
    return call.proceed(**{name: given and given[1:] + given[:1]})


def too_early(call: Call) -> Any:
    timeout = call.arguments["timeout"]
    return call.proceed(timeout=timeout and timeout / 2)


def ranks_reversed(call: Call) -> Any:
    """Who starts as rank r is the r-th from the end."""
    size, rank = call.arguments["world_size"], call.arguments["rank"]
    return call.right(**{**call.arguments, "rank": size - 1 - rank})


def waiting_for_everyone(call: Call) -> Any:
    """A group is there only once the whole world has come."""
    dist.barrier()
    return call.proceed()


def every_other_rank(call: Call) -> Any:
    """new_subgroups deals out the ranks in turn."""
    everyone = list(range(dist.get_world_size()))
    count = len(everyone) // call.arguments["group_size"]
    return dist.new_subgroups_by_enumeration([everyone[first::count] for first in range(count)])


def another_dimension(call: Call) -> Any:
    """A mesh gives the group of the dimension counted from the end."""
    mesh, dimension = call.arguments["self"], call.arguments["mesh_dim"]
    return call.proceed(mesh_dim=mesh.ndim - 1 - dimension)


def from_the_end(call: Call) -> Any:
    return call.arguments["self"].size() - 1 - call.proceed()
