"""Is a run on ranks the run on one device?  Every oracle that a program's outcome is held against.

- *exact*: where the computation is proven exact in any order (:mod:`harness.oracles.proof`), bit for bit;
- *bounded*: where it is not, within what rounding can explain (:mod:`harness.oracles.tolerance`);
- *agreement*: ranks have the same gradients, parameters, buffers and states, bit for bit;
- *accounting*: the ranks of a group launched the same number of collectives on it in every forward and backward, none
  over data-parallel ranks where synchronisation is off, some where it is on; communication hooks are called once with
  each bucket, alike on all ranks; every rank compiled at least one graph, and all the same where they see the same
  shapes;
- *residue*: a run leaves nothing behind in the process (:mod:`harness.programs.residue`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from harness.oracles.exact import difference, identical
from harness.oracles.proof import Exactness, NotExact
from harness.oracles.tolerance import Bounded
from harness.profiles.obeyed import in_force
from harness.programs import execute
from harness.programs.execute import Outcome, Tensors
from harness.programs.options import dtypes_of, output_dtype_of, promises_of
from harness.programs.shapes import walk
from harness.programs.spec import Model, Program

_MOST_SHOWN = 6


class Different(AssertionError):
    """A run on ranks is not the run on one device.  ``problems``: a sentence for each thing that differs."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        more = f"\nand {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        super().__init__("\n".join(problems[:_MOST_SHOWN]) + more)


@dataclass(frozen=True)
class Truth:
    """What the single device says, and how near ranks must come."""

    tensors: Mapping[str, torch.Tensor]
    """float64, by name, in order."""
    unproven: tuple[str, ...]
    """Why bits can't be compared; empty where they can."""
    bounded: Bounded | None
    """What rounding can explain, where bits can't be compared."""

    @property
    def exact(self) -> bool:
        return not self.unproven


@execute.for_small_tensors()
def truth_of(program: Program, *, bound: bool = True) -> Truth:
    """Train on one device, and find out what can be asked of ranks.

    ``bound``: whether to find out what rounding explains where bits can't be asked for.
    """
    narrowest = max((_torch(d) for d in dtypes_of(program)), key=lambda d: torch.finfo(d).eps)
    # Ranks multiply the loss by their number, or halve it (the option ``divide``), and gradients go the other way.
    proof = Exactness(narrowest, factor=max(2, program.parts), stop=bound)
    train = execute.alone(program)
    tensors: Tensors = {}
    with contextlib.suppress(NotExact), proof:
        tensors = train()
    unproven = list(proof.unproven)
    if _averaged_again(program):
        unproven.append("an average over a number of ranks that is no power of two is averaged again")
    if not unproven or not bound:
        return Truth(tensors, tuple(unproven), None)
    bounded = Bounded(execute.alone(program), narrowest, world=program.layout.world)
    allowed = in_force().factor(dtypes_of(program))  # what the profile says that its backend rounds more
    bounded.tolerance = {name: allowed * tolerance for name, tolerance in bounded.tolerance.items()}
    _allow_all_after_wild_clipping(program, bounded)
    return Truth(bounded.truth, tuple(unproven), bounded)


def _allow_all_after_wild_clipping(program: Program, bounded: Bounded) -> None:
    """Where nobody knows by how much gradients are clipped, nothing is known of what follows.

    Elsewhere larger errors have larger effects, so that samples, whose errors are larger than those of any run, say how
    far a run may be.  Where they let gradients explode that are clipped then, most of them become nothing, in samples;
    in a run they need not.
    """
    clips = {f"step {number}: norm of gradients": step.clip for number, step in enumerate(program.steps) if step.clip}
    wild = False
    for name, tolerance in bounded.tolerance.items():
        if wild:
            tolerance.fill_(math.inf)
        elif name in clips:
            norm, far = float(bounded.truth[name]), float(tolerance)
            wild = far > norm and norm + far > clips[name]


def _averaged_again(program: Program) -> bool:
    """Whether gradients that ranks have averaged go into another average, and dividing them can't be exact."""
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


def tame(program: Program, seen: Mapping[str, torch.Tensor]) -> bool:
    """Whether no number is so large that one on its way to it may have overflowed in the program's dtypes.

    ``seen``: what one device says.
    """
    most = min(torch.finfo(_torch(name)).max for name in dtypes_of(program)) / (64 * program.layout.world)
    floats = [t for t in seen.values() if t.is_floating_point() and t.numel()]
    return all(bool(t.isfinite().all()) and float(t.abs().max()) <= most for t in floats)


@execute.for_small_tensors()
def problems(program: Program, truth: Truth, outcomes: Sequence[Outcome]) -> list[str]:
    """What is wrong with the outcomes of all ranks, a sentence each; [] if nothing."""
    found: list[str] = []
    right: Tensors = {}
    for rank, outcome in enumerate(outcomes):
        found += [f"rank {rank}: {problem}" for problem in _wrong(program, truth, rank, outcome.seen, right)]
    for rank, outcome in enumerate(outcomes[1:], 1):
        found += [f"ranks 0 and {rank} differ: {problem}" for problem in _disagree(outcomes[0].seen, outcome.seen)]
    return found + _accounts(program, outcomes)


def _wrong(program: Program, truth: Truth, rank: int, seen: Tensors, right: Tensors) -> list[str]:
    """``right``: what was found right of other ranks, and what every rank has to have; more is put into it."""
    found = []
    for name, tensor in seen.items():
        if name in right and identical(tensor, right[name]):
            continue
        expected = truth.tensors.get(name)
        if expected is None:
            # FSDP1 gives zeros to a parameter that nothing used, beside others that were.
            if not (promises_of(program).zeros_for_unused and not tensor.any()):
                found.append(f"{name}: there is one, where one device has none")
            continue
        part = (program.part(rank), program.parts) if name.endswith(": output") else (0, 1)
        problem = _differs(program, truth, name, tensor, part)
        if problem:
            found.append(problem)
        elif part[1] == 1:
            right[name] = tensor
    missing = [name for name in truth.tensors if name not in seen and _promised(program, name)]
    return found + [f"{name}: there is none, where one device has one" for name in missing]


def _promised(program: Program, name: str) -> bool:
    """Whether a stack shows a thing whole."""
    promises = promises_of(program)
    if "gradient of" in name:
        return promises.gradients
    return promises.states or " of " not in name


def _differs(program: Program, truth: Truth, name: str, found: torch.Tensor, part: tuple[int, int]) -> str:
    expected = truth.tensors[name]
    if expected.is_floating_point() and "norm of" not in name and found.dtype != (right := _dtype_of(program, name)):
        return f"{name}: found {found.dtype}, where {right} is right"
    if truth.bounded is not None:
        return truth.bounded.differs(name, found, dtype=found.dtype, part=part)
    if part[1] > 1:
        expected = expected.tensor_split(part[1])[part[0]]
    if found.is_floating_point():  # 0.0 is added because the sign of a zero depends on the order of a sum
        return difference(expected.to(found.dtype) + 0, found + 0, name)
    return difference(expected, found, name)


@functools.lru_cache(maxsize=16)
def _own_dtypes(model: Model) -> dict[str, str]:
    """The dtypes of layers that have one of their own, by name.  Asked for everything that a rank has seen."""
    return {n.name: n.dtype for n in walk(model) if n.dtype}


def _dtype_of(program: Program, name: str) -> torch.dtype:
    """The dtype of something that is compared: that of the layer that it belongs to, or the program's, or, of outputs,
    what the stack casts to."""
    if name.endswith(": output") and (cast := output_dtype_of(program.layout)):
        return _torch(cast)
    own = (dtype for layer, dtype in _own_dtypes(program.model).items() if f" {layer}." in name)
    return _torch(next(own, program.dtype))


def _torch(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _disagree(one: Tensors, other: Tensors) -> list[str]:
    found = []
    for name, tensor in one.items():
        if name.endswith(": output"):
            continue
        if name not in other:
            found.append(f"{name}: only the first has it")
        elif not identical(tensor, other[name]) and difference(tensor, other[name], name):
            found.append(f"{name}: other bits")
    return found + [f"{name}: only the second has it" for name in other if name not in one]


def _accounts(program: Program, outcomes: Sequence[Outcome]) -> list[str]:
    found = [f"rank {rank}: left behind: {what}" for rank, outcome in enumerate(outcomes) for what in outcome.left]
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.launched):
        found += _launches(program, name, [o.launched.get(name) for o in outcomes])
        found += _hooks(name, [o.hooked.get(name, {}) for o in outcomes])
    if program.layout.compiled is not None:
        graphs = [o.graphs for o in outcomes]
        if not all(graphs):
            found.append(f"nothing was compiled on ranks {[i for i, g in enumerate(graphs) if not g]}")
        elif len(set(graphs)) > 1 and program.even:  # other shapes may compile anew
            found.append(f"ranks compiled different graphs, of {' / '.join(map(str, graphs))} nodes")
    return found


Launched: TypeAlias = dict[tuple[int, ...], int]


def _launches(program: Program, name: str, ranks: Sequence[Launched | None]) -> list[str]:
    """What is wrong with the numbers of collectives that ranks launched in one forward or backward."""
    found = [f"{name}: rank {rank} has none" for rank, launched in enumerate(ranks) if launched is None]
    tables = [launched or {} for launched in ranks]
    for group in sorted({group for launched in tables for group in launched}):
        others = [rank for rank, launched in enumerate(tables) if rank not in group and launched.get(group)]
        if others:
            found.append(f"{name}: ranks {others} launched collectives on the group of {_listed(group)}")
        counts = [tables[rank].get(group, 0) for rank in group]
        if len(set(counts)) > 1:
            found.append(f"{name}: the ranks {_listed(group)} launched different numbers of collectives: {counts}")
        elif ", unsynced" in name and group in _data_groups(program) and counts[0] > (most := _most_unsynced(program)):
            allowed = f", at most {most}" if most else ""
            what = f"{counts[0]} collectives of the ranks {_listed(group)}{allowed}"
            found.append(f"{name}: {what}, though gradients are not to be synchronised")
    idle = [group for group in (_data_groups(program) if ", synced" in name else ()) if not _joined(group, tables)]
    what = "though gradients are to be synchronised"
    return found + [f"{name}: no collective of the ranks {_listed(group)}, {what}" for group in idle]


def _joined(group: Sequence[int], tables: Sequence[Launched]) -> bool:
    """Whether collectives tell every rank of a group of every other, perhaps by way of a third."""
    reached = {group[0]}
    for _ in group:
        for rank in tuple(reached):
            reached |= {other for over, count in tables[rank].items() if count and rank in over for other in over}
    return set(group) <= reached


def _hooks(name: str, ranks: Sequence[Mapping[str, Sequence[tuple[int, bool]]]]) -> list[str]:
    """What is wrong with the calls of communication hooks in one forward or backward."""
    found = []
    for module in dict.fromkeys(module for called in ranks for module in called):
        for rank, called in enumerate(ranks):
            calls = list(called.get(module, ()))
            due = [(bucket, bucket == len(calls) - 1) for bucket in range(len(calls))]
            if calls and ", synced" not in name:
                found.append(f"{name}: rank {rank}: the communication hook of {module!r} was called: {calls}")
            elif ", synced" in name and (not calls or calls != due):
                found.append(f"{name}: rank {rank}: the communication hook of {module!r} was called with {calls}")
            elif calls != ranks[0].get(module, ()):
                found.append(f"{name}: ranks 0 and {rank} called the communication hook of {module!r} otherwise")
    return found


def _data_groups(program: Program) -> list[tuple[int, ...]]:
    """The ranks that average gradients with each other."""
    tensor = program.layout.tensor
    return [tuple(range(first, program.layout.world, tensor)) for first in range(tensor)]


def _most_unsynced(program: Program) -> int:
    """How many collectives a backward may launch though it averages nothing."""
    return promises_of(program).unsynced_collectives


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
