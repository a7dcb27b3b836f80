"""What property-based suites call: a program must be on ranks what it is on one device, or there is a reproducer."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import assume

from harness.programs import execute, reproducer
from harness.programs.check import Different, Truth, problems, tame, truth_of
from harness.programs.spec import Program
from harness.worlds.postmortem import RanksFailed
from harness.worlds.world import World


def assert_same_as_alone(worlds: Callable[[int], World], program: Program) -> None:
    """Execute a program on one device and on ranks; require that it is the same run.

    A program with numbers that may overflow is given up (Hypothesis draws another).  What fails is written down as a
    reproducer, each failure of a test over the one before, so that the smallest stays; the exception has a note that
    says where it is.
    Errors: :class:`~harness.programs.check.Different`; :class:`~harness.RanksFailed` if ranks fail, hang or die.
    """
    __tracebackhide__ = True
    truth = truth_of(program)
    assume(tame(program, truth))
    world = worlds(program.layout.world)
    try:
        outcomes = world.run(execute.on_rank, program)
    except RanksFailed as e:
        write(world, program, e, e.summary(), None)
        raise
    found = problems(program, truth, outcomes)
    if found:
        error = Different(found)
        write(world, program, error, "\n".join(found), truth)
        raise error


def write(world: World, program: Program, error: Exception, what: str, truth: Truth | None, *, part: str = "") -> None:
    """Write a reproducer of a program that fails, and note in the exception where it is.

    ``part``: goes into the file's name, where a failure has several programs.
    """
    try:
        file, command = reproducer.write(
            program,
            reproducer.name_of_test() + part,
            what=what,
            truth=truth,
            backend=world.spec.backend,
            device=world.spec.device,
        )
    except OSError as e:  # a full disk must not hide what was found
        error.add_note(f"no reproducer could be written: {e}")
        return
    error.add_note(f"reproducer, which needs only torch: {command}\nthe program: {file.with_suffix('.json')}")
