"""What training runs of programs need on any stack, with torch alone: a party, a handle on its model, and counters.

A reproducer contains the definitions of this file that it uses, so nothing here may import Concord.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from harness.stacks.seen import Calls, Launched, Pass

Tensors = dict[str, torch.Tensor]


class Handle:
    """Access to the parameters, gradients and states of a model on ranks.

    This class is for parameters that are plain tensors or DTensors. A stack that keeps them otherwise derives its own,
    and its function ``on_<stack>`` assigns that to :attr:`Party.handle`.
    """

    def optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Return what is called instead of the optimizer, for a stack that puts the optimizer on ranks, too.

        It has the optimizer's ``step`` and ``zero_grad``, and is what :meth:`states` gets.
        """
        return optimizer

    def set_sync(self, model: nn.Module, synced: bool) -> None:
        """Set whether the model's next backward averages gradients over ranks."""
        modules: Iterable[Any] = model.modules()
        for module in modules:
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(synced)

    def forget(self, model: nn.Module) -> None:
        """Free whole parameters that the last forward kept, so that the next one makes them of the model's own."""
        modules: Iterable[Any] = model.modules()
        for module in modules:
            if hasattr(module, "reshard"):
                module.reshard()

    def close(self, model: nn.Module) -> None:
        """Release what the stack keeps outside of the model, after the last step."""

    def clip(self, model: nn.Module, most: float) -> torch.Tensor:
        """Clip all gradients together, and return their norm before."""
        return whole(nn.utils.clip_grad_norm_(model.parameters(), most))

    def gradients(self, model: nn.Module) -> Tensors:
        """Return whole gradients by the plain model's names, not always copies; {} if the stack can't show them."""
        return {plain(n): whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}

    def parameters(self, model: nn.Module) -> Tensors:
        """Return whole parameters by the plain model's names, not always copies."""
        return {plain(n): whole(p) for n, p in model.named_parameters()}

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensors]:
        """Return whole optimizer states, by the optimizer's name for the state and by the plain model's names."""
        names = {id(p): plain(n) for n, p in model.named_parameters()}
        states: dict[str, Tensors] = {}
        for parameter, state in optimizer.state.items():
            for kind, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    states.setdefault(kind, {})[names[id(parameter)]] = whole(value)
        return states

    def saving(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which state dicts are taken and loaded."""
        return contextlib.nullcontext()

    def optimizer_state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict, as the stack saves it."""
        return optimizer.state_dict()

    def load_optimizer_state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load what :meth:`optimizer_state_dict` returned."""
        optimizer.load_state_dict(state)


@dataclass
class Party:
    """The party that trains: the single device, or one rank of a world."""

    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    index: int = 0
    """Global rank."""
    world: int = 1
    part: int = 0
    """Which part of a batch the party trains on, out of :attr:`parts`."""
    parts: int = 1
    model: nn.Module | None = None
    """The module that the stack made, before it is compiled; None on a single device."""
    graphs: list[int] = field(default_factory=list)
    """The number of nodes in each compiled graph, in order."""
    launched: dict[Pass, Launched] = field(default_factory=dict)
    """The number of collectives that each forward and backward launched."""
    buckets: Calls = field(default_factory=dict)
    """The buckets that each module's communication hook got since the last backward, and whether each was the last."""
    hooked: dict[Pass, Calls] = field(default_factory=dict)
    """The same, by forward and backward."""
    unwaited: int = 0
    """The number of functional collectives that nothing had waited for after a synced backward."""
    handle: Handle = field(default_factory=Handle)
    """Access to what is in :attr:`model`."""
    divided_by: float = 0.0
    """The divisor of summed gradients in the stack; 0 for the number of parts."""

    @property
    def factor(self) -> float:
        """The factor of the loss with which gradients are those of one device."""
        return self.divided_by or self.parts

    def root(self, model: Any) -> Any:
        """Return the module that has the parameters of a model, which may have been compiled."""
        return model if self.model is None else self.model

    def clip(self, model: Any, most: float) -> torch.Tensor:
        """Clip all gradients together, and return their norm before."""
        return self.handle.clip(self.root(model), most)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one device would have it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain(name: str) -> str:
    """Return a parameter's name in the plain model."""
    for inserted in ("_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(inserted, "")
    return name


# putting a model on ranks


def line_mesh(party: Party, shape: str) -> DeviceMesh:
    """Return a one-dimensional mesh of all ranks, sliced or flattened from a mesh such as ``1x2`` or ``2x1x2``."""
    sizes = [int(size) for size in shape.split("x")]
    names = tuple(f"d{i}" for i in range(len(sizes)))
    mesh = init_device_mesh(party.device.type, tuple(sizes), mesh_dim_names=names)
    if len(sizes) == 1:
        return mesh
    long = [name for name, size in zip(names, sizes, strict=True) if size > 1]
    return mesh._flatten() if len(long) > 1 else mesh[long[0] if long else names[0]]


def counted(party: Party, name: str, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a communication hook that also records the buckets that it is called with, under a module's name."""
    party.buckets[name] = []

    def note(bucket: Any) -> Any:
        party.buckets[name].append((bucket.index(), bucket.is_last()))
        return bucket

    return lambda state, bucket: hook(state, note(bucket))  # a lambda, since DDP checks annotations


def dtype_of(name: str) -> torch.dtype | None:
    """Return a dtype by its name; None for ""."""
    return getattr(torch, name) if name else None


def compiled(party: Party, model: nn.Module, backend: str, *, in_place: bool = False, **options: Any) -> Any:
    """Apply ``torch.compile``, and record the number of nodes of every compiled graph in ``party.graphs``."""
    real = lookup_backend(backend)

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **more: Any) -> Callable[..., Any]:
        party.graphs.append(len(graph.graph.nodes))
        return real(graph, inputs, **more)

    if in_place:
        model.compile(backend=counting, **options)
        return model
    return torch.compile(model, backend=counting, **options)


# while training


def set_sync(party: Party, synced: bool) -> None:
    """Set whether the next backward averages gradients over ranks."""
    if party.model is not None:
        party.handle.set_sync(party.model, synced)


def with_optimizer(party: Party, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return what is called instead of the optimizer. On a single device, this is the optimizer itself."""
    return party.handle.optimizer(party.root(model), optimizer)


def launched() -> dict[tuple[int, ...], int]:
    """Return how many collectives this process has launched on each group, by its members' sorted global ranks."""
    counts: dict[tuple[int, ...], int] = {}
    for group in dist.distributed_c10d._world.pg_map:
        members = tuple(sorted(dist.get_process_group_ranks(group)))
        # Ask the backends themselves, because a group passes the question on only to those that torch ships.
        backends = {id(b): b for b in map(group._get_backend, group._device_types)}
        counters: list[Any] = list(backends.values())  # they have no type
        launches = sum(int(counter._get_sequence_number_for_group()) for counter in counters)
        counts[members] = counts.get(members, 0) + launches
    return counts


def since(before: Mapping[tuple[int, ...], int]) -> dict[tuple[int, ...], int]:
    """Return how many collectives were launched since ``before``, by group, without groups that have none."""
    return {group: count - before.get(group, 0) for group, count in launched().items() if count != before.get(group, 0)}


def finish(party: Party) -> None:
    """After a synced backward, count the collectives that nothing has waited for, and synchronize the device."""
    if dist.is_initialized():
        party.unwaited += torch._C._distributed_c10d._get_work_registry_size()
    if party.device.type != "cpu":
        torch.accelerator.synchronize()


def gradients(party: Party, model: Any) -> Tensors:
    """Return whole gradients by the plain model's names, not always copies; {} if the stack can't show them."""
    return party.handle.gradients(party.root(model))


def optimizer_state(party: Party, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensors]:
    """Return whole parameters, buffers and states of the optimizer, by the plain model's names.

    They are under ``parameter``, ``buffer``, and the optimizer's name for each of its states.
    """
    root = party.root(model)
    tensors = {"parameter": party.handle.parameters(root), "buffer": {plain(n): b for n, b in root.named_buffers()}}
    return {**tensors, **party.handle.states(root, optimizer)}


def reload(party: Party, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Save the state dicts of model and optimizer, zero parameters and states, and load the state dicts again."""
    root = party.root(model)
    with party.handle.saving(root):
        saved = copied(root.state_dict())
        state = copied(party.handle.optimizer_state_dict(root, optimizer))
        with torch.no_grad():
            for tensor in root.parameters():
                tensor.zero_()
            for values in optimizer.state.values():
                for value in values.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        root.load_state_dict(saved)
        party.handle.load_optimizer_state_dict(root, optimizer, state)


def copied(state: Any, device: str = "") -> Any:
    """Return a copy of nested dicts and lists, including their tensors, on the same device or another."""
    if isinstance(state, dict):
        return {key: copied(value, device) for key, value in state.items()}
    if isinstance(state, list):
        return [copied(value, device) for value in state]
    if not isinstance(state, torch.Tensor):
        return state
    return state.detach().to(device, copy=True) if device else state.clone()


class _ClearThere(torch.autograd.Function):
    """Clears DTensor's cache of the thread in which backwards of a device run."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it has no types
        return gradient


def clear_shardings(device: torch.device) -> None:
    """Clear what DTensor has cached for each operation: it refers to the mesh on which the operation was first seen.

    Each thread has a cache of its own, and backwards of an accelerator run in another thread. ``device``: of the rank.
    """
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it has no types
    if device.type != "cpu":
        with torch.enable_grad():
            _ClearThere.apply(torch.zeros((), device=device, requires_grad=True)).backward()  # type: ignore[no-untyped-call]


def clean_up(device: torch.device) -> None:
    """Forget compiled code, and destroy every process group but the default one.  ``device``: of the rank."""
    torch._dynamo.reset()
    with contextlib.suppress(RuntimeError):  # of a device that has failed, whose error is told already
        clear_shardings(device)
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


__all__ = [
    "Handle",
    "Party",
    "clean_up",
    "clear_shardings",
    "compiled",
    "copied",
    "counted",
    "dtype_of",
    "finish",
    "gradients",
    "launched",
    "line_mesh",
    "optimizer_state",
    "plain",
    "reload",
    "set_sync",
    "since",
    "whole",
    "with_optimizer",
]
