"""What torch.compile makes of a function: its graphs, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from harness.oracles.tracing import Graph, Operator

__all__ = ["Tracer"]


class Tracer:
    """A compiler backend that keeps what it is given, and hands it to another one.

    Under ``aot_eager`` it keeps what AOTAutograd makes of it as well.
    """

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs: list[Graph] = []
        """What Dynamo made."""
        self.forwards: list[Graph] = []
        """What AOTAutograd made of the forward, with ``aot_eager``."""
        self.backwards: list[Graph] = []
        self._backend: Callable[..., Any] = lookup_backend(backend)
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
        """Backwards are kept here, since they are compiled no earlier than the first of them runs."""
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        self.backwards.append(graph(backward))
        return forward, backward

    def launched(self) -> list[str]:
        """Which collectives every graph launches, forwards and backwards in the order of their making."""
        return [c for graph in self.forwards + self.backwards for c in graph.collectives()]


def _as_it_is(module: GraphModule, inputs: Any) -> Callable[..., Any]:
    def run(inputs: list[Any]) -> Any:
        return module.forward(*inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def graph(module: GraphModule) -> Graph:
    """A graph of torch.fx as plain data."""
    return Graph(tuple(_operator(node) for node in module.graph.nodes if node.op.startswith("call_")))


def _operator(node: Node) -> Operator:
    target = node.target
    name = str(target) if isinstance(target, str | torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    value = node.meta.get("example_value", node.meta.get("val"))
    constants = tuple(str(a) for a in node.args if not isinstance(a, Node | list | tuple))
    return Operator(name, constants, _shape(value))


def _shape(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_shape, value))})"
    return f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
