"""The collectives in the graph of a backward, with and without compiled autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.tracing import Tracer

GATHERED = "_c10d_functional.all_gather_into_tensor.default(2, 0) -> float32[4]"
SCATTERED = "_c10d_functional.reduce_scatter_tensor.default(sum, 2, 0) -> float32[2]"
EXCHANGED = "_c10d_functional.all_to_all_single.default(0) -> float32[2]"


@dataclass(frozen=True)
class Backward:
    """A function of two elements and a mesh, and the collectives that its backward launches."""

    code: Callable[[torch.Tensor, Any], torch.Tensor]
    collectives: tuple[str, ...] = ()


def local(x: torch.Tensor, mesh: Any, placement: Any) -> DTensor:
    """Create a DTensor from each rank's local tensor."""
    return DTensor.from_local(x, mesh, [placement])


BACKWARDS = {
    "a gather": Backward(lambda x, m: functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD) * 3, (SCATTERED,)),
    "a scatter": Backward(
        lambda x, m: functional.reduce_scatter_tensor_autograd(torch.cat([x, x]), "sum", 0, dist.group.WORLD) * 3,
        (GATHERED,),
    ),
    "an exchange": Backward(
        lambda x, m: functional.all_to_all_single_autograd(x, [1, 1], [1, 1], dist.group.WORLD) * 3, (EXCHANGED,)
    ),
    "shards made whole, with partial gradients": Backward(
        lambda x, m: (
            local(x, m, Shard(0)).redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) * 3
        ),
        (SCATTERED,),
    ),
    "partial sums made whole": Backward(
        lambda x, m: local(x, m, Partial()).redistribute(placements=[Replicate()]).to_local() * 3
    ),
    "a full tensor": Backward(lambda x, m: local(x, m, Shard(0)).full_tensor() * 3),
}


@requirement(
    "DYN-TRACE-03",
    "Compiled autograd captures the backward of a distributed construct in one graph for all steps.",
    source="torch._dynamo.compiled_autograd; torch/distributed/_functional_collectives.py: autograd formulas",
)
@requirement(
    "DYN-TRACE-04",
    "The backward graph of a distributed construct has exactly the collectives of its autograd formula, on every rank.",
    source="torch._dynamo.compiled_autograd; torch/distributed/_functional_collectives.py: autograd formulas",
)
@requirement(
    "DYN-TRACE-05",
    "Gradients through a compiled distributed construct equal those of uncompiled code, with or without compiled "
    "autograd.",
    source="torch._dynamo.compiled_autograd; torch/distributed/_functional_collectives.py: autograd formulas",
)
@pytest.mark.parametrize("captured", [True, False], ids=["compiled-autograd", "aot-autograd"])
@pytest.mark.parametrize("name", BACKWARDS)
@pytest.mark.world(2, timeout=180)
@pytest.mark.each_choice
def test_backward(world: World, name: str, captured: bool) -> None:
    """Run two steps, whose values differ by step, rank and element."""

    def body(rank: Rank) -> list[str]:
        backward, mesh = BACKWARDS[name], rank.mesh(2)
        torch.compiler.reset()
        forward, further = Tracer("aot_eager"), Tracer("aot_eager")
        compiled: Any = torch.compile(backward.code, backend=forward)
        for step in range(2):
            x = dyadic(2, key=(rank.index, step), dtype=torch.float32).to(rank.device).requires_grad_()
            backward.code(x, mesh).square().sum().backward()
            right, x.grad = x.grad, None
            if captured:
                with dynamo.compiled_backward(further):
                    compiled(x, mesh).square().sum().backward()
            else:
                compiled(x, mesh).square().sum().backward()
            assert right is not None
            assert x.grad is not None
            assert_same(right, x.grad, f"gradient of step {step}")
        assert len(forward.graphs) == 1
        assert len(further.graphs) == (1 if captured else 0)
        seen = [c for graph in (further.graphs if captured else forward.backwards) for c in graph.collectives()]
        assert tuple(seen) == backward.collectives
        return [graph.fingerprint() for graph in [*forward.graphs, *forward.backwards, *further.graphs]]

    one, other = world.run(body)
    assert one == other
