"""FSDP-replicate: ``replicate(module)`` with the interface of ``fully_shard``, but every rank keeps whole parameters.

How it behaves:

1. ``replicate`` replaces a module's parameters with DTensors that are replicated over the mesh and share the
   parameters' memory. These are what the module shows, and what is optimized, saved and loaded. The parameters that one
   call takes are a group, without those that are ignored, and without those of inner modules that had a call of their
   own. A parameter that is already a DTensor, divided over another dimension of the mesh, becomes a DTensor over both
   dimensions.
2. A forward of the module computes with plain parameters in ``param_dtype``, which are made from the DTensors. They
   stay in place until the outermost forward ends, and return for a backward, which may compute parts of it again.
3. Their gradients are added up in ``reduce_dtype`` until the end of a backward with synchronization. Then the gradients
   of each group are averaged over the mesh in one collective, and accumulated in the DTensors in the DTensors' dtype.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed._composable.contract import contract
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)
from torch.distributed.tensor import DTensor, Replicate

from harness.reference.containers import cast, mapped, tensors
from harness.reference.dtensors import Layout, laid, local, moved
from harness.reference.meshes import mesh_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims  # newer than the oldest supported PyTorch


class Group:
    """The parameters that one call of replicate() took, which are replicated and averaged together."""

    # The registry creates it without arguments, before the call knows what it takes.
    slots: list[tuple[nn.Module, str]]
    """Where the parameters are: modules, and names in them. A shared parameter has several places."""
    mesh: DeviceMesh
    """The mesh over which gradients are averaged."""
    whole_mesh: DeviceMesh | None
    """The mesh that parameters must be DTensors on, if ``mesh`` is only some of its dimensions."""
    policy: MixedPrecisionPolicy
    offload: OffloadPolicy

    def __init__(self) -> None:
        self.root: Root | None = None
        self.replaced: dict[tuple[nn.Module, str], nn.Parameter] = {}
        """The DTensors that plain parameters replace at the moment."""
        self.pending: dict[nn.Parameter, torch.Tensor] = {}
        """Gradients that have not been averaged yet, by DTensor."""
        self.reduces = self.all_reduces = True
        self.averages_unused = False
        self.divide_by: float | None = None
        self.hook: Callable[[torch.Tensor], None] | None = None
        self.optimized: torch.Event | None = None
        """The event that the next forward waits for."""

    def parameters(self) -> list[Any]:
        """Return the DTensors, each once. They are Parameters as well, but a type can't say both."""
        return list(dict.fromkeys(self.replaced.get((m, name), getattr(m, name)) for m, name in self.slots))

    @torch.no_grad()
    def replace_parameters(self) -> None:
        """Replace plain parameters with DTensors permanently."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module, name in self.slots:
            p = getattr(module, name)
            if p not in made:
                home = "cpu" if isinstance(self.offload, CPUOffloadPolicy) else self.mesh.device_type
                own = moved(local(p).detach(), home)
                own = own.pin_memory() if getattr(self.offload, "pin_memory", False) else own
                made[p] = nn.Parameter(laid(own, *self.outer(p, name), p), requires_grad=p.requires_grad)
            setattr(module, name, made[p])

    def outer(self, p: nn.Parameter, name: str) -> Layout:
        """Return the layout of a parameter over ranks once it is replicated.

        Errors: ValueError for a parameter that must be a DTensor on the whole mesh, but is not.
        """
        replicated = (Replicate(),) * self.mesh.ndim
        if self.whole_mesh is not None:
            if not isinstance(p, DTensor) or p.device_mesh != self.whole_mesh:
                raise ValueError(f"with dp_mesh_dims all parameters must be DTensors on the whole mesh; {name} is not")
            return p.device_mesh, p.placements
        if not isinstance(p, DTensor):
            return self.mesh, replicated
        names = (*(self.mesh.mesh_dim_names or ()), *(p.device_mesh.mesh_dim_names or ()))
        return self.mesh._get_root_mesh()[names], (*replicated, *p.placements)

    def inner(self, p: DTensor) -> Layout | None:
        """Return a parameter's layout over ranks in a forward; None if it is plain there."""
        if self.whole_mesh is not None:
            return p.device_mesh, p.placements
        others = (p.device_mesh.mesh_dim_names or ())[self.mesh.ndim :]
        return (p.device_mesh[others], p.placements[self.mesh.ndim :]) if others else None

    # plain parameters, temporarily

    @torch.no_grad()
    def unshard(self) -> None:
        """Replace DTensors with plain parameters, which share their memory if dtype and device are the same."""
        if self.replaced:
            return
        here = weakref.ref(self)  # a strong reference would make a cycle that no garbage collector sees
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module, name in self.slots:
            p = getattr(module, name)
            if p not in made:
                own = cast(self.policy.param_dtype, local(p).detach().to(self.mesh.device_type))
                inner = self.inner(p)
                made[p] = nn.Parameter(laid(own, *inner, p) if inner else own, requires_grad=p.requires_grad)
                if p.requires_grad:
                    made[p].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda plain, of=p: has_gradient(here, of, plain)
                    )
            self.replaced[module, name] = p
            setattr(module, name, made[p])

    def reshard(self) -> None:
        """Put the DTensors back in place."""
        for (module, name), p in self.replaced.items():
            setattr(module, name, p)
        self.replaced.clear()

    # torch.distributed.fsdp.share_comm_ctx shares streams by these names, but there are none.
    _comm_ctx = _fsdp_param_group = None
    _fsdp_param_groups = ()

    # torch.distributed.fsdp.register_fsdp_forward_method calls these two names.

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.root is None:
            Root(module)
        assert self.root is not None
        if self.root.module is module:
            if self.root.averages_at_the_end:  # a failed backward has left it True
                self.root.end_backward()
            self.root.forward_is_going_on = True
            if self.optimized is not None and self.mesh.device_type != "cpu":
                torch.accelerator.current_stream().wait_event(self.optimized)
                self.optimized = None
            if self.mesh.device_type != "cpu":
                args, kwargs = mapped(lambda tensor: tensor.to(self.mesh.device_type), (args, kwargs))
        self.unshard()
        if self.policy.cast_forward_inputs:
            args, kwargs = cast(self.policy.param_dtype, (args, kwargs))
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        root = self.root
        if root is None:  # the forward failed before it began
            return output
        if root.module is module:
            root.forward_is_going_on = False
            for group in root.groups:
                group.reshard()
        elif not root.forward_is_going_on and not root.averages_at_the_end:  # a part of the model was called alone
            self.reshard()
        for tensor in tensors(output):
            if tensor.requires_grad:  # the backward reaches this hook first
                tensor.register_hook(lambda _: root.backward_is_going_on())  # type: ignore[no-untyped-call]
        return cast(self.policy.output_dtype, output)

    # gradients

    def add(self, parameter: nn.Parameter, plain: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add to the future gradient of a DTensor. ``plain``: the parameter in its place, which has this gradient."""
        if isinstance(plain, DTensor) and isinstance(gradient, DTensor):
            averaged, names = self.mesh.mesh_dim_names or (), gradient.device_mesh.mesh_dim_names or ()
            lie = zip(names, gradient.placements, plain.placements, strict=True)
            gradient = gradient.redistribute(placements=[own if name in averaged else of for name, own, of in lie])
        gradient = local(gradient)
        gradient = gradient.to(self.policy.reduce_dtype or gradient.dtype)
        before = self.pending.get(parameter)
        self.pending[parameter] = gradient if before is None else before + gradient

    @torch.no_grad()
    def average(self) -> None:
        """Average all pending gradients, and accumulate the means in the DTensors.

        Every rank must have gradients for the same parameters, unless unused ones are averaged, too.
        Errors: RuntimeError for gradients of several dtypes.
        """
        if not (self.reduces and self.all_reduces):
            return
        if self.averages_unused:
            dtype = self.policy.reduce_dtype or self.policy.param_dtype
            for p in self.parameters():
                if p.requires_grad and p not in self.pending:
                    self.pending[p] = torch.zeros_like(local(p), dtype=dtype, device=self.mesh.device_type)
        parameters = [p for p in self.parameters() if p in self.pending]
        gradients = [self.pending.pop(p) for p in parameters]
        if not gradients:
            return
        if len({gradient.dtype for gradient in gradients}) > 1:
            raise RuntimeError("a group's parameters must have one dtype: give those of another a group of their own")
        total = torch.cat([gradient.reshape(-1) for gradient in gradients])
        total /= self.divide_by or self.mesh.size()
        for dimension in range(self.mesh.ndim):
            dist.all_reduce(total, group=self.mesh.get_group(dimension))
        if self.hook is not None:
            self.hook(total)
        for p, mean in zip(parameters, torch.split(total, [gradient.numel() for gradient in gradients]), strict=True):
            own = local(p).detach()
            mean = mean.view(own.shape).to(own.device, p.dtype)
            torch.autograd.backward(p, laid(mean, p.device_mesh, p.placements, p))  # this also calls its hooks


def has_gradient(group: weakref.ref[Group], parameter: nn.Parameter, plain: nn.Parameter) -> None:
    """Pass on the gradient of a plain parameter. ``parameter``: the DTensor that it replaces."""
    of, gradient = group(), plain.grad
    if of is not None and of.root is not None and gradient is not None:
        plain.grad = None
        of.add(parameter, plain, gradient.detach())
        of.root.backward_is_going_on()


class Root:
    """The module whose forward is called first, with all groups inside. They are averaged when a backward ends."""

    def __init__(self, module: nn.Module) -> None:
        """Collect all groups.

        Errors: RuntimeError if an inner module was called first, or a parameter has no memory; ValueError if two groups
        share a parameter.
        """
        empty = [name for name, p in module.named_parameters() if p.is_meta]
        if empty:
            raise RuntimeError(f"on the meta device, and to be filled before the first forward: {', '.join(empty)}")
        self.module = module
        self.forward_is_going_on = False
        self.averages_at_the_end = False
        """Whether the current backward averages at its end."""
        found = [(name, group_of(m)) for name, m in module.named_modules() if isinstance(m, ReplicateModule)]
        self.groups: list[Group] = list(dict.fromkeys(group for _, group in found))
        memory: set[int] = set()
        for name, group in found:
            if group.root not in (None, self):
                raise RuntimeError(f"Replicate requires running forward through the root module first, not {name}")
            group.root = self
        for group in self.groups:
            of_group = {local(p).detach().data_ptr() for p in group.parameters()} - {0}  # 0: no elements
            if of_group & memory:
                raise ValueError("a parameter is shared with another group: use replicate([module_a, module_b])")
            memory |= of_group

    def backward_is_going_on(self) -> None:
        if not self.averages_at_the_end:
            self.averages_at_the_end = True
            Variable._execution_engine.queue_callback(self.average)  # compiled autograd raises an error here
            for group in self.groups:
                group.unshard()

    def end_backward(self) -> None:
        self.averages_at_the_end = False
        if not self.forward_is_going_on:
            for group in self.groups:
                group.reshard()

    def average(self) -> None:
        if self.averages_at_the_end:
            self.end_backward()
            for group in self.groups:
                group.average()


def group_of(module: Any) -> Group:
    """Return the group of a replicated module."""
    found: Group = replicate.state(module)
    return found


class ReplicateModule(FSDPModule):
    """Methods of a replicated module, whose class derives from this one and its own."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a new container, such as a slice, in the plain class."""
        return cls.__mro__[3](*args, **kwargs)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")

    # Names that PyTorch calls, in register_fsdp_forward_method and when a module is cast or moved.

    def _get_fsdp_state(self) -> Any:
        return group_of(self)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()
        return super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]

    def _groups(self, recurse: bool = True) -> Iterator[Group]:
        modules = self.modules() if recurse else [self]  # type: ignore[attr-defined]
        for module in modules:
            if isinstance(module, ReplicateModule):
                yield group_of(module)

    def _sharded_inside(self, recurse: bool) -> list[FSDPModule]:
        """Return the modules inside that fully_shard manages, to which switches apply as well."""
        inside = self.modules() if recurse else ()  # type: ignore[attr-defined]
        return [m for m in inside if isinstance(m, FSDPModule) and not isinstance(m, ReplicateModule)]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Show plain parameters until the next forward ends or :meth:`reshard` is called."""
        group_of(self).unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Show DTensors again."""
        group_of(self).reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards average from now on. The next backward that does also averages what was left."""
        for group in self._groups(recurse):
            group.reduces = group.all_reduces = requires_gradient_sync
        for module in self._sharded_inside(recurse):
            module.set_requires_gradient_sync(requires_gradient_sync, recurse=False)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backwards average, like :meth:`set_requires_gradient_sync`, as there is no reduce-scatter."""
        for group in self._groups(recurse):
            group.all_reduces = requires_all_reduce
        for module in self._sharded_inside(recurse):
            module.set_requires_all_reduce(requires_all_reduce, recurse=False)

    def set_reduce_scatter_unused_params(self, enable: bool, *, recurse: bool = True) -> None:
        """Set whether parameters that a backward does not reach count as zeros, and get an average."""
        for group in self._groups(recurse):
            group.averages_unused = enable
        for module in self._sharded_inside(recurse):
            module.set_reduce_scatter_unused_params(enable, recurse=False)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of summed gradients, in place of the number of ranks."""
        group_of(self).divide_by = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Set a hook that is called with the group's averaged gradients in one vector, which it may change."""
        group_of(self).hook = hook

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Set an event of the optimizer's stream, which the next forward of this root module waits for."""
        group_of(self).optimized = event

    def reset_iter_state(self) -> None:
        """Forget what a failed forward or backward has left, and all gradients that have not been averaged.

        Errors: RuntimeError for a module that is not the root.
        """
        root = group_of(self).root
        if root is not None and group_of(root.module) is not group_of(self):
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        for group in self._groups():
            group.reshard()
            group.pending.clear()

    def _how_not_what(self, *args: Any, **kwargs: Any) -> None:
        """Ignore a setting of when memory is released or how ranks communicate, because it does not affect results."""

    set_is_last_backward = set_reshard_after_forward = set_reshard_after_backward = _how_not_what
    set_unshard_in_backward = _how_not_what
    set_custom_all_gather = set_custom_reduce_scatter = set_separate_reduce_scatter_group = _how_not_what
    set_force_sum_reduction_for_comms = set_reduce_scatter_max_input_buffers = _how_not_what
    set_allocate_memory_from_process_group_for_comm = set_symm_mem_for_comm = _how_not_what

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Ignore a setting that does not affect results. Errors: ValueError for a module that is not replicated."""
        plain = [module for module in modules if not isinstance(module, FSDPModule)]
        if plain:
            raise ValueError(f"only what is replicated can be prefetched, and not {plain[0]}")

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch


@contract(state_cls=Group)  # type: ignore[type-var]
def replicate(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  it is frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  it is frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Replicate a module, or several as one group, over a mesh of one dimension, in place.

    ``mesh``: by default all ranks; ``dp_mesh_dims``: the dimensions to replicate over, if the mesh has others.
    Errors: RuntimeError for a module that ``fully_shard`` manages; ValueError for a container without a forward, and
    for a mesh that does not fit; AssertionError for a module that is already replicated.
    """
    modules = module if isinstance(module, list) else [module]
    modules = [m for m in modules if not any(m in other.modules() for other in modules if other is not m)]
    for m in modules:
        if isinstance(m, FSDPModule):  # the registry rejects modules that are already replicated
            raise RuntimeError("Cannot apply `replicate()` on a Module already managed by `fully_shard`")
        if isinstance(m, nn.ModuleList | nn.ModuleDict) and type(m).forward is nn.Module.forward:
            raise ValueError(f"replicate does not support containers that do not implement forward: {m}")
    group = group_of(modules[0])
    group.policy, group.offload = mp_policy, offload_policy
    group.mesh, group.whole_mesh = mesh_of(mesh, dp_mesh_dims), mesh if dp_mesh_dims is not None else None
    taken = [inner for m in modules for inner in managed(m)]
    group.slots = [
        (m, name)
        for m in taken
        for name, p in m.named_parameters(recurse=False, remove_duplicate=False)
        if p not in (ignored_params or ())
    ]
    group.replace_parameters()
    for m in taken:
        for name, buffer in m.named_buffers(recurse=False):
            setattr(m, name, moved(buffer, group.mesh.device_type))
        m.register_state_dict_pre_hook(lambda *_: group.reshard())  # type: ignore[no-untyped-call]
        m.register_load_state_dict_pre_hook(lambda *_: group.reshard())  # type: ignore[no-untyped-call]
    for m in modules:
        m.register_forward_pre_hook(group._pre_forward, prepend=True, with_kwargs=True)
        m.register_forward_hook(group._post_forward, always_call=True)
        m.__class__ = replicated(type(m))  # type: ignore[arg-type]
    return module


@functools.cache
def replicated(of: type[nn.Module]) -> type[nn.Module]:
    """Return the class of replicated modules of a class, which is the same for all of them."""
    return type(f"Replicate{of.__name__}", (ReplicateModule, of), {})


def managed(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those inside it, except those that are replicated or sharded on their own."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from managed(child)
