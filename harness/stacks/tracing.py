"""Record what torch.compile makes of a function: its graphs, both forward and backward, and its guards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed.device_mesh as device_mesh
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from harness.oracles.tracing import Graph, Guard, Operator, Trace

__all__ = ["MESHES_ARE_OPAQUE", "OPAQUE", "Tracer", "attributes", "guards", "traced"]

MESHES_ARE_OPAQUE = hasattr(device_mesh, "_register_distributed_opaque_types")
"""Whether groups and meshes are opaque objects to Dynamo, which they are not in PyTorch 2.11.

Of an opaque object, Dynamo guards what the code reads, such as a group's name. Before, it guarded the identity of a
group, and compared meshes as a whole.
"""

_OF_TYPE = "FAKE_SCRIPT_TYPE_MATCH" if hasattr(GuardBuilder, "FAKE_SCRIPT_TYPE_MATCH") else "TYPE_MATCH"
OPAQUE = _OF_TYPE if MESHES_ARE_OPAQUE else "ID_MATCH"
"""The guard that this version of torch puts on groups and meshes, which it does not look into."""

_ATTRIBUTE = re.compile(r"object\.__getattribute__\(([^()]*), '(\w+)'\)")


class Tracer:
    """A compiler backend that records the graphs that it is given, and passes them to another backend.

    With ``aot_eager`` it also records what AOTAutograd makes of them. With ``inductor passes`` it records what
    Inductor's passes make of those, and runs that without generating code.
    """

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs: list[Graph] = []
        """The graphs from Dynamo."""
        self.forwards: list[Graph] = []
        """The forward graphs from AOTAutograd, with ``aot_eager``."""
        self.backwards: list[Graph] = []
        if backend == "inductor passes":
            from torch._inductor.decomposition import select_decomp_table  # takes seconds, and ranks have it

            self._backend: Callable[..., Any] = aot_autograd(
                fw_compiler=self._passed_forward,
                bw_compiler=self._passed_backward,
                inference_compiler=self._passed_inference,
                partition_fn=min_cut_rematerialization_partition,
                decompositions=select_decomp_table(),
                keep_inference_input_mutations=True,
            )
            return
        self._backend = lookup_backend(backend)
        if backend == "aot_eager":
            self._backend = aot_autograd(
                fw_compiler=self._forward,
                bw_compiler=_as_it_is,
                partition_fn=self._parted,
                keep_inference_input_mutations=True,
            )

    def __call__(self, module: GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        self.graphs.append(graph(module))
        compiled: Callable[..., Any] = self._backend(module, inputs, **options)
        return compiled

    def _forward(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        self.forwards.append(graph(module))
        return _as_it_is(module, inputs)

    def _parted(self, joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        """Partition a joint graph and record the backward, which is not compiled before the first backward runs."""
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        self.backwards.append(graph(backward))
        return forward, backward

    def _passed_inference(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        return _passed(module, inputs, self.forwards, inference=True)

    def _passed_forward(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        return _passed(module, inputs, self.forwards)

    def _passed_backward(self, module: GraphModule, inputs: Any) -> Callable[..., Any]:
        return _passed(module, inputs, self.backwards)

    def launched(self) -> list[str]:
        """Return the collectives that all graphs launch: forwards, then backwards, in the order of creation."""
        return [c for graph in self.forwards + self.backwards for c in graph.collectives()]


def traced(
    function: FunctionType,
    calls: Iterable[tuple[Any, ...]],
    *,
    backend: str = "eager",
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> tuple[list[Any], Trace]:
    """Compile a function and call it with each of these arguments. Returns the results and the trace."""
    torch.compiler.reset()
    counters["graph_break"].clear()
    tracer, reasons = Tracer(backend), list[str]()
    compiled = torch._dynamo.optimize(
        tracer, nopython=fullgraph, dynamic=dynamic, guard_fail_fn=lambda failure: reasons.append(failure.reason)
    )(function)
    results = [compiled(*arguments) for arguments in calls]
    breaks = tuple(_first_line(reason) for reason, times in counters["graph_break"].items() for _ in range(times))
    return results, Trace(tuple(tracer.graphs), tuple(guards(function)), tuple(map(_first_line, reasons)), breaks)


def _first_line(text: str) -> str:
    """Return the first line of a text, without the place in the code, which no contract depends on."""
    return attributes(re.split(r"\s+# |\n", text.strip())[0])


def attributes(text: str) -> str:
    """Return a text in which every attribute is read with a dot, as all versions but PyTorch 2.12 read it."""
    while (read := _ATTRIBUTE.sub(r"\1.\2", text)) != text:
        text = read
    return text


def guards(function: FunctionType) -> list[Guard]:
    """Return the guards of a function's compiled code, as they are installed and not as they were requested."""
    installed, sources = [], dict[int, str]()
    for entry in _debug_get_cache_entry_list(function.__code__):
        for line in str(entry.guard_manager).splitlines():
            match = re.fullmatch(r"([| ]*)\+- (\w+)(?:: (.*))?", line)
            if match is None:
                continue
            depth, kind, text = len(match[1]), match[2], match[3] or ""
            sources = {d: known for d, known in sources.items() if d < depth}  # only those of its ancestors
            if source := re.search(r"source=(.*?), (?:accessed_by|type)=", text):
                sources[depth] = attributes(source[1])
            elif kind.isupper():
                installed.append(Guard(sources[max(sources)] if sources else "", kind, _first_line(text)))
    return installed


def _as_it_is(module: GraphModule, inputs: Any) -> Callable[..., Any]:
    def run(inputs: list[Any]) -> Any:
        return module.forward(*inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _passed(module: GraphModule, inputs: Any, graphs: list[Graph], *, inference: bool = False) -> Callable[..., Any]:
    """Apply the passes with which Inductor changes a graph before it generates code."""
    from torch._inductor.compile_fx import fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(module)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        mode = fake_tensor_prop(module, inputs)
    with V.set_fake_mode(mode):
        post_grad_passes(module, inference)
    graphs.append(graph(module))
    return _as_it_is(module, inputs)


def graph(module: GraphModule) -> Graph:
    """Return a graph of torch.fx as plain data."""
    return Graph(tuple(_operator(node) for node in module.graph.nodes if node.op.startswith("call_")))


def _operator(node: Node) -> Operator:
    node = _ordered(node)
    target = node.target
    name = str(target) if isinstance(target, str | torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    value = node.meta.get("example_value", node.meta.get("val"))
    constants = tuple(str(a) for a in node.args if not isinstance(a, Node | list | tuple))
    return Operator(name, constants, _shape(value))


def _ordered(node: Node) -> Node:
    """Return the call itself of a node that Inductor has tied to a place after other nodes."""
    if getattr(node.target, "__name__", "") != "control_deps":
        return node
    module, name = node.graph.owning_module, node.args[1]
    assert module is not None and isinstance(name, Node)
    (call,) = (n for n in getattr(module, str(name.target)).graph.nodes if n.op == "call_function")
    return cast(Node, call)


def _shape(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_shape, value))})"
    return f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
