"""The trials of a probe: functions that run on ranks and return what is wrong, empty if nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from harness.oracles.collectives import COLLECTIVES, COMPLEX, FLOATS, INTEGERS, REDUCING, Case, inputs
from harness.oracles.exact import difference
from harness.profiles.vocabulary import DTYPES, OPS
from harness.specs.program import Compile, Layout, Linear, Model, Program
from harness.stacks.collectives import name_of, run_cases
from harness.worlds.rank import Rank

Work = Callable[[Rank], str]
"""A function that every rank runs; returns what was wrong, on one line, empty if nothing."""

_SHORT = timedelta(seconds=1)
_WHOLE = (torch.bool, *INTEGERS)


def ops_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the reductions that are meaningful for a dtype and that the exact model knows."""
    if dtype in COMPLEX:
        return ("SUM", "AVG")
    if dtype in FLOATS:
        return ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM")
    return tuple(op for op in OPS if op not in ("AVG", "PREMUL_SUM")) if dtype in _WHOLE else ()


def cases_of(collective: str, dtype: str) -> list[Case]:
    """Return a case for each reduction of a dtype, or one case for a collective without reductions."""
    kind: torch.dtype = getattr(torch, dtype)
    if collective in REDUCING:
        return [Case(collective, op, kind) for op in ops_of(kind)]
    return [Case(collective, dtype=kind)]


def portions() -> Iterator[list[Case]]:
    """Yield every case; those of one collective and dtype come together."""
    for collective in COLLECTIVES:
        for dtype in DTYPES:
            if cases := cases_of(collective, dtype):
                yield cases


def op_of(case: Case) -> str:
    """Return the reduction of a case; empty if it has none."""
    return case.op if case.collective in REDUCING else ""


def dtype_of(case: Case) -> str:
    """Return the name of a case's dtype."""
    return name_of(case.dtype)


# worlds and features of collectives


def smoke(rank: Rank) -> str:
    """Run two collectives on all ranks."""
    return _of_cases(rank, [Case("all_reduce"), Case("all_gather", repeats=2)])


def _of_cases(rank: Rank, cases: Sequence[Case]) -> str:
    wrong = run_cases(rank, cases)
    return wrong[0][1].split("\n")[0] if wrong else ""


def _cases(*cases: Case) -> Work:
    return lambda rank: _of_cases(rank, cases)


def _subgroups(rank: Rank) -> str:
    last = rank.size - 1
    groups = ((last,), tuple(range(1, rank.size)) or (0,), tuple(range(rank.size))[::-1])
    return _of_cases(rank, [Case(name, group=group) for group in groups for name in ("all_reduce", "all_gather")])


def _messages(rank: Rank) -> str:
    """Send messages around a ring, one by one and as a batch."""
    onward, back = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
    if rank.size == 1:
        return ""
    mine, due = _message(rank.index, rank), _message(back, rank)
    for batch in (False, True):
        received = torch.zeros_like(due)
        operations = [dist.P2POp(dist.isend, mine, onward), dist.P2POp(dist.irecv, received, back)]
        works = dist.batch_isend_irecv(operations) if batch else [o.op(o.tensor, o.peer) for o in operations]
        for work in works:
            work.wait()
        if problem := difference(due.cpu(), received.cpu(), "what was received"):
            return problem
    return ""


def _message(sender: int, rank: Rank, call: int = 0) -> torch.Tensor:
    return inputs(Case("all_gather"), 1, sender, call)[0].to(rank.device)


def _tags(rank: Rank) -> str:
    """Receive two messages in the other order than they were sent."""
    return _from_first(rank, (1, 0), 0)


def _any_source(rank: Rank) -> str:
    """Receive two messages from any rank, in the order in which they were sent."""
    return _from_first(rank, (0, 0), None)


def _from_first(rank: Rank, tags: tuple[int, int], source: int | None) -> str:
    """Send two messages from rank 0 to rank 1, which receives them with the smaller tag first."""
    if rank.size == 1 or rank.index > 1:
        return ""
    order = range(2) if rank.index == 0 else sorted(range(2), key=lambda call: tags[call])
    due = {call: _message(0, rank, call) for call in order}
    tensors = due if rank.index == 0 else {call: torch.zeros_like(tensor) for call, tensor in due.items()}
    works = [
        dist.isend(tensors[call], 1, tag=tags[call])
        if rank.index == 0
        else dist.irecv(tensors[call], source, tag=tags[call])
        for call in order
    ]
    for work in works:
        if work is not None:
            work.wait()
    wrong = (difference(due[call].cpu(), tensors[call].cpu(), f"message {call}") for call in order)
    return next(filter(None, wrong), "")


def _objects(rank: Rank) -> str:
    gathered: list[object] = [None] * rank.size
    dist.all_gather_object(gathered, {"rank": rank.index})
    sent: list[object] = [("from", rank.index)]
    dist.broadcast_object_list(sent, src=0)
    if gathered != [{"rank": i} for i in range(rank.size)] or sent != [("from", 0)]:
        return f"other objects came back: {gathered}, {sent}"
    return ""


def _gradients(rank: Rank) -> str:
    import torch.distributed.nn.functional as differentiable

    leaf = torch.full((3,), rank.index + 1.0, device=rank.device, requires_grad=True)
    summed = differentiable.all_reduce(leaf)  # type: ignore[no-untyped-call]  # torch's
    (summed * (rank.index + 1)).sum().backward()
    due = torch.full((3,), rank.size * (rank.size + 1) / 2)
    return difference(due, leaf.grad.cpu(), "the gradient") if leaf.grad is not None else "there is no gradient"


def _meshes(rank: Rank) -> str:
    tensor = torch.ones(3, device=rank.device)
    dist.all_reduce(tensor, group=rank.mesh(rank.size, 1, names=("a", "b")).get_group("a"))
    return difference(torch.full((3,), float(rank.size)), tensor.cpu(), "the sum over a mesh")


def _monitored_barrier(rank: Rank) -> str:
    dist.monitored_barrier()
    return ""


def _splitting(rank: Rank) -> str:
    group = dist.split_group(split_ranks=[list(range(rank.size))])
    tensor = torch.ones(3, device=rank.device)
    dist.all_reduce(tensor, group=group)
    return difference(torch.full((3,), float(rank.size)), tensor.cpu(), "the sum in a part")


def _restarts(rank: Rank) -> str:
    dist.destroy_process_group()
    store = dist.PrefixStore("once more", rank.store)  # type: ignore[attr-defined]  # not in __all__
    dist.init_process_group(rank.backend, store=store, rank=rank.index, world_size=rank.size)
    return smoke(rank)


def _streams(rank: Rank) -> str:
    """Run a collective on a separate stream, between operations that were queued there before and after it."""
    with torch.Stream(device=rank.device):
        tensor = torch.ones(1 << 20, device=rank.device)
        for _ in range(20):
            tensor.add_(1)
        dist.all_reduce(tensor, async_op=True).wait()
        tensor.add_(1)
        return difference(torch.full((1 << 20,), 21.0 * rank.size + 1), tensor.cpu(), "the sum on a stream")


def _timeouts(rank: Rank) -> str:
    """Let a rank wait for one that does not come, for as long as its group's timeout."""
    group = dist.new_group(timeout=_SHORT)
    if rank.size > 1 and rank.index == 0:
        try:
            dist.all_reduce(torch.ones(3, device=rank.device), group=group, async_op=True).wait()
        except RuntimeError:
            return _told(rank)
        return "a rank did not come, and the collective ended well"
    rank.store.wait(["concord probe: told"])
    return ""


def _told(rank: Rank) -> str:
    rank.store.set("concord probe: told", b"1")
    return ""


FEATURES: dict[str, Work] = {
    "any_source": _any_source,
    "async": _cases(*(Case(name, form="async", repeats=2) for name in ("all_reduce", "broadcast", "all_gather"))),
    "coalescing": _cases(Case("all_reduce", form="coalesced"), Case("all_gather_into_tensor", form="coalesced")),
    "functional": _cases(*(Case(name, form="functional") for name in ("all_reduce", "all_gather_into_tensor"))),
    "gradients": _gradients,
    "meshes": _meshes,
    "messages": _messages,
    "monitored_barrier": _monitored_barrier,
    "objects": _objects,
    "splitting": _splitting,
    "streams": _streams,
    "strided": _cases(*(Case(n, shape=(3, 5), layout="transposed") for n in ("all_reduce", "broadcast", "all_gather"))),
    "subgroups": _subgroups,
    "tags": _tags,
    "timeouts": _timeouts,
    "restarts": _restarts,
}
"""Features of collectives, by name; a feature that is not here is not tried."""


# stacks


def _compiled(rank: Rank) -> str:
    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor * 2

    tensor = torch.ones(3, device=rank.device)
    result = torch.compile(doubled, backend="eager", fullgraph=True)(tensor)
    return difference(torch.full((3,), 2.0 * rank.size), result.cpu(), "the compiled sum")


WORK: dict[tuple[str, str], Work] = {("dynamo", "collectives"): _compiled}
"""Functions that try features of stacks, by stack and feature."""

_MODEL = Model((4,), (Linear(4), Linear(2)))


def programs(world: int) -> dict[tuple[str, str], Program]:
    """Return the training runs that try stacks, by stack and feature, the stack itself first.

    Their results are compared with those of one device.
    """
    layouts = {
        ("replicate", ""): Layout("replicate", world),
        ("replicate", "comm_hooks"): Layout("replicate", world, options=(("hook", "allreduce_hook"),)),
        ("replicate", "static_graph"): Layout("replicate", world, options=(("static_graph", True),)),
        ("replicate", "unused_parameters"): Layout("replicate", world, options=(("find_unused_parameters", True),)),
        ("replicate_fsdp", ""): Layout("replicate_fsdp", world),
        ("replicate_fsdp", "mixed_precision"): Layout(
            "replicate_fsdp", world, options=(("param_dtype", "bfloat16"), ("reduce_dtype", "float32"))
        ),
        ("tp_extension", ""): Layout(
            "tp_extension", world, options=(("use_orig_params", False), ("strategy", "FULL_SHARD"))
        ),
        ("dynamo", ""): Layout("dynamo", world, options=(("inner", "replicate"),), compiled=Compile("eager")),
    }
    return {key: Program(_MODEL, layout, dtype="float32") for key, layout in layouts.items()}
