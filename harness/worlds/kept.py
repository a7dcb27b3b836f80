"""What a test's functions leave behind in a fresh rank: tensors that outlive them, pending works, hooks and modes.

A rank looks once, when its test has ended.  What there was before is frozen, so that a collection, and a look at what
survives it, take less than a millisecond.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.worlds import switches

_PATIENCE = 1.0
"""Seconds within which threads, such as a backend's, must release what they hold."""
_MOST = 5
"""How many tensors an error describes."""


class KeptError(AssertionError):
    """Something of a test outlives the functions that the rank executed."""


@dataclass(frozen=True)
class State:
    """What a function of PyTorch may change in a process only while it runs."""

    hooks: dict[str, int]
    """The number of hooks that apply to all modules, by kind."""
    modes: tuple[str, ...]
    """Dispatch modes and function modes, outermost first."""
    saved_tensor_hooks: bool
    inference: bool
    autocast: bool
    works: int
    """Functional collectives that nothing has waited for.  They hold their results."""
    switches: dict[str, Any]
    modules: frozenset[str]
    """Names of the modules that have been imported."""

    @classmethod
    def take(cls) -> State:
        """Return the state of this process and thread."""
        import torch

        return cls(
            hooks=global_hooks(),
            modes=modes(),
            saved_tensor_hooks=has_saved_tensor_hooks(),
            inference=torch.is_inference_mode_enabled(),
            autocast=torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(),
            works=unwaited(),
            switches=switches.take(),
            modules=frozenset(sys.modules),
        )


def unwaited() -> int:
    """Return the number of functional collectives that nothing has waited for."""
    import torch

    return int(torch._C._distributed_c10d._get_work_registry_size())


def global_hooks() -> dict[str, int]:
    """Count the hooks that apply to all modules, by kind."""
    from torch.nn.modules import module

    return {name: len(hooks) for name, hooks in vars(module).items() if name.startswith("_global_") and _is_dict(hooks)}


def modes() -> tuple[str, ...]:
    """Return the names of the dispatch modes and of the function modes of this thread, outermost first."""
    import torch

    dispatch = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    functions = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return tuple(type(mode).__name__ for mode in (*dispatch, *functions))


def has_saved_tensor_hooks() -> bool:
    """Return whether hooks for saved tensors are in force in this thread."""
    import torch

    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def begin() -> State:
    """Return the state of this process, of which all objects so far are no test's."""
    gc.freeze()  # the server has frozen its own, but not what it made since then, such as Inductor's patterns
    return State.take()


def require_nothing(before: State, ranks: int) -> None:
    """Require that nothing is there now that was not before.

    ``ranks``: the size of the world.  Device meshes keep whole numbers in tensors of at most this many elements.
    Errors: :class:`KeptError`.
    """
    until = time.monotonic() + _PATIENCE
    while not (left := _look(before, ranks)).nothing and time.monotonic() < until:
        left.tensors.clear()
        time.sleep(0.01)  # until other threads have released it
    if not left.nothing:
        raise KeptError(f"when the test had ended, something of it was still there: {'; '.join(left.told())}")


@dataclass(frozen=True)
class _Left:
    """What is there and was not before."""

    changes: list[str]
    """Phrases."""
    tensors: list[Any]

    @property
    def nothing(self) -> bool:
        return not self.changes and not self.tensors

    def told(self) -> list[str]:
        """Return phrases, which say of the first tensors what refers to them."""
        gc.unfreeze()  # or the collector does not know of what was there before the test
        number = len(self.tensors)
        described = [_described(self.tensors, i) for i in range(min(number, _MOST))]
        more = [f"and {number - _MOST} more"] if number > _MOST else []
        tensors = f"{number} tensor{'s' * (number > 1)}: {'; '.join(described + more)}"
        return [*self.changes, *([tensors] if number else [])]


def _look(before: State, ranks: int) -> _Left:
    now = State.take()
    changes = _changed(before, now)
    if _has_compiled():  # which caches tensors, and returns collectives that nobody waits for
        return _Left(changes, [])
    gc.collect()
    tensors = list(_alive(gc.get_objects(), ranks))
    if tensors:
        constants = set(_constants(before.modules))
        tensors = [tensor for tensor in tensors if id(tensor) not in constants]
    if any(map(_is_fake, tensors)):  # of compiled code before a reset, or of torch.export
        return _Left(changes, [])
    if number := max(0, now.works - before.works):
        changes.append(f"{number} functional collective{'s' * (number > 1)} that nothing has waited for")
    return _Left(changes, [] if any(map(_is_flat_parameter, tensors)) else tensors)


def _changed(before: State, now: State) -> list[str]:
    changes = [
        f"{name}: {now.hooks[name]} hooks, {n} before" for name, n in before.hooks.items() if now.hooks[name] != n
    ]
    for field in ("modes", "saved_tensor_hooks", "inference", "autocast"):
        was, found = getattr(before, field), getattr(now, field)
        if was != found:
            changes.append(f"{field.replace('_', ' ')}: {found}, {was} before")
    changes += [
        f"{name}: {now.switches.get(name)}, {was} before"
        for name, was in before.switches.items()
        if now.switches.get(name) != was
    ]
    return changes


def _has_compiled() -> bool:
    """Return whether Dynamo has compiled anything in this process since its last reset."""
    convert_frame: Any = sys.modules.get("torch._dynamo.convert_frame")
    return convert_frame is not None and convert_frame.FRAME_COUNTER > 0


def _alive(objects: list[Any], ranks: int) -> Iterator[Any]:
    """Yield the tensors among some objects, without those that device meshes keep."""
    import torch

    for thing in objects:
        # not isinstance, which asks proxies for their class
        if not issubclass(type(thing), torch.Tensor):
            continue
        whole = not (_is_fake(thing) or thing.dtype.is_floating_point or thing.dtype.is_complex)
        if not whole or (thing.numel() > ranks and not _is_of_mesh(thing)):
            yield thing


def _constants(known: frozenset[str]) -> Iterator[int]:
    """Yield the identities of the tensors that modules beside PyTorch's have in variables, if they are new.

    A rank imports the modules of the functions that it is sent, and what these define is not a test's.
    """
    import torch

    for name in sys.modules.keys() - known:
        if name.partition(".")[0] == "torch":  # which may keep a test's tensors in a module that it imports late
            continue
        for value in list(getattr(sys.modules[name], "__dict__", {}).values()):
            members = value.values() if _is_dict(value) else value if type(value) in (list, tuple) else [value]
            for member in members:
                if issubclass(type(member), torch.Tensor):
                    yield id(member)
                    yield id(member._base)


def _is_fake(tensor: Any) -> bool:
    return type(tensor).__name__ == "FakeTensor"


def _is_of_mesh(tensor: Any) -> bool:
    """Return whether a device mesh refers to a tensor, such as one of more ranks than there are."""
    return any(type(holder).__name__ == "DeviceMesh" for holder in gc.get_referrers(tensor))


def _is_flat_parameter(tensor: Any) -> bool:
    """Return whether this is a flat parameter of FSDP1.

    They are never freed, nor is what they refer to, which is all that its module has (docs/findings/tp_memory.py).
    """
    return getattr(tensor, "_is_flat_param", False) is True


def _described(tensors: list[Any], i: int) -> str:
    """Describe one of these tensors, and say what of Python refers to it."""
    names = [
        _name(holder, tensors[i])
        for holder in gc.get_referrers(tensors[i])
        if holder is not tensors and type(holder).__name__ != "frame"
    ]
    dtype = str(tensors[i].dtype).removeprefix("torch.")
    holders = f"held by {', '.join(names[:3])}" if names else "held by no object of Python"
    return f"{type(tensors[i]).__name__} {dtype}{list(tensors[i].shape)}, {holders}"


def _name(holder: Any, held: Any) -> str:
    if _is_dict(holder):
        for key, value in holder.items():
            if value is held:
                return f"the entry {str(key)[:60]!r} of a dict"
    kind = type(holder)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _is_dict(thing: Any) -> bool:
    return issubclass(type(thing), dict)
