"""The ``dynamo`` stack: another stack's module under ``torch.compile``, with a count of its graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import _functorch as functorch
from torch import nn
from torch._dynamo import compiled_autograd, trace_rules
from torch._dynamo import distributed as compile_groups
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.autograd import Variable
from torch.distributed._composable.checkpoint_activation import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn import attention

from harness.oracles.baseline import Tensors, plain_gradients, plain_parameters
from harness.specs.program import Compile, Hooked
from harness.stacks import replicate
from harness.stacks.drawing import Drawing
from harness.stacks.limit import Case, Limit, defect
from harness.stacks.stack import Stack
from harness.stacks.training import Party
from harness.worlds.rank import Rank

__all__ = [
    "AT_LIMIT",
    "BUCKET_MODES",
    "COMPILES_MESSAGES",
    "INTERNAL",
    "JOINED_SUMS",
    "ON_ONE_RANK",
    "REFUSED",
    "REFUSES_BREAKS",
    "STACK",
    "Explained",
    "GraphCounter",
    "agreeing",
    "apply",
    "at_end_of_backward",
    "attention_backends",
    "breaks_refused",
    "budget",
    "cache_counts",
    "cached_as",
    "caches_of_graphs_alone",
    "checkpointed",
    "checkpointed_in_place",
    "compiled",
    "compiled_backward",
    "compiled_messages",
    "compiler_collectives",
    "data_in_graphs",
    "ddp_mode",
    "explained",
    "gradients",
    "graph_break",
    "inductor_options",
    "inflight_inputs",
    "marked",
    "on_one_rank",
    "parameters",
    "parts",
    "python_reducer",
    "read",
    "recorded_regions",
    "settings",
    "without_functions",
    "without_subclasses",
]

Compiled = Callable[..., Any]

BUCKET_MODES = "torch._inductor.config.bucket_all_gathers_bucket_mode"
"""The name in PyTorch without which Inductor can't put every kind of collective into buckets, for ``needs(torch=)``."""

JOINED_SUMS = "torch._inductor.config.dedup_reduce_scatters"
"""The name in PyTorch without which Inductor can't join reduce-scatters that are added, for ``needs(torch=)``."""

REFUSES_BREAKS = "torch._dynamo.error_on_graph_break"
"""The name in PyTorch of :data:`breaks_refused`, for ``@pytest.mark.needs(torch=)``."""

COMPILES_MESSAGES = "torch._dynamo.config.enable_p2p_compilation"
"""The name in PyTorch without which isend and irecv can't be in graphs, for ``@pytest.mark.needs(torch=)``."""

_OF_ONE_RANK = torch.compiler.config if hasattr(torch.compiler.config, "compile_on_one_rank") else dist.config
ON_ONE_RANK = f"{_OF_ONE_RANK.__name__}.compile_on_one_rank"
"""The name in PyTorch of the setting of :func:`on_one_rank`, for ``@pytest.mark.needs(torch=)``. It moved in 2.15."""

_FUSED = ("_fuse_ddp_communication", "_fuse_ddp_bucket_size")
"""Settings of Inductor that a DDP module with the reducer in Python changes."""

INTERNAL = torch._dynamo.exc.InternalTorchDynamoError
"""The exception that is raised for a mistake of Dynamo's own."""

AT_LIMIT = torch._dynamo.exc.FailOnRecompileLimitHit
"""The exception that is raised for one more recompilation than the limit allows, if that is an error."""

REFUSED = torch._dynamo.exc.Unsupported
"""The exception that is raised if one graph is required, but something can't be part of it."""

without_subclasses: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses of tensors do not override functions."""

breaks_refused: Any = getattr(torch._dynamo, "error_on_graph_break", None)
"""A context or decorator in which graph breaks raise an error, or are allowed again; None where PyTorch has it not."""

without_functions: Any = torch._C.DisableTorchFunction
"""A context in which neither subclasses of tensors nor modes override functions."""


def recorded_regions() -> AbstractContextManager[Any]:
    """Return a context in which compiled code has the regions of ``record_function``."""
    context: AbstractContextManager[Any] = torch._dynamo.config.patch(capture_profiler_record_function=True)
    return context


def settings(**values: Any) -> AbstractContextManager[Any]:
    """Return a context with other values of settings of Dynamo, as ``recompile_limit=2``."""
    context: AbstractContextManager[Any] = torch._dynamo.config.patch(**values)
    return context


def on_one_rank() -> AbstractContextManager[Any]:
    """Return a context in which graphs are made so that every rank could run them."""
    context: AbstractContextManager[Any] = _OF_ONE_RANK.patch(compile_on_one_rank=True)
    return context


@contextmanager
def agreeing() -> Iterator[None]:
    """Turn on guard collectives: no rank uses compiled code again unless all ranks do."""
    before = torch.compiler.set_enable_guard_collectives(True)
    try:
        yield
    finally:
        torch.compiler.set_enable_guard_collectives(before)
        _destroy("_GUARD_PG")


@contextmanager
def compiler_collectives() -> Iterator[None]:
    """Let ranks tell each other the sizes of their inputs while they compile."""
    with torch._dynamo.config.patch(enable_compiler_collectives=True):
        try:
            yield
        finally:
            _destroy("_COMPILE_PG")


def _destroy(name: str) -> None:
    """Destroy a group that Dynamo has made for itself and would keep."""
    if (group := getattr(compile_groups, name)) is not None:
        dist.destroy_process_group(group)
        setattr(compile_groups, name, None)


def budget(share: float) -> AbstractContextManager[Any]:
    """Return a context in which backwards may keep a share of the forwards' memory: 1 for all, 0 for only inputs."""
    context: AbstractContextManager[Any] = functorch.config.patch(activation_memory_budget=share)
    return context


def cached_as(tag: str) -> AbstractContextManager[Any]:
    """Return a context in which compiled code on disk is found only if it was saved under the same tag."""
    context: AbstractContextManager[Any] = torch.compiler.config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
    return context


def caches_of_graphs_alone() -> AbstractContextManager[Any]:
    """Return a context in which Inductor's graphs are found on disk, but not what AOTAutograd makes around them."""
    context: AbstractContextManager[Any] = functorch.config.patch(enable_autograd_cache=False)
    return context


def cache_counts() -> dict[str, int]:
    """Return how often graphs were a ``hit`` or ``miss`` in the cache on disk, ``saved`` there, or a ``bypass``."""
    return {what: counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss", "saved", "bypass")}


def compiled_messages(on: bool = True) -> AbstractContextManager[Any]:
    """Return a context in which isend and irecv become part of graphs; ``on`` = False: in which they do not."""
    context: AbstractContextManager[Any] = torch._dynamo.config.patch(enable_p2p_compilation=on)
    return context


def data_in_graphs() -> AbstractContextManager[Any]:
    """Return a context in which graphs have numbers that are read from tensors, and sizes that depend on data."""
    context: AbstractContextManager[Any] = torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    )
    return context


def recurrent_in_graphs() -> AbstractContextManager[Any]:
    """Return a context in which graphs have LSTM, GRU and RNN."""
    context: AbstractContextManager[Any] = torch._dynamo.config.patch(allow_rnn=True)
    return context


def read(tensor: torch.Tensor, least: int, most: int) -> Any:
    """Return the whole number that a tensor has, and let the compiler know that it is from ``least`` to ``most``."""
    number, check = tensor.item(), cast(Any, torch._check)
    check(number >= least)
    check(number <= most)
    return number


@contextmanager
def ddp_mode(mode: bool | str) -> Iterator[None]:
    """Give ``torch._dynamo.config.optimize_ddp`` a value in a context.

    A DDP module with the reducer in Python lets Dynamo trace DDP's own code and Inductor fuse all-reduces, for as long
    as the process runs, and static graphs of other modules fail then. Both are undone.
    """
    traced = set(trace_rules.LEGACY_MOD_INLINELIST)
    fused = {name: getattr(torch._inductor.config, name) for name in _FUSED}
    try:
        with torch._dynamo.config.patch(optimize_ddp=mode), torch._inductor.config.patch(fused):
            yield
    finally:
        trace_rules.LEGACY_MOD_INLINELIST.intersection_update(traced)
        trace_rules.get_legacy_mod_inlinelist.cache_clear()


def python_reducer() -> AbstractContextManager[Any]:
    """Return a context in which DDP is made with the reducer in Python, which can be compiled."""
    return ddp_mode("python_reducer")


def inductor_options(options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return a context in which Inductor has these options, by their names in ``torch._inductor.config``."""
    context: AbstractContextManager[Any] = torch._inductor.config.patch(dict(options))
    return context


def inflight_inputs(*value: bool) -> AbstractContextManager[Any]:
    """Return a context in which compiled code can wait for an asynchronous collective launched before it."""
    return functional.allow_inflight_collective_as_graph_input_ctx(*value)


def compiled_backward(backend: Any, **options: Any) -> AbstractContextManager[Any]:
    """Return a context in which backwards are compiled, including hooks. ``backend`` is a name or a function."""
    context: AbstractContextManager[Any] = compiled_autograd._enable(torch.compile(backend=backend, **options))
    return context


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have a function called at the end of the backward that is under way."""
    Variable._execution_engine.queue_callback(callback)


def compiled(
    function: Compiled, *, backend: str = "aot_eager", fullgraph: bool = True, **options: Any
) -> tuple[Compiled, GraphCounter]:
    """Compile a function or a module as if for the first time, and return it with the counter of its graphs."""
    torch.compiler.reset()
    counter = GraphCounter(backend)
    return torch.compile(function, backend=counter, fullgraph=fullgraph, **options), counter


def marked(how: str, tensor: Any, dims: int | Sequence[int], **options: Any) -> Any:
    """Mark dimensions of a tensor as ``dynamic``, ``maybe-dynamic``, ``static`` or ``unbacked``, and return it."""
    marks: dict[str, Callable[..., None]] = {
        "dynamic": torch._dynamo.mark_dynamic,
        "maybe-dynamic": torch._dynamo.maybe_mark_dynamic,
        "static": torch._dynamo.mark_static,
        "unbacked": torch._dynamo.decorators.mark_unbacked,
    }
    marks[how](tensor, dims, **options)
    return tensor


@dataclass(frozen=True)
class Explained:
    """What ``torch._dynamo.explain`` says of a function."""

    graphs: int
    breaks: int
    reasons: tuple[str, ...]
    """The first line of the reason of each break."""


def explained(function: Compiled, *arguments: Any) -> Explained:
    """Explain the graphs of a function, which is called once with these arguments."""
    torch.compiler.reset()
    told = torch._dynamo.explain(function)(*arguments)
    reasons = tuple(str(each.reason).splitlines()[0] for each in told.break_reasons)
    assert len(told.graphs) == told.graph_count
    return Explained(told.graph_count, told.graph_break_count, reasons)


def checkpointed(module: nn.Module, *, reentrant: bool = False, **options: Any) -> nn.Module:
    """Wrap a module by ``checkpoint_wrapper``: its backward computes its forward again."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrapped: nn.Module = checkpoint_wrapper(module, checkpoint_impl=kind, **options)
    return wrapped


def offloaded(module: nn.Module) -> nn.Module:
    """Wrap a module by ``offload_wrapper``: its activations wait for the backward on the host."""
    return offload_wrapper(module)


def apply_checkpointing(model: nn.Module, wrapper: Callable[[nn.Module], nn.Module] | None = None, **how: Any) -> None:
    """Wrap modules of a model by ``apply_activation_checkpointing``, each by a wrapper (that of ``checkpointed``)."""
    options: dict[str, Any] = how if wrapper is None else how | {"checkpoint_wrapper_fn": wrapper}
    apply_activation_checkpointing(model, **options)


def checkpointed_in_place(module: nn.Module, **options: Any) -> nn.Module:
    """Have a module's backward compute its forward again by hooks, and return the module."""
    found: nn.Module = composable_checkpoint(module, **options)
    return found


def attention_backends() -> list[str]:
    """Return the names of the backends of attention that are enabled, in the order in which they are tried."""
    return [backend.name for backend in attention._cur_sdpa_kernel_backends(with_priority=True)]


def graph_break() -> None:
    """Break the graph."""
    torch._dynamo.graph_break()


class GraphCounter:
    """A compiler backend that counts the graphs that it is given, and passes them to another backend.

    Without a count, a test of compiled code would also pass if nothing was compiled.
    """

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs = 0
        self._backend = lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Compiled:
        self.graphs += 1
        return self._backend(graph, inputs, **options)


def apply(module: nn.Module, rank: Rank, *, backend: Any = "aot_eager", **options: Any) -> nn.Module:
    """Replicate a module over the world and compile it; ``options`` go to ``torch.compile``."""
    compiled: nn.Module = torch.compile(replicate.apply(module, rank), backend=backend, **options)  # type: ignore[assignment]
    return compiled


def parts(size: int) -> list[int]:
    """Return each rank's part of the batch: every rank has its own."""
    return list(range(size))


def gradients(module: nn.Module) -> Tensors:
    """Return gradients by the plain module's parameter names."""
    return _plain(plain_gradients(module))


def parameters(module: nn.Module) -> Tensors:
    """Return parameters by the plain module's names."""
    return _plain(plain_parameters(module))


def _plain(tensors: Tensors) -> Tensors:
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.items()}


# for programs


def on_dynamo(party: Party, model: nn.Module, wrapped: Sequence[str]) -> nn.Module:
    """Raise NotImplementedError: no model is on this stack alone, and its layouts name the stack under it."""
    raise NotImplementedError


def _hooked(case: Case, *kinds: str) -> bool:
    """Return whether a layer has a hook of one of some kinds."""
    return any(isinstance(n.layer, Hooked) and n.layer.kind in kinds for n in case.named)


def _in_one_graph(case: Case) -> bool:
    return case.layout.compiled is not None and case.layout.compiled.fullgraph


LIMITS: tuple[Limit, ...] = (
    defect(
        "compiled_backward_hooks",
        "Nothing is compiled of a model of which one module has a backward hook.",
        lambda case: case.compiled and _hooked(case, "backward"),
    ),
    defect(
        "compiled_dynamic",
        "Compiling FSDP1 over a tensor-parallel layer with dynamic=True is an endless recursion.",
        lambda case: bool(case.layout.plan) and case.layout.compiled is not None and case.layout.compiled.dynamic,
    ),
    Limit(
        "Hooks of layers that are wrapped on their own break the graph.",
        lambda case: bool(case.layout.wrapped) and _in_one_graph(case),
    ),
    Limit("Hooks of saved tensors break the graph.", lambda case: _in_one_graph(case) and _hooked(case, "saved")),
    Limit(
        "Dynamo takes no hook of autograd that counts its calls.",
        lambda case: case.compiled and _hooked(case, "tensor", "node"),
    ),
    Limit(
        "An exception becomes another one if it leaves a whole graph, and nothing may be compiled after it.",
        lambda case: case.compiled and case.abandons("layer"),
    ),
)


def draw_over(d: Drawing, how: Compile) -> None:
    """Compile a layout that was drawn, with what fits of the settings in ``how``."""
    for changed in (
        how,
        msgspec.structs.replace(how, dynamic=False),
        msgspec.structs.replace(how, fullgraph=False),
        msgspec.structs.replace(how, dynamic=False, fullgraph=False),
    ):
        if d.fits(case := d.with_layout(compiled=changed)):
            break
    d.become(case)
    options = (*d.case.layout.options, ("inner", d.case.layout.stack))
    d.become(d.with_layout(stack="dynamo", options=options))


STACK = Stack("dynamo", on_dynamo, limits=LIMITS, over=draw_over)
