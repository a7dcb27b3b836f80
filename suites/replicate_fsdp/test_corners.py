"""Behavior of FSDP-replicate that generated programs avoid because PyTorch has defects there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp

SOURCE = "torch/distributed/_composable/replicate_with_fsdp.py: replicate"


@requirement(
    "RFSDP-DIV-01",
    "Gradients are summed and divided once by the gradient divide factor, whatever the dtype or reduction.",
    source="torch/distributed/fsdp/_fully_shard: set_gradient_divide_factor, set_force_sum_reduction_for_comms",
)
@pytest.mark.parametrize("sums", [False, True], ids=["any-reduction", "sums"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.world(1, 2, 3)
def test_divide_factor(world: World, dtype: str, sums: bool) -> None:
    """The factor is 4, and every rank has a gradient of 8."""

    def body(rank: Rank) -> list[float]:
        model = replicate_fsdp.apply(nn.Linear(2, 1, bias=False, dtype=getattr(torch, dtype)), rank)
        model.set_gradient_divide_factor(4.0)
        model.set_force_sum_reduction_for_comms(sums)
        model(torch.full((1, 2), 8.0, dtype=getattr(torch, dtype), device=rank.device)).sum().backward()
        return [float(x) for x in replicate_fsdp.gradients(model)["weight"].flatten()]

    assert_on_ranks([[8.0 * world.size / 4.0] * 2] * world.size, world.run(body))


@requirement(
    "RFSDP-DIM-01",
    "A parameter without elements has a gradient without elements.",
    source=SOURCE,
)
@pytest.mark.parametrize("groups", [True, False], ids=["own-group", "one-group"])
@pytest.mark.world(1, 2)
def test_no_elements(world: World, groups: bool) -> None:
    """A layer without outputs lies beside one with outputs, in the same group or in its own."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.some, self.none = nn.Linear(2, 2), nn.Linear(2, 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.some(x)
            return torch.cat([x, self.none(x)], dim=1)

    def body(rank: Rank) -> list[int]:
        model = replicate_fsdp.apply(Model(), rank, groups=groups)
        model(torch.ones(1, 2, device=rank.device)).sum().backward()
        return list(replicate_fsdp.gradients(model)["none.weight"].shape)

    assert_on_ranks([[0, 2]] * world.size, world.run(body))


@requirement(
    "RFSDP-THAW-01",
    "A layer that was frozen in the first forward trains once it requires gradients.",
    source=SOURCE,
)
@pytest.mark.parametrize("reduced", [None, "bfloat16"], ids=["plain", "mixed"])
@pytest.mark.world(2)
def test_thawed(world: World, reduced: str | None) -> None:
    """Freeze, use and unfreeze the second of two groups, with or without mixed precision."""
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, reduced)) if reduced else MixedPrecisionPolicy()

    def body(rank: Rank) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].requires_grad_(False)
        replicate_fsdp.apply(model, rank, mp_policy=policy)
        model(torch.ones(1, 2, device=rank.device)).sum().backward()
        model[1].requires_grad_(True)
        model(torch.ones(1, 2, device=rank.device)).sum().backward()
        return str(replicate_fsdp.gradients(model)["1.weight"].dtype)

    assert_on_ranks(["torch.float32"] * world.size, world.run(body))


@requirement(
    "RFSDP-TIED-01",
    "A parameter shared by two groups has its whole gradient, or raises an error on every rank.",
    source=SOURCE,
)
@pytest.mark.world(1, 2)
def test_tied_across_groups(world: World) -> None:
    """Two layers, each its own group, share a weight: its gradient is that of both uses."""

    def body(rank: Rank) -> str | list[float]:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(rank.device)
        nn.init.ones_(model[0].weight)
        model[1].weight = model[0].weight
        try:
            replicate_fsdp.apply(model, rank)
            model(torch.ones(1, 2, device=rank.device)).sum().backward()
        except (RuntimeError, ValueError, AssertionError) as e:
            return type(e).__name__
        return [float(x) for x in replicate_fsdp.gradients(model)["0.weight"].flatten()]

    outcomes = world.run(body)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert isinstance(outcomes[0], str) or outcomes[0] == [4.0] * 4


@requirement(
    "RFSDP-ACC-01",
    "Gradients accumulate without synchronization even if a micro-batch skips layers, with or without reduce_dtype.",
    source="torch/distributed/fsdp/_fully_shard: MixedPrecisionPolicy.reduce_dtype, set_requires_gradient_sync",
)
@pytest.mark.parametrize("reduced", [None, "float32"], ids=["plain", "reduced"])
@pytest.mark.world(2)
def test_accumulated_dtype(world: World, reduced: str | None) -> None:
    """An unsynchronized backward uses one of two layers, then a synchronized one uses both."""
    policy = MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduced)) if reduced else MixedPrecisionPolicy()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            result: torch.Tensor = self.always(x)
            return self.sometimes(result) if both else result

    def body(rank: Rank) -> str:
        model = replicate_fsdp.apply(Model().double(), rank, groups=False, mp_policy=policy)
        for both in (False, True):
            model.set_requires_gradient_sync(both)
            model(torch.ones(1, 2, dtype=torch.float64, device=rank.device), both).sum().backward()
        return str(replicate_fsdp.gradients(model)["always.weight"].dtype)

    assert_on_ranks(["torch.float64"] * world.size, world.run(body))


@requirement(
    "RFSDP-STATE-01",
    "A full state dict can be loaded into a replicated model, even if a parameter has several names.",
    source="torch/distributed/checkpoint/state_dict.py: set_model_state_dict",
)
@pytest.mark.parametrize("names", ["one-name", "two-modules", "one-module"])
@pytest.mark.world(2)
def test_names(world: World, names: str) -> None:
    """A weight has one name, one in each of two layers, or two in one module."""

    def body(rank: Rank) -> list[float] | str:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).to(rank.device)
        if names != "one-name":
            model[1].weight = model[0].weight
        if names == "one-module":
            model[0].again = model[0].weight
        saved = {name: torch.full((2, 2), 3.0) for name in model.state_dict()}
        replicate_fsdp.apply(model, rank, groups=False)
        try:
            set_model_state_dict(model, saved, options=StateDictOptions(full_state_dict=True))
        except RuntimeError as e:
            return str(e)
        return [float(x) for p in model.parameters() for x in p.detach().full_tensor().flatten()]  # type: ignore[attr-defined]

    assert_on_ranks([[3.0] * (8 if names == "one-name" else 4)] * world.size, world.run(body))
