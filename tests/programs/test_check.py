"""What programs are held against: it is quiet about a healthy run, and says what is wrong with any other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import Phase, given, settings

from harness.programs import execute
from harness.programs.check import Truth, problems, tame, truth_of
from harness.programs.execute import Outcome
from harness.programs.spec import (
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
from harness.programs.strategies import programs

EXACT = Program(Model((3,), (Linear(4), Activation(), Linear(2))), steps=(Step(rows=(2, 5)),), dtype="float32")
ROUNDED = Program(
    Model((3,), (Linear(4), Norm(), Linear(2))), steps=(Step(rows=(2, 5)),), dtype="float32", span=0, denominator=1
)
COMPILED = Program(EXACT.model, Layout("dynamo", compiled=Compile()), (Step(rows=(2, 4)),))
_with = msgspec.structs.replace
GRADIENT = "micro-batch 1: gradient of linear0.weight"


@functools.cache
def truth(program: Program) -> Truth:
    return truth_of(program)


def healthy(program: Program) -> list[Outcome]:
    """What two healthy ranks see."""
    found = []
    for rank in range(program.layout.world):
        seen = {}
        for name, tensor in truth(program).tensors.items():
            mine = tensor.tensor_split(program.parts)[rank] if name.endswith(": output") else tensor
            seen[name] = mine.to(getattr(torch, program.dtype)) if mine.is_floating_point() else mine.clone()
        launched = {"micro-batch 0, unsynced": {}, "micro-batch 1, synced": {(0, 1): 1}}
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
    name = "micro-batch 1: output"
    outcomes[0].seen[name], outcomes[1].seen[name] = outcomes[1].seen[name], outcomes[0].seen[name]


def missing(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        del outcome.seen[GRADIENT]


def unexpected(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.seen["micro-batch 1: gradient of nothing"] = torch.ones(2)


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
        outcome.launched["micro-batch 0, unsynced"] = {(0, 1): 1}


def not_at_all(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.launched["micro-batch 1, synced"] = {}


def one_more(outcomes: list[Outcome]) -> None:
    outcomes[1].launched["micro-batch 1, synced"] = {(0, 1): 2}


def on_another_group(outcomes: list[Outcome]) -> None:
    outcomes[1].launched["micro-batch 1, synced"] = {(0,): 1}


def alone(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        outcome.launched["micro-batch 1, synced"] = {(rank,): 1}


def not_counted(outcomes: list[Outcome]) -> None:
    del outcomes[1].launched["micro-batch 1, synced"]


def hook_too_early(outcomes: list[Outcome]) -> None:
    outcomes[1].hooked["micro-batch 0, unsynced"] = {"linear0": [(0, True)]}


def hook_not_called(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.hooked["micro-batch 1, synced"] = {"linear0": []}


def hook_called_twice(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        outcome.hooked["micro-batch 1, synced"] = {"linear0": [(0, True), (0, True)]}


def hook_called_otherwise(outcomes: list[Outcome]) -> None:
    outcomes[0].hooked["micro-batch 1, synced"] = {"linear0": [(0, True)]}
    outcomes[1].hooked["micro-batch 1, synced"] = {"linear0": [(0, False), (1, True)]}


def left_behind(outcomes: list[Outcome]) -> None:
    outcomes[1] = replace(outcomes[1], left=("threads: other: 1, before None",))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (scaled, "rank 0: micro-batch 1: gradient of linear0.weight: "),
        (lost, "1 of 12 elements differ"),
        (one_ulp_on_one_rank, "ranks 0 and 1 differ: micro-batch 1: gradient of linear0.weight: other bits"),
        (others_part, "micro-batch 1: output: "),
        (missing, "gradient of linear0.weight: there is none, where one device has one"),
        (unexpected, "gradient of nothing: there is one, where one device has none"),
        (another_dtype, "found torch.float64, where torch.float32 is right"),
        (another_shape, "linear0.weight: expected float32[4, 3], found float32[12]"),
        (not_a_number, "1 of 12 elements differ"),
        (
            too_early,
            "micro-batch 0, unsynced: 1 collectives of the ranks 0, 1, though gradients are not to be synchronised",
        ),
        (not_at_all, "micro-batch 1, synced: no collective of the ranks 0, 1, though gradients are to be synchronised"),
        (one_more, "micro-batch 1, synced: the ranks 0, 1 launched different numbers of collectives: [1, 2]"),
        (on_another_group, "micro-batch 1, synced: ranks [1] launched collectives on the group of 0"),
        (alone, "micro-batch 1, synced: no collective of the ranks 0, 1, though gradients are to be synchronised"),
        (not_counted, "micro-batch 1, synced: rank 1 has none"),
        (hook_too_early, "unsynced: rank 1: the communication hook of 'linear0' was called: [(0, True)]"),
        (hook_not_called, "synced: rank 0: the communication hook of 'linear0' was called with []"),
        (
            hook_called_twice,
            "synced: rank 0: the communication hook of 'linear0' was called with [(0, True), (0, True)]",
        ),
        (hook_called_otherwise, "synced: ranks 0 and 1 called the communication hook of 'linear0' otherwise"),
        (left_behind, "rank 1: left behind: threads: other: 1, before None"),
    ],
)
@pytest.mark.parametrize("program", [EXACT, ROUNDED], ids=["exact", "rounded"])
def test_damage_is_found(program: Program, damage: Callable[[list[Outcome]], None], message: str) -> None:
    """Every way of being wrong is found, and named."""
    outcomes = healthy(program)
    damage(outcomes)
    found = problems(program, truth(program), outcomes)
    assert any(message in problem for problem in found), found


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
    """Without synchronisation tensor-parallel ranks go on, data-parallel ones gather what is sharded, and no more."""
    program = Program(SHARDED.model, _with(SHARDED.layout, options=(("strategy", strategy),)), SHARDED.steps)
    synced = [{(0, 2): 1}, {(1, 3): 1}] * 2
    early: list[dict[tuple[int, ...], int]] = [{group: count} if rank in group else {} for rank in range(4)]
    outcomes = [
        Outcome({}, (), {"micro-batch 0, unsynced": early[rank], "micro-batch 1, synced": synced[rank]})
        for rank in range(4)
    ]
    found = [p for p in problems(program, truth(EXACT), outcomes) if "collective" in p]
    assert bool(found) == problem, found


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        ([(), ()], "nothing was compiled on ranks [0, 1]"),
        ([(4, 2), ()], "nothing was compiled on ranks [1]"),
        ([(4, 2), (4, 3)], "ranks compiled different graphs"),
    ],
)
def test_graphs_are_counted(graphs: list[tuple[int, ...]], message: str) -> None:
    """Compiled code that was not compiled, or not alike, is found."""
    outcomes = [replace(o, graphs=g) for o, g in zip(healthy(COMPILED), graphs, strict=True)]
    assert any(message in problem for problem in problems(COMPILED, truth(COMPILED), outcomes))


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


CLIPPED = "step 1: parameter attention3.out.weight"
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
    assert bounded.tolerance["micro-batch 2: gradient of attention3.out.weight"].isfinite().all()


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
