"""The ``collectives`` stack: run cases of the exact model on ranks, and compare the results there, bit for bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import _make_nccl_premul_sum as premul_sum  # type: ignore[attr-defined]  # not in __all__
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager
from torch.distributed.distributed_c10d import _get_default_store as default_store

from harness import executed
from harness.oracles import collectives as model
from harness.oracles.collectives import IN_PLACE, REDUCING, Case
from harness.oracles.exact import difference
from harness.profiles.obeyed import in_force
from harness.results import (
    EVERYONE,
    NOT_REACHED,
    ONE,
    PASSED,
    SOME,
    STOPPED,
    UNDECLARED,
    WHOLE,
    WRONG,
    Call,
    NotClaimed,
    unsupported,
)
from harness.worlds.kept import unwaited
from harness.worlds.postmortem import RanksFailed
from harness.worlds.rank import Rank
from harness.worlds.world import World

__all__ = [
    "assert_right",
    "claimed",
    "claimed_cases",
    "coalescing_manager",
    "concatenated",
    "default_store",
    "flattened",
    "functional",
    "issue",
    "issue_in",
    "premul_sum",
    "reduction",
    "refusals",
    "run_cases",
    "set_timeout",
    "summed_later",
    "unflattened",
    "unwaited",
]

set_timeout: Any = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
"""Set the timeout of a group, or of the default group.  Before 2.14 the function is private."""

_MOST_SHOWN = 12
_PORTION = 20_000_000
_LONG = 900.0
"""Timeout in seconds of a case that is larger than a portion: 30 calls with 4 MiB, on a machine that has other work."""
_FEATURES = {"async": "async", "coalesced": "coalescing", "functional": "functional"}
"""The feature of this stack that a case needs, by its form."""

Laid = tuple[torch.Tensor, torch.Tensor]
"""A tensor as it is passed, and the buffer of which it is a view."""


def summed_later(tensors: list[torch.Tensor], group: Any) -> list[torch.Tensor]:
    """Sum each tensor over a group, and return results that nobody waits for unless the caller does."""
    results: list[torch.Tensor] = torch.ops._c10d_functional.all_reduce_coalesced(tensors, "sum", group.group_name)
    return results


def flattened(mesh: DeviceMesh, name: str | None = None, **options: Any) -> DeviceMesh:
    """Flatten a mesh into one dimension of that name. ``options``: ``backend_override``."""
    flat: DeviceMesh = mesh._flatten(name, **options)
    return flat


def unflattened(
    mesh: DeviceMesh, dim: int | str, sizes: Sequence[int], names: Sequence[str], **options: Any
) -> DeviceMesh:
    """Divide a dimension of a mesh into several, of these sizes and names. ``options``: ``backend_override``."""
    divided: DeviceMesh = mesh._unflatten(dim, tuple(sizes), names, **options)  # type: ignore[arg-type]  # a list will do
    return divided


def concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh that has the dimensions of all of these slices of one mesh."""
    whole: DeviceMesh = DeviceMesh._concatenate(list(meshes))
    return whole


def reduction(op: str) -> Any:
    """Return the reduce op for a name in :data:`~harness.oracles.collectives.REDUCTIONS`."""
    return premul_sum(model.PREMULTIPLIER) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def run_cases(rank: Rank, cases: Sequence[Case]) -> list[tuple[int, str]]:
    """Execute every case on this rank. Returns what is wrong: a case's position and a paragraph, for each call.

    Every rank of the world must be given the same cases. Groups are made when a case first names them, and destroyed at
    the end. A Python error counts as a failure of its case.
    """
    groups: dict[tuple[int, ...] | None, Any] = {None: None}
    wrong: list[tuple[int, str]] = []
    for number, case in enumerate(cases):
        rank.progress(wrong[0][0] if wrong else number, number + 1)
        if case.group not in groups:
            groups[case.group] = dist.new_group(list(case.group or ()))
        ranks = case.ranks(rank.size)
        if rank.index not in ranks:
            continue
        member, size = ranks.index(rank.index), len(ranks)
        for call in range(case.repeats):
            try:
                problem = _execute(case, size, member, call, ranks, groups[case.group], rank.device)
            except Exception as e:
                problem = f"raised {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
            if problem:
                wrong.append((number, f"{case}, call {call + 1}, rank {rank.index}: {problem}"))
    rank.progress(wrong[0][0] if wrong else len(cases), len(cases) + 1)
    for group in groups.values():
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return wrong


def assert_right(world: World, cases: Sequence[Case]) -> None:
    """Run cases on the ranks of a world, and require that every rank finds every result right.

    Cases that the profile does not claim are left out. The test is skipped as unsupported if none is left.
    Errors: AssertionError with what each rank found; :class:`~harness.RanksFailed` if ranks hang or die.
    """
    __tracebackhide__ = True
    executed.add(_kinds([case for case in cases if not _claimed(case)], world.size), world.size, UNDECLARED)
    cases = claimed_cases(cases)
    wrong, begun = [], 0
    with executed.Batch(_kinds(cases, world.size), world.size, NOT_REACHED) as batch:
        for some in _portions(cases):
            numbers = range(begun, begun := begun + len(some))
            timeout = None if _work(some[0]) <= _PORTION else _LONG
            try:
                found = [each for of_rank in world.run(run_cases, some, timeout=timeout) for each in of_rank]
            except RanksFailed as e:
                batch.end(numbers, NOT_REACHED)
                for ended, positions in _reached(e, len(some)):
                    batch.end((numbers[position] for position in positions), ended)
                raise
            batch.end(numbers, PASSED)
            batch.end((numbers[number] for number, _ in found), WRONG)
            wrong += [problem for _, problem in found]
    if wrong:
        more = f"\n... and {len(wrong) - _MOST_SHOWN} more" if len(wrong) > _MOST_SHOWN else ""
        raise AssertionError(
            f"{len(wrong)} wrong answers in {len(cases)} cases:\n" + "\n".join(wrong[:_MOST_SHOWN]) + more
        )


def _reached(failure: RanksFailed, count: int) -> list[tuple[str, Iterable[int]]]:
    """Return how some of ``count`` cases had ended when ranks failed, with their positions.

    The case that stopped is the one that the first rank to fail had begun. If no rank failed by itself, it is the
    earliest that any rank had begun. Cases before it are right only if every rank has found them right.
    """
    first = [failure.first] if failure.first is not None else failure.ends
    stopped = min(end.reached[1] for end in first) - 1
    right = max(0, min(count, stopped, *(end.reached[0] for end in failure.ends)))
    wrong = {right for right, begun in (end.reached for end in failure.ends) if right < min(begun - 1, count)}
    return [(PASSED, range(right)), (WRONG, wrong), (STOPPED, [stopped] if 0 <= stopped < count else [])]


def claimed(dtypes: Iterable[torch.dtype], collective: str = "", op: str = "") -> list[torch.dtype]:
    """Return those of the dtypes that the profile claims for a collective and a reduction, or for any.

    Call this in the test, and not on its ranks. The test is skipped as unsupported if none is left.
    """
    wanted = list(dtypes)
    kept = [dtype for dtype in wanted if not in_force().claims.lacks(collective, name_of(dtype), op)]
    if wanted and not kept:
        names = list(map(name_of, wanted))
        what = " ".join([*([collective] if collective else []), "of", ", ".join(names)])
        unsupported(in_force().not_claimed(what, names, collective, op))
    return kept


def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def claimed_cases(cases: Sequence[Case]) -> Sequence[Case]:
    """Return the cases that the profile claims. The test is skipped as unsupported if none is left."""
    kept = [case for case in cases if _claimed(case)]
    if cases and not kept:
        first = cases[0]
        if feature := _lacking(first):
            what = f"feature {feature} of collectives"
            unsupported(NotClaimed(what=what, profile=in_force().profile, stack="collectives", feature=feature))
        unsupported(in_force().not_claimed(str(first), [name_of(first.dtype)], first.collective, first.op))
    return kept


def _claimed(case: Case) -> bool:
    return not _lacking(case) and in_force().claims.has(case.collective, name_of(case.dtype), case.op)


def _lacking(case: Case) -> str:
    """Return the feature that a case's form needs, if the profile does not claim it."""
    feature, claimed = _FEATURES.get(case.form, ""), in_force().claims.features_of("collectives")
    return feature if claimed is not None and feature not in claimed else ""


def _kinds(cases: Sequence[Case], world: int) -> list[Call]:
    """Return what results keep of each case."""
    return [kind_of(case, world) for case in cases] if executed.recorded() else []


def kind_of(case: Case, world: int) -> Call:
    """Return what results keep of a case in a world of a size."""
    members = len(set(case.group)) if case.group is not None else 0
    group = WHOLE if case.group is None else ONE if members == 1 else EVERYONE if members == world else SOME
    op = case.op if case.collective in REDUCING else ""
    out = "" if case.collective in IN_PLACE or case.form == "functional" else case.out_layout
    return Call(case.collective, op, name_of(case.dtype), case.layout, out, group, case.form)


def _portions(cases: Sequence[Case]) -> list[list[Case]]:
    """Split cases, in order, into portions that are sure to end within a world's timeout. A larger case is alone."""
    portions: list[list[Case]] = []
    room = 0
    for case in cases:
        if not portions or _work(case) > room:
            portions.append([])
            room = _PORTION
        portions[-1].append(case)
        room -= _work(case)
    return portions


def _work(case: Case) -> int:
    """Estimate the work of a case: the elements of one rank's pieces over all calls, plus a constant for each call."""
    return case.repeats * (20_000 + math.prod(case.shape))


def refusals(rank: Rank, cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Execute cases on the default group, and return how each ended on this rank.

    Possible ends are ``("refused", error)`` for a Python error, ``("right", "")``, and ``("wrong", what)``.
    """
    endings = []
    for case in cases:
        try:
            problem = _execute(case, rank.size, rank.index, 0, range(rank.size), None, rank.device)
        except Exception as e:
            endings.append(("refused", f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"))
        else:
            endings.append(("wrong" if problem else "right", problem))
    return endings


def issue(case: Case, ins: list[torch.Tensor], outs: list[torch.Tensor], group: Any) -> Any:
    """Issue the collective of a case asynchronously on the given tensors, and return its work."""
    options: dict[str, Any] = {"group": group, "async_op": True}
    if case.collective in REDUCING:
        options["op"] = reduction(case.op)
    return _issue(case, 0, ins, outs, options, dist.get_process_group_ranks(group))


def issue_in(
    case: Case,
    ins: list[torch.Tensor],
    outs: list[torch.Tensor],
    options: dict[str, Any],
    ranks: Sequence[int],
) -> Callable[[], Any]:
    """Return the call of a case's collective, with nothing in it but ``torch.distributed``'s own function."""
    bound: list[Callable[[], Any]] = []

    class Binding:
        def __getattr__(self, name: str) -> Callable[..., None]:
            collective = getattr(dist, name)
            return lambda *args, **named: bound.append(functools.partial(collective, *args, **named))

    _issue(case, 0, ins, outs, dict(options), ranks, Binding())
    return bound[0]


def _execute(
    case: Case, size: int, member: int, call: int, ranks: Sequence[int], group: Any, device: torch.device
) -> str:
    """Execute one call of a case on one rank. Returns what is wrong afterwards, or ""."""
    expected = model.outputs(case, size, member, call)
    given = [_lay(value, case.layout, device) for value in model.inputs(case, size, member, call)]
    if case.collective in IN_PLACE:
        received = given if expected else []
    else:
        received = [_lay(model.poison(tuple(e.shape), case.dtype), case.out_layout, device) for e in expected]
    if case.requires_grad:
        for view, _ in [*given, *received]:
            view.requires_grad_()
    untouched = (
        [] if case.collective in IN_PLACE and case.form != "functional" else [b.detach().clone() for _, b in given]
    )
    between = [model.gaps(*laid) for laid in received]
    with torch.no_grad():
        results = _call(case, size, call, [v for v, _ in given], [v for v, _ in received], ranks, group)
    if len(results) != len(expected):
        return f"{len(results)} tensors came back, {len(expected)} were expected"
    problems = []
    for number, (right, result) in enumerate(zip(expected, results, strict=True)):
        dense = model.settled(case, size, member, call, right, _dense(result))
        problems.append(difference(right, dense, f"output {number}" if len(expected) > 1 else "output"))
    for number, (before, (_, buffer)) in enumerate(zip(untouched, given, strict=bool(untouched))):
        problems.append(difference(before, _dense(buffer), f"input {number}, which must stay as it was"))
    if case.form != "functional":
        for before, laid in zip(between, received, strict=True):
            gaps = _dense(model.gaps(*laid))
            problems.append(difference(before, gaps, "memory outside of the output, which must stay as it was"))
    if case.requires_grad and not all(v.requires_grad for v, _ in [*given, *received]):
        problems.append("requires_grad was lost")
    return "; ".join(filter(None, problems))


def _lay(value: torch.Tensor, layout: str, device: torch.device) -> Laid:
    return model.lay(value.to(device), layout)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the CPU that is contiguous."""
    return tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format).cpu()


def _call(
    case: Case,
    size: int,
    call: int,
    ins: list[torch.Tensor],
    outs: list[torch.Tensor],
    ranks: Sequence[int],
    group: Any,
) -> list[torch.Tensor]:
    """Issue the collective and wait for it. Returns the tensors that hold its result."""
    if case.form == "functional":
        return _call_functional(case, call, ins, ranks, group)
    options: dict[str, Any] = {"group": group}
    if case.form == "async":
        options["async_op"] = True
    if case.collective in REDUCING:
        options["op"] = reduction(case.op)
    if case.form == "coalesced":
        with coalescing_manager(group, async_ops=True) as manager:
            _issue(case, call, ins, outs, options, ranks)
        manager.wait()
        return outs
    work = _issue(case, call, ins, outs, options, ranks)
    if case.form == "async":
        work.wait()
    return outs


def _issue(
    case: Case,
    call: int,
    ins: list[torch.Tensor],
    outs: list[torch.Tensor],
    options: dict[str, Any],
    ranks: Sequence[int],
    module: Any = dist,
) -> Any:
    kind = case.collective
    if kind in model.ROOTED:
        name = "src" if kind in ("broadcast", "scatter") else "dst"
        options |= {name: ranks[case.root]} if case.root_as == "global" else {f"group_{name}": case.root}
    collective: Callable[..., Any] = getattr(module, kind)
    if kind in IN_PLACE:
        return collective(ins[0], **options)
    if kind == "all_gather":
        return collective(outs, ins[0], **options)
    if kind == "gather":
        return collective(ins[0], outs or None, **options)
    if kind == "scatter":
        return collective(outs[0], ins or None, **options)
    if kind == "reduce_scatter":
        return collective(outs[0], ins, **options)
    if kind == "all_to_all":
        return collective(outs, ins, **options)
    if kind == "all_to_all_single" and case.uneven:
        return collective(outs[0], ins[0], *_splits(case, call, ranks), **options)
    return collective(outs[0], ins[0], **options)


def _splits(case: Case, call: int, ranks: Sequence[int]) -> tuple[list[int], list[int]]:
    member, everyone = list(ranks).index(dist.get_rank()), range(len(ranks))
    received = [model.rows(case, sender, member, call) for sender in everyone]
    return received, [model.rows(case, member, receiver, call) for receiver in everyone]


def _call_functional(
    case: Case, call: int, ins: list[torch.Tensor], ranks: Sequence[int], group: Any
) -> list[torch.Tensor]:
    group = dist.group.WORLD if group is None else group
    kind, tensor, op = case.collective, ins[0], case.op.lower()
    if kind == "all_reduce":
        out = functional.all_reduce(tensor, op, group)
    elif kind == "broadcast":
        out = functional.broadcast(tensor, case.root, group)  # a rank within the group
    elif kind == "all_gather_into_tensor":
        out = functional.all_gather_tensor(tensor, 0, group)
    elif kind == "reduce_scatter_tensor":
        out = functional.reduce_scatter_tensor(tensor, op, 0, group)
    elif kind == "all_to_all_single":
        received, sent = _splits(case, call, ranks) if case.uneven else (None, None)
        out = functional.all_to_all_single(tensor, received, sent, group)
    else:
        raise ValueError(f"{kind} has no functional form")
    return [functional.wait_tensor(out)]  # type: ignore[no-untyped-call]  # torch's
