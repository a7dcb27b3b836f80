"""Laws that need no baseline: two runs that must end with the same numbers.

A law makes two runs of one program, or None where it has nothing to say.  A run is a program and how it is executed: on
its world, alone in a rank, or begun in one world and finished in another.  Programs are compared with each other only
where both are proven exact in any order, so any difference is one of the ranks'; except where both runs do the same
operations in the same order (``same_order``), whatever they round to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch
from hypothesis import assume

from harness.oracles.exact import compare
from harness.programs import assertion, execute, resumption
from harness.programs.check import tame, truth_of
from harness.programs.connecting import once_connected
from harness.programs.execute import Tensors
from harness.programs.options import case_of, casts_of, takes
from harness.programs.problem import Different, Problem
from harness.specs.program import Branch, Option, Program, Scale
from harness.specs.shapes import walk
from harness.stacks.registry import stack_of
from harness.worlds.postmortem import RanksFailed
from harness.worlds.rank import Rank
from harness.worlds.world import World

Worlds = Callable[[int], World]

_with = msgspec.structs.replace


def _seen(rank: Rank, program: Program) -> Tensors:
    return execute.on_rank(rank, program).seen


def on_ranks(worlds: Worlds, program: Program) -> Tensors:
    """A program on its world: what rank 0 saw."""
    found: Tensors = worlds(program.layout.world).run(_seen, program)[0]
    return found


def _alone(rank: Rank, program: Program) -> Tensors:
    return execute.alone(program, getattr(torch, program.dtype))()


def plainly(worlds: Worlds, program: Program) -> Tensors:
    """A program with torch alone, in its own dtype, in a process of a world of one rank."""
    found: Tensors = worlds(1).run(_alone, program)[0]
    return found


@dataclass(frozen=True)
class Law:
    """Two runs of a program that must be the same."""

    runs: Callable[[Program], tuple[Program, Program] | None]
    """The programs of both; None where the law has nothing to say."""
    second: Callable[[Worlds, Program], Tensors] = on_ranks
    """How the second of them is executed."""
    same_order: bool = False
    """Whether both do the same operations in the same order, so that bits are compared whatever is rounded."""


def _pair(one: Program, other: Program) -> tuple[Program, Program] | None:
    return (one, other) if one != other and takes(one) and takes(other) else None


def _spanning(program: Program, world: int, **changes: Option) -> Program:
    """The same on so many ranks, with other options of the stack."""
    layout = program.layout
    options = stack_of(layout).spanning(dict(layout.options), changes)
    return _with(program, layout=_with(layout, world=world, options=tuple(options.items())))


def permuted(program: Program) -> tuple[Program, Program] | None:
    """Ranks exchange their parts of the batch: gradients are the same."""
    return _pair(program, _with(program, rotated=program.rotated + 1)) if program.parts > 1 else None


def spread(program: Program) -> tuple[Program, Program] | None:
    """The same batch over twice as many ranks."""
    if program.same_data or program.layout.world > 3:
        return None  # worlds of more ranks than cores add nothing but time
    return _pair(program, _spanning(program, 2 * program.layout.world))


def accumulated(program: Program) -> tuple[Program, Program] | None:
    """A batch in one piece, or in several micro-batches that are averaged after the last."""
    counting = any(
        isinstance(n.layer, Branch) or (isinstance(n.layer, Scale) and n.layer.kind == "rebound")
        for n in walk(program.model)
    )
    if counting or program.same_data:
        return None  # what a layer does depends on how many forwards there were
    whole = _with(program, steps=tuple(_with(s, rows=(sum(s.rows),), synced=(), joint=True) for s in program.steps))
    pieces = tuple(_with(s, rows=_halves(sum(s.rows)), synced=(), joint=True) for s in program.steps)
    return _pair(whole, _with(program, steps=pieces))


def _halves(rows: int) -> tuple[int, ...]:
    return (rows // 2, rows - rows // 2) if rows > 1 else (rows,)


def unwrapped(program: Program) -> tuple[Program, Program] | None:
    """No layer is wrapped on its own."""
    own = any(n.dtype for n in walk(program.model))
    return None if own else _pair(program, _with(program, layout=_with(program.layout, wrapped=())))


def rewrapped(program: Program) -> tuple[Program, Program] | None:
    """Layers are wrapped in the other order, those inside others still before them."""
    backwards = program.layout.wrapped[::-1]
    other = tuple(sorted(backwards, key=lambda name: -name.count(".")))
    return _pair(program, _with(program, layout=_with(program.layout, wrapped=other)))


def undivided(program: Program) -> tuple[Program, Program] | None:
    """A mesh of data- and tensor-parallel ranks, or the same ranks all data parallel."""
    if program.layout.tensor == 1 or program.same_data:
        return None
    return _pair(program, _with(program, layout=_with(program.layout, tensor=1, plan=())))


def flattened(program: Program) -> tuple[Program, Program] | None:
    """Four ranks in one dimension, or in two that are flattened; for FSDP1, which takes two: sharded in pairs."""
    if (flat := stack_of(program.layout).flat) is None:
        return None
    plain = _with(program, layout=_with(program.layout, tensor=1, plan=()))
    one, other = (_spanning(plain, 4, **options) for options in flat)
    return _pair(one, other)


def never_saved(program: Program) -> tuple[Program, Program] | None:
    """Nothing is saved and loaded in between."""
    return _pair(program, _with(program, steps=tuple(_with(step, reload=False) for step in program.steps)))


def resumed(program: Program) -> tuple[Program, Program] | None:
    """Half of the steps in one world, the others in a fresh one of another size; a single step is done in both."""
    stateful = program.optimizer.momentum or program.optimizer.kind != "sgd"
    if stateful and any(isinstance(n.layer, Branch) for n in walk(program.model)):
        return None  # what had no gradient has no state yet, and strict loading wants one
    case = case_of(program)
    if any(limit.applies() and limit.forbids(case) for limit in stack_of(program.layout).resuming):
        return None
    steps = program.steps if len(program.steps) > 1 else program.steps * 2
    half = len(steps) // 2
    # Gradients are no part of what is saved.
    steps = (*steps[: half - 1], _with(steps[half - 1], zero="none"), *steps[half:])
    program = _with(program, steps=steps)
    return (program, program) if takes(program) and takes(_continued(program)) else None


def _continued(program: Program) -> Program:
    """The same in the world in which it is finished."""
    return _spanning(program, program.layout.tensor * (1 if program.layout.world > program.layout.tensor else 2))


def _resume(worlds: Worlds, program: Program) -> Tensors:
    half = len(program.steps) // 2
    state = worlds(program.layout.world).run(resumption.begin, program, half)[0]
    other = _continued(program)
    found: Tensors = worlds(other.layout.world).run(resumption.finish, other, half, state)[0]
    return found


def eager(program: Program) -> tuple[Program, Program] | None:
    """The same ranks, uncompiled."""
    options = dict(program.layout.options)
    inner = str(options.pop("inner", ""))
    layout = _with(program.layout, stack=inner, compiled=None, options=tuple(options.items()))
    return _pair(program, _with(program, layout=layout)) if inner else None


def single(program: Program) -> tuple[Program, Program] | None:
    """One rank, or torch alone."""
    changes = stack_of(program.layout).alone(case_of(program))
    if changes is None or casts_of(program.layout):
        return None  # numbers are added up in another order, or rounded otherwise
    one = _with(program, layout=_with(program.layout, tensor=1, plan=()), rotated=0)
    one = _spanning(one, 1, **changes)
    return (one, one) if takes(one) else None


LAWS: dict[str, Law] = {
    "permuted": Law(permuted),
    "spread": Law(spread),
    "accumulated": Law(accumulated),
    "unwrapped": Law(unwrapped),
    "rewrapped": Law(rewrapped),
    "undivided": Law(undivided),
    "flattened": Law(flattened),
    "never-saved": Law(never_saved),
    "resumed": Law(resumed, second=_resume),
    "eager": Law(eager, same_order=True),
    "single": Law(single, second=plainly, same_order=True),
}


def assert_law(worlds: Worlds, program: Program, law: str) -> None:
    """Require that the two runs of a law end with the same parameters and states after every step.

    A program about which the law has nothing to say is given up (Hypothesis draws another).
    Errors: :class:`~harness.programs.problem.Different`; :class:`~harness.RanksFailed` if ranks fail, hang or die.
    Either has a note that says where the reproducers of both programs are.
    """
    __tracebackhide__ = True
    assume(holds(worlds, program, law))


def holds(worlds: Worlds, program: Program, law: str) -> bool:
    """The same; False where the law has nothing to say."""
    __tracebackhide__ = True
    made = LAWS[law].runs(program)
    if made is None or not all(_comparable(each, LAWS[law]) for each in dict.fromkeys(made)):
        return False
    first, second = made
    try:
        one = once_connected(lambda: on_ranks(worlds, first))
        other = once_connected(lambda: LAWS[law].second(worlds, second))
    except RanksFailed as e:
        _write(worlds, made, e, e.summary())
        raise
    problems = list(_differences(one, other))
    if problems:
        error = Different(problems, law=law)
        _write(worlds, made, error, error.whole())
        raise error
    return True


def _comparable(program: Program, law: Law) -> bool:
    truth = truth_of(program, bound=False)
    return tame(program, truth.tensors) and (truth.exact or law.same_order)


def _differences(one: Tensors, other: Tensors) -> Iterator[Problem]:
    """What differs of the states after those steps that the second run has seen."""
    steps = {seen.step for seen in other if seen.step is not None}
    if not steps:
        yield Problem("no step")
    for seen, tensor in one.items():
        if seen.step is None or seen.reloaded or seen.kind == "calls":
            continue
        if seen in other:
            difference = compare(tensor + 0, other[seen] + 0)
            if difference is not None:
                yield Problem("values", seen, found=difference)
        elif seen.step in steps and seen.kind in ("parameter", "buffer"):  # not every stack shows the rest
            yield Problem("missing of second", seen)


def _write(worlds: Worlds, made: tuple[Program, Program], error: Exception, what: str) -> None:
    """Reproducers of both programs: each is compared with one device, and one at least is not what it is there."""
    for number, program in enumerate(dict.fromkeys(made), 1):
        assertion.write(worlds(program.layout.world), program, error, what, None, part=f"_{number}")


__all__ = ["LAWS", "Law", "assert_law", "holds"]
