"""What torch works out at its first use in a process: the server does so once, for all ranks forked from it."""

from __future__ import annotations

import contextlib
import importlib
import mmap
import sys
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
            lambda: _funcnames().get_funcname(torch.distributed._functional_collectives.__file__, 1),
            lambda: dynamo.list_backends(),
            lambda: torch._functorch.partitioners.get_default_op_list(),
            lambda: _leave_out_latency(dynamo.guards),
        )


def _funcnames() -> Any:
    return importlib.import_module("torch._dynamo.funcname_cache")


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


class InductorTables:
    """What Inductor works out at its first use, which takes longer than all the rest of a short test.

    It tries in child processes which vector instructions work, hashes torch's sources and traces its patterns.  The
    server does so once a rank has used Inductor, so sessions that never do pay nothing.  A page of memory that the
    server and its ranks share tells it.
    """

    def __init__(self) -> None:
        self._told = mmap.mmap(-1, mmap.PAGESIZE)
        self._filled = False

    def tell(self) -> None:
        """Tell the server, in a rank, if Inductor has been used here."""
        if _tried() and not self._filled:
            self._told[0] = 1

    def fill_if_used(self) -> None:
        """Fill the tables in the server, the first time after a rank has used Inductor.

        Not where the kernel shows an accelerator: tracing a pattern starts autograd, which asks for devices.
        """
        if self._filled or not self._told[0]:
            return
        self._filled = True
        if runtimes.shown():
            return
        inductor: Any = importlib.import_module("torch._inductor")
        cpu: Any = importlib.import_module("torch").device("cpu")
        passes = f"{inductor.__name__}.fx_passes"
        with runtimes.out_of_reach():
            _each(
                lambda: inductor.cpu_vec_isa.valid_vec_isa_list(),
                lambda: inductor.codecache.torch_key(),
                lambda: importlib.import_module(f"{passes}.joint_graph").lazy_init(cpu),
                lambda: importlib.import_module(f"{passes}.post_grad").lazy_init(),
            )


def _tried() -> bool:
    """Whether Inductor has tried in this process which vector instructions work."""
    module: Any = sys.modules.get("torch._inductor.cpu_vec_isa")
    tried: Any = getattr(module, "valid_vec_isa_list", None)
    return hasattr(tried, "cache_info") and tried.cache_info().currsize > 0


INDUCTOR = InductorTables()
"""The tables of this process: the server's, which its ranks inherit."""
