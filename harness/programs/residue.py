"""Detect what a run leaves behind in a process, by comparing the process's state before and after.

In the steady state, which was found by running the same program again and again, no thread, process group or tensor of
a run outlives it. A model is part of reference cycles, so the garbage collector runs first. It has little to look at,
because the objects that ranks start with are frozen, and so are those that a run has left for good.
"""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from harness.oracles.exact import kind, kind_of
from harness.worlds import kept

_POOLS = frozenset(("pt_autograd_",))
"""Prefixes of the names of threads that torch starts once and keeps."""

_GLOO_LOOPS = "gloo_"
"""Prefix of the names of the threads that move gloo's data, where they have a name."""
_GLOO_WORKERS = "pt_gloo_"
"""Prefix of the names of the threads that execute gloo's collectives."""
_OF_GLOO = (_GLOO_LOOPS, _GLOO_WORKERS)
_OF_TORCH = ("gloo_", "pt_")
_PATIENCE = 0.5
"""Seconds within which threads must end, and release what they hold."""
_PATIENCE_ON_DEVICE = 5.0
"""The same for threads of groups that wait for their device before they end."""


class Left(NamedTuple):
    """Something that a run left behind in a process."""

    kind: str
    """A field of :class:`State`, or ``memory``, ``parameters``, ``gradients``, ``random numbers``, ``collectives``."""
    name: str = ""
    """The thread, variable, module, parameter …, for a kind that has several."""
    now: str = ""
    before: str = ""

    def __str__(self) -> str:
        kind = self.kind.replace("_", " ")
        match self.kind:
            case "memory":
                return f"{kind}: {self.name} is still there"
            case "random numbers":
                return f"{kind}: the state of the generator has changed"
            case "collectives":
                return f"{kind}: nothing has waited for {self.now} after a backward"
            case "gradients":
                return f"{kind}: {self.name}: {self.now}, expected {self.before}"
        return f"{kind}: {f'{self.name}: ' if self.name else ''}{self.now}, before {self.before}"


@dataclass(frozen=True)
class State:
    """The state of a process that another run in it could notice."""

    threads: Mapping[str, int]
    """The number of threads, by name."""
    groups: tuple[tuple[int, ...], ...]
    """Members of every process group."""
    global_hooks: Mapping[str, int]
    """The number of hooks that apply to all modules, by kind."""
    modes: tuple[str, ...]
    """Dispatch modes and function modes, outermost first."""
    default_dtype: torch.dtype
    default_device: torch.device
    grad: bool
    inference: bool
    autocast: bool
    anomaly: bool
    saved_tensor_hooks: bool
    deterministic: tuple[bool, bool]
    threads_of_torch: int
    active_ddp: bool
    """Whether a DDP module is in the middle of its forward."""
    registered_works: int
    """Functional collectives that nothing has waited for."""
    environment: Mapping[str, str] = field(repr=False)


def take() -> State:
    """Return the state of this process and thread."""
    return State(
        threads=_threads(),
        groups=tuple(tuple(dist.get_process_group_ranks(group)) for group in dist.distributed_c10d._world.pg_map),
        global_hooks=kept.global_hooks(),
        modes=kept.modes(),
        default_dtype=torch.get_default_dtype(),
        default_device=torch.get_default_device(),
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(),
        anomaly=torch.is_anomaly_enabled(),
        saved_tensor_hooks=kept.has_saved_tensor_hooks(),
        deterministic=(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        threads_of_torch=torch.get_num_threads(),
        active_ddp=getattr(DistributedDataParallel, "_active_ddp_module", None) is not None,  # only torch's has it
        registered_works=kept.unwaited(),
        environment={name: value for name, value in os.environ.items() if not name.startswith(_OF_INDUCTOR)},
    )


_OF_INDUCTOR = ("_TORCHINDUCTOR_", "TRITON_")
"""How variables begin that Inductor sets once per process, for its compiled code and for Triton."""


def left(before: State, *, groups_freed: bool = True, on_device: bool = False) -> list[Left]:
    """Return what has changed since ``before``.

    ``groups_freed``: whether gloo's threads must have ended, too. They live as long as anything holds their group.
    ``on_device``: libraries of an accelerator start threads, without names, when they are first needed. These stay.
    Groups of its backend have threads of other names than gloo's.
    """
    if not groups_freed:
        of_groups = (*_OF_TORCH, _own_name()) if on_device else _names_of_gloo(before.threads)
        return [c for c in _changes(before) if not (c.kind == "threads" and c.name.startswith(of_groups))]
    if on_device:
        own = _own_name()
        changes = _once_ended(before, _PATIENCE_ON_DEVICE, own)
        return [change for change in changes if (change.kind, change.name) != ("threads", own)]
    return _once_ended(before, _PATIENCE)


def _once_ended(before: State, seconds: float, ignored: str = "") -> list[Left]:
    """Return the changes when all threads have ended but those of the ignored name, or so many seconds are over."""
    changes = _changes(before)
    until = time.monotonic() + seconds
    # A thread that has been joined is still listed for a moment.
    while any(c.kind == "threads" and c.name != ignored for c in changes) and time.monotonic() < until:
        time.sleep(0.001)
        changes = _changes(before)
    return changes


def _names_of_gloo(threads: Iterable[str]) -> tuple[str, ...]:
    """Return prefixes of the names of gloo's threads. Not all of them have a name of their own in PyTorch 2.11."""
    names = list(threads)
    loops = any(name.startswith(_GLOO_LOOPS) for name in names)
    workers = any(name.startswith(_GLOO_WORKERS) for name in names)
    return (*_OF_GLOO, _own_name()) if workers and not loops else _OF_GLOO


def keep() -> None:
    """Exclude all objects that exist now from later garbage collections.

    A collection then costs only what the run before it has created. Call this after a collection: what is left then is
    imports and caches, which stay.
    """
    gc.freeze()


def _changes(before: State) -> list[Left]:
    after = take()
    changes = []
    for f in fields(State):
        was, now = getattr(before, f.name), getattr(after, f.name)
        if was == now:
            continue
        if isinstance(was, Mapping):
            names = _started(was, now) if f.name == "threads" else sorted({*was, *now})
            changes += [
                Left(f.name, name, str(now.get(name)), str(was.get(name)))
                for name in names
                if was.get(name) != now.get(name)
            ]
        else:
            changes.append(Left(f.name, "", str(now), str(was)))
    return changes


def _started(was: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return the names of which there are more threads than before.

    A thread of C++ gives itself its name, so on a busy machine it may have been counted before it had one.
    """
    own = _own_name()
    named = max(0, was.get(own, 0) - now.get(own, 0))
    names = []
    for name in sorted(now):
        more = now[name] - was.get(name, 0)
        if more > named:
            names.append(name)
        named -= min(named, max(0, more))
    return names


def _threads() -> dict[str, int]:
    """Count the threads of this process by name, both C++'s and Python's, without the pools that torch keeps."""
    names: Counter[str] = Counter()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as f:
                name = f.read().strip()
        except OSError:  # it has ended
            continue
        if not name.startswith(tuple(_POOLS)):
            names[name] += 1
    if _has_device():  # the device's runtime may start and keep threads at any time
        own = _own_name()
        names = Counter({n: count for n, count in names.items() if n == own or n.startswith(_OF_TORCH)})
    return dict(names)


def _own_name() -> str:
    """Return the name of this process, which is also that of threads without a name."""
    with open("/proc/self/comm") as f:
        return f.read().strip()


def _has_device() -> bool:
    """Return whether this process has used an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and bool(torch.get_device_module(accelerator).is_initialized())


# random state


def randomness() -> torch.Tensor:
    """Return the state of the CPU's random number generator: uint8[5056]."""
    return torch.get_rng_state()


# what must be gone


class Remains:
    """Objects that must not outlive a run: its modules and parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._of: dict[str, weakref.ref[Any]] = {"the model": weakref.ref(model)}
        self.also("parameter ", model.named_parameters())

    def also(self, what: str, named: Iterable[tuple[str, Any]]) -> None:
        """Watch more objects, such as those with which a stack has replaced parameters."""
        for name, thing in named:
            self._of.setdefault(f"{what}{name}", weakref.ref(thing))

    def alive(self, *, patient: bool = True) -> list[Left]:
        """Return the objects that survive a garbage collection.

        ``patient``: whether other threads get a moment to release them, as those of autograd and of gloo may only do
        after this thread has gone on.
        """
        left = self._there()
        until = time.monotonic() + (_PATIENCE if patient else 0)  # from here on, as a collection may take long
        while left and time.monotonic() < until:
            time.sleep(0.001)
            left = self._there()
        return left

    def _there(self) -> list[Left]:
        gc.collect()
        return [Left("memory", name) for name, thing in self._of.items() if thing() is not None]


# parameters and gradients


def parameters_of(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
    """Return shape, dtype and requires_grad of every parameter of a plain model."""
    return {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}


def misplaced(
    model: nn.Module,
    plain: Mapping[str, tuple[torch.Size, torch.dtype, bool]],
    *,
    cleared: bool = False,
    toggled: bool = False,
    whole: bool = True,
) -> list[Left]:
    """Return what is wrong with a model's parameters after a run, by their names in the plain model.

    ``cleared``: whether gradients were last set to None; ``toggled``: whether requires_grad of some parameters was
    toggled; ``whole``: whether the stack promises that parameters keep their shapes.
    Parameters must be leaves. A gradient must have its parameter's shape, dtype and device, must be a DTensor if the
    parameter is one, and must not require a gradient itself. Names and shapes of parameters are checked if they are
    whole.
    """
    wrong: list[Left] = []
    seen = {_plain(name): parameter for name, parameter in model.named_parameters()}
    if whole and list(seen) != list(plain):
        wrong.append(Left("parameters", "", str(list(seen)), str(list(plain))))
    for name, parameter in seen.items():
        if not isinstance(parameter, nn.Parameter) or not parameter.is_leaf:
            now = f"a {type(parameter).__name__} that is {'a' if parameter.is_leaf else 'no'} leaf"
            wrong.append(Left("parameters", name, now, "a Parameter that is a leaf"))
        if whole and name in plain:
            shape, dtype, required = plain[name]
            if (parameter.shape, parameter.dtype) != (shape, dtype):
                wrong.append(Left("parameters", name, kind(parameter), kind_of(dtype, shape)))
            if not toggled and parameter.requires_grad != required:
                now = f"requires_grad={parameter.requires_grad}"
                wrong.append(Left("parameters", name, now, f"requires_grad={required}"))
        wrong += _misplaced_gradient(name, parameter, cleared=cleared)
    return wrong


def _misplaced_gradient(name: str, parameter: nn.Parameter, *, cleared: bool) -> list[Left]:
    gradient = parameter.grad
    if gradient is None:
        return []
    wrong = []
    if cleared:
        wrong.append(Left("gradients", name, kind(gradient), "None, since all were set to None"))
    if gradient.requires_grad:
        wrong.append(Left("gradients", name, "requires_grad=True", "requires_grad=False"))
    if (gradient.shape, gradient.dtype, gradient.device) != (parameter.shape, parameter.dtype, parameter.device):
        now, due = (f"{kind(t)} on {t.device}" for t in (gradient, parameter))
        wrong.append(Left("gradients", name, now, due))
    if isinstance(gradient, DTensor) != isinstance(parameter, DTensor):
        due = "a DTensor" if isinstance(parameter, DTensor) else "no DTensor"
        wrong.append(Left("gradients", name, f"a {type(gradient).__name__}", due))
    return wrong


def _plain(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")


__all__ = ["Left", "Remains", "State", "keep", "left", "misplaced", "parameters_of", "randomness", "take"]
