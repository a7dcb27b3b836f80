"""Parameters of fully_shard between forwards, and prefetched ones that change before they are used."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with


@requirement(
    "RFSDP-KEPT-331",
    "With an integer reshard_after_forward, the parameters of a module after its forward have the values of before.",
    source="torch.distributed.fsdp.fully_shard: reshard_after_forward: 'The registered parameters are … the parameters "
    "resharded to the smaller mesh'",
)
@pytest.mark.parametrize("rows", [1, 4, 8, 3, 5, 6])
@pytest.mark.world(4)
def test_rows(world: World, rows: int) -> None:
    """Between a forward and a backward, and after it, a parameter over four ranks, resharded to two."""

    def body(rank: Rank) -> list[list[float]]:
        model: Any = nn.Sequential(nn.Linear(1, rows, bias=False)).to(rank.device)
        with torch.no_grad():
            model[0].weight.copy_(torch.arange(1.0, rows + 1).view(rows, 1))
        fully_shard(model[0], mesh=rank.mesh(), reshard_after_forward=2)
        fully_shard(model, mesh=rank.mesh())
        found = []
        for _ in range(2):
            output = model(torch.ones(1, 1, device=rank.device))
            found.append(model[0].weight.detach().full_tensor().flatten().tolist())
            output.sum().backward()
            found.append(model[0].weight.detach().full_tensor().flatten().tolist())
        return found

    assert_on_ranks([[[i + 1.0 for i in range(rows)]] * 4] * 4, world.run(body))


@requirement(
    "RFSDP-KEPT-332",
    "With an integer reshard_after_forward, parameters may be sharded over any dimension.",
    source="torch.distributed.fsdp.fully_shard: reshard_after_forward, shard_placement_fn",
)
@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
@pytest.mark.world(4)
def test_columns(world: World, dim: int) -> None:
    """Two steps of a square layer; the gradients of its weight and of its input."""

    def body(rank: Rank) -> list[Any]:
        model: Any = nn.Sequential(nn.Linear(4, 4, bias=False)).to(rank.device)
        with torch.no_grad():
            model[0].weight.copy_(torch.arange(16.0).view(4, 4))
        placed: Any = {"shard_placement_fn": lambda parameter: Shard(dim)}
        fully_shard(model[0], mesh=rank.mesh(), reshard_after_forward=2, **placed)
        fully_shard(model, mesh=rank.mesh())
        found: list[Any] = []
        for _ in range(2):
            model.zero_grad()
            x = torch.ones(1, 4, device=rank.device, requires_grad=True)
            model(x).sum().backward()
            assert x.grad is not None
            found += [x.grad.tolist(), model[0].weight.grad.full_tensor().tolist()]
        return found

    assert_on_ranks([[[[24.0, 28.0, 32.0, 36.0]], [[1.0] * 4] * 4] * 2] * 4, world.run(body))


class Both(nn.Module):
    """Two layers, of which the second is used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(1, 1, bias=False) for _ in range(2))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor, both: bool) -> Any:
        """Return the output of the last layer that is used."""
        x = self.first(x)
        return self.second(x) if both else x


@requirement(
    "RFSDP-PREFETCH-331",
    "A forward computes with the present values of parameters, also if an earlier one prefetched them unused.",
    source="torch.distributed.fsdp.FSDPModule: set_modules_to_forward_prefetch",
)
@pytest.mark.parametrize("prefetch", [False, True], ids=["plain", "prefetch"])
@pytest.mark.world(2)
def test_prefetched(world: World, prefetch: bool) -> None:
    """Without gradients, a forward that leaves the second layer out; then all values change."""

    def body(rank: Rank) -> float:
        model: Any = Both().to(rank.device)
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=rank.mesh())
        if prefetch:
            model.first.set_modules_to_forward_prefetch([model.second])
        x = torch.ones(1, 1, device=rank.device)
        with torch.no_grad():
            model(x, False)
            model.reshard()
            for parameter in model.parameters():
                parameter.fill_(2.0)
            return float(model(x, True))

    assert_on_ranks([4.0, 4.0], world.run(body))


def set_state(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Set whole values of the parameters by a full state."""
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))


def set_own(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Load the state dict of sharded values."""
    own = dict(model.named_parameters())
    model.load_state_dict({name: distribute(own[name], value) for name, value in values.items()})


def assign(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Load the state dict of sharded values, which become the parameters."""
    own = dict(model.named_parameters())
    model.load_state_dict({name: distribute(own[name], value) for name, value in values.items()}, assign=True)


def copy(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Copy values into the shards."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(distribute(parameter, values[name]))


def step(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Step to the values with gradients that no backward made."""
    for name, parameter in model.named_parameters():
        parameter.grad = parameter.detach() - distribute(parameter, values[name])
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.zero_grad()


def distribute(parameter: Any, value: torch.Tensor) -> Any:
    """Shard a value as a parameter is."""
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


PARTS = ("first", "second")
CHANGES: dict[str, Callable[[Any, dict[str, torch.Tensor]], None]] = {
    "full state": set_state,
    "own state": set_own,
    "assigned state": assign,
    "in place": copy,
    "step": step,
}
POLICIES = {
    "plain": MixedPrecisionPolicy(),
    "narrow": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "wide": MixedPrecisionPolicy(param_dtype=torch.float64),
    "reduced": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "reduced alone": MixedPrecisionPolicy(reduce_dtype=torch.float64),
}


@requirement(
    "RFSDP-KEPT-7006",
    "A forward computes with the values that parameters have got since the last one, whatever its dtype is.",
    source="torch.distributed.fsdp.fully_shard; MixedPrecisionPolicy: param_dtype; "
    "torch.distributed.checkpoint.state_dict: set_model_state_dict",
)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.world(2)
def test_changed_values(world: World, change: str) -> None:
    """Evaluate or train between changes, with layers that are resharded after a forward or by hand."""

    def body(rank: Rank) -> None:
        for (name, policy), reshards in zip(POLICIES.items(), itertools.cycle((True, False)), strict=False):
            model: Any = Both().to(rank.device)
            for module in (model.first, model.second, model):
                fully_shard(module, mesh=rank.mesh(), mp_policy=policy, reshard_after_forward=reshards)
            x = torch.ones(1, 1, device=rank.device)
            found, right = [], []
            for turn, trained in enumerate((False, False, True, True, False, False)):
                for module in (model.first, model.second, model):
                    module.reshard()
                values = {f"{part}.weight": torch.full((1, 1), 2.0 + turn + i) for i, part in enumerate(PARTS)}
                CHANGES[change](model, {key: value.to(rank.device) for key, value in values.items()})
                with torch.set_grad_enabled(trained):
                    output = model(x, True)
                found.append(float(output))
                right.append((2.0 + turn) * (3.0 + turn))
                if trained and turn == 2:  # the other one is left without a backward
                    output.sum().backward()
                    model.zero_grad()
            assert found == right, f"{name}, {reshards=}: {found}"

    world.run(body)


class Complex(nn.Module):
    """A weight of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 1 + 2j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a real number."""
        return (self.weight * x).abs().square().sum()


@requirement(
    "RFSDP-COMPLEX-331",
    "With any MixedPrecisionPolicy, complex parameters have complex gradients.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: 'floating-point'",
)
@pytest.mark.parametrize(
    "policy",
    [
        "plain",
        pytest.param(
            "param",
            marks=pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, param_dtype alone has the same defect"),
        ),
        "reduce",
        "both",
    ],
)
@pytest.mark.world(2)
def test_complex(world: World, policy: str) -> None:
    """A backward with one of two dtypes, with both or neither."""

    def body(rank: Rank) -> Any:
        dtypes = {
            "param_dtype": torch.bfloat16 if policy in ("param", "both") else None,
            "reduce_dtype": torch.float32 if policy in ("reduce", "both") else None,
        }
        model: Any = Complex().to(rank.device)
        fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(**dtypes))
        model(torch.ones(2, device=rank.device)).backward()
        return model.weight.grad.full_tensor().tolist()

    assert_on_ranks([[2 + 4j] * 2] * 2, world.run(body))


@requirement(
    "RFSDP-KEPT-3673",
    "With an integer reshard_after_forward, a module may be sharded over all ranks, with replicas, or over a part of a "
    "mesh.",
    source="torch.distributed.fsdp.fully_shard: mesh, reshard_after_forward",
)
@pytest.mark.parametrize("over", ["all", "hybrid", "slice"])
@pytest.mark.world(8)
def test_meshes(world: World, over: str) -> None:
    """Shard three layers over eight ranks or over four, shard them on pairs after the forward, and run two steps."""

    def body(rank: Rank) -> list[Any]:
        plane = rank.mesh(2, 4, names=("first", "second"))
        mesh = {"all": rank.mesh(), "hybrid": plane, "slice": plane["second"]}[over]
        model: Any = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))).to(rank.device)
        for layer in model:
            nn.init.eye_(layer.weight)
            fully_shard(layer, mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)
        found: list[Any] = []
        for _ in range(2):
            output = model(torch.full((1, 8), 1.0 + rank.index, device=rank.device))
            found.append(output.unique().tolist())
            output.sum().backward()
            found += [layer.weight.grad.full_tensor().unique().tolist() for layer in model]
            model.zero_grad()
        return found

    def right(rank: int) -> list[Any]:
        mean = sum(1.0 + r for r in range(8) if over != "slice" or r // 4 == rank // 4) / (4 if over == "slice" else 8)
        return [[1.0 + rank], [mean], [mean], [mean]] * 2

    assert_on_ranks([right(rank) for rank in range(8)], world.run(body))
