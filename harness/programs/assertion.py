"""The assertion of property-based suites: a program must give the same results on ranks as on one device."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from hypothesis import reject

from harness import executed
from harness.profiles.obeyed import in_force
from harness.programs import execute, reproducer
from harness.programs.check import Truth, problems, tame, truth_of
from harness.programs.connecting import once_connected
from harness.programs.options import dtypes_of, settings_of
from harness.programs.patience import Patience, patience_of
from harness.programs.problem import Different
from harness.reproducers import Written, attach
from harness.results import PASSED, STOPPED, WRONG
from harness.specs.program import Program
from harness.stacks.seen import Seen
from harness.subjects import TORCH
from harness.worlds.postmortem import RanksFailed
from harness.worlds.world import World, WorldSpec


def assert_same_as_alone(worlds: Callable[[int], World], program: Program) -> None:
    """Execute a program on one device and on ranks, and require the same results.

    A program whose numbers may overflow is rejected (Hypothesis draws another). A failure is written as a reproducer,
    which replaces that of the test's failure before, so the smallest one stays; a note of the exception says where it
    is. Shrinking ends after a while (:mod:`harness.programs.patience`).
    Errors: :class:`~harness.programs.problem.Different`; :class:`~harness.RanksFailed` if ranks fail, hang or die.
    """
    __tracebackhide__ = True
    patience = patience_of(worlds)
    patience.begin(program)
    if "float16" in dtypes_of(program):  # often rejected, so train alone first, which costs less than a run on ranks
        _require_tame(program, execute.trained_alone(program))
    truths: list[Truth] = []
    world = worlds(program.layout.world)

    def run() -> list[execute.Outcome]:
        nonlocal world
        world = worlds(program.layout.world)
        # Ranks mostly wait for one another, so the expected results are computed meanwhile, even for programs that are
        # then rejected.
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
        if e.verdict == "hung":  # one defect, although ranks are stopped at random places
            e.__cause__ = e.__context__ = None
        executed.add(settings_of(program), program.layout.world, STOPPED)
        _failed(patience, world, program, e, e.summary(), None)
        raise
    truth = truths[-1]
    _require_tame(program, truth.tensors)
    patience.passed(max(outcome.seconds for outcome in outcomes))
    wrong = problems(program, truth, outcomes)
    executed.add(settings_of(program), program.layout.world, WRONG if wrong else PASSED)
    if wrong:
        if any(outcome.left for outcome in outcomes):
            world.kill()  # or the residue would be found again after every smaller program
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
    """Write a reproducer of a program that fails, attach it to the exception, and add a note that says where it is.

    ``part``: a suffix of the file's name, for a failure that has several programs.
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
    except OSError as e:  # a full disk must not hide the failure
        error.add_note(f"no reproducer could be written: {e}")
        return
    again = _replayed(file.with_suffix(".json"), world.spec)
    attach(error, Written(file, command, again))
    error.add_note(f"reproducer, which needs only torch: {command}\nthe program, with Concord: {again}")


def _replayed(stored: Path, spec: WorldSpec) -> str:
    """Return the command that runs a stored program again in the same way."""
    profile = in_force().profile
    where = ["--profile", profile] if profile else ["--backend", spec.backend, "--device", spec.device]
    subject = ["--subject", spec.subject] if spec.subject != TORCH else []
    return shlex.join(["concord", "replay", str(stored), *where, *subject])
