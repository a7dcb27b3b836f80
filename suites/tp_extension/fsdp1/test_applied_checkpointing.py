"""Layers of FSDP models that apply_activation_checkpointing wraps, to compute their forward again or to offload."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
)

from fixtures.tensors import numbers
from fixtures.wrapped import whole, wrapped
from harness import Rank, World, assert_same_all, requirement
from harness.stacks.dynamo import apply_checkpointing, checkpointed, offloaded

SOURCE = "torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py"


class Block(nn.Module):
    """A linear layer that also takes a number and a dictionary by name, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.forwards = nn.Linear(3, 3, dtype=torch.float64), 0
        self.offset = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        with torch.no_grad():
            for p in self.layer.parameters():
                p.copy_(numbers(*p.shape) % 3 - 1)

    def forward(self, x: torch.Tensor, *, factor: float = 2.0, more: dict[str, torch.Tensor] | None = None) -> Any:
        self.forwards += 1
        result = self.layer(x) * factor + self.offset
        return result if more is None else result + more["added"]


def blocks() -> Any:
    """Return a model with a block, and with another one in a deeper container."""
    return nn.Sequential(Block(), nn.Sequential(nn.ReLU(), Block()))


def plainly(function: Callable[..., Any], *args: Any, called: list[Any], **options: Any) -> Any:
    """Call a function, and note that it was called: a checkpoint that recomputes nothing."""
    called.append(0)
    return function(*args, **options)


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


WRAPPERS: dict[str, tuple[Callable[..., nn.Module] | None, int]] = {
    "default": (None, 2),
    "reentrant": (functools.partial(checkpointed, reentrant=True), 2),
    "offloaded": (offloaded, 1),
    "offloaded and recomputed": (lambda module, **options: offloaded(checkpointed(module, **options)), 2),
}
"""Functions that wrap a block, and how often a block's forward then runs in a step."""
CHOICES: dict[str, dict[str, Any]] = {
    "check": {"check_fn": is_block},
    "classes": {"auto_wrap_policy": ModuleWrapPolicy({Block})},
    "custom": {"auto_wrap_policy": CustomPolicy(is_block)},
    "function": {"auto_wrap_policy": functools.partial(lambda_auto_wrap_policy, lambda_fn=is_block)},
    "size": {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=13)},
    "over a check": {"auto_wrap_policy": ModuleWrapPolicy({Block}), "check_fn": lambda _: True},
}
"""Ways to choose the blocks."""


@requirement(
    "TP-GRAD-4400",
    "apply_activation_checkpointing wraps the layers of a model that its check or policy chooses, which then trains "
    "and saves as without.",
    source=f"{SOURCE}: apply_activation_checkpointing, checkpoint_wrapper, offload_wrapper",
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.world(2)
def test_chosen_layers(world: World, wrapper: str) -> None:
    """Choose the blocks in each way, before FSDP wraps the model; nothing chosen leaves the model as it was."""
    wrap, times = WRAPPERS[wrapper]

    def body(rank: Rank) -> None:
        x = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64, device=rank.device)
        alone = blocks().to(rank.device)
        alone(x).sum().backward()
        torch.optim.SGD(alone.parameters(), lr=0.5).step()
        right = {name: p.detach().cpu() for name, p in alone.named_parameters()}
        for name, how in CHOICES.items():
            model = blocks()
            names = list(model.state_dict())
            apply_checkpointing(model, wrap, **how)
            assert list(model.state_dict()) == names, name
            assert not isinstance(model[0], Block), f"{name}: the first is not wrapped"
            assert isinstance(model[1][0], nn.ReLU), f"{name}: {model}"
            assert not isinstance(model[1][1], Block), f"{name}: the second is not wrapped"
            counted = [model[0], model[1][1]]
            model[0], model[1][1] = (wrapped(rank, block, use_orig_params=True) for block in counted)
            fsdp = wrapped(rank, model, use_orig_params=True)
            fsdp(x.clone().requires_grad_()).sum().backward()
            assert [block.forwards for block in counted] == [times] * 2, name
            torch.optim.SGD(fsdp.parameters(), lr=0.5).step()
            found = {key.replace("_checkpoint_wrapped_module.", ""): p.cpu() for key, p in whole(fsdp).items()}
            assert_same_all(right, found, f"{wrapper}, {name}")
            blocks().load_state_dict({key: value.cpu() for key, value in found.items()})
            fsdp.load_state_dict({key: value.to(rank.device) for key, value in blocks().state_dict().items()})
        model = blocks()
        apply_checkpointing(model, wrap, check_fn=lambda _: False)
        assert [type(part) for part in model] == [Block, nn.Sequential]

    world.run(body)


@requirement(
    "TP-GRAD-4401",
    "A checkpoint's own function and the options that a policy gives are used, while what is no policy is refused.",
    source=f"{SOURCE}: checkpoint_wrapper: checkpoint_fn, checkpoint_fn_kwargs; apply_activation_checkpointing",
)
@pytest.mark.world(1)
def test_options_of_checkpoints(world: World) -> None:
    """The function notes its calls; a policy asks for it for one of the blocks; everything may be chosen, too."""

    def body(rank: Rank) -> None:
        called: list[Any] = []
        model = blocks().to(rank.device)
        first, second = model[0], model[1][1]
        policy = CustomPolicy(lambda m: {"checkpoint_fn": plainly, "called": called} if m is first else m is second)
        apply_checkpointing(model, checkpointed, auto_wrap_policy=policy)
        x = torch.ones(1, 3, dtype=torch.float64, device=rank.device, requires_grad=True)
        model(x).sum().backward()
        assert (len(called), first.forwards, second.forwards) == (1, 1, 2)
        everything = blocks().to(rank.device)
        counted = everything[0]
        apply_checkpointing(everything)
        everything(x).sum().backward()
        assert counted.forwards > 1
        with pytest.raises(ValueError, match="policy"):
            apply_checkpointing(blocks(), auto_wrap_policy=3)

    world.run(body)


@requirement(
    "TP-GRAD-4402",
    "A wrapped layer takes what is given by name, and an index or an attribute gives that of the layer inside.",
    source=f"{SOURCE}: ActivationWrapper; torch.distributed.fsdp.FullyShardedDataParallel.__getitem__: "
    "'Forward indexing calls in case the module is an nn.Sequential'",
)
@pytest.mark.parametrize("way", ["recomputed", "reentrant", "offloaded", "sharded"])
@pytest.mark.world(2)
def test_wrapped_as_inside(world: World, way: str) -> None:
    """Give a block a number and a dictionary; take one layer of a container, the last, or some of them."""

    def body(rank: Rank) -> None:
        wrap: Any = {
            "recomputed": checkpointed,
            "reentrant": functools.partial(checkpointed, reentrant=True),
            "offloaded": offloaded,
            "sharded": functools.partial(wrapped, rank),
        }[way]
        sequence = blocks().to(rank.device)
        around = wrap(sequence)
        assert around[0] is sequence[0]
        assert around[-1] is sequence[1]
        assert list(around[:1]) == [sequence[0]]
        assert list(around) == list(sequence)
        with pytest.raises(AttributeError, match="__getitem__"):
            wrap(nn.Linear(2, 2))[0]
        block = Block().to(rank.device)
        x = torch.ones(1, 3, dtype=torch.float64, device=rank.device)
        added = torch.full((1, 3), 8.0, dtype=torch.float64, device=rank.device, requires_grad=True)
        right = block(x, factor=4.0, more={"added": added}).detach()
        block.forwards = 0
        again = wrap(block)
        y = again(x.clone().requires_grad_(), factor=4.0, more={"added": added})
        y.sum().backward()
        assert torch.equal(y, right)
        assert added.grad is not None
        assert added.grad.tolist() == [[1.0] * 3]
        assert again.forwards == (2 if way in ("recomputed", "reentrant") else 1)

    world.run(body)
