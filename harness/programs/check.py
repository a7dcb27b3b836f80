"""Compare a run on ranks with the run on one device.

An outcome is checked in five ways:

- *exact*: if the computation is proven exact in any order (:mod:`harness.oracles.proof`), results must agree bit for
  bit;
- *bounded*: otherwise, results must agree within a bound on rounding errors (:mod:`harness.oracles.tolerance`);
- *agreement*: all ranks must have the same gradients, parameters, buffers and states, bit for bit;
- *accounting*: the ranks of a group must launch the same number of collectives on it in every forward and backward. A
  backward without gradient synchronization launches at most as many as the stack promises, and one with synchronization
  connects all data-parallel ranks. Communication hooks are called once with each bucket, alike on all ranks. Every rank
  compiles at least one graph, and all ranks compile the same graphs if they see the same shapes;
- *residue*: a run must leave nothing behind in the process (:mod:`harness.programs.residue`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from harness.oracles.exact import Difference, compare, identical
from harness.oracles.proof import Exactness, NotExact
from harness.oracles.tolerance import Bounded
from harness.profiles.obeyed import in_force
from harness.programs import execute
from harness.programs.execute import Outcome, Tensors
from harness.programs.options import dtypes_of, output_dtype_of, promises_of
from harness.programs.problem import Problem
from harness.specs.program import Model, Program
from harness.specs.shapes import walk
from harness.stacks.seen import Launched, Pass, Seen


@dataclass(frozen=True)
class Truth:
    """The expected results of a program, and how close ranks must come to them."""

    tensors: Mapping[Seen, torch.Tensor]
    """The single device's results in float64, in the order in which they were seen."""
    unproven: tuple[str, ...]
    """Reasons why results can't be compared bit for bit; empty if they can."""
    bounded: Bounded[Seen] | None
    """The bounded oracle, if results can't be compared bit for bit."""

    @property
    def exact(self) -> bool:
        return not self.unproven


@execute.for_small_tensors()
def truth_of(program: Program, *, bound: bool = True) -> Truth:
    """Train on one device, and decide how its results are compared with those of ranks.

    ``bound``: whether to derive tolerances if results can't be compared bit for bit.
    """
    narrowest = max((_torch(d) for d in dtypes_of(program)), key=lambda d: torch.finfo(d).eps)
    # Ranks multiply the loss by the number of parts, or halve it (the option ``divide``), and divide gradients by the
    # same factor.
    proof = Exactness(narrowest, factor=max(2, program.parts), stop=bound)
    # The oracles know the operations of the plain form. Those of the others compute the same, and round no more often.
    plain = msgspec.structs.replace(program, optimizer=msgspec.structs.replace(program.optimizer, form="each"))
    train = execute.alone(plain)
    tensors: Tensors = {}
    with contextlib.suppress(NotExact), proof:
        tensors = train()
    unproven = list(proof.unproven)
    if _averaged_again(program):
        unproven.append("an average over a number of ranks that is no power of two is averaged again")
    if not unproven or not bound:
        return Truth(tensors, tuple(unproven), None)
    bounded = Bounded(execute.alone(plain), narrowest, world=program.layout.world)
    allowed = in_force().factor(dtypes_of(program))  # above 1 if the profile says that its backend rounds more
    bounded.tolerance = {seen: allowed * tolerance for seen, tolerance in bounded.tolerance.items()}
    _allow_all_after_wild_clipping(program, bounded)
    return Truth(bounded.truth, tuple(unproven), bounded)


def _allow_all_after_wild_clipping(program: Program, bounded: Bounded[Seen]) -> None:
    """Allow any value after a clipping whose factor is unknown.

    Usually larger errors have larger effects, so the samples of the bounded oracle, whose errors are larger than those
    of any run, show how far a run may be off. Clipping can break this rule: if gradients explode in the samples and are
    then clipped, most of them vanish in the samples, but need not vanish in a run.
    """
    wild = False
    for seen, tolerance in bounded.tolerance.items():
        if wild:
            tolerance.fill_(math.inf)
        elif seen.kind == "norm" and seen.step is not None:
            norm, far = float(bounded.truth[seen]), float(tolerance)
            wild = far > norm and norm + far > program.steps[seen.step].clip


def _averaged_again(program: Program) -> bool:
    """Return whether averaged gradients enter another average whose division can't be exact."""
    if program.parts & (program.parts - 1) == 0:
        return False
    averaged = False
    for step in program.steps:
        for synced in step.averages:
            if averaged:
                return True
            averaged = averaged or synced
        averaged = averaged and step.zero == "keep"
    return False


def tame(program: Program, seen: Mapping[Seen, torch.Tensor]) -> bool:
    """Return whether all values are so small that none on the way to them can have overflowed in the program's dtypes.

    ``seen``: the single device's results.
    """
    most = min(torch.finfo(_torch(name)).max for name in dtypes_of(program)) / (64 * program.layout.world)
    floats = [t for t in seen.values() if t.is_floating_point() and t.numel()]
    return all(bool(t.isfinite().all()) and float(t.abs().max()) <= most for t in floats)


@execute.for_small_tensors()
def problems(program: Program, truth: Truth, outcomes: Sequence[Outcome]) -> list[Problem]:
    """Return everything that is wrong with the outcomes of all ranks."""
    wrong: list[Problem] = []
    right: Tensors = {}
    for rank, outcome in enumerate(outcomes):
        wrong += _wrong(program, truth, rank, outcome.seen, right)
    for rank, outcome in enumerate(outcomes[1:], 1):
        wrong += _disagree(rank, outcomes[0].seen, outcome.seen)
    return wrong + _accounts(program, outcomes)


def _wrong(program: Program, truth: Truth, rank: int, tensors: Tensors, right: Tensors) -> list[Problem]:
    """Return what is wrong with one rank's tensors, compared with one device.

    ``right``: tensors that were right on other ranks and must be the same on every rank. Those of this rank are added
    to it.
    """
    wrong = []
    for seen, tensor in tensors.items():
        if seen in right and identical(tensor, right[seen]):
            continue
        expected = truth.tensors.get(seen)
        if expected is None:
            # FSDP1 gives a gradient of zeros to a parameter that nothing has used, if others beside it were used.
            if not (promises_of(program).zeros_for_unused and not tensor.any()):
                wrong.append(Problem("unexpected", seen, (rank,)))
            continue
        due = _dtype_of(program, seen) if expected.is_floating_point() else None
        if due is not None and tensor.dtype != due:
            wrong.append(Problem("dtype", seen, (rank,), due, tensor.dtype))
            continue
        part = (program.part(rank), program.parts) if seen.of_part else (0, 1)
        difference = _difference(truth, seen, tensor, part)
        if difference is not None:
            wrong.append(Problem("values", seen, (rank,), found=difference))
        elif part[1] == 1:
            right[seen] = tensor
    missing = [seen for seen in truth.tensors if seen not in tensors and _promised(program, seen)]
    return wrong + [Problem("missing", seen, (rank,)) for seen in missing]


def _promised(program: Program, seen: Seen) -> bool:
    """Return whether the stack promises to show a tensor whole."""
    promises = promises_of(program)
    if seen.kind == "gradient":
        return promises.gradients
    return promises.states or seen.kind != "state"


def _difference(truth: Truth, seen: Seen, found: torch.Tensor, part: tuple[int, int]) -> Difference | None:
    if truth.bounded is not None:
        return truth.bounded.compare(seen, found, dtype=found.dtype, part=part)
    expected = truth.tensors[seen]
    if part[1] > 1:
        expected = expected.tensor_split(part[1])[part[0]]
    if found.is_floating_point():  # adding 0 removes the sign of zeros, which depends on the order of a sum
        return compare(expected.to(found.dtype) + 0, found + 0)
    return compare(expected, found)


@functools.lru_cache(maxsize=16)
def _own_dtypes(model: Model) -> dict[str, str]:
    """Return the dtypes of layers that have their own, by layer name. Cached, because it is needed for every tensor."""
    return {n.name: n.dtype for n in walk(model) if n.dtype}


def _dtype_of(program: Program, seen: Seen) -> torch.dtype | None:
    """Return the dtype that a tensor must have.

    This is its layer's own, the program's, or, for outputs, the one that the stack casts to. None if any dtype will do,
    as for the norm of gradients of several dtypes.
    """
    if seen.kind == "norm":
        return None
    if seen.of_part and (cast := output_dtype_of(program.layout)):
        return _torch(cast)
    own = (dtype for layer, dtype in _own_dtypes(program.model).items() if seen.name.startswith(f"{layer}."))
    return _torch(next(own, program.dtype))


def _torch(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _disagree(rank: int, first: Tensors, other: Tensors) -> list[Problem]:
    """Return how a rank differs from rank 0 in tensors that every rank has whole."""
    wrong = []
    for seen, tensor in first.items():
        if seen.of_part:
            continue
        if seen not in other:
            wrong.append(Problem("one-sided", seen, (0, rank), found=0))
        elif not identical(tensor, other[seen]) and compare(tensor, other[seen]) is not None:
            wrong.append(Problem("bits", seen, (0, rank)))
    return wrong + [Problem("one-sided", seen, (0, rank), found=rank) for seen in other if seen not in first]


def _accounts(program: Program, outcomes: Sequence[Outcome]) -> list[Problem]:
    wrong = [Problem("left behind", left, (rank,)) for rank, outcome in enumerate(outcomes) for left in outcome.left]
    for each in dict.fromkeys(each for outcome in outcomes for each in outcome.launched):
        wrong += _launches(program, each, [o.launched.get(each) for o in outcomes])
        wrong += _hooks(each, [o.hooked.get(each, {}) for o in outcomes])
    if program.layout.compiled is not None:
        graphs = tuple(o.graphs for o in outcomes)
        if not all(graphs):
            wrong.append(Problem("not compiled", ranks=tuple(rank for rank, g in enumerate(graphs) if not g)))
        elif len(set(graphs)) > 1 and program.even:  # different shapes may recompile
            wrong.append(Problem("graphs", ranks=tuple(range(len(graphs))), found=graphs))
    return wrong


def _launches(program: Program, what: Pass, ranks: Sequence[Launched | None]) -> list[Problem]:
    """Return what is wrong with the numbers of collectives that ranks launched in one forward or backward."""
    wrong = [Problem("uncounted", what, (rank,)) for rank, launched in enumerate(ranks) if launched is None]
    tables = [launched or {} for launched in ranks]
    data_groups = _data_groups(program)
    for group in sorted({group for launched in tables for group in launched}):
        others = tuple(rank for rank, launched in enumerate(tables) if rank not in group and launched.get(group))
        if others:
            wrong.append(Problem("outsiders", what, others, found=group))
        counts = tuple(tables[rank].get(group, 0) for rank in group)
        if len(set(counts)) > 1:
            wrong.append(Problem("counts", what, group, found=counts))
        elif what.phase == "unsynced" and group in data_groups and counts[0] > (most := _most_unsynced(program)):
            wrong.append(Problem("unsynced", what, group, most, counts[0]))
    if what.phase == "synced":
        wrong += [Problem("not joined", what, group) for group in data_groups if not _joined(group, tables)]
    return wrong


def _joined(group: Sequence[int], tables: Sequence[Launched]) -> bool:
    """Return whether collectives connect every rank of a group with every other, directly or through other ranks."""
    reached = {group[0]}
    for _ in group:
        for rank in tuple(reached):
            reached |= {other for over, count in tables[rank].items() if count and rank in over for other in over}
    return set(group) <= reached


def _hooks(what: Pass, ranks: Sequence[Mapping[str, Sequence[tuple[int, bool]]]]) -> list[Problem]:
    """Return what is wrong with the calls of communication hooks in one forward or backward."""
    wrong = []
    synced = what.phase == "synced"
    for module in dict.fromkeys(module for called in ranks for module in called):
        first = tuple(ranks[0].get(module, ()))
        for rank, called in enumerate(ranks):
            calls = tuple(called.get(module, ()))
            due = tuple((bucket, bucket == len(calls) - 1) for bucket in range(len(calls)))
            if calls and not synced:
                wrong.append(Problem("hook called early", what, (rank,), found=calls, name=module))
            elif synced and (not calls or calls != due):
                wrong.append(Problem("hook calls", what, (rank,), due, calls, module))
            elif calls != first:
                wrong.append(Problem("hook calls differ", what, (0, rank), first, calls, module))
    return wrong


def _data_groups(program: Program) -> list[tuple[int, ...]]:
    """Return the groups of ranks that average gradients with each other."""
    tensor = program.layout.tensor
    return [tuple(range(first, program.layout.world, tensor)) for first in range(tensor)]


def _most_unsynced(program: Program) -> int:
    """Return the maximum number of collectives in a backward that does not average gradients."""
    return promises_of(program).unsynced_collectives
