"""Mutants: modules of torch with one edit, which are put into a rank without a change to any file.

An edit (:mod:`harness.audit.sites`) is inside the body of a function.  The module's syntax tree is edited and compiled,
and the live function gets the new code (``function.__code__``), so the edit takes effect under every name that refers
to the function.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib
import marshal
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.audit.sites import edited, file, sites_of
from harness.faults import keep_apart

SOURCES: dict[str, tuple[str, ...]] = {
    "replicate": ("torch.distributed._composable.replicate", "torch.nn.parallel.distributed"),
    "replicate_fsdp": (
        "torch.distributed._composable.replicate_with_fsdp",
        "torch.distributed.fsdp._fully_shard._fsdp_api",
        "torch.distributed.fsdp._fully_shard._fsdp_collectives",
        "torch.distributed.fsdp._fully_shard._fsdp_common",
        "torch.distributed.fsdp._fully_shard._fsdp_init",
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "torch.distributed.fsdp._fully_shard._fully_shard",
    ),
    "tp_extension": (
        "torch.distributed.tensor.parallel.fsdp",
        "torch.distributed.tensor.parallel._data_parallel_utils",
        "torch.distributed.fsdp._fsdp_extensions",
    ),
    "dynamo": ("torch._dynamo.variables.distributed",),
    "collectives": ("torch.distributed._functional_collectives", "torch.distributed.nn.functional"),
}
"""The modules of each component that are mutated; the first is the source under test."""
_DTENSOR, _FSDP, _CHECKPOINT = "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"
_AOT, _INDUCTOR = "torch._functorch._aot_autograd", "torch._inductor"
FOUNDATIONS: dict[str, tuple[str, ...]] = {
    "replicate": (
        "torch.distributed._composable.contract",
        "torch.distributed._composable_state",
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
        "torch.distributed.algorithms.join",
        "torch.distributed.optim.zero_redundancy_optimizer",
        "torch.distributed.utils",
    ),
    "replicate_fsdp": (
        "torch.distributed._composable.checkpoint_activation",
        "torch.distributed._state_dict_utils",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        f"{_CHECKPOINT}.default_planner",
        f"{_CHECKPOINT}.filesystem",
        f"{_CHECKPOINT}.optimizer",
        f"{_CHECKPOINT}.planner_helpers",
        f"{_CHECKPOINT}.resharding",
        f"{_CHECKPOINT}.state_dict",
        f"{_CHECKPOINT}.state_dict_loader",
        f"{_CHECKPOINT}.state_dict_saver",
        f"{_CHECKPOINT}.utils",
    ),
    "tp_extension": (
        f"{_DTENSOR}._api",
        f"{_DTENSOR}._collective_utils",
        f"{_DTENSOR}._dispatch",
        f"{_DTENSOR}._dtensor_spec",
        f"{_DTENSOR}._op_schema",
        f"{_DTENSOR}._ops._common_rules",
        f"{_DTENSOR}._ops._conv_ops",
        f"{_DTENSOR}._ops._einsum_strategy",
        f"{_DTENSOR}._ops._embedding_ops",
        f"{_DTENSOR}._ops._math_ops",
        f"{_DTENSOR}._ops._matrix_ops",
        f"{_DTENSOR}._ops._pointwise_ops",
        f"{_DTENSOR}._ops._random_ops",
        f"{_DTENSOR}._ops._tensor_ops",
        f"{_DTENSOR}._ops._view_ops",
        f"{_DTENSOR}._ops.utils",
        f"{_DTENSOR}._random",
        f"{_DTENSOR}._redistribute",
        f"{_DTENSOR}._sharding_prop",
        f"{_DTENSOR}._tp_conv",
        f"{_DTENSOR}._utils",
        f"{_DTENSOR}.experimental._func_map",
        f"{_DTENSOR}.parallel.api",
        f"{_DTENSOR}.parallel.input_reshard",
        f"{_DTENSOR}.parallel.loss",
        f"{_DTENSOR}.parallel.style",
        f"{_DTENSOR}.placement_types",
        f"{_FSDP}._common_utils",
        f"{_FSDP}._flat_param",
        f"{_FSDP}._init_utils",
        f"{_FSDP}._optim_utils",
        f"{_FSDP}._runtime_utils",
        f"{_FSDP}._shard_utils",
        f"{_FSDP}._state_dict_utils",
        f"{_FSDP}._traversal_utils",
        f"{_FSDP}._unshard_param_utils",
        f"{_FSDP}._wrap_utils",
        f"{_FSDP}.fully_sharded_data_parallel",
        f"{_FSDP}.sharded_grad_scaler",
        f"{_FSDP}.wrap",
    ),
    "dynamo": (
        "torch._dynamo.backends.distributed",
        "torch._dynamo.compiled_autograd",
        "torch._dynamo.variables.script_object",
        f"{_AOT}.collect_metadata_analysis",
        f"{_AOT}.functional_utils",
        f"{_AOT}.runtime_wrappers",
        f"{_AOT}.subclass_parametrization",
        f"{_AOT}.subclass_utils",
        f"{_INDUCTOR}.comm_lowering",
        f"{_INDUCTOR}.comms",
        f"{_INDUCTOR}.fx_passes.bucketing",
        f"{_INDUCTOR}.fx_passes.control_dependencies",
        f"{_INDUCTOR}.fx_passes.ddp_fusion",
        f"{_INDUCTOR}.fx_passes.fsdp",
        f"{_INDUCTOR}.fx_passes.overlap_preserving_bucketer",
        f"{_INDUCTOR}.fx_passes.overlap_scheduling",
    ),
    "collectives": (
        "torch.distributed._mesh_layout",
        "torch.distributed.device_mesh",
        "torch.distributed.distributed_c10d",
        "torch.distributed.rendezvous",
    ),
}
"""The modules that these build on: of DTensor, FSDP1, checkpoints, process groups and compilers."""
LEVELS = ("source", "all", "wide")
"""Which modules to mutate: the source under test; all of :data:`SOURCES`; :data:`FOUNDATIONS`, too."""
REFERENCE: dict[str, tuple[str, ...]] = {
    "replicate": ("harness.reference.replicate", "harness.reference.containers"),
    "replicate_fsdp": ("harness.reference.replicate_fsdp",),
    "tp_extension": ("harness.reference.tp_extension",),
}
"""The same for the subject ``reference``."""


def sources(component: str, subject: str = "torch", level: str = "all") -> tuple[str, ...]:
    """Return the modules whose mutants belong to a component, the source under test first; empty if none are known.

    ``level``: one of :data:`LEVELS`.
    """
    by_subject = {"torch": SOURCES, "reference": REFERENCE}
    modules = by_subject.get(subject, {}).get(component, ())
    if level == "wide" and subject == "torch":
        return modules + FOUNDATIONS.get(component, ())
    return modules[:1] if level == "source" else modules


@dataclass(frozen=True)
class Mutant:
    """One edit of one function."""

    module: str
    function: str
    """Qualified name of the outermost function around the edit: ``Class.method``."""
    edit: str
    """The edit in words."""
    lines: tuple[int, int]
    """First and last line of the statement; for a compound statement, of its head."""
    number: int
    """Index among the edits of the module, from 0."""

    @property
    def name(self) -> str:
        """``module function: edit``: unique, readable, and independent of line numbers."""
        return f"{self.module} {self.function}: {self.edit}"

    @property
    def file(self) -> str:
        """The path of its module."""
        return file(self.module)

    def __str__(self) -> str:
        return self.name


def mutants(module: str) -> list[Mutant]:
    """Return every mutant of a module, in source order.  Errors: ModuleNotFoundError if there is no such module."""
    result = []
    names: dict[str, int] = {}
    for number, site in enumerate(sites_of(module)):
        names[site.key] = names.get(site.key, 0) + 1
        again = f" ({names[site.key]})" if names[site.key] > 1 else ""
        result.append(Mutant(module, site.function, site.edit + again, site.lines, number))
    return result


def prepared(mutant: Mutant) -> str:
    """Return the argument for :func:`put`, which is made once for all ranks."""
    site = sites_of(mutant.module)[mutant.number]
    return base64.b85encode(marshal.dumps((mutant.module, edited(mutant.module, site), site.default))).decode()


def put(prepared: str) -> None:
    """Apply an edit in this process.  ``prepared``: from :func:`prepared`.

    Errors: LookupError if the live function is not found; ValueError if it can't take the code.
    """
    module, code, default = marshal.loads(base64.b85decode(prepared))  # noqa: S302  our own, over inherited sockets
    functions = live(module, code)
    if not functions:
        raise LookupError(f"{module}: no live function {code.co_qualname} at line {code.co_firstlineno}")
    keep_apart()
    within = list(_changed_within(functions[0].__code__, code))
    for function in functions:
        function.__code__ = code
        if default is not None:
            _set_default(function, *default)
    everywhere = _everywhere() if within else []
    for before, after in within:
        for made in (f for f in everywhere if _same(f.__code__, before)):
            with contextlib.suppress(ValueError):  # the edit needs another variable of the outer function
                made.__code__ = after


def _changed_within(before: types.CodeType, after: types.CodeType) -> Iterator[tuple[types.CodeType, types.CodeType]]:
    """Yield the codes of inner functions that an edit changes, each before and after it.

    What a decorator has returned is such a function, made when the module was imported.
    """
    inner = [c for c in before.co_consts if isinstance(c, types.CodeType)]
    for changed in (c for c in after.co_consts if isinstance(c, types.CodeType)):
        for same in (c for c in inner if _same(c, changed) and c != changed):
            yield same, changed
            yield from _changed_within(same, changed)


def _set_default(function: types.FunctionType, parameter: str, value: Any) -> None:
    if parameter in (function.__kwdefaults__ or {}):
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), parameter: value}
        return
    code, defaults = function.__code__, list(function.__defaults__ or ())
    named = code.co_varnames[: code.co_argcount][-len(defaults) :]
    defaults[named.index(parameter)] = value
    function.__defaults__ = tuple(defaults)


def live(module: str, code: types.CodeType) -> list[types.FunctionType]:
    """Return the functions in this process that were compiled from the same lines, decorated or not."""
    member: Any = importlib.import_module(module)
    for part in code.co_qualname.split("."):
        member = vars(member).get(part) if hasattr(member, "__dict__") else None
        if member is None:
            break
    functions = [f for f in _behind(member) if _same(f.__code__, code)] if member is not None else []
    return functions or [f for f in _everywhere() if _same(f.__code__, code)]


def _everywhere() -> list[types.FunctionType]:
    """Return all functions in this process."""
    gc.unfreeze()  # otherwise gc.get_objects() leaves out what the server has frozen
    return [f for f in gc.get_objects() if type(f) is types.FunctionType]  # isinstance() would ask objects for a class


def _same(one: types.CodeType, other: types.CodeType) -> bool:
    return (one.co_filename, one.co_qualname, one.co_firstlineno) == (
        other.co_filename,
        other.co_qualname,
        other.co_firstlineno,
    )


def _behind(found: Any, depth: int = 6) -> Iterator[types.FunctionType]:
    """Yield a function, and the functions that its decorators wrap."""
    if depth == 0:
        return
    if isinstance(found, types.FunctionType):
        yield found
        for cell in found.__closure__ or ():
            try:
                yield from _behind(cell.cell_contents, depth - 1)
            except ValueError:  # an empty cell
                continue
    for name in ("__wrapped__", "__func__", "fget", "fset", "func"):
        inner = getattr(found, name, None)
        if inner is not None and not isinstance(found, type):
            yield from _behind(inner, depth - 1)
