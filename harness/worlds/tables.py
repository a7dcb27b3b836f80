"""What torch works out at its first use in a process: the server does so once, for all ranks forked from it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import mmap
from collections.abc import Callable, Collection
from typing import Any

from harness.worlds import runtimes


def fill(imported: Collection[str]) -> None:
    """Have torch make the tables of functions, operators, backends and lines that compiling makes at its first use.

    They depend on nothing that a rank does.  Without them, or without Dynamo among what was imported, ranks make them.
    """
    if "torch._dynamo" not in imported:
        return
    with contextlib.suppress(ImportError):
        torch: Any = importlib.import_module("torch")
        dynamo = torch._dynamo
        _each(
            # Joining a group empties these tables, which would copy all their pages into each rank.
            lambda: dynamo.trace_rules.clear_lru_cache(),
            lambda: torch.overrides.get_overridable_functions(),
            lambda: torch.overrides.get_testing_overrides(),
            lambda: importlib.import_module("torch._dynamo.funcname_cache").get_funcname(
                torch.distributed._functional_collectives.__file__, 1
            ),
            lambda: dynamo.list_backends(),
            lambda: torch._functorch.partitioners.get_default_op_list(),
            lambda: _leave_out_latency(dynamo.guards),
        )
    if "torch._inductor.compile_fx" in imported:
        _each(INDUCTOR.share)


def _each(*steps: Callable[[], Any]) -> None:
    """Take all steps; another PyTorch may not have what one of them asks for."""
    for step in steps:
        with contextlib.suppress(Exception):
            step()


def _leave_out_latency(guards: Any) -> None:
    """Have Dynamo report a latency of 0 for the guards of what it has compiled, in place of measuring it.

    To measure it, Dynamo fills 32 MiB of fresh memory to flush the processor's caches, and evaluates the guards again,
    which it has just done.  A sixth of the processor time of ranks that compile was spent there.
    """
    if callable(guards.profile_guard_manager):
        guards.profile_guard_manager = lambda *_: 0.0


_SLOTS = 128
_MARK = 8  # bytes of a digest


class SharedAnswers:
    """Answers yes or no to questions of the ranks of a server, in a page of memory that it shares with them.

    A question has one slot.  An answer that another has overwritten, or that is half written, is none.
    """

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, _SLOTS * (_MARK + 1))

    def answer(self, question: str, find: Callable[[], bool]) -> bool:
        """Return the answer of whoever asked first, or find it."""
        digest = hashlib.sha256(question.encode()).digest()
        place = digest[0] % _SLOTS * (_MARK + 1)
        for known in (b"y", b"n"):
            if self._page[place : place + _MARK + 1] == self._entry(digest, known):
                return known == b"y"
        found = find()
        self._page[place : place + _MARK + 1] = self._entry(digest, b"y" if found else b"n")
        return found

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(self._page[:])

    @staticmethod
    def _entry(digest: bytes, known: bytes) -> bytes:
        return hashlib.sha256(digest + known).digest()[:_MARK] + known


class InductorTables:
    """What Inductor works out at its first use, which takes longer than all the rest of a short test.

    Which vector instructions work: it compiles a file for each kind and loads it in a new process.  The first rank that
    uses Inductor does so, and the others have its answers.

    A hash of torch's sources, and Inductor's patterns: once there is such an answer, the server makes them, a table at
    a fork, since it serves nobody meanwhile.  So sessions without Inductor pay nothing.
    """

    def __init__(self) -> None:
        self._answers = SharedAnswers()
        self._steps: list[Callable[[], Any]] = [
            lambda: self._module("codecache").torch_key(),
            lambda: self._module("fx_passes.post_grad").lazy_init(),
            lambda: self._module("fx_passes.joint_graph").lazy_init(importlib.import_module("torch").device("cpu")),
        ]

    def share(self) -> None:
        """Have Inductor, in ranks that are forked from now on, ask once which instructions work."""
        kind = self._module("cpu_vec_isa").VecISA
        build = kind.check_build

        def check_build(isa: Any, code: str) -> bool:
            question = f"{type(isa).__name__} {isa.build_arch_flags()} {isa._arch_flags} {code}"
            return self._answers.answer(question, lambda: bool(build(isa, code)))

        kind.check_build = check_build

    def fill_next(self) -> None:
        """Make a table in the server, if a rank has used Inductor and one is missing.

        Not where the kernel shows an accelerator: tracing a pattern starts autograd, which asks for devices.
        """
        if not (self._steps and self._answers):
            return
        if runtimes.shown():
            self._steps.clear()
            return
        with runtimes.out_of_reach():
            _each(self._steps.pop(0))

    @staticmethod
    def _module(name: str) -> Any:
        return importlib.import_module(f"torch._inductor.{name}")


INDUCTOR = InductorTables()
"""The tables of this process: the server's, which its ranks inherit."""
