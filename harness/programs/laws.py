"""Laws that need no baseline: another program that must train to the same numbers on ranks.

Each law makes another program of one, or None where it has nothing to say.  Programs are compared with each other only
where both are proven exact in any order, so any difference is one of the ranks'.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from hypothesis import assume

from harness.oracles.exact import difference
from harness.programs import execute
from harness.programs.check import Different, tame, truth_of
from harness.programs.spec import Branch, Program, Scale, walk
from harness.worlds.world import World

_with = msgspec.structs.replace


def permuted(program: Program) -> Program | None:
    """Ranks exchange their parts of the batch: gradients are the same."""
    return _with(program, rotated=program.rotated + 1) if program.parts > 1 else None


def spread(program: Program) -> Program | None:
    """The same batch over twice as many ranks."""
    if program.same_data:
        return None
    return _with(program, layout=_with(program.layout, world=2 * program.layout.world))


def accumulated(program: Program) -> Program | None:
    """A batch in one piece, or in several micro-batches that are averaged after the last."""
    counting = any(
        isinstance(n.layer, Branch) or (isinstance(n.layer, Scale) and n.layer.kind == "rebound")
        for n in walk(program.model)
    )
    if counting or program.same_data:
        return None  # what a layer does depends on how many forwards there were
    pieces = tuple(_with(step, rows=_halves(sum(step.rows)), synced=(), joint=True) for step in program.steps)
    return _with(program, steps=pieces)


def in_one_piece(program: Program) -> Program:
    """What :func:`accumulated` is compared with."""
    return _with(program, steps=tuple(_with(s, rows=(sum(s.rows),), synced=(), joint=True) for s in program.steps))


def _halves(rows: int) -> tuple[int, ...]:
    return (rows // 2, rows - rows // 2) if rows > 1 else (rows,)


def unwrapped(program: Program) -> Program | None:
    """No layer is wrapped on its own."""
    own = any(getattr(n.layer, "dtype", "") for n in walk(program.model))
    return _with(program, layout=_with(program.layout, wrapped=())) if program.layout.wrapped and not own else None


def never_saved(program: Program) -> Program | None:
    """Nothing is saved and loaded in between."""
    if not any(step.reload for step in program.steps):
        return None
    return _with(program, steps=tuple(_with(step, reload=False) for step in program.steps))


LAWS: dict[str, Callable[[Program], Program | None]] = {
    "permuted": permuted,
    "spread": spread,
    "accumulated": accumulated,
    "unwrapped": unwrapped,
    "never-saved": never_saved,
}


def assert_law(worlds: Callable[[int], World], program: Program, law: str) -> None:
    """Require that a program and what a law makes of it end with the same parameters and states after every step.

    Errors: :class:`~harness.programs.check.Different`; :class:`~harness.RanksFailed` if ranks fail, hang or die.
    """
    __tracebackhide__ = True
    if law == "accumulated":
        program = in_one_piece(program)
    other = LAWS[law](program)
    assume(other is not None)
    assert other is not None
    for each in (program, other):
        truth = truth_of(each, bound=False)
        assume(truth.exact and tame(each, truth))
    one, two = (worlds(p.layout.world).run(execute.on_rank, p)[0].seen for p in (program, other))
    problems = []
    for name in [name for name in one if name.startswith("step ") and "loaded again" not in name]:
        if name not in two:
            problems.append(f"{name}: is missing of the other program")
            continue
        problem = difference(one[name] + 0, two[name] + 0, name)
        if problem:
            problems.append(problem)
    if problems:
        raise Different([f"the law {law!r} does not hold", *problems])
