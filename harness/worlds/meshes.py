"""What remembers device meshes after a test: DTensor's caches, of which each thread has its own.

The next test's mesh can equal the old one.  It would then find results that refer to the old one, whose process groups
have ended.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_DESCRIPTIONS = (
    "torch.distributed.device_mesh",
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed.tensor._op_schema",
)
"""The modules whose objects describe how tensors are sharded."""

_Cached = type(functools.lru_cache(lambda: None))


def forget(groups: Iterable[Any], *, on_device: bool) -> bool:
    """Empty what remembers meshes, and return whether nothing refers to a mesh of these process groups any more.

    Compiled code may, so Dynamo has been reset before.  ``on_device``: this rank has an accelerator, so that another
    thread runs its backwards, which has caches, too.
    """
    try:
        _empty(on_device=on_device)
    except Exception:  # the test broke something, or this torch has other caches
        return False
    from torch.distributed.device_mesh import DeviceMesh

    ended = set(map(id, groups))
    left = [it for it in gc.get_objects() if issubclass(type(it), DeviceMesh)]  # isinstance would run properties
    left = [mesh for mesh in left if not ended.isdisjoint(map(id, _groups_of(mesh)))]
    return not left or not _referred_to(left)


def _empty(*, on_device: bool) -> None:
    if "torch.distributed.tensor" in sys.modules:
        _forget_redistributions()
        _forget_propagation()
        if on_device:
            _on_the_autograd_thread(_forget_propagation)
    for cached in _cached_functions():
        cached.cache_clear()
    gc.collect()


def forget_randomness() -> None:
    """Drop what DTensor keeps of random numbers, so that the next test begins to share them as a fresh rank does."""
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is not None:
        random._rng_tracker = None


def _groups_of(mesh: Any) -> list[Any]:
    try:
        return list(mesh.get_all_groups())
    except RuntimeError:  # it has none
        return []


def _referred_to(meshes: list[Any]) -> bool:
    """Return whether anything refers to these meshes other than what describes a sharding.

    PyTorch 2.11 and 2.12 do not count down the references to what an operator is called with.  So the descriptions that
    refer to a mesh stay, and nothing refers to them.
    """
    gc.unfreeze()  # otherwise what the server imported is not seen
    try:
        level: list[Any] = meshes
        ours: list[Any] = []  # which stay until the end, so that no other object gets the identity of one
        seen = {id(ours)}
        while level:
            above = gc.get_referrers(*level)
            ours += [level, above]
            seen.update(map(id, [level, above, *level]))
            level = [it for it in above if id(it) not in seen and not isinstance(it, types.FrameType)]
            if not all(_describes(it) for it in level):
                return True
        return False
    finally:
        gc.freeze()


def _describes(it: Any) -> bool:
    """Return whether this is a part of the description of a sharding, or may be."""
    of = type(it)
    return of in (dict, list, tuple) or of.__module__ in _DESCRIPTIONS


def _cached_functions() -> Iterator[Any]:
    """Go through the functions of torch.distributed's modules and classes that remember what they returned.

    The garbage collector does not know those that the server imported: it has frozen them.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.distributed."):
            continue
        for value in list(vars(module).values()):
            inside = list(vars(value).values()) if type(value) is type and value.__module__ == name else []
            for function in (value, *(getattr(it, "__func__", it) for it in inside)):
                if type(function) is _Cached:  # isinstance would ask torch.distributed.reduce_op, which warns
                    yield function


def _forget_redistributions() -> None:
    from torch.distributed.tensor import _redistribute

    _redistribute.clear_redistribute_planner_cache()


def _forget_propagation() -> None:
    """Empty the calling thread's caches of how DTensor's operators are sharded."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _on_the_autograd_thread(call: Callable[[], None]) -> None:
    import torch

    class Called(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, grad: Any) -> Any:
            call()
            return grad

    one = torch.ones(1, device=torch.accelerator.current_accelerator(), requires_grad=True)
    Called.apply(one).backward()  # type: ignore[no-untyped-call]
