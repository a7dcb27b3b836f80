"""Checkpointed modules that have forward hooks of their own, beside those that compute them again."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fixtures.managed import ways
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.dynamo import checkpointed, checkpointed_in_place


class Product(nn.Module):
    """Multiply by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def doubled(module: nn.Module) -> None:
    """Double the input before the forward."""
    module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def doubled_by_keyword(module: nn.Module) -> None:
    """Double the input before the forward, in a hook that is given keywords, too."""
    module.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)


def scaled(module: nn.Module) -> None:
    """Multiply the output by its value, which is saved for the backward."""
    module.register_forward_hook(lambda module, args, output: output * output.detach())


KINDS: dict[str, tuple[tuple[Callable[[nn.Module], None], ...], tuple[bool, ...], tuple[bool, ...]]] = {
    "input before": ((doubled, doubled_by_keyword), (True,), (True, False)),
    "input after": ((doubled, doubled_by_keyword), (False,), (True, False)),
    "output": ((scaled,), (True, False), (True,)),
    "output complete": ((scaled,), (True, False), (False,)),
}
"""Hooks, whether they come before the checkpoint, and whether what is computed again stops early."""
WAYS = ("alone", "sharded")


@requirement(
    "RFSDP-CKPT-4601",
    "A checkpointed module with forward hooks of its own has the gradients of one that is not checkpointed.",
    source="torch.nn.Module: register_forward_pre_hook, register_forward_hook; torch.utils.checkpoint.checkpoint; "
    "torch/distributed/_composable/checkpoint_activation.py: 'can be easily applied to any model'",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["hooks", "wrapper", "around"])
@pytest.mark.world(2)
def test_hooks(world: World, how: str, kind: str) -> None:
    """Register a hook that changes the input or the output, before or after the module is checkpointed."""
    hooks, befores, earlies = KINDS[kind]

    def gradients(rank: Rank, hook: Callable[[nn.Module], None], before: bool, early: bool, way: str) -> Any:
        module = Product().to(rank.device)
        if before:
            hook(module)
        model: Any = module
        if how == "hooks":
            checkpointed_in_place(module, early_stop=early)
        elif how == "wrapper":
            model = checkpointed(module, early_stop=early)
        else:
            model = functools.partial(checkpoint, module, use_reentrant=False, early_stop=early)
        if not before:
            hook(module)
        if way != "alone":
            ways(rank)[way](module)
        x = torch.ones(4, device=rank.device, requires_grad=True)
        try:
            model(x).sum().backward()
        except RuntimeError as e:
            return str(e).strip().splitlines()[0]
        (gradient,) = replicate_fsdp.gradients(module).values()
        return gradient.tolist(), None if x.grad is None else x.grad.tolist()

    def body(rank: Rank) -> list[str]:
        right = ([3.0] * 4, [9.0] * 4) if hooks == (scaled,) else ([2.0] * 4, [6.0] * 4)  # of x w times 3, or of 2 x w
        cases = {case: gradients(rank, *case) for case in itertools.product(hooks, befores, earlies, WAYS)}
        return [f"{case[0].__name__}, {case[1:]}: {found}" for case, found in cases.items() if found != right]

    assert_on_ranks([[]] * world.size, world.run(body))
