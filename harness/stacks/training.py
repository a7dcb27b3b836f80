"""What generated training runs need of any stack, with torch alone: a party, a handle on its model, counters.

A reproducer carries along the definitions of this file that it uses, so nothing here may import Concord.
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
    """How to reach what is in a model that is on ranks.

    This one is for parameters that are plain tensors, or DTensors; a stack that keeps them otherwise derives its own,
    and its function ``on_<stack>`` puts that into :attr:`Party.handle`.
    """

    def set_sync(self, model: nn.Module, synced: bool) -> None:
        """Whether the model's next backward averages gradients over ranks."""
        modules: Iterable[Any] = model.modules()
        for module in modules:
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(synced)

    def clip(self, model: nn.Module, most: float) -> torch.Tensor:
        """Clip all gradients together; returns their norm before."""
        return whole(nn.utils.clip_grad_norm_(model.parameters(), most))

    def gradients(self, model: nn.Module) -> Tensors:
        """Whole gradients by the plain model's names, not always copies; {} where the stack can't show them."""
        return {plain(n): whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}

    def parameters(self, model: nn.Module) -> Tensors:
        """Whole parameters by the plain model's names, not always copies."""
        return {plain(n): whole(p) for n, p in model.named_parameters()}

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensors]:
        """Whole states of the optimizer, by what the optimizer calls them and by the plain model's names."""
        names = {id(p): plain(n) for n, p in model.named_parameters()}
        found: dict[str, Tensors] = {}
        for parameter, state in optimizer.state.items():
            for kind, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    found.setdefault(kind, {})[names[id(parameter)]] = whole(value)
        return found

    def saving(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Where state dicts are taken and loaded."""
        return contextlib.nullcontext()

    def optimizer_state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state dict, as the stack saves it."""
        return optimizer.state_dict()

    def load_optimizer_state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """The inverse of :meth:`optimizer_state_dict`."""
        optimizer.load_state_dict(state)


@dataclass
class Party:
    """Who trains: the single device, or one rank of a world."""

    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    index: int = 0
    """Global rank."""
    world: int = 1
    part: int = 0
    """Which part of a batch, of how many."""
    parts: int = 1
    model: nn.Module | None = None
    """What has the parameters of the model that the stack made, by the plain model's names, before any compilation."""
    graphs: list[int] = field(default_factory=list)
    """Number of nodes in each graph that was compiled, in order."""
    launched: dict[Pass, Launched] = field(default_factory=dict)
    """How many collectives each forward and backward launched."""
    buckets: Calls = field(default_factory=dict)
    """Which buckets each module's communication hook was called with, and if with the last, since the last backward."""
    hooked: dict[Pass, Calls] = field(default_factory=dict)
    """The same, by forward and backward."""
    unwaited: int = 0
    """Functional collectives that nothing had waited for after a synced backward."""
    handle: Handle = field(default_factory=Handle)
    """How to reach what is in :attr:`model`."""
    divided_by: float = 0.0
    """What the stack divides summed gradients by; 0 for the number of parts."""

    @property
    def factor(self) -> float:
        """What a loss is multiplied with, so that gradients come out as those of one device."""
        return self.divided_by or self.parts

    def root(self, model: Any) -> Any:
        """What has the parameters of a model that may have been compiled."""
        return model if self.model is None else self.model

    def clip(self, model: Any, most: float) -> torch.Tensor:
        """Clip all gradients together; returns their norm before."""
        return self.handle.clip(self.root(model), most)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as one device would have it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain(name: str) -> str:
    """A parameter's name in the plain model."""
    for inserted in ("_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(inserted, "")
    return name


# putting a model on ranks


def line_mesh(party: Party, shape: str) -> DeviceMesh:
    """All ranks in one dimension, cut or flattened out of a mesh such as ``1x2`` or ``2x1x2``."""
    sizes = [int(size) for size in shape.split("x")]
    names = tuple(f"d{i}" for i in range(len(sizes)))
    mesh = init_device_mesh(party.device.type, tuple(sizes), mesh_dim_names=names)
    if len(sizes) == 1:
        return mesh
    long = [name for name, size in zip(names, sizes, strict=True) if size > 1]
    return mesh._flatten() if len(long) > 1 else mesh[long[0] if long else names[0]]


def counted(party: Party, name: str, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A communication hook that notes the buckets which it is called with, under a module's name."""
    party.buckets[name] = []

    def note(bucket: Any) -> Any:
        party.buckets[name].append((bucket.index(), bucket.is_last()))
        return bucket

    return lambda state, bucket: hook(state, note(bucket))  # DDP minds annotations


def dtype_of(name: str) -> torch.dtype | None:
    """A dtype by its name; None for ""."""
    return getattr(torch, name) if name else None


def compiled(party: Party, model: nn.Module, backend: str, *, in_place: bool = False, **options: Any) -> Any:
    """``torch.compile``; notes the size of every graph that is compiled in ``party.graphs``."""
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
    """Whether the next backward averages gradients over ranks."""
    if party.model is not None:
        party.handle.set_sync(party.model, synced)


def launched() -> dict[tuple[int, ...], int]:
    """How many collectives this process has launched on its groups, by the members' global ranks, ascending."""
    found: dict[tuple[int, ...], int] = {}
    for group in dist.distributed_c10d._world.pg_map:
        members = tuple(sorted(dist.get_process_group_ranks(group)))
        # The backends themselves are asked: a group passes the question on to those alone that torch ships.
        backends = {id(b): b for b in map(group._get_backend, group._device_types)}
        counters: list[Any] = list(backends.values())  # they have no type
        launches = sum(int(counter._get_sequence_number_for_group()) for counter in counters)
        found[members] = found.get(members, 0) + launches
    return found


def since(before: Mapping[tuple[int, ...], int]) -> dict[tuple[int, ...], int]:
    """How many collectives were launched since, by the members of the group; groups without any are left out."""
    return {group: count - before.get(group, 0) for group, count in launched().items() if count != before.get(group, 0)}


def finish(party: Party) -> None:
    """After a synced backward, nothing is on its way any more."""
    if dist.is_initialized():
        party.unwaited += torch._C._distributed_c10d._get_work_registry_size()
    if party.device.type != "cpu":
        torch.accelerator.synchronize()


def gradients(party: Party, model: Any) -> Tensors:
    """Whole gradients by the plain model's names, not always copies; {} where the stack can't show them."""
    return party.handle.gradients(party.root(model))


def optimizer_state(party: Party, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensors]:
    """Whole parameters, buffers and states of the optimizer, by the plain model's names.

    Under ``parameter``, ``buffer``, and what the optimizer calls each of its states.
    """
    root = party.root(model)
    found = {"parameter": party.handle.parameters(root), "buffer": {plain(n): b for n, b in root.named_buffers()}}
    return {**found, **party.handle.states(root, optimizer)}


def reload(party: Party, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Save the state dicts of model and optimizer, disturb both, and load them again."""
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
    """A copy of nested dicts and lists, tensors and all, on their own device or another."""
    if isinstance(state, dict):
        return {key: copied(value, device) for key, value in state.items()}
    if isinstance(state, list):
        return [copied(value, device) for value in state]
    if not isinstance(state, torch.Tensor):
        return state
    return state.detach().to(device, copy=True) if device else state.clone()


def clean_up() -> None:
    """Forget what was compiled, and destroy every process group but the default one."""
    torch._dynamo.reset()
    # What DTensor remembers of operations names the groups of the mesh that they were first seen on.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it has no types
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


__all__ = [
    "Handle",
    "Party",
    "clean_up",
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
]
