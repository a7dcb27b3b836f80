"""Lists and dicts that users give to DTensors, to tensor parallelism and to FSDP1, and give again."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fixtures.tensors import numbers
from fixtures.wrapped import STRATEGIES, inputs, nested
from harness import Rank, World, assert_same, assert_same_all, requirement
from harness.stacks.limit import runs_with

LAST: tuple[list[Placement], ...] = ([Shard(-1)], [Shard(-2)], [Replicate()])
MAKES: dict[str, Callable[[torch.Tensor, Any, Any], Any]] = {
    "distribute_tensor": lambda x, mesh, to: distribute_tensor(x, mesh, to),
    "distribute_tensor alone": lambda x, mesh, to: distribute_tensor(x, mesh, to, src_data_rank=None),
    "from_local": lambda x, mesh, to: DTensor.from_local(x, mesh, to),
    "from_local with gradients": lambda x, mesh, to: DTensor.from_local(x, mesh, [Replicate()], grad_placements=to),
    "redistribute": lambda x, mesh, to: DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, to),
    "to_local": lambda x, mesh, to: DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=to),
    "full_tensor": lambda x, mesh, to: DTensor.from_local(x, mesh, [Replicate()]).full_tensor(grad_placements=to),
    "local_map": lambda x, mesh, to: local_map(lambda y: y, to)(DTensor.from_local(x, mesh, [Replicate()])),
}
"""What takes a list of placements."""


@requirement(
    "TP-MAKE-5520",
    "Functions that make or convert DTensors leave a list of placements as it is, which may be given again.",
    source="torch.distributed.tensor: distribute_tensor, DTensor.from_local, redistribute, to_local, full_tensor; "
    "torch.distributed.tensor.experimental.local_map",
)
@pytest.mark.world(2)
def test_placements(world: World) -> None:
    """Give a list that counts from the end for tensors of two, three and again two dimensions."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh()
        for (name, make), layout in itertools.product(MAKES.items(), LAST):
            if name == "from_local with gradients" and runs_with("<2.12"):
                continue  # from_local has no such argument yet
            given = list(layout)
            for shape in (4, 6), (2, 4, 6), (4, 6):
                if given != layout:
                    break
                made = make(numbers(*shape).to(rank.device).requires_grad_(), mesh, given)
                if name in ("distribute_tensor", "distribute_tensor alone", "from_local", "redistribute"):
                    dim = getattr(layout[0], "dim", None)
                    right = Replicate() if dim is None else Shard(dim + len(shape))
                    assert made.placements == (right,), f"{name}, {layout} of {shape}"
            assert given == layout, f"{name}: {given} was {layout}"

    world.run(body)


class Block(nn.Module):
    """A norm and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(self.norm(x)))


@requirement(
    "TP-PLAN-5521",
    "parallelize_module leaves its plan and styles as they are, so that they parallelize the next module as well.",
    source="torch.distributed.tensor.parallel.parallelize_module: parallelize_plan",
)
@pytest.mark.world(2)
def test_plans(world: World) -> None:
    """Use one plan with patterns and the module itself for three models, by a list of its blocks and alone."""

    def body(rank: Rank) -> None:
        rows: Any = {"input_layouts": Shard(0), "desired_input_layouts": Shard(0), "use_local_output": True}
        plan: dict[str, ParallelStyle] = {
            "": PrepareModuleInput(**rows),
            "n*": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        before, described = list(plan.items()), repr(plan)
        results = []
        for number in range(3):
            torch.manual_seed(3)
            block = Block().to(rank.device)
            if number == 2:
                parallelize_module(block, rank.mesh(), plan, src_data_rank=None)
            else:
                assert parallelize_module(block, rank.mesh(), plan) is block
            assert (list(plan.items()), repr(plan)) == (before, described), f"model {number}"
            assert [type(p) for p in block.parameters()] == [DTensor] * 6, f"model {number}"
            results.append(block(torch.ones(3, 6, device=rank.device)).detach() + 0)
        assert_same(results[0], results[1], "the second model")
        assert_same(results[0], results[2], "the third model")

    world.run(body)


def described(state: Any) -> Any:
    """Return the keys of nested dicts in their order, and which object each value is."""
    if isinstance(state, dict):
        return [(key, described(value)) for key, value in state.items()]
    return id(state) if isinstance(state, torch.Tensor) else repr(state)


@requirement(
    "TP-STATE-5522",
    "Loading a state dict of a model or an optimizer under FSDP leaves it as it is, and it loads into another model.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: load_state_dict, optim_state_dict_to_load",
)
@pytest.mark.world(2)
def test_states(world: World) -> None:
    """Load whole and sharded states of each strategy into two models, one of which then trains on."""
    fsdp = FullyShardedDataParallel

    def body(rank: Rank) -> None:
        kinds = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
        for strategy, original, kind in itertools.product(STRATEGIES, (True, False), kinds):
            what = f"{strategy}, {original=}, {kind}"
            model, *others = (nested(rank, sharding_strategy=strategy, use_orig_params=original) for _ in range(3))
            sgd, *sgds = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) for m in (model, *others))
            model(inputs(rank)).sum().backward()
            sgd.step()
            with fsdp.state_dict_type(model, kind):
                state, momenta = model.state_dict(), fsdp.optim_state_dict(model, sgd)
            before = described(state), described(momenta)
            found = []
            for other, optimizer in zip(others, sgds, strict=True):
                with fsdp.state_dict_type(other, kind):
                    other.load_state_dict(state)
                    converted = fsdp.optim_state_dict_to_load(other, optimizer, momenta)
                optimizer.load_state_dict(
                    copy.deepcopy(converted)
                )  # as an optimizer keeps the tensors that it is given
                assert (described(state), described(momenta)) == before, what
                other(inputs(rank)).sum().backward()
                optimizer.step()
                with fsdp.summon_full_params(other):
                    found.append({name: p.detach().clone() for name, p in other.named_parameters()})
            assert_same_all(found[0], found[1], what)

    world.run(body)
