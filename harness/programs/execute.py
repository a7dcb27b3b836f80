"""Executing programs: alone for the truth, and on ranks for what is under test."""

from __future__ import annotations

import contextlib
import functools
import linecache
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from harness.programs import prelude
from harness.programs.source import source
from harness.programs.spec import Program
from harness.stacks import training
from harness.worlds.rank import Rank

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw."""

    seen: Tensors
    """Everything that is compared, by name, in order, whole and on the CPU."""
    graphs: tuple[int, ...]
    """Nodes of each compiled graph."""
    launched: dict[str, int]
    """How many collectives each backward launched on the default group, by micro-batch."""
    seconds: float = 0.0
    """How long the program took: ``build``, ``distribute`` and ``train``."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: tensors are small, and threads that wait for each other take ten times as
    long where ranks have the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.lru_cache(maxsize=256)
def _code(text: str) -> tuple[CodeType, str]:
    file = f"<program {zlib.crc32(text.encode()):08x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # tracebacks show its lines
    return compile(text, file, "exec"), file


def functions(program: Program) -> dict[str, Any]:
    """The names that a program's source defines, and those that it stands on."""
    text = source(program)
    code, file = _code(text)
    namespace: dict[str, Any] = {**vars(training), **vars(prelude), "__name__": "program", "__file__": file}
    exec(code, namespace)
    return namespace


def alone(program: Program, dtype: torch.dtype = torch.float64) -> Callable[[], Tensors]:
    """Get ready to train on one device, on the whole of each batch.

    The function that is returned trains, once, and returns everything that is compared, by name.
    """
    names = functions(program)
    party = training.Party(dtype=dtype)
    model = names["build"](party)
    train: Callable[[Any, Any], Tensors] = names["train"]
    return lambda: train(party, model)


def on_rank(rank: Rank, program: Program) -> Outcome:
    """Train on this rank, on its part of each batch."""
    names = functions(program)
    party = training.Party(
        dtype=getattr(torch, program.dtype),
        device=rank.device,
        index=rank.index,
        world=rank.size,
        part=program.part(rank.index),
        parts=program.parts,
    )
    build: Callable[..., Any] = names["build"]
    began = time.perf_counter()
    try:
        seen = names["train"](party, names["distribute"](party, build(party)))
        took = time.perf_counter() - began
    finally:
        training.clean_up()
    return Outcome(seen, tuple(party.graphs), party.launched, took)
