"""What PyTorch offers to users of each stack: every public function, method and class, with its parameters.

It is computed from the installed PyTorch, so that what a new version adds is in it.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

Surface = Mapping[str, tuple[str, ...]]
"""Names of parameters by the dotted name of a function."""

_OF_A_BACKEND = re.compile("ProcessGroup.")


def surface(stack: str) -> Surface:
    """Return the parameters of every public function of a stack, by its dotted name.  ``stack``: as in ``STACKS``.

    A class stands for its constructor.  Functions of C++ have the parameters that their docstrings state.  Parameters
    whose name begins with an underscore are private.  The classes of backends, such as ProcessGroupNCCL, are left out:
    a build of PyTorch has only some of them, and no suite names a backend.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that are deprecated
        return dict(sorted((name, tuple(parameters)) for name, _, parameters in listing(stack)))


def listing(stack: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield every public function of a stack: its dotted name, the function, and the names of its parameters."""
    for prefix, module, chosen in _SOURCES[stack]():
        for name in _public(module):
            value = getattr(module, name, None)
            if callable(value) and chosen(name, value) and not _OF_A_BACKEND.match(name):
                yield from _of(f"{prefix}.{name}", value)
    if stack == "dynamo":
        yield from _of_dynamo()


def _public(module: ModuleType) -> list[str]:
    """Return the names that a module says are public, or else the public ones that it defines."""
    said = getattr(module, "__all__", None)
    if said:
        return sorted(said)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def _of(name: str, value: Any) -> Iterator[tuple[str, Any, list[str]]]:
    if not inspect.isclass(value):
        if (found := parameters(value)) is not None:
            yield name, value, found
        return
    if issubclass(value, (enum.Enum, BaseException)):
        return
    constructor = vars(value).get("__init__") or vars(value).get("__new__")
    yield name, value, (parameters(constructor, method=True) if constructor else None) or []
    for method, raw in sorted(vars(value).items()):
        function = getattr(raw, "__func__", raw)
        is_method = not method.startswith("_") and callable(getattr(value, method)) and not inspect.isclass(raw)
        if is_method and (found := parameters(function, method=not isinstance(raw, staticmethod))) is not None:
            yield f"{name}.{method}", function, found


def parameters(function: Callable[..., Any], *, method: bool = False) -> list[str] | None:
    """Return the names of a function's public parameters, or None if nothing states them.

    ``method``: the first one is the object or the class, and is left out.
    """
    try:
        names = list(inspect.signature(function).parameters)
    except (ValueError, TypeError):
        return stated(getattr(function, "__doc__", None) or "", getattr(function, "__name__", ""))
    return [name for name in names[method:] if not name.startswith("_")]


_NAME = re.compile(r"\s*\*{0,2}(\w+)\s*(?=[:=,)]|$)")


def stated(doc: str, name: str) -> list[str] | None:
    """Return the names of the parameters in the signatures with which pybind11 begins a docstring, or None."""
    found: dict[str, None] = {}
    every = re.findall(rf"^(?:\d+\. )?{re.escape(name)}\((.*)\)(?: ->.*)?$", doc, re.MULTILINE) if name else []
    signatures = [signature for signature in every if signature != "*args, **kwargs"] or every
    for signature in signatures:
        depth = start = 0
        for at, letter in enumerate(f"{signature},"):
            depth += (letter in "([{<") - (letter in ")]}>" and signature[at - 1] != "-")
            if letter == "," and depth <= 0:
                if (match := _NAME.match(signature[start:at])) and match[1] != "self":
                    found[match[1]] = None
                start = at + 1
    return list(found) if signatures else None


_Source = tuple[str, ModuleType, Callable[[str, Any], bool]]


def _any(name: str, value: Any) -> bool:
    return True


def _collectives() -> Iterator[_Source]:
    import torch.distributed as dist
    from torch.distributed import _functional_collectives, device_mesh, distributed_c10d
    from torch.distributed.nn import functional

    yield "torch.distributed", distributed_c10d, _any
    yield "torch.distributed", dist, lambda name, value: getattr(value, "__module__", "") == "torch.distributed"
    yield "torch.distributed.device_mesh", device_mesh, _any
    yield (
        "torch.distributed._functional_collectives",
        _functional_collectives,
        lambda name, value: not name.endswith(("_backward", "_setup_context")),
    )
    yield "torch.distributed.nn.functional", functional, _any


def _replicate() -> Iterator[_Source]:
    from torch.nn.parallel import distributed

    composable = importlib.import_module("torch.distributed._composable.replicate")
    yield composable.__name__, composable, _any
    yield "torch.nn.parallel", distributed, _any


def _is_fsdp2(name: str, value: Any) -> bool:
    return str(getattr(value, "__module__", "")) == "torch.distributed.fsdp"


def _replicate_fsdp() -> Iterator[_Source]:
    from torch.distributed import fsdp

    composable = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
    yield composable.__name__, composable, _any
    yield "torch.distributed.fsdp", fsdp, _is_fsdp2


def _tp_extension() -> Iterator[_Source]:
    from torch.distributed import fsdp, tensor
    from torch.distributed.tensor import parallel
    from torch.distributed.tensor.parallel import fsdp as extension

    yield "torch.distributed.tensor.parallel.fsdp", extension, _any
    yield "torch.distributed.tensor.parallel", parallel, _any
    yield "torch.distributed.tensor", tensor, _any
    yield "torch.distributed.fsdp", fsdp, lambda name, value: not _is_fsdp2(name, value)


def _dynamo() -> Iterator[_Source]:
    import torch.compiler

    yield "torch.compiler", torch.compiler, _any


_DISTRIBUTED_OPTION = re.compile(r"ddp|fsdp|collective|rank|distributed|p2p|recompile_limit|force_parameter_static")


def _of_dynamo() -> Iterator[tuple[str, Any, list[str]]]:
    import torch
    import torch._dynamo

    yield "torch.compile", torch.compile, parameters(torch.compile) or []
    options = torch._dynamo.config.get_config_copy()
    yield (
        "torch._dynamo.config",
        None,
        sorted(name for name in options if _DISTRIBUTED_OPTION.search(name) and not name.startswith("_")),
    )


_SOURCES: dict[str, Callable[[], Iterator[_Source]]] = {
    "collectives": _collectives,
    "replicate": _replicate,
    "replicate_fsdp": _replicate_fsdp,
    "tp_extension": _tp_extension,
    "dynamo": _dynamo,
}
STACKS = tuple(_SOURCES)
