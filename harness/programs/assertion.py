"""What property-based suites call: a program must be on ranks what it is on one device, or there is a reproducer."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from hypothesis import reject

from harness.profiles.obeyed import in_force
from harness.programs import execute, reproducer
from harness.programs.check import Truth, problems, tame, truth_of
from harness.programs.connecting import once_connected
from harness.programs.options import dtypes_of
from harness.programs.patience import Patience, patience_of
from harness.programs.problem import Different
from harness.reproducers import Written, attach
from harness.specs.program import Program
from harness.stacks.seen import Seen
from harness.subjects import TORCH
from harness.worlds.postmortem import RanksFailed
from harness.worlds.world import World, WorldSpec


def assert_same_as_alone(worlds: Callable[[int], World], program: Program) -> None:
    """Execute a program on one device and on ranks; require that it is the same run.

    A program with numbers that may overflow is given up (Hypothesis draws another).  What fails is written down as a
    reproducer, each failure of a test over the one before, so that the smallest stays; the exception has a note that
    says where it is.  Shrinking ends after a while (:mod:`harness.programs.patience`).
    Errors: :class:`~harness.programs.problem.Different`; :class:`~harness.RanksFailed` if ranks fail, hang or die.
    """
    __tracebackhide__ = True
    patience = patience_of(worlds)
    patience.begin(program)
    if "float16" in dtypes_of(program):  # often given up: training alone first costs less than asking ranks in vain
        _require_tame(program, execute.trained_alone(program))
    truths: list[Truth] = []
    world = worlds(program.layout.world)

    def run() -> list[execute.Outcome]:
        nonlocal world
        world = worlds(program.layout.world)
        # Ranks mostly wait for one another: the truth is found meanwhile, for programs that are given up as well.
        return world.run_beside(
            lambda: truths.append(truth_of(program)),
            execute.on_rank,
            program,
            timeout=patience.timeout(world.spec.timeout),
        )

    try:
        outcomes = once_connected(run)
    except RanksFailed as e:
        if truths:
            _require_tame(program, truths[0].tensors)
        if e.verdict == "hung":  # one defect: where ranks stand when they are stopped is chance
            e.__cause__ = e.__context__ = None
        _failed(patience, world, program, e, e.summary(), None)
        raise
    truth = truths[-1]
    _require_tame(program, truth.tensors)
    patience.passed(max(outcome.seconds for outcome in outcomes))
    wrong = problems(program, truth, outcomes)
    if wrong:
        if any(outcome.left for outcome in outcomes):
            world.kill()  # or what was left behind would be found again after every smaller program
        error = Different(wrong)
        _failed(patience, world, program, error, error.whole(), truth)
        raise error


def _require_tame(program: Program, seen: Mapping[Seen, torch.Tensor]) -> None:
    if not tame(program, seen):
        reject()


def _failed(
    patience: Patience, world: World, program: Program, error: Exception, what: str, truth: Truth | None
) -> None:
    patience.failed(program)
    if patience.ended:
        error.add_note("shrinking has had its time, so the program may be larger than it has to be")
    write(world, program, error, what, truth)


def write(world: World, program: Program, error: Exception, what: str, truth: Truth | None, *, part: str = "") -> None:
    """Write a reproducer of a program that fails; the exception carries it, and has a note that says where it is.

    ``part``: goes into the file's name, where a failure has several programs.
    """
    try:
        file, command = reproducer.write(
            program,
            reproducer.name_of_test() + part,
            what=what,
            problems=error.problems if isinstance(error, Different) else (),
            truth=truth,
            backend=world.spec.backend,
            device=world.spec.device,
            subject=world.spec.subject,
        )
    except OSError as e:  # a full disk must not hide what was found
        error.add_note(f"no reproducer could be written: {e}")
        return
    again = _replayed(file.with_suffix(".json"), world.spec)
    attach(error, Written(file, command, again))
    error.add_note(f"reproducer, which needs only torch: {command}\nthe program, with Concord: {again}")


def _replayed(stored: Path, spec: WorldSpec) -> str:
    """The command that runs a stored program again as it was run."""
    profile = in_force().profile
    where = ["--profile", profile] if profile else ["--backend", spec.backend, "--device", spec.device]
    subject = ["--subject", spec.subject] if spec.subject != TORCH else []
    return shlex.join(["concord", "replay", str(stored), *where, *subject])
