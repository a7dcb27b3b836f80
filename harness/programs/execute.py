"""Execute programs: alone for the expected results, and on ranks for the implementation under test."""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from harness.programs import prelude, residue
from harness.programs.options import promises_of
from harness.programs.source import source
from harness.specs.program import Program
from harness.stacks import training
from harness.stacks.registry import stack_of
from harness.stacks.seen import Calls, Launched, Pass, Seen
from harness.worlds.rank import Rank

Tensors = dict[Seen, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program on one rank.

    Pickling joins the tensors of each dtype into one, because pickling many small tensors costs more than everything
    else.
    """

    seen: Tensors
    """Everything that is compared, in order: whole tensors on the CPU."""
    graphs: tuple[int, ...]
    """The number of nodes in each compiled graph."""
    launched: dict[Pass, Launched]
    """The number of collectives that each forward and backward launched."""
    hooked: dict[Pass, Calls] = field(default_factory=dict)
    """The calls of communication hooks in each forward and backward."""
    left: tuple[residue.Left, ...] = ()
    """What the run left behind in the process."""
    seconds: float = 0.0
    """How long the program took: ``build``, ``distribute``, ``train``, and the destruction of what they made."""

    def __getstate__(self) -> dict[str, Any]:
        flat: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in self.seen.values():
            flat.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        kinds = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in self.seen.items()}
        return vars(self) | {"seen": (kinds, {dtype: torch.cat(tensors) for dtype, tensors in flat.items()})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kinds, flat = state["seen"]
        sizes: dict[torch.dtype, list[int]] = {dtype: [] for dtype in flat}
        for dtype, shape in kinds.values():
            sizes[dtype].append(math.prod(shape))
        parts = {dtype: iter(tensor.split(sizes[dtype])) for dtype, tensor in flat.items()}
        seen = {key: next(parts[dtype]).view(shape) for key, (dtype, shape) in kinds.items()}
        vars(self).update(state | {"seen": seen})


@contextlib.contextmanager
def for_small_tensors() -> Iterator[None]:
    """Make torch compute with one thread, and pause garbage collection.

    Threads that wait for each other take ten times as long when ranks occupy the cores. Structures of many small
    tensors, such as a tape, live until the end, so looking through them again and again frees nothing.
    """
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


@functools.lru_cache(maxsize=256)
def _code(text: str) -> tuple[CodeType, str]:
    file = f"<program {zlib.crc32(text.encode()):08x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # so that tracebacks show its lines
    return compile(text, file, "exec"), file


def functions(program: Program) -> dict[str, Any]:
    """Return the names that a program's source defines, along with those that it uses."""
    text = source(program)
    code, file = _code(text)
    namespace: dict[str, Any] = {**vars(training), **vars(prelude), "__name__": "program", "__file__": file}
    stack = stack_of(program.layout)
    namespace[f"on_{stack.name}"] = stack.apply
    exec(code, namespace)
    return namespace


def alone(program: Program, dtype: torch.dtype = torch.float64) -> Callable[[], Tensors]:
    """Build a program's model on one device, and return a function that trains it on the whole of each batch.

    Call the function only once. It returns everything that is compared.
    """
    names = functions(program)
    one = training.Party(dtype=dtype)
    model = names["build"](one)
    train: Callable[[Any, Any], Tensors] = names["train"]
    return lambda: train(one, model)


@for_small_tensors()
def trained_alone(program: Program) -> Tensors:
    """Train on one device in float64, and return everything that is compared."""
    return alone(program)()


def party(rank: Rank, program: Program) -> training.Party:
    """Return the party that trains on this rank."""
    return training.Party(
        dtype=getattr(torch, program.dtype),
        device=rank.device,
        index=rank.index,
        world=rank.size,
        part=program.part(rank.index),
        parts=program.parts,
    )


def _trained(
    program: Program, party: training.Party, names: dict[str, Any]
) -> tuple[Tensors, residue.Remains, list[residue.Left]]:
    """Train, and return what was seen, what must be gone after this call, and what is wrong with the trained model."""
    model = names["build"](party)
    remains = residue.Remains(model)
    plain = residue.parameters_of(model)
    random = residue.randomness()  # after the layers have been initialized
    model = names["distribute"](party, model)
    seen = names["train"](party, model)
    remains.also("the stack's ", party.root(model).named_parameters())
    cleared, toggled = program.steps[-1].zero == "none", any(step.toggle for step in program.steps)
    whole = promises_of(program).whole_parameters
    left = residue.misplaced(party.root(model), plain, cleared=cleared, toggled=toggled, whole=whole)
    party.handle.close(party.root(model))
    if not torch.equal(random, residue.randomness()):
        left.append(residue.Left("random numbers"))
    if party.unwaited:
        left.append(residue.Left("collectives", now=str(party.unwaited)))
    return seen, remains, left


def on_rank(rank: Rank, program: Program) -> Outcome:
    """Train on this rank, on its part of each batch, and return the outcome."""
    names = functions(program)
    of_rank = party(rank, program)
    before = residue.take()
    began = time.perf_counter()
    try:
        seen, remains, left = _trained(program, of_rank, names)
    finally:
        training.clean_up(rank.device)
    of_rank.model, of_rank.handle = None, training.Handle()
    names.clear()
    promises = promises_of(program)
    kept = remains.alive(patient=promises.frees_model)  # collects garbage
    left += kept if promises.frees_model else []
    took = time.perf_counter() - began  # includes the destruction of process groups that are freed here
    on_device = rank.device.type != "cpu"
    left += residue.left(before, groups_freed=promises.frees_groups, on_device=on_device)
    residue.keep()
    return Outcome(seen, tuple(of_rank.graphs), of_rank.launched, of_rank.hooked, tuple(left), took)
