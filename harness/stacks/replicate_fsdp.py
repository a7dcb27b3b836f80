"""The ``replicate_fsdp`` stack: replication on FSDP2's machinery."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree

from harness.oracles.baseline import Tensors
from harness.specs.program import (
    Attention,
    Conv,
    Data,
    Embedding,
    Layer,
    Layout,
    Linear,
    Norm,
    Residual,
    Scale,
    Tied,
    children,
)
from harness.stacks.drawing import (
    Drawing,
    draw_ignored,
    draw_mesh,
    draw_recast,
    mesh_sizes,
    several_dimensions,
    sharing,
    within,
    wrappable,
)
from harness.stacks.limit import Case, Limit, defect, fused_sgd, runs_with
from harness.stacks.stack import (
    NONE,
    Dtype,
    Layers,
    Mesh,
    Options,
    Promises,
    Stack,
    averages_apart,
    require_ranks,
)
from harness.stacks.training import Party, dtype_of, line_mesh
from harness.worlds.rank import Rank

__all__ = [
    "MESH",
    "STACK",
    "ReplicateModule",
    "Wrapping",
    "apply",
    "gradients",
    "held",
    "parameters",
    "parts",
    "replicate",
    "rewrite",
    "sharder",
    "whole",
]

MESH = "mesh" if "mesh" in inspect.signature(replicate).parameters else "device_mesh"
"""The name of the argument that takes the mesh."""
REDUCES_IN_PARAMETER_DTYPE = "param_dtype_override_fn" in inspect.signature(MixedPrecisionPolicy).parameters
"""Whether gradients are reduced in the dtype of their parameters if no other is given, and not in param_dtype."""


# for tests of the stack


def apply(module: nn.Module, rank: Rank, *, groups: bool = True, **options: Any) -> nn.Module:
    """Replicate a module over the world. If ``groups``, each child with parameters is a group of its own.

    ``options`` go to ``replicate``.
    """
    module.to(rank.device)
    options.setdefault(MESH, rank.mesh())
    if groups:
        for child in module.children():
            if any(True for _ in child.parameters()):
                replicate(child, **options)
    replicate(module, **options)
    return module


def sharder(mesh: DeviceMesh) -> Callable[[int], Any]:
    """Return a function of a dimension: what ``shard_placement_fn`` returns for a parameter over this mesh.

    Parameters that share a mesh need the same function. A mesh of two dimensions has replicas in the first.
    """
    info = HSDPMeshInfo(mesh, 1, 0) if mesh.ndim == 2 else FSDPMeshInfo(mesh, 0)
    return lambda dim: _fsdp_common.ShardPlacementResult(Shard(dim), info)


class Wrapping(torch.Tensor):
    """A tensor of a class of its own, which holds a plain one; what is computed of it has its class and its list."""

    plain: torch.Tensor
    shared: list[Any]

    @staticmethod
    def __new__(cls, plain: torch.Tensor, shared: list[Any] | None = None) -> Wrapping:
        made: Wrapping = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, plain.stride(), plain.storage_offset(), dtype=plain.dtype, device=plain.device
        )
        made.plain, made.shared = plain, [] if shared is None else shared
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        shared = next(x.shared for x in _pytree.tree_leaves(given) if isinstance(x, Wrapping))
        plain, named = _pytree.tree_map_only(Wrapping, lambda x: x.plain, given)
        return _pytree.tree_map_only(torch.Tensor, lambda x: cls(x, shared), func(*plain, **named))


def rewrite(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a parameter that autograd may have saved, as a gather does."""
    with torch.no_grad(), _unsafe_preserve_version_counter(parameter):
        parameter.copy_(values)


def held(parameter: DTensor) -> torch.Tensor:
    """Return the very tensor of a parameter's shard; ``to_local`` makes another object for a parameter."""
    return parameter._local_tensor


def parts(size: int) -> list[int]:
    """Return each rank's part of the batch: every rank has its own."""
    return list(range(size))


def gradients(module: nn.Module) -> Tensors:
    """Return whole gradients by parameter name."""
    return {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}


def parameters(module: nn.Module) -> Tensors:
    """Return whole parameters by name."""
    return {n: whole(p) for n, p in module.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor as one device would have it, where the tensor is."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    there: Any = tensor.to(tensor.device_mesh.device_type)  # offloaded, and the host may have no collectives
    result: torch.Tensor = there.full_tensor().to(tensor.device)
    return result.clone()


# for programs


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
    """Replicate a model on FSDP2's machinery, ``wrapped`` submodules first, each as a group of its own.

    ``mesh``: see :func:`line_mesh`; ``output_dtype``: of the whole model; ``divide``: the divisor of summed gradients,
    if not the number of ranks; ``sums``: reduce with sums only; ``ignored``: layers whose parameters are left alone;
    ``recast``: use float64 while wrapping.
    """
    if recast:
        model.to(torch.float64)
    known = inspect.signature(replicate).parameters
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    if mesh:
        options["mesh" if "mesh" in known else "device_mesh"] = line_mesh(party, mesh)
    if ignored:
        options["ignored_params"] = {p for name in ignored for p in model.get_submodule(name).parameters()}
    for name in wrapped:
        policy = MixedPrecisionPolicy(
            dtype_of(param_dtype), dtype_of(reduce_dtype), None if name else dtype_of(output_dtype)
        )
        module: Any = replicate(model.get_submodule(name), mp_policy=policy, **options)
        if divide:
            module.set_gradient_divide_factor(divide)
        if sums:
            module.set_force_sum_reduction_for_comms(True)
    if recast:
        model.to(party.dtype)
    party.divided_by = divide
    party.model = model
    return model


class ReplicateFsdpOptions(Data, frozen=True):
    """Options of :func:`on_replicate_fsdp`."""

    offload: bool = False
    mesh: Mesh = ""
    param_dtype: Dtype = ""
    reduce_dtype: Dtype = ""
    output_dtype: Dtype = ""
    divide: Annotated[float, Meta(ge=0, le=1 << 20)] = 0.0
    sums: bool = False
    ignored: Layers = ()
    recast: bool = False


CASTS = ("param_dtype", "reduce_dtype", "output_dtype")


def _check(layout: Layout, options: ReplicateFsdpOptions) -> None:
    require_ranks(options.mesh, layout.world)


def _casts(options: Options) -> set[str]:
    return {str(options[name]) for name in CASTS if options.get(name)}


def _output_dtype(options: Options) -> str:
    return str(options.get("output_dtype") or options.get("param_dtype") or "")


def _promises(layout: Layout) -> Promises:
    # For a flattened mesh, DTensor keeps the groups of the original mesh until it sees another mesh.
    # A slice of a mesh is kept by PyTorch before 2.13 (docs/findings/dtensor_mesh_kept.py).
    sliced = len(mesh_sizes(layout)) > 1
    return Promises(frees_groups=not several_dimensions(layout) and not (sliced and runs_with("<2.13")))


def _reduced(case: Case) -> str:
    """Return the dtype in which gradients are reduced."""
    computed = "" if REDUCES_IN_PARAMETER_DTYPE else case.options.get("param_dtype")
    return str(case.options.get("reduce_dtype") or computed or case.dtype)


def _ignores_trained(case: Case) -> bool:
    ignored: object = case.options.get("ignored", ())
    return any(n.trains and n.name in ignored for n in case.named) if isinstance(ignored, tuple) else False


def _twice_in_one_module(case: Case) -> bool:
    """Return whether the model itself has one Parameter under two names, apart from the layer that made it."""
    aliases: dict[str, str] = {}
    for n in case.named:
        if isinstance(n.layer, Tied) and n.layer.alias:
            aliases[n.name] = aliases.get(n.layer.of, n.layer.of)
    return len(set(aliases.values())) < len(aliases)


LIMITS: tuple[Limit, ...] = (
    Limit("Fused SGD takes no DTensors.", fused_sgd),
    Limit(
        "Only parameters of one dtype are cast.",
        lambda case: bool(_casts(case.options)) and (case.own_dtypes or case.dtype not in ("float64", "float32")),
    ),
    Limit(
        "Buffers and ignored layers keep their dtype: a product with float32 is no input for a layer of bfloat16.",
        lambda case: (
            bool(case.options.get("param_dtype"))
            and (bool(case.options.get("ignored")) or any(isinstance(n.layer, Scale) for n in case.named))
        ),
    ),
    Limit(
        "clip_grad_norm_ takes no mixture of DTensors and the plain gradients of ignored layers.",
        lambda case: case.clips and _ignores_trained(case),
    ),
    Limit(
        "Each dtype is wrapped on its own, and hooks of what is wrapped break the graph of a compiled model.",
        lambda case: case.compiled and case.own_dtypes,
    ),
    defect(
        "fsdp_no_elements",
        "The backward of a replicated parameter without elements fails.",
        lambda case: any(isinstance(n.layer, Linear) and not n.layer.out for n in case.named),
    ),
    defect(
        "fsdp_thawed",
        "A group that is frozen in the first forward forgets its dtypes.",
        lambda case: bool(_casts(case.options)) and case.toggles,
        torch=">=2.11,<2.15",
    ),
    defect(
        "fsdp_accumulated_dtype",
        "With a reduce_dtype, a layer that an unsynchronized backward left out breaks the next backward.",
        lambda case: bool(_casts(case.options)) and case.optional and case.accumulates,
        torch=">=2.11,<2.15",
    ),
    defect(
        "fsdp_divided_twice",
        "Where sums are forced, or float64 or float16 is reduced, a divide factor is divided by twice.",
        lambda case: (
            bool(case.options.get("divide"))
            and (bool(case.options.get("sums")) or case.own_dtypes or _reduced(case) not in ("float32", "bfloat16"))
        ),
    ),
)

RESUMING: tuple[Limit, ...] = (
    defect(
        "fsdp_two_names",
        "The whole state can't be set where one parameter has two names in one module.",
        _twice_in_one_module,
    ),
)


def draw(d: Drawing) -> None:
    """Draw a layout: layers that are groups of their own, mixed precision, offloading, and factors."""
    draw_mesh(d)
    draw_recast(d)
    draw_ignored(d)
    draw_options(d)
    named, ignored = d.case.named, d.case.options.get("ignored", ())
    kept = set(ignored) if isinstance(ignored, tuple) else set()
    own = {n.name for n in named if n.dtype}
    # Parameters of two dtypes can't be in one group, and shared parameters must be in one.
    able = [n.name for n in named if wrappable(n) and not (sharing(named) | kept) & within(n, named)]
    chosen = d.some(able)
    if d.case.compiled:  # hooks break graphs, so something must stay unwrapped in the root's graph
        chosen -= within(named[0], named)
    d.become(d.with_layout(wrapped=tuple(n.name for n in reversed(named) if n.name in chosen | (own - kept))))


def draw_options(d: Drawing) -> None:
    """Draw the options that are not about layers."""
    narrow, wide = ("bfloat16", "float16"), ("float32", "float64")
    fixed = d.same_data or d.any_world
    if d.among((False, False, True)):
        d.set(offload=True)
    if d.offers("param_dtype") and d.among((False, False, True)):
        if not fixed:
            d.option("param_dtype", narrow)
            if "param_dtype" in d.case.options and d.either():
                d.option("output_dtype", wide)
        if d.either():
            d.option("reduce_dtype", ("float32", *narrow))
    factor = d.among(("", "", "", "divide", "sums"))
    if factor == "sums":
        d.set(sums=True)
    elif factor and not fixed:
        d.option("divide", (1.0, 2.0, 0.5, float(d.case.layout.world)))


def _alone(case: Case) -> Options | None:
    """Return options with which one rank has the bits of torch alone, as for :attr:`Stack.alone`.

    FSDP2 puts an autograd function before each wrapped module. So what the module adds to the gradient of its input is
    added up first. Torch alone adds it to what others have added, one after the other, which rounds differently.
    """
    layers = {named.name: named.layer for named in case.named}
    first: dict[str, str] = {}
    for name in layers:
        first.setdefault(name.rpartition(".")[0], name)
    apart = (name for name in case.layout.wrapped if name in layers and _uses_input_often(layers[name]))
    return None if any(_shares_input(name, layers, first) for name in apart) else averages_apart(case)


def _uses_input_often(layer: Layer) -> bool:
    """Return whether the gradient of a layer's input may have several parts."""
    inside = children(layer)
    if isinstance(layer, Residual) or not inside:
        return not (isinstance(layer, _USE_ONCE) or (isinstance(layer, Norm) and layer.kind != "rms"))
    return _uses_input_often(inside[0])


_USE_ONCE = (Linear, Conv, Embedding, Attention, Tied)


def _shares_input(name: str, layers: Mapping[str, Layer], first: Mapping[str, str]) -> bool:
    """Return whether a residual layer around a layer uses the layer's input, too."""
    around = name.rpartition(".")[0]
    if not around or first[around] != name:
        return False
    return isinstance(layers[around], Residual) or _shares_input(around, layers, first)


STACK = Stack(
    "replicate_fsdp",
    on_replicate_fsdp,
    options=ReplicateFsdpOptions,
    layers=("ignored",),
    check=_check,
    casts=_casts,
    output_dtype=_output_dtype,
    promises=_promises,
    alone=_alone,
    limits=LIMITS,
    features=dict.fromkeys(CASTS, "mixed_precision"),
    draw=draw,
    compilable=True,
    flat=(NONE, {"mesh": "2x2"}),
    resuming=RESUMING,
)
