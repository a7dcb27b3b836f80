"""What programs are held against: it is quiet about a healthy run, and says what is wrong with any other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest
import torch
from hypothesis import Phase, given, settings

from harness.programs import execute
from harness.programs.check import Truth, problems, tame, truth_of
from harness.programs.execute import Outcome
from harness.programs.problem import Problem
from harness.programs.residue import Left
from harness.programs.strategies import programs
from harness.specs.program import (
    Activation,
    Attention,
    Compile,
    Embedding,
    Layout,
    Linear,
    Model,
    Norm,
    Optimizer,
    Program,
    Step,
    Tied,
    Twice,
)
from harness.stacks.seen import Launched, Pass, Seen

EXACT = Program(Model((3,), (Linear(4), Activation(), Linear(2))), steps=(Step(rows=(2, 5)),), dtype="float32")
ROUNDED = Program(
    Model((3,), (Linear(4), Norm(), Linear(2))), steps=(Step(rows=(2, 5)),), dtype="float32", span=0, denominator=1
)
COMPILED = Program(EXACT.model, Layout("dynamo", compiled=Compile()), (Step(rows=(2, 4)),))
_with = msgspec.structs.replace
GRADIENT = Seen("gradient", "linear0.weight", micro_batch=1)
NOTHING = Seen("gradient", "nothing", micro_batch=1)
FIRST, LAST = Pass(0, "unsynced"), Pass(1, "synced")
THREAD = Left("threads", "other", "1", "None")


@functools.cache
def truth(program: Program) -> Truth:
    return truth_of(program)


def healthy(program: Program) -> list[Outcome]:
    """What two healthy ranks see."""
    found = []
    for rank in range(program.layout.world):
        seen = {}
        for name, tensor in truth(program).tensors.items():
            mine = tensor.tensor_split(program.parts)[rank] if name.of_part else tensor
            seen[name] = mine.to(getattr(torch, program.dtype)) if mine.is_floating_point() else mine.clone()
        launched: dict[Pass, Launched] = {FIRST: {}, LAST: {(0, 1): 1}}
        found.append(Outcome(seen, (4, 2) if program.layout.compiled else (), launched))
    return found


def test_which_oracle() -> None:
    """Small whole numbers through linear layers are proven exact; norms are not."""
    assert truth(EXACT).exact
    assert truth(EXACT).bounded is None
    assert not truth(ROUNDED).exact
    assert "layer_norm" in " ".join(truth_of(ROUNDED, bound=False).unproven)


@pytest.mark.parametrize("program", [EXACT, ROUNDED, COMPILED], ids=["exact", "rounded", "compiled"])
def test_healthy_is_quiet(program: Program) -> None:
    """Nothing is said about ranks that do as one device does; not about the sign of a zero either."""
    outcomes = healthy(program)
    assert problems(program, truth(program), outcomes) == []
    for outcome in outcomes:
        for tensor in outcome.seen.values():
            tensor[tensor == 0] *= -1
    assert problems(program, truth(program), outcomes) == []


def scaled(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.seen[GRADIENT] *= 1.001


def lost(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.seen[GRADIENT][1, 2] = 0


def one_ulp_on_one_rank(outcomes: list[Outcome]) -> None:
    seen = outcomes[1].seen
    seen[GRADIENT] = torch.nextafter(seen[GRADIENT], torch.tensor(torch.inf))


def others_part(outcomes: list[Outcome]) -> None:
    name = Seen("output", micro_batch=1)
    outcomes[0].seen[name], outcomes[1].seen[name] = outcomes[1].seen[name], outcomes[0].seen[name]


def missing(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        del outcome.seen[GRADIENT]


def unexpected(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.seen[NOTHING] = torch.ones(2)


def another_dtype(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.seen[GRADIENT] = outcome.seen[GRADIENT].double()


def another_shape(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.seen[GRADIENT] = outcome.seen[GRADIENT].flatten()


def not_a_number(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.seen[GRADIENT][0, 0] = torch.nan


def too_early(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.launched[FIRST] = {(0, 1): 1}


def not_at_all(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.launched[LAST] = {}


def one_more(outcomes: list[Outcome]) -> None:
    outcomes[1].launched[LAST] = {(0, 1): 2}


def on_another_group(outcomes: list[Outcome]) -> None:
    outcomes[1].launched[LAST] = {(0,): 1}


def alone(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        outcome.launched[LAST] = {(rank,): 1}


def not_counted(outcomes: list[Outcome]) -> None:
    del outcomes[1].launched[LAST]


def hook_too_early(outcomes: list[Outcome]) -> None:
    outcomes[1].hooked[FIRST] = {"linear0": [(0, True)]}


def hook_not_called(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.hooked[LAST] = {"linear0": []}


def hook_called_twice(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.hooked[LAST] = {"linear0": [(0, True), (0, True)]}


def hook_called_otherwise(outcomes: list[Outcome]) -> None:
    outcomes[0].hooked[LAST] = {"linear0": [(0, True)]}
    outcomes[1].hooked[LAST] = {"linear0": [(0, False), (1, True)]}


def left_behind(outcomes: list[Outcome]) -> None:
    outcomes[1] = replace(outcomes[1], left=(THREAD,))


@dataclass
class Found:
    """What must be found: a problem, and what is said of it."""

    problem: Problem
    says: str


BOTH = (0, 1)
FOUND: dict[Callable[[list[Outcome]], None], Found] = {
    scaled: Found(Problem("values", GRADIENT, (0,)), "rank 0: micro-batch 1: gradient of linear0.weight: "),
    lost: Found(Problem("values", GRADIENT, (1,)), "1 of 12 elements differ"),
    one_ulp_on_one_rank: Found(
        Problem("bits", GRADIENT, BOTH),
        "ranks 0 and 1 differ: micro-batch 1: gradient of linear0.weight: different bits",
    ),
    others_part: Found(Problem("values", Seen("output", micro_batch=1), (0,)), "micro-batch 1: output: "),
    missing: Found(
        Problem("missing", GRADIENT, (0,)), "gradient of linear0.weight: missing tensor: present on one device"
    ),
    unexpected: Found(
        Problem("unexpected", NOTHING, (0,)), "gradient of nothing: unexpected tensor: absent on one device"
    ),
    another_dtype: Found(
        Problem("dtype", GRADIENT, (0,), torch.float32, torch.float64), "expected torch.float32, found torch.float64"
    ),
    another_shape: Found(
        Problem("values", GRADIENT, (0,)), "linear0.weight: expected float32[4, 3], found float32[12]"
    ),
    not_a_number: Found(Problem("values", GRADIENT, (0,)), "1 of 12 elements differ"),
    too_early: Found(
        Problem("unsynced", FIRST, BOTH, 0, 1),
        "micro-batch 0, unsynced backward: ranks 0, 1 launched 1 collectives without gradient synchronization",
    ),
    not_at_all: Found(
        Problem("not joined", LAST, BOTH),
        "micro-batch 1, synced backward: gradients are not synchronized over ranks 0, 1",
    ),
    one_more: Found(
        Problem("counts", LAST, BOTH, found=(1, 2)), "ranks 0, 1 launched different numbers of collectives: 1, 2"
    ),
    on_another_group: Found(
        Problem("outsiders", LAST, (1,), found=(0,)), "ranks 1 launched collectives on the group of ranks 0"
    ),
    alone: Found(Problem("not joined", LAST, BOTH), "gradients are not synchronized over ranks 0, 1"),
    not_counted: Found(Problem("uncounted", LAST, (1,)), "micro-batch 1, synced backward: rank 1 did not run it"),
    hook_too_early: Found(
        Problem("hook called early", FIRST, (1,), found=((0, True),), name="linear0"),
        "unsynced backward: rank 1: the communication hook of 'linear0' was called: ((0, True),)",
    ),
    hook_not_called: Found(
        Problem("hook calls", LAST, (0,), (), (), "linear0"),
        "synced backward: rank 0: the communication hook of 'linear0' was called with ()",
    ),
    hook_called_twice: Found(
        Problem("hook calls", LAST, (0,), ((0, False), (1, True)), ((0, True), (0, True)), "linear0"),
        "rank 0: the communication hook of 'linear0' was called with ((0, True), (0, True))",
    ),
    hook_called_otherwise: Found(
        Problem("hook calls differ", LAST, BOTH, ((0, True),), ((0, False), (1, True)), "linear0"),
        "ranks 0 and 1 called the communication hook of 'linear0' differently",
    ),
    left_behind: Found(Problem("left behind", THREAD, (1,)), "rank 1: left behind: threads: other: 1, before None"),
}


def essence(problem: Problem) -> Problem:
    """A problem without the numbers in which tensors differ."""
    return replace(problem, found=None) if problem.kind == "values" else problem


@pytest.mark.parametrize("damage", FOUND, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("program", [EXACT, ROUNDED], ids=["exact", "rounded"])
def test_damage_is_found(program: Program, damage: Callable[[list[Outcome]], None]) -> None:
    """Every way of being wrong is found, and named."""
    outcomes = healthy(program)
    damage(outcomes)
    wrong = problems(program, truth(program), outcomes)
    assert FOUND[damage].problem in map(essence, wrong), wrong
    assert any(FOUND[damage].says in str(problem) for problem in wrong), list(map(str, wrong))


SHARDED = Program(
    EXACT.model,
    Layout("tp_extension", 4, 2, wrapped=("linear0",), options=(("strategy", "FULL_SHARD"),)),
    EXACT.steps,
)


@pytest.mark.parametrize(
    ("group", "count", "strategy", "problem"),
    [
        ((0, 1), 5, "FULL_SHARD", False),
        ((0, 2), 1, "FULL_SHARD", False),
        ((0, 2), 2, "FULL_SHARD", True),
        ((0, 2), 1, "NO_SHARD", True),
    ],
    ids=["tensor-parallel", "gathered", "reduced-too", "unsharded"],
)
def test_unsynced_where_groups_differ(group: tuple[int, ...], count: int, strategy: str, problem: bool) -> None:
    """Without synchronization tensor-parallel ranks go on, data-parallel ones gather what is sharded, and no more."""
    program = Program(SHARDED.model, _with(SHARDED.layout, options=(("strategy", strategy),)), SHARDED.steps)
    synced = [{(0, 2): 1}, {(1, 3): 1}] * 2
    early: list[dict[tuple[int, ...], int]] = [{group: count} if rank in group else {} for rank in range(4)]
    outcomes = [Outcome({}, (), {FIRST: early[rank], LAST: synced[rank]}) for rank in range(4)]
    found = [p for p in problems(program, truth(EXACT), outcomes) if p.kind == "unsynced"]
    assert bool(found) == problem, found


@pytest.mark.parametrize(
    ("graphs", "problem", "says"),
    [
        ([(), ()], Problem("not compiled", ranks=(0, 1)), "nothing was compiled on ranks 0, 1"),
        ([(4, 2), ()], Problem("not compiled", ranks=(1,)), "nothing was compiled on ranks 1"),
        (
            [(4, 2), (4, 3)],
            Problem("graphs", ranks=(0, 1), found=((4, 2), (4, 3))),
            "ranks compiled different graphs, of (4, 2) / (4, 3) nodes",
        ),
    ],
)
def test_graphs_are_counted(graphs: list[tuple[int, ...]], problem: Problem, says: str) -> None:
    """Compiled code that was not compiled, or not alike, is found."""
    outcomes = [replace(o, graphs=g) for o, g in zip(healthy(COMPILED), graphs, strict=True)]
    assert problems(COMPILED, truth(COMPILED), outcomes) == [problem]
    assert str(problem) == says


def test_uneven_batches_may_compile_anew() -> None:
    """Ranks that see other shapes may have other graphs."""
    uneven = Program(COMPILED.model, COMPILED.layout, (Step(rows=(2, 3)),))
    outcomes = [replace(o, graphs=g) for o, g in zip(healthy(uneven), [(4, 2), (4, 2, 5)], strict=True)]
    assert problems(uneven, truth(uneven), outcomes) == []


@pytest.mark.parametrize("stack", ["replicate", "replicate_fsdp", "tp_extension"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_are_compared_bit_for_bit(stack: str, dtype: str) -> None:
    """Of programs that are drawn to be representable, about half are, also where a dtype has 8 bits or 11."""
    proven: list[bool] = []

    @settings(max_examples=80, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(programs(stack, (2,), smooth=False, dtypes=(dtype,)))
    def check(program: Program) -> None:
        proven.append(truth_of(program, bound=False).exact)

    check()
    assert sum(proven) > 0.35 * len(proven), f"{sum(proven)} of {len(proven)}"


def test_averages_of_averages_by_three() -> None:
    """Three ranks that average twice divide what is no multiple of three: bits can't be asked for."""
    twice = Program(EXACT.model, Layout(world=3), (Step(rows=(3, 3), synced=(True,)),))
    once = Program(EXACT.model, Layout(world=3), (Step(rows=(3, 3)),))
    assert truth(once).exact
    assert not truth(twice).exact


CLIPPED = Seen("parameter", "attention3.out.weight", step=1)
WILDLY = Program(
    Model((2,), (Embedding(8), Tied("embedding0"), Twice(Linear(5, bias=False)), Attention(), Attention()), tokens=5),
    steps=(Step(rows=(1, 1)), Step(rows=(1,), clip=1000.0)),
    optimizer=Optimizer(rate=0.25),
    dtype="bfloat16",
    seed=1,
    span=0,
    denominator=1,
)
"""Its last gradients explode where softmax is not saturated to the bit, as it is in bfloat16."""


def test_after_wild_clipping_nothing_is_known() -> None:
    """A healthy run was farther from the truth than any sample, in which clipping left nothing of this gradient."""
    bounded = truth(WILDLY).bounded
    assert bounded is not None
    for name, found in execute.alone(WILDLY, torch.bfloat16)().items():
        assert not bounded.differs(name, found, dtype=found.dtype)
    assert bounded.tolerance[CLIPPED].isinf().all()
    assert bounded.tolerance[Seen("gradient", "attention3.out.weight", micro_batch=2)].isfinite().all()


@pytest.mark.parametrize("clip", [0.001, 1e30])
def test_after_clipping_that_is_known_all_is_known(clip: float) -> None:
    """Where gradients explode in no sample, and where they do and nothing is clipped."""
    program = _with(ROUNDED if clip < 1 else WILDLY, steps=(Step(rows=(1, 1)), Step(rows=(1,), clip=clip)))
    bounded = truth(program).bounded
    assert bounded is not None
    assert all(tolerance.isfinite().all() for tolerance in bounded.tolerance.values())


def test_wild_numbers_are_given_up() -> None:
    """Training that comes near what a dtype can hold would show overflow, and not the stack."""
    calm = Program(Model((3,), (Linear(2),)), dtype="float16")
    wild = Program(
        Model((8,), (Linear(8),) * 5), optimizer=Optimizer(rate=0.25), dtype="float16", span=3, denominator=1
    )
    assert tame(calm, truth(calm).tensors)
    assert not tame(wild, truth(wild).tensors)
