"""Composable DDP: ``replicate(module)``, and DistributedDataParallel, which does the same as a wrapper around a module.

How it behaves:

1. ``replicate`` changes only the module's class and hooks. The first forward requires that all ranks have parameters of
   the same shapes and dtypes, and sends rank 0's parameters and buffers to every rank.
2. A forward first sends rank 0's buffers to every rank, unless the last forward was not synchronized.
3. At the end of a backward, the gradient of every parameter that any rank has used is replaced by its mean over ranks,
   including everything that was accumulated in it. The preceding forward decides whether this happens.
4. If outputs have a backward each, this happens at the end of the one with which every parameter has been used. Only
   find_unused_parameters and static_graph let a step leave out parameters, the latter the same ones in every step.

Modules that are ignored, or managed by ``fully_shard``, are left alone with everything inside them. Of a DTensor, which
is divided over another dimension of the mesh, the local part is sent and averaged.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed._composable.contract import contract
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from harness.reference.containers import mapped, tensors
from harness.reference.dtensors import local
from harness.reference.hooks import Bucket, Hook, buckets, require_hook, result


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of replicate() and DistributedDataParallel."""

    device_id: int | torch.device | None = None
    """The accelerator that the module is on. Inputs are moved to it before a forward, unless it is None."""
    process_group: dist.ProcessGroup | None = None
    device_mesh: DeviceMesh | None = None
    """A mesh of one dimension. Without a mesh and a group, all ranks are used."""
    broadcast_buffers: bool = True
    init_sync: bool = True
    """Whether the first forward makes parameters and buffers equal on all ranks."""
    find_unused_parameters: bool = False
    """Whether a backward may leave out parameters."""
    static_graph: bool = False
    """Whether every backward leaves out the same parameters."""
    gradient_as_bucket_view: bool = False
    """Where gradients are stored. This does not change them, and neither does the next option."""
    bucket_cap_mb: float | None = None
    mixed_precision: object = None

    def __post_init__(self) -> None:
        if self.mixed_precision is not None:
            raise NotImplementedError("replicate has no mixed precision; FSDP-replicate has")
        if self.process_group is not None and self.device_mesh is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if self.device_mesh is not None and self.device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {self.device_mesh}.")

    def group(self) -> dist.ProcessGroup:
        """Return the group of ranks that have the same module."""
        if self.device_mesh is not None:
            return self.device_mesh.get_group()
        found: dist.ProcessGroup = self.process_group or dist.group.WORLD  # type: ignore[assignment]
        return found


class Replica:
    """One rank's replica of a module: makes it equal to the other ranks' replicas, and keeps it so."""

    def __init__(self, module: nn.Module, ignored: Iterable[nn.Module] = (), **options: Any) -> None:
        self.module, self.ignored, self.options = module, set(ignored), Options(**options)
        self.requires_sync = True
        """Whether the next forward is synchronized."""
        self.synced = True
        """Whether the last forward was synchronized, so that the next backward averages."""
        self.hook: tuple[Any, Hook] | None = None
        self.parameters: dict[nn.Parameter, str] = {}
        """The averaged parameters and their names, in module order: those requiring gradients in the last forward."""
        self.hooks: dict[nn.Parameter, Any] = {}
        """Handles to remove each parameter's hook."""
        self.used: set[nn.Parameter] = set()
        """Parameters that backwards have come to since the last average."""
        self.outputs: set[object] = set()
        """A token for each output of the last forward that no backward has come to."""
        self.waits = False
        """Whether the last synchronized backward left the average to that of another output."""
        self.graph: dict[str, int] = {}
        """How many ranks use each parameter in the first step, by name. A static graph must not change this."""
        self.begun = False
        self.averages_at_the_end = False
        """Whether the current backward averages at its end."""

    # before the first step

    def managed(self, module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that are replicated, each with the prefix of its parameters' names."""
        if module not in self.ignored and not isinstance(module, FSDPModule):
            yield name, module
            for child, inner in module.named_children():
                yield from self.managed(inner, f"{name}{child}.")

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self) -> None:
        """Make parameters and buffers equal on all ranks.

        Errors: RuntimeError if nothing is to be trained, or if ranks have parameters of different shapes or strides;
        ValueError if the module is not on the given device.
        """
        self.begun = True
        self.group, self.size = self.options.group(), dist.get_world_size(self.options.group())
        every = self.everything()
        if not any(p.requires_grad for p in every):
            raise RuntimeError("replicate is not needed when a module has no parameters that require a gradient.")
        self.require_device(every)
        self.require_equal_shapes(every)
        if self.options.init_sync:
            self.send([*every, *(self.buffers() if self.options.broadcast_buffers else ())])

    def everything(self) -> dict[nn.Parameter, str]:
        """Return the parameters that the modules have now, with their names.

        During torch.func.functional_call, they are what it is given.
        """
        sharded = {module for module in self.module.modules() if isinstance(module, FSDPModule)}
        others = {p for module in self.ignored | sharded for p in module.parameters()}
        return {
            p: f"{prefix}{name}"
            for prefix, module in self.managed(self.module)
            for name, p in module.named_parameters(recurse=False)
            if p not in others
        }

    def require_device(self, parameters: Iterable[nn.Parameter]) -> None:
        said = self.options.device_id
        number = said if isinstance(said, int) else said.index if said is not None and said.type != "cpu" else None
        found = {p.device for p in parameters}
        if number is not None and any(device.index != number for device in found):
            raise ValueError(f"device_ids [{number}]: the module's parameters are on {', '.join(map(str, found))}")

    def require_equal_shapes(self, parameters: dict[nn.Parameter, str]) -> None:
        mine = [(tuple(p.shape), p.stride(), str(p.dtype)) for p in parameters]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, mine, group=self.group)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise RuntimeError(
                    f"ranks must have parameters of the same number, shapes and strides; verified: rank {rank} has "
                    f"{theirs}, rank 0 {everyone[0]}"
                )

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers that the modules have now, because a forward may have replaced some."""
        return [buffer for _, module in self.managed(self.module) for buffer in module.buffers(recurse=False)]

    def send(self, everything: list[Any]) -> None:
        """Send tensors from the first rank of the group to all others, unnoticed by graphs that have saved them."""
        for tensor in everything:
            own = local(tensor.data)
            sent = own.contiguous()  # gloo sends the memory of a strided tensor instead of its elements
            dist.broadcast(sent, group=self.group, group_src=0)
            if sent is not own:
                own.copy_(sent)

    # in every step

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare for a forward. Returns the inputs, moved to the module's device if that is given."""
        if not self.begun and all(isinstance(p, nn.Parameter) for p in self.everything()):
            self.begin()
        if self.begun:
            self.before_own_forward()
        device = self.options.device_id
        if device is None or device == torch.device("cpu"):
            return args, kwargs
        found: tuple[Any, Any] = mapped(lambda tensor: tensor.to(device), (args, kwargs))
        return found

    def before_own_forward(self) -> None:
        """Prepare for a forward of the module, with its own parameters or in torch.func.functional_call."""
        if self.options.broadcast_buffers and self.synced:
            with torch.no_grad():
                self.send(self.buffers())
        if torch.is_grad_enabled():
            if self.waits:
                raise self.unused(self.parameters.keys() - self.used)
            self.outputs.clear()
            self.synced = self.requires_sync
            self.averages_at_the_end = False  # a failed backward may have left it True
            self.find_parameters()

    def find_parameters(self) -> None:
        """Find the parameters to average, because some may have been replaced, frozen or thawed.

        Tensors that torch.func.functional_call puts in their place are no parameters, and keep their own gradients.
        Parameters that nothing has replaced are averaged still: hooks of tensor-parallel layers take them away.
        """
        every = self.everything()
        found = {p: name for p, name in every.items() if p.requires_grad and isinstance(p, nn.Parameter)}
        found |= {p: name for p, name in self.parameters.items() if name not in every.values()}
        here = weakref.ref(self)  # a strong reference would make a cycle that no garbage collector sees
        for p in self.hooks.keys() - found.keys():
            self.hooks.pop(p).remove()
        for p in found.keys() - self.hooks.keys():
            hook = p.register_post_accumulate_grad_hook(lambda p: has_gradient(here, p))  # type: ignore[no-untyped-call]
            self.hooks[p] = hook
        self.parameters = found
        self.used &= found.keys()

    def after_forward(self, output: Any) -> None:
        """Add hooks to the output's tensors. The backward of a loss that is computed from them reaches a hook first."""
        here = weakref.ref(self)  # the module may keep its output
        for tensor in tensors(output):
            if tensor.requires_grad:
                self.outputs.add(token := object())
                tensor.register_hook(lambda _, token=token: has_come(here, token))  # type: ignore[no-untyped-call]

    def backward_is_going_on(self) -> None:
        if not self.averages_at_the_end and self.synced:
            self.averages_at_the_end = True
            Variable._execution_engine.queue_callback(self.average)

    @torch.no_grad()
    def average(self) -> None:
        """Replace gradients with their means over ranks, but leave parameters that no rank has used as they are.

        Errors: RuntimeError on all ranks if a rank has not used a parameter, and no option allows this, or if a static
        graph has changed.
        """
        asked, self.averages_at_the_end = self.averages_at_the_end, False
        leaves_out = self.options.find_unused_parameters or self.options.static_graph
        if not asked or not self.parameters:
            return
        if not self.used and not leaves_out:  # torch.autograd.grad, for example, comes to no parameter
            return
        self.waits = not leaves_out and bool(self.outputs) and not self.used.issuperset(self.parameters)
        if self.waits:
            return
        parameters = list(self.parameters)
        mine = [[p in self.used for p in parameters], [p.grad is not None for p in parameters]]
        counts = torch.tensor(mine, dtype=torch.int64, device=parameters[0].device)
        dist.all_reduce(counts, group=self.group)
        self.used.clear()
        users, owners = counts.tolist()
        if not any(users):
            return
        if not leaves_out and min(users) < self.size:
            raise self.unused(p for p, count in zip(parameters, users, strict=True) if count < self.size)
        if self.options.static_graph:
            self.require_same_graph(dict(zip(self.parameters.values(), users, strict=True)))
        found = buckets([p for p, used, owned in zip(parameters, users, owners, strict=True) if used and owned])
        for index, members in enumerate(found):
            bucket = Bucket(index, members, last=index == len(found) - 1)
            if self.hook is None:
                bucket.buffer().div_(self.size)  # before the sum, which may overflow
                dist.all_reduce(bucket.buffer(), group=self.group)
            else:
                state, hook = self.hook
                bucket.set_buffer(result(hook(state, bucket)))
            bucket.give_back()

    def unused(self, parameters: Iterable[nn.Parameter]) -> RuntimeError:
        names = ", ".join(self.parameters[p] for p in parameters)
        return RuntimeError(f"a rank has not used {names} in producing its loss; pass find_unused_parameters=True")

    def require_same_graph(self, users: dict[str, int]) -> None:
        self.graph = self.graph or users
        changed = [name for name, count in users.items() if count != self.graph.get(name)]
        if changed:
            raise RuntimeError(f"the static graph has changed: not as many ranks as at first use {', '.join(changed)}")

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Let a hook average gradients: ``hook(state, bucket)`` returns a future of the bucket's new contents.

        Errors: see :func:`require_hook`; RuntimeError if there is a hook.
        """
        require_hook(hook)
        if self.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.hook = state, hook


def has_gradient(replica: weakref.ref[Replica], parameter: nn.Parameter) -> None:
    """Record that a backward has come to a parameter. This also notices a loss that does not come from an output."""
    of = replica()
    if of is not None:
        of.used.add(parameter)
        of.backward_is_going_on()


def has_come(replica: weakref.ref[Replica], output: object) -> None:
    """Record that a backward has come to an output."""
    of = replica()
    if of is not None:
        of.outputs.discard(output)
        of.backward_is_going_on()


# composable


class Replicated:
    """What the registry stores about a module that replicate() was called on."""

    replica: Replica

    @property
    def _param_names(self) -> list[str]:
        return list(self.replica.parameters.values())


class DDP:
    """Methods of a replicated module, whose class derives from this one and its own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a new container, such as a slice, in the plain class."""
        return cls.__mro__[2](*args, **kwargs)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise AssertionError("DDP does not support deepcopy. Please use state dict for serialization.")

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Set whether backwards average, from the next forward on."""
        replicate.state(self).replica.requires_sync = requires_gradient_sync  # type: ignore[arg-type]

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """See :meth:`Replica.register_comm_hook`."""
        replicate.state(self).replica.register_comm_hook(state, hook)  # type: ignore[arg-type]


@contract(state_cls=Replicated)  # type: ignore[arg-type,type-var]
def replicate(module: nn.Module, ignored_modules: Iterable[nn.Module] | None = None, **options: Any) -> nn.Module:
    """Replicate a module over ranks, in place. ``options``: see :class:`Options`.

    Errors: RuntimeError for a module that ``fully_shard`` manages, and for an invalid device; AssertionError for a
    module that is already replicated.
    """
    if "device_id" in options and not isinstance(options["device_id"], int | torch.device):
        raise RuntimeError(f"Expected device_id to be int or torch.device, but got {type(options['device_id'])}")
    if isinstance(module, FSDPModule):
        raise RuntimeError("Cannot apply `replicate()` on a Module already managed by `fully_shard`")
    replica = Replica(module, ignored_modules or (), **options)
    replicate.state(module).replica = replica
    module.register_forward_pre_hook(lambda _, args, kwargs: replica.before_forward(args, kwargs), with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: replica.after_forward(output))
    module.__class__ = type(f"DDP{type(module).__name__}", (DDP, type(module)), {})
    return module


# as a wrapper around a module


def require_supported(module: nn.Module, device_ids: list[Any] | None, output_device: Any) -> None:
    """Check what DistributedDataParallel is made of.

    Errors: RuntimeError if parameters are uninitialized or none requires a gradient; ValueError for several devices,
    parameters on several kinds of devices, and devices or a SyncBatchNorm of a module on the host.
    """
    parameters = list(module.parameters())
    if any(isinstance(p, nn.UninitializedParameter) for p in parameters):
        raise RuntimeError("a module with uninitialized parameters needs a forward before DistributedDataParallel")
    if not any(p.requires_grad for p in parameters):
        raise RuntimeError("DistributedDataParallel needs a module with a parameter that requires a gradient")
    if device_ids and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    types = {p.device.type for p in parameters}
    if len(types) > 1:
        raise ValueError(f"the module must be on the same type of devices, not on {', '.join(sorted(types))}")
    if types == {"cpu"} and (device_ids or output_device is not None):
        raise ValueError(f"a module on the host has no device_ids ({device_ids}) or output_device ({output_device})")
    if types == {"cpu"} and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with modules on accelerators")


class DistributedDataParallel(nn.Module):
    """A wrapper that replicates its module at once, not in the first forward, and leaves the module's class alone."""

    def __init__(
        self, module: nn.Module, device_ids: list[Any] | None = None, output_device: Any = None, **options: Any
    ) -> None:
        super().__init__()
        require_supported(module, device_ids, output_device)
        self.module = module
        self.replica = Replica(module, device_id=device_ids[0] if device_ids else None, **options)
        self.replica.begin()

    @property
    def require_backward_grad_sync(self) -> bool:
        return self.replica.requires_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, synced: bool) -> None:
        self.replica.requires_sync = synced

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Return None, as no module has buckets by which Dynamo could cut its graphs."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make forwards whose backwards average nothing."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """See :meth:`Replica.register_comm_hook`."""
        self.replica.register_comm_hook(state, hook)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.replica.before_forward(args, kwargs)
        output = self.module(*args, **kwargs)
        self.replica.after_forward(output)
        return output
