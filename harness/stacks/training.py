"""How a generated training run gets onto ranks with each stack, and how whole tensors come back; with torch alone.

A reproducer carries along the definitions of this file that it uses, so nothing here may import Concord.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed._composable.replicate import replicate as replicate_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from harness.stacks.seen import Calls, Launched, Pass

Tensors = dict[str, torch.Tensor]


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
    """The model as the stack made it, before any compilation."""
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
        if isinstance(self.model, FullyShardedDataParallel):
            return self.model.clip_grad_norm_(most)
        return whole(nn.utils.clip_grad_norm_(model.parameters(), most))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as one device would have it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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


def on_replicate(
    party: Party,
    model: nn.Module,
    wrapped: Sequence[str],
    *,
    hook: str = "",
    mesh: str = "",
    ignored: Sequence[str] = (),
    recast: bool = False,
    **options: Any,
) -> nn.Module:
    """Composable DDP: ``wrapped`` submodules each on its own, or the whole model for [""].

    ``mesh``: see :func:`line_mesh`; ``ignored``: submodules that are left alone; ``recast``: float64 while wrapped.
    """
    if recast:
        model.to(torch.float64)
    if mesh:
        options["device_mesh"] = line_mesh(party, mesh)
    if ignored:
        options["ignored_modules"] = [model.get_submodule(name) for name in ignored]
    for name in wrapped:
        module: Any = model.get_submodule(name)
        replicate_ddp(module, **options)
        if hook:
            module.register_comm_hook(None, counted(party, name, getattr(default_hooks, hook)))
    if recast:
        model.to(party.dtype)
    party.model = model
    return model


def on_replicate_fsdp(
    party: Party,
    model: nn.Module,
    wrapped: Sequence[str],
    *,
    offload: bool = False,
    mesh: str = "",
    param_dtype: str = "",
    reduce_dtype: str = "",
    output_dtype: str = "",
    divide: float = 0.0,
    sums: bool = False,
    ignored: Sequence[str] = (),
    recast: bool = False,
) -> nn.Module:
    """Replication on FSDP2's machinery, ``wrapped`` submodules first, each a group of its own.

    ``mesh``: see :func:`line_mesh`; ``output_dtype``: of the whole model; ``divide``: summed gradients by that, not by
    the number of ranks; ``sums``: no reduction but sums; ``ignored``: layers whose parameters are left alone;
    ``recast``: float64 while wrapped.
    """
    if recast:
        model.to(torch.float64)
    known = inspect.signature(replicate_fsdp).parameters
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    if mesh:
        options["mesh" if "mesh" in known else "device_mesh"] = line_mesh(party, mesh)
    if ignored:
        options["ignored_params"] = {p for name in ignored for p in model.get_submodule(name).parameters()}
    for name in wrapped:
        policy = MixedPrecisionPolicy(
            dtype_of(param_dtype), dtype_of(reduce_dtype), None if name else dtype_of(output_dtype)
        )
        module: Any = replicate_fsdp(model.get_submodule(name), mp_policy=policy, **options)
        if divide:
            module.set_gradient_divide_factor(divide)
        if sums:
            module.set_force_sum_reduction_for_comms(True)
    if recast:
        model.to(party.dtype)
    party.divided_by = divide
    party.model = model
    return model


def dtype_of(name: str) -> torch.dtype | None:
    """A dtype by its name; None for ""."""
    return getattr(torch, name) if name else None


def on_tp_extension(
    party: Party,
    model: nn.Module,
    wrapped: Sequence[str],
    *,
    tensor: int,
    plan: Mapping[str, str],
    use_orig_params: bool = True,
    strategy: str = "FULL_SHARD",
    replicas: int = 0,
    param_dtype: str = "",
    reduce_dtype: str = "",
) -> nn.Module:
    """FSDP1 over tensor parallelism: ``plan`` gives ``columns`` or ``rows`` to layers; the rest stays whole.

    ``replicas``: how often the shards are replicated, for hybrid strategies: a mesh of three dimensions; 0 for two.
    """
    data = party.world // tensor
    sizes: tuple[int, ...] = (replicas, data // replicas, tensor) if replicas else (data, tensor)
    names: tuple[str, ...] = ("replicas", "shards", "tp") if replicas else ("dp", "tp")
    mesh = init_device_mesh(party.device.type, sizes, mesh_dim_names=names)
    styles: dict[str, ParallelStyle] = {
        name: ColwiseParallel(output_layouts=Replicate())
        if how == "columns"
        else RowwiseParallel(input_layouts=Replicate())
        for name, how in plan.items()
    }
    parallelize_module(model, mesh["tp"], styles)
    options: dict[str, Any] = {
        "device_mesh": mesh["replicas", "shards"] if replicas else mesh["dp"],
        "device_id": party.device,
        "use_orig_params": use_orig_params,
        "sharding_strategy": ShardingStrategy[strategy],
    }
    if param_dtype or reduce_dtype:
        options["mixed_precision"] = MixedPrecision(
            dtype_of(param_dtype), dtype_of(reduce_dtype), dtype_of(param_dtype)
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", category=FutureWarning)
        for name in wrapped:
            above, _, last = name.rpartition(".")
            parent = model.get_submodule(above)
            setattr(parent, last, FullyShardedDataParallel(parent.get_submodule(last), **options))
        party.model = FullyShardedDataParallel(model, **options)
    return party.model


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
        set_sync_of(party.model, synced)


def set_sync_of(model: nn.Module, synced: bool) -> None:
    """Whether the model's next backward averages gradients over ranks, whichever stack it is on."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(synced)
        elif hasattr(module, "_sync_gradients"):
            module._sync_gradients = synced


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


def plain(name: str) -> str:
    """A parameter's name in the plain model."""
    for inserted in ("_fsdp_wrapped_module.", "_orig_mod."):
        name = name.replace(inserted, "")
    return name


def gradients(party: Party, model: Any) -> Tensors:
    """Whole gradients by the plain model's names, not always copies; {} where the stack can't show them."""
    root = party.root(model)
    if isinstance(root, FullyShardedDataParallel):
        if not root._use_orig_params:
            return {}
        with FullyShardedDataParallel.summon_full_params(root, writeback=False, with_grads=True):
            return {plain(n): whole(p.grad).clone() for n, p in root.named_parameters() if p.grad is not None}
    return {plain(n): whole(p.grad) for n, p in root.named_parameters() if p.grad is not None}


def optimizer_state(party: Party, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensors]:
    """Whole parameters, buffers and states of the optimizer, by the plain model's names.

    Under ``parameter``, ``buffer``, and what the optimizer calls each of its states.
    """
    root = party.root(model)
    buffers = {plain(n): b for n, b in root.named_buffers()}
    found: dict[str, Tensors] = {"parameter": {}, "buffer": buffers}
    if isinstance(root, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(root, writeback=False):
            found["parameter"] = {plain(n): whole(p).clone() for n, p in root.named_parameters()}
        return found
    names = {id(p): plain(n) for n, p in root.named_parameters()}
    found["parameter"] = {plain(n): whole(p) for n, p in root.named_parameters()}
    for parameter, state in optimizer.state.items():
        for kind, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                found.setdefault(kind, {})[names[id(parameter)]] = whole(value)
    return found


def reload(party: Party, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Save the state dicts of model and optimizer, disturb both, and load them again."""
    root = party.root(model)
    fsdp1 = isinstance(root, FullyShardedDataParallel)
    with contextlib.ExitStack() as stack:
        if fsdp1:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(FullyShardedDataParallel.state_dict_type(root, StateDictType.SHARDED_STATE_DICT))
        saved = copied(root.state_dict())
        state = copied(FullyShardedDataParallel.optim_state_dict(root, optimizer) if fsdp1 else optimizer.state_dict())
        with torch.no_grad():
            for tensor in root.parameters():
                tensor.zero_()
            for values in optimizer.state.values():
                for value in values.values():
                    if isinstance(value, torch.Tensor):
                        value.zero_()
        root.load_state_dict(saved)
        if fsdp1:
            state = FullyShardedDataParallel.optim_state_dict_to_load(root, optimizer, state)
        optimizer.load_state_dict(state)


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
    "on_replicate",
    "on_replicate_fsdp",
    "on_tp_extension",
    "optimizer_state",
    "reload",
    "set_sync",
    "since",
    "whole",
]
