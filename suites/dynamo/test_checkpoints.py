"""Collectives in regions of compiled code whose activations are checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks.collectives import functional
from harness.stacks.tracing import Tracer

CHOICES: dict[str, tuple[CheckpointPolicy | None, int]] = {
    "must save": (CheckpointPolicy.MUST_SAVE, 0),
    "prefer to save": (CheckpointPolicy.PREFER_SAVE, 0),
    "must recompute": (CheckpointPolicy.MUST_RECOMPUTE, 1),
    "prefer to recompute": (CheckpointPolicy.PREFER_RECOMPUTE, 1),
    "no policy": (None, 1),
}
"""What a policy says about collectives, and how many of one collective the backward launches."""

COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD),
    "all_gather": lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD)[:4],
}


def is_collective(op: Any) -> bool:
    """Return whether an operator is a functional collective or the wait for one."""
    return str(op).startswith(("_c10d_functional.", "c10d_functional."))


def choose(policy: CheckpointPolicy, context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Apply a policy to collectives; compute everything else again."""
    return policy if is_collective(op) else CheckpointPolicy.PREFER_RECOMPUTE


@requirement(
    "DYN-CKPT-01",
    "The backward of a compiled checkpointed region computes a collective again exactly if its policy says so.",
    source="torch.utils.checkpoint: create_selective_checkpoint_contexts; torch/_functorch/partitioners.py",
)
@requirement(
    "DYN-CKPT-02",
    "A compiled checkpointed region with collectives has the gradients of the same code without checkpoints, "
    "with every policy.",
    source="torch.utils.checkpoint: create_selective_checkpoint_contexts; torch/_functorch/partitioners.py",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(2)
def test_policies(world: World, collective: str) -> None:
    """Use each policy for the collective in a region whose backward needs its result."""

    def body(rank: Rank) -> None:
        def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = COLLECTIVES[collective]((x * w).detach())
            return y * w * y

        def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return region(x, w).sum()

        def gradient(function: Any) -> torch.Tensor:
            x = dyadic(4, key=rank.index, dtype=torch.float32).to(rank.device)
            w = dyadic(4, key=("w", rank.index), dtype=torch.float32).to(rank.device).requires_grad_()
            function(x, w).backward()
            assert w.grad is not None
            return w.grad

        right = gradient(plain)
        for name, (policy, count) in CHOICES.items():
            options: dict[str, Any] = {}
            if policy is not None:
                options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(choose, policy))

            def checkpointed(x: torch.Tensor, w: torch.Tensor, options: dict[str, Any] = options) -> torch.Tensor:
                result: torch.Tensor = checkpoint(region, x, w, use_reentrant=False, **options)
                return result.sum()

            torch.compiler.reset()
            tracer = Tracer("aot_eager")
            found = gradient(torch.compile(checkpointed, backend=tracer, fullgraph=True))
            assert_same(right, found, name)
            assert [len(g.collectives()) for g in (*tracer.forwards, *tracer.backwards)] == [1, count], name

    world.run(body)
