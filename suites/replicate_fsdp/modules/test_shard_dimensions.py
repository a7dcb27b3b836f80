"""Parameters that fully_shard shards over the dimensions that shard_placement_fn returns, and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fixtures.states import whole
from fixtures.tensors import chunk, numbers
from harness import Rank, World, assert_same, requirement
from harness.stacks import replicate_fsdp

SOURCE = "torch.distributed.fsdp.fully_shard: shard_placement_fn"
SHAPES = {"vector": (3,), "matrix": (3, 8), "cube": (2, 8, 4)}
"""Two and four ranks divide all but the first dimensions."""
DIMS: dict[str, dict[str, int]] = {
    "columns": {"matrix": 1, "cube": 1},
    "from-the-end": {"matrix": -1, "cube": -2},
    "inner": {"cube": 2},
    "rows": {"vector": 0, "matrix": -2, "cube": -3},
}
"""The dimensions that are returned by the names of the parameters, for others None."""


class Weights(nn.Module):
    """The sum of every element times its number times the input, so that every element has another gradient."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(numbers(*shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        assert all(p.is_contiguous() for p in self.parameters())
        return sum(((p * numbers(*p.shape).to(x.device)).sum() for p in self.parameters()), x.new_zeros(())) * x


def sharded(rank: Rank, mesh: Any, dims: dict[str, int], **options: Any) -> Any:
    """Shard the weights over these dimensions."""
    model = Weights().to(rank.device)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def place(parameter: nn.Parameter) -> Shard | None:
        name = names[parameter]
        return Shard(dims[name]) if name in dims else None

    return fully_shard(model, mesh=mesh, shard_placement_fn=place, **options)


WAYS: dict[str, tuple[dict[str, Any], Callable[[Any], None]]] = {
    "plain": ({}, lambda model: None),
    "kept": ({}, lambda model: model.set_reshard_after_forward(False)),
    "sums": ({}, lambda model: model.set_force_sum_reduction_for_comms(True)),
    "reduced-wide": ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}, lambda model: None),
    "offloaded": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, lambda model: None),
}
"""Options and settings of a sharded module."""


@requirement(
    "RFSDP-SHARDDIM-01",
    "A parameter is sharded over the dimension that shard_placement_fn returns for it, or over the first for None.",
    source=SOURCE,
)
@requirement(
    "RFSDP-SHARDDIM-02",
    "A module computes with whole parameters, whichever dimensions shard them.",
    source=SOURCE,
)
@requirement(
    "RFSDP-SHARDDIM-03",
    "The gradient of a parameter is averaged, accumulated and sharded as the parameter, whichever dimension shards it.",
    source=SOURCE,
)
@requirement(
    "RFSDP-SHARDDIM-05",
    "A full state dict of a module has whole parameters, and loads into its shards, whichever dimensions these divide.",
    source="torch.distributed.checkpoint.state_dict: get_model_state_dict, set_model_state_dict; full_state_dict",
)
@pytest.mark.world(2, 4)
def test_dimensions(world: World) -> None:
    """Shard over two or four ranks, or two of four with replicas; accumulate over three backwards, step, and load."""

    def body(rank: Rank) -> None:
        meshes = [rank.mesh(), *([rank.mesh(2, 2, names=("replicas", "shards"))] if rank.size > 2 else [])]
        for mesh in meshes:
            shards, index = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
            every = itertools.product(DIMS.items(), WAYS.items())
            some = zip(itertools.cycle(DIMS.items()), WAYS.items(), strict=False)
            for (name, dims), (way, (options, set_it)) in every if rank.size == 2 else some:
                model = sharded(rank, mesh, dims, **options)
                set_it(model)
                actual = {n: dims.get(n, 0) % len(shape) for n, shape in SHAPES.items()}
                check(rank, model, actual, shards, index, f"{mesh.shape}, {name}, {way}")

    world.run(body)


def check(rank: Rank, model: Any, dims: dict[str, int], shards: int, index: int, what: str) -> None:
    """Check the parameters, their gradients over three backwards, a step, and loading other values."""
    alone = Weights()
    for name, parameter in model.named_parameters():
        assert parameter.is_contiguous(), f"{what}: {name}"
        assert parameter.to_local().is_contiguous(), f"{what}: {name}"
        assert parameter.placements[-1] == Shard(dims[name]), f"{what}: {name}"
        assert parameter.placements[:-1] in ((), (Replicate(),)), f"{what}: {name}"
    mean = (rank.size + 1) / 2
    for done, synced in enumerate((True, False, True), 1):
        model.set_requires_gradient_sync(synced)
        output = model(torch.tensor(1.0 + rank.index, device=rank.device))
        assert output.item() == alone(torch.tensor(1.0 + rank.index)).item(), what
        output.backward()
        model.reshard()
        if not synced:
            continue
        for name, parameter in model.named_parameters():
            right = numbers(*SHAPES[name]) * mean * done
            assert parameter.grad.placements == parameter.placements, f"{what}: gradient of {name}"
            assert parameter.grad.to_local().is_contiguous(), f"{what}: gradient of {name}"
            part = chunk(right, shards, index, dims[name])
            assert_same(part, parameter.grad.to_local(), f"{what}: gradient of {name} after {done} backwards")
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, shape in SHAPES.items():
        assert_same(numbers(*shape) * (1 - 3 * mean), state[name], f"{what}: {name} after a step")
    other: dict[str, Any] = {name: (numbers(*shape) + 7).to(rank.device) for name, shape in SHAPES.items()}
    set_model_state_dict(model, other, options=StateDictOptions(full_state_dict=True))
    for name, parameter in model.named_parameters():
        part = chunk(numbers(*SHAPES[name]) + 7, shards, index, dims[name])
        assert_same(part, parameter.to_local().detach(), f"{what}: loaded {name}")


@requirement(
    "RFSDP-SHARDDIM-04",
    "Sharding over a dimension other than the first that ranks do not divide, or that is missing, raises an error.",
    source=f"{SOURCE}: 'we currently require even sharding'",
)
@pytest.mark.world(2)
def test_refused(world: World) -> None:
    """Two ranks do not divide three columns, and do divide three rows."""

    def body(rank: Rank) -> None:
        for shape, dim, refused in (
            ((2, 3), 1, True),
            ((2, 3), -1, True),
            ((2, 2, 3), 2, True),
            ((2, 2), 2, True),
            ((3,), 1, True),
            ((3, 2), 0, False),
            ((1, 2), 1, False),
        ):
            module = nn.ParameterList([torch.ones(shape, device=rank.device)])
            model = nn.Sequential()
            model.register_parameter("weight", module[0])
            if refused:
                with pytest.raises((NotImplementedError, AssertionError), match=r"[Ss]hard"):
                    fully_shard(model, mesh=rank.mesh(), shard_placement_fn=lambda p, dim=dim: Shard(dim))  # type: ignore[misc]
            else:
                fully_shard(model, mesh=rank.mesh(), shard_placement_fn=lambda p, dim=dim: Shard(dim))  # type: ignore[misc]
                weight: Any = model.weight
                assert weight.placements == (Shard(dim),), (shape, dim)

    world.run(body)


class Divided(nn.Module):
    """Weights that tensor parallelism divides in each way, each times its elements' numbers times the input."""

    def __init__(self, mesh: Any, device: torch.device, *shape: int) -> None:
        super().__init__()
        for name, placement in TENSOR_PARALLEL.items():
            whole = distribute_tensor(numbers(*(shape or TENSOR_PARALLEL_SHAPE)).to(device), mesh, [placement])
            self.register_parameter(name, nn.Parameter(whole))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number."""
        parts = {name: (p.to_local(), p.detach().to_local()) for name, p in self.named_parameters()}  # type: ignore[operator]
        return sum(((part * factor).sum() for part, factor in parts.values()), x.new_zeros(())) * x


TENSOR_PARALLEL_SHAPE = (8, 4)
TENSOR_PARALLEL = {"rows": Shard(0), "columns": Shard(1), "not": Replicate()}
"""How tensor parallelism places weights, by their names."""


@requirement(
    "RFSDP-TP-03",
    "A parameter that tensor parallelism and fully_shard divide, over one dimension or two, is put together in order.",
    source=f"{SOURCE}; torch.distributed.tensor.DTensor.full_tensor; torch.distributed.checkpoint.state_dict",
)
@pytest.mark.world(4)
def test_tensor_parallel(world: World) -> None:
    """Put parameters and gradients together by full_tensor, redistribute and state dicts, also with replicas."""

    def body(rank: Rank) -> None:
        meshes = [
            rank.mesh(2, 2, names=("shards", "tensor")),
            rank.mesh(1, 2, 2, names=("replicas", "shards", "tensor")),
        ]
        for mesh, dim in itertools.product(meshes, (0, 1)):
            data = mesh["shards"] if mesh.ndim == 2 else mesh["replicas", "shards"]
            model: Any = Divided(mesh["tensor"], rank.device)
            fully_shard(model, mesh=data, shard_placement_fn=lambda p, dim=dim: Shard(dim))  # type: ignore[misc]
            right, at = numbers(*TENSOR_PARALLEL_SHAPE), mesh["tensor"].get_local_rank()
            model(torch.tensor(1.0 + rank.index // 2, device=rank.device)).backward()
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            for name, parameter in model.named_parameters():
                what, placed = f"{mesh.shape}, dimension {dim}, {name}", TENSOR_PARALLEL[name]
                own = chunk(right, 2, at, placed.dim) if isinstance(placed, Shard) else right
                part = chunk(own, data.size(-1), data.get_local_rank(data.ndim - 1), dim)
                everywhere = [Replicate()] * parameter.device_mesh.ndim
                assert parameter.grad.placements == parameter.placements, what
                for tensor, factor in ((parameter.detach(), 1.0), (parameter.grad, 1.5)):
                    assert_same(part * factor, tensor.to_local(), what)
                    assert_same(right * factor, tensor.full_tensor(), what)
                assert_same(right, parameter.detach().redistribute(placements=everywhere).to_local(), what)
                assert_same(right, state[name], what)
            other: dict[str, Any] = {name: (right + 7).to(rank.device) for name in TENSOR_PARALLEL}
            set_model_state_dict(model, other, options=StateDictOptions(full_state_dict=True))
            for name, parameter in model.named_parameters():
                assert_same(
                    right + 7, parameter.detach().full_tensor(), f"{mesh.shape}, dimension {dim}, {name}: loaded"
                )

    world.run(body)


UNEVEN = [(5, 3), (3, 5), (3, 5), (5, 3), (2, 3), (7, 2)]
"""Shapes of which two ranks, or two by two, do not divide a dimension; some shards are empty."""


@requirement(
    "RFSDP-TP-3650",
    "A parameter that tensor parallelism and data parallelism divide is put together in order, also where ranks do not "
    "divide its size.",
    source="torch.distributed.fsdp.fully_shard; torch.distributed.tensor.DTensor.full_tensor",
)
@pytest.mark.world(4)
def test_uneven_tensor_parallel(world: World) -> None:
    """Shard, replicate or both; take two backwards, a step and an evaluation."""

    def body(rank: Rank) -> None:
        planes = {
            "sharded": rank.mesh(2, 2, names=("data", "tensor")),
            "replicated": rank.mesh(2, 2, names=("data", "tensor")),
            "hybrid": rank.mesh(1, 2, 2, names=("replicas", "data", "tensor")),
            "replicas": rank.mesh(2, 1, 2, names=("data", "shards", "tensor")),
        }
        for (way, mesh), shape in zip(itertools.cycle(planes.items()), UNEVEN, strict=False):
            names = mesh.mesh_dim_names[:-1]
            data = mesh[names[0]] if len(names) == 1 else mesh[names]
            model: Any = Divided(mesh["tensor"], rank.device, *shape)
            if way == "replicated":
                replicate_fsdp.replicate(model, **{replicate_fsdp.MESH: data})
            else:
                fully_shard(model, mesh=data)
            part, at, right = mesh.get_local_rank("data"), mesh.get_local_rank("tensor"), numbers(*shape)
            for _ in range(2):
                model(torch.tensor(1.0 + part, device=rank.device)).backward()
            own = {
                name: chunk(right, 2, at, p.dim) if isinstance(p, Shard) else right
                for name, p in TENSOR_PARALLEL.items()
            }
            for name, parameter in model.named_parameters():
                what = f"{way}, {shape}, {name}"
                mine = chunk(own[name], 2, part, 0) if way in ("sharded", "hybrid") else own[name]
                for tensor, factor in ((parameter.detach(), 1.0), (parameter.grad, 3.0)):
                    assert_same(mine * factor, tensor.to_local(), what)
                    assert_same(right * factor, tensor.full_tensor(), what)
            torch.optim.SGD(model.parameters(), lr=1.0, foreach=False).step()
            with torch.no_grad():
                found = model(torch.tensor(1.0, device=rank.device)).item()
            assert found == sum(4.0 * (mine**2).sum().item() for mine in own.values()), f"{way}, {shape}"

    world.run(body)


ORDERS = [
    (("shards", "tensor"), "shards"),
    (("tensor", "shards"), "shards"),
    (("replicas", "shards", "tensor"), "replicas"),
    (("replicas", "tensor", "shards"), "replicas"),
    (("replicas", "tensor", "shards"), "shards"),
    (("tensor", "replicas", "shards"), "replicas"),
    (("tensor", "replicas", "shards"), "shards"),
]
"""The dimensions of meshes, of which fully_shard has all but one, and which of them has two ranks as that one has."""


@requirement(
    "RFSDP-TP-900",
    "fully_shard shards tensor-parallel parameters whichever order their dimensions have in the mesh that both take "
    "theirs from.",
    source="torch.distributed.fsdp.fully_shard: mesh; torch.distributed.device_mesh.DeviceMesh",
)
@pytest.mark.world(4)
def test_mesh_orders(world: World) -> None:
    """Tensor parallelism has the first, a middle or the last dimension; two ranks are shards or replicas."""

    def body(rank: Rank) -> None:
        for dims, divided in ORDERS:
            mesh = rank.mesh(*[2 if dim in (divided, "tensor") else 1 for dim in dims], names=dims)
            data = mesh["replicas", "shards"] if "replicas" in dims else mesh["shards"]
            model: Any = Divided(mesh["tensor"], rank.device)
            fully_shard(model, mesh=data)
            model(torch.tensor(1.0 + mesh.get_local_rank(divided), device=rank.device)).backward()
            right = numbers(*TENSOR_PARALLEL_SHAPE)
            for name, parameter in model.named_parameters():
                what, placed = f"{dims}, {divided}, {name}", TENSOR_PARALLEL[name]
                at, part = mesh.get_local_rank("tensor"), mesh.get_local_rank("shards")
                own = chunk(right, 2, at, placed.dim) if isinstance(placed, Shard) else right
                own = chunk(own, data.size(-1), part, 0)
                assert parameter.grad.placements == parameter.placements, what
                for tensor, factor in ((parameter.detach(), 1.0), (parameter.grad, 1.5)):
                    assert_same(own * factor, tensor.to_local(), what)
                    assert_same(right * factor, tensor.full_tensor(), what)

    world.run(body)


class Branches(Divided):
    """The same weights, of which each forward uses the one whose number it is given."""

    def forward(self, x: torch.Tensor, branch: int = 0) -> torch.Tensor:
        """Return one number."""
        used: Any = self.get_parameter(list(TENSOR_PARALLEL)[branch])
        return used.to_local().sum() * x


@requirement(
    "RFSDP-UNUSED-01",
    "With set_reduce_scatter_unused_params, a parameter that only some ranks use has the average over all ranks.",
    source="torch.distributed.fsdp.FSDPModule: set_reduce_scatter_unused_params",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.set_reduce_scatter_unused_params")
@pytest.mark.world(4)
def test_unused(world: World) -> None:
    """Parameters are divided by tensor parallelism; two data-parallel ranks use different ones in three steps."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("shards", "tensor"))
        model: Any = Branches(mesh["tensor"], rank.device)
        fully_shard(model, mesh=mesh["shards"])
        model.set_reduce_scatter_unused_params(True)
        for step in range(3):
            model(torch.tensor(1.0 + rank.index // 2, device=rank.device), (rank.index // 2 + step) % 3).backward()
            for number, (name, parameter) in enumerate(model.named_parameters()):
                right = sum((1.0 + r) / 2 for r in range(2) if (r + step) % 3 == number)
                assert parameter.grad.placements == parameter.placements, f"step {step}: {name}"
                assert parameter.grad.full_tensor().unique().tolist() == [right], f"step {step}: {name}"
            model.zero_grad()

    world.run(body)


@requirement(
    "RFSDP-INF-6903",
    "A sharded module computes in inference mode before its first step or after it, whichever dimension shards it.",
    source="torch.inference_mode; torch.distributed.fsdp.fully_shard: shard_placement_fn; pytorch/pytorch#197327",
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dimension", [0, 1], ids=["rows", "columns"])
@pytest.mark.world(1, 2)
def test_inference(world: World, dimension: int, when: str) -> None:
    """Call a layer whose weight's rows or columns are sharded in inference mode, as the first call or after a step."""

    def body(rank: Rank) -> None:
        model = nn.Linear(4, 2, bias=False).to(rank.device)
        nn.init.ones_(model.weight)
        fully_shard(model, mesh=rank.mesh(), shard_placement_fn=lambda _: Shard(dimension))
        x = numbers(3, 4).to(rank.device)
        if when == "after":
            model(x).sum().backward()
        with torch.inference_mode():
            assert_same(x.sum(1, keepdim=True).expand(3, 2), model(x), f"{when} the first step")

    world.run(body)


@requirement(
    "RFSDP-INF-6905",
    "A sharded module is trained as ever after a first forward without gradients, whichever mode turned them off.",
    source="torch.inference_mode; torch.no_grad; torch.distributed.fsdp.fully_shard",
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.world(2)
def test_part_without_gradients(world: World, mode: Any) -> None:
    """Call one of two sharded layers without gradients before all training, as for a cache of its outputs."""

    def body(rank: Rank) -> None:
        layers = [nn.Linear(2, 2, bias=False).to(rank.device) for _ in range(2)]
        for layer in layers:
            nn.init.ones_(layer.weight)
            fully_shard(layer, mesh=rank.mesh())
        x = torch.ones(1, 2, device=rank.device)
        with mode():
            layers[0](x)
        layers[1](layers[0](x)).sum().backward()
        found = [None if layer.weight.grad is None else whole(layer.weight.grad).tolist() for layer in layers]
        assert found == [[[2.0, 2.0]] * 2] * 2, f"gradients after {mode.__name__}: {found}"

    world.run(body)
