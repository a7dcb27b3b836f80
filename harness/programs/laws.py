"""Laws: pairs of runs that must end with the same numbers, without a baseline.

A law turns a program into two runs, or into None if it does not apply. A run is a program and how it is executed: on
its world, alone on one rank, or begun in one world and finished in another. Two runs are compared only if both programs
are proven exact in any order, so that any difference is the ranks' fault. The exception is a law whose runs execute the
same operations in the same order (``same_order``): they are compared however they round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch
from hypothesis import assume

from harness import executed
from harness.oracles.exact import compare
from harness.profiles.obeyed import in_force
from harness.programs import assertion, execute, resumption
from harness.programs.check import tame, truth_of
from harness.programs.connecting import once_connected
from harness.programs.execute import Tensors
from harness.programs.options import case_of, casts_of, settings_of, takes
from harness.programs.problem import Different, Problem
from harness.results import PASSED, STOPPED, WRONG, NoFittingSize, unsupported
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
    """Run a program on its world, and return what rank 0 saw."""
    tensors: Tensors = worlds(program.layout.world).run(_seen, program)[0]
    return tensors


def _alone(rank: Rank, program: Program) -> Tensors:
    return execute.alone(program, getattr(torch, program.dtype))()


def plainly(worlds: Worlds, program: Program) -> Tensors:
    """Run a program with torch alone, in its own dtype, in the process of a world of one rank."""
    tensors: Tensors = worlds(1).run(_alone, program)[0]
    return tensors


@dataclass(frozen=True)
class Law:
    """A law: two runs of a program that must give the same results."""

    runs: Callable[[Program], tuple[Program, Program] | None]
    """Returns the programs of both runs, or None if the law does not apply."""
    second: Callable[[Worlds, Program], Tensors] = on_ranks
    """Executes the second run."""
    ranks: int = 1
    """Ranks that it needs at least."""
    ends_as: Callable[[Program], Program] = lambda program: program
    """Returns the second run's program in the world in which it ends."""
    same_order: bool = False
    """Whether both runs execute the same operations in the same order: bits are compared even after rounding."""


def _pair(one: Program, other: Program) -> tuple[Program, Program] | None:
    return (one, other) if one != other and takes(one) and takes(other) else None


def _spanning(program: Program, world: int, **changes: Option) -> Program:
    """Return the program on another number of ranks, with other options of the stack."""
    layout = program.layout
    options = stack_of(layout).spanning(dict(layout.options), changes)
    return _with(program, layout=_with(layout, world=world, options=tuple(options.items())))


def permuted(program: Program) -> tuple[Program, Program] | None:
    """Exchange the parts of the batch among ranks: gradients stay the same."""
    return _pair(program, _with(program, rotated=program.rotated + 1)) if program.parts > 1 else None


def spread(program: Program) -> tuple[Program, Program] | None:
    """Spread the same batch over twice as many ranks."""
    if program.same_data or program.layout.world > 3:
        return None  # more ranks than cores only take more time
    return _pair(program, _spanning(program, 2 * program.layout.world))


def accumulated(program: Program) -> tuple[Program, Program] | None:
    """Train on a batch in one piece, and in several micro-batches that are averaged after the last."""
    counting = any(
        isinstance(n.layer, Branch) or (isinstance(n.layer, Scale) and n.layer.kind == "rebound")
        for n in walk(program.model)
    )
    if counting or program.same_data:
        return None  # these layers depend on the number of forwards
    whole = _with(program, steps=tuple(_with(s, rows=(sum(s.rows),), synced=(), joint=True) for s in program.steps))
    pieces = tuple(_with(s, rows=_halves(sum(s.rows)), synced=(), joint=True) for s in program.steps)
    return _pair(whole, _with(program, steps=pieces))


def _halves(rows: int) -> tuple[int, ...]:
    return (rows // 2, rows - rows // 2) if rows > 1 else (rows,)


def unwrapped(program: Program) -> tuple[Program, Program] | None:
    """Wrap no layer on its own."""
    own = any(n.dtype for n in walk(program.model))
    return None if own else _pair(program, _with(program, layout=_with(program.layout, wrapped=())))


def rewrapped(program: Program) -> tuple[Program, Program] | None:
    """Wrap layers in the reverse order, but inner layers still before outer ones."""
    backwards = program.layout.wrapped[::-1]
    other = tuple(sorted(backwards, key=lambda name: -name.count(".")))
    return _pair(program, _with(program, layout=_with(program.layout, wrapped=other)))


def undivided(program: Program) -> tuple[Program, Program] | None:
    """Train on a mesh of data- and tensor-parallel ranks, and on the same ranks with data parallelism alone."""
    if program.layout.tensor == 1 or program.same_data:
        return None
    return _pair(program, _with(program, layout=_with(program.layout, tensor=1, plan=())))


def flattened(program: Program) -> tuple[Program, Program] | None:
    """Train on four ranks in one mesh dimension, and in two that are flattened.

    FSDP1 takes two dimensions as they are: there, the second run shards in pairs.
    """
    if (flat := stack_of(program.layout).flat) is None:
        return None
    plain = _with(program, layout=_with(program.layout, tensor=1, plan=()))
    one, other = (_spanning(plain, 4, **options) for options in flat)
    return _pair(one, other)


def never_saved(program: Program) -> tuple[Program, Program] | None:
    """Save and load nothing between steps."""
    return _pair(program, _with(program, steps=tuple(_with(step, reload=False) for step in program.steps)))


def resumed(program: Program) -> tuple[Program, Program] | None:
    """Run half of the steps in one world, and the others in a fresh world of another size.

    A single step runs in both.
    """
    stateful = program.optimizer.momentum or program.optimizer.kind != "sgd"
    if stateful and any(isinstance(n.layer, Branch) for n in walk(program.model)):
        return None  # a parameter without a gradient has no state yet, which strict loading requires
    case = case_of(program)
    if any(limit.applies() and limit.forbids(case) for limit in stack_of(program.layout).resuming):
        return None
    steps = program.steps if len(program.steps) > 1 else program.steps * 2
    half = len(steps) // 2
    # Gradients are not saved, so they are cleared before the state is.
    steps = (*steps[: half - 1], _with(steps[half - 1], zero="none"), *steps[half:])
    program = _with(program, steps=steps)
    return (program, program) if takes(program) and takes(_continued(program)) else None


def _continued(program: Program) -> Program:
    """Return the program on the world in which it is finished."""
    return _spanning(program, program.layout.tensor * (1 if program.layout.world > program.layout.tensor else 2))


def _resume(worlds: Worlds, program: Program) -> Tensors:
    half = len(program.steps) // 2
    state = worlds(program.layout.world).run(resumption.begin, program, half)[0]
    other = _continued(program)
    tensors: Tensors = worlds(other.layout.world).run(resumption.finish, other, half, state)[0]
    return tensors


def eager(program: Program) -> tuple[Program, Program] | None:
    """Run on the same ranks without compilation."""
    options = dict(program.layout.options)
    inner = str(options.pop("inner", ""))
    layout = _with(program.layout, stack=inner, compiled=None, options=tuple(options.items()))
    return _pair(program, _with(program, layout=layout)) if inner else None


def single(program: Program) -> tuple[Program, Program] | None:
    """Run on one rank, and with torch alone."""
    changes = stack_of(program.layout).alone(case_of(program))
    if changes is None or casts_of(program.layout):
        return None  # numbers are added up in another order, or rounded differently
    one = _with(program, layout=_with(program.layout, tensor=1, plan=()), rotated=0)
    one = _spanning(one, 1, **changes)
    return (one, one) if takes(one) else None


LAWS: dict[str, Law] = {
    "permuted": Law(permuted, ranks=2),
    "spread": Law(spread, ranks=2),
    "accumulated": Law(accumulated),
    "unwrapped": Law(unwrapped),
    "rewrapped": Law(rewrapped),
    "undivided": Law(undivided, ranks=2),
    "flattened": Law(flattened, ranks=4),
    "never-saved": Law(never_saved),
    "resumed": Law(resumed, second=_resume, ends_as=_continued, ranks=2),
    "eager": Law(eager, same_order=True),
    "single": Law(single, second=plainly, same_order=True),
}


def assert_law(worlds: Worlds, program: Program, law: str) -> None:
    """Require that the two runs of a law end with the same parameters and states after every step.

    A program to which the law does not apply is rejected (Hypothesis draws another).
    Errors: :class:`~harness.programs.problem.Different`; :class:`~harness.RanksFailed` if ranks fail, hang or die.
    Either has a note that says where the reproducers of both programs are.
    """
    __tracebackhide__ = True
    sizes = in_force().sizes
    if sizes is not None and max(sizes) < LAWS[law].ranks:
        unsupported(NoFittingSize((LAWS[law].ranks,), sizes))
    assume(holds(worlds, program, law))


def holds(worlds: Worlds, program: Program, law: str) -> bool:
    """Check a law like :func:`assert_law`, and return False if it does not apply."""
    __tracebackhide__ = True
    pair = LAWS[law].runs(program)
    if pair is None or not all(_comparable(each, LAWS[law]) for each in dict.fromkeys(pair)):
        return False
    first, second = pair
    needed = {each.layout.world for each in (*pair, LAWS[law].ends_as(second))}
    if not all(map(in_force().fits, needed)):
        return False
    try:
        first_tensors = once_connected(lambda: on_ranks(worlds, first))
        second_tensors = once_connected(lambda: LAWS[law].second(worlds, second))
    except RanksFailed as e:
        _executed(pair, law, STOPPED)
        _write(worlds, pair, e, e.summary())
        raise
    problems = list(_differences(first_tensors, second_tensors))
    _executed(pair, law, WRONG if problems else PASSED)
    if problems:
        error = Different(problems, law=law)
        _write(worlds, pair, error, error.whole())
        raise error
    return True


def _executed(pair: tuple[Program, Program], law: str, ended: str) -> None:
    """Record both runs of a law, which end in the same way, since one is compared with the other."""
    first, second = pair
    on_stack = [first] if LAWS[law].second is plainly else [first, LAWS[law].ends_as(second)]
    for program in on_stack:
        executed.add(settings_of(program), program.layout.world, ended)


def _comparable(program: Program, law: Law) -> bool:
    truth = truth_of(program, bound=False)
    return tame(program, truth.tensors) and (truth.exact or law.same_order)


def _differences(one: Tensors, other: Tensors) -> Iterator[Problem]:
    """Yield the differences between the states after the steps that the second run has seen."""
    steps = {seen.step for seen in other if seen.step is not None}
    if not steps:
        yield Problem("no step")
    for seen, tensor in one.items():
        if seen.step is None or seen.reloaded or seen.kind in ("calls", "averaged"):
            continue
        if seen in other:
            difference = compare(tensor + 0, other[seen] + 0)
            if difference is not None:
                yield Problem("values", seen, found=difference)
        elif seen.step in steps and seen.kind in ("parameter", "buffer"):  # not every stack shows the rest
            yield Problem("missing of second", seen)


def _write(worlds: Worlds, made: tuple[Program, Program], error: Exception, what: str) -> None:
    """Write a reproducer for each program, to compare it with one device: at least one of them must differ."""
    for number, program in enumerate(dict.fromkeys(made), 1):
        assertion.write(worlds(program.layout.world), program, error, what, None, part=f"_{number}")


__all__ = ["LAWS", "Law", "assert_law", "holds"]
