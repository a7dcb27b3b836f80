"""Which parameters are replicated, and over which ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fixtures.layers import layer, layers, row
from harness import Rank, World, assert_on_ranks, requirement, unsupported
from harness.results import TorchLacks
from harness.stacks import replicate_fsdp

SOURCE = "torch/distributed/_composable/replicate_with_fsdp.py: replicate"


def backward(rank: Rank, model: nn.Module) -> dict[str, list[float]]:
    """Run one backward on the rank's own data and return the gradients by name, flattened."""
    model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
    return {name: gradient.flatten().tolist() for name, gradient in replicate_fsdp.gradients(model).items()}


class Sum(nn.Module):
    """A module that adds the outputs of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = layer(), layer(), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(x) + self.second(x) + self.third(x)
        return result


@requirement(
    "RFSDP-IGN-01",
    "Ignored parameters stay plain tensors with the gradients of their rank, while others are averaged.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate, ignored_params",
)
@pytest.mark.parametrize("ignored", ["first", "second", "third"])
@pytest.mark.world(2)
def test_ignored(world: World, ignored: str) -> None:
    """Ignore one of three layers of the same shape."""

    def body(rank: Rank) -> dict[str, list[float]]:
        model = Sum().to(rank.device)
        left = set(model.get_submodule(ignored).parameters())
        replicate_fsdp.apply(model, rank, groups=False, ignored_params=left)
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor) != name.startswith(ignored), name
        return backward(rank, model)

    assert_on_ranks(
        [
            {f"{name}.weight": [1.0 + rank if name == ignored else 1.5] * 4 for name in ("first", "second", "third")}
            for rank in range(world.size)
        ],
        world.run(body),
    )


@requirement(
    "RFSDP-IGN-02",
    "Some parameters of a module can be ignored while its others are replicated.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate, ignored_params",
)
@pytest.mark.parametrize("ignored", ["weight", "bias"])
@pytest.mark.world(2)
def test_ignored_in_part(world: World, ignored: str) -> None:
    """Ignore the weight of a layer, or its bias."""

    def body(rank: Rank) -> dict[str, list[float]]:
        model = nn.Linear(2, 1, device=rank.device)
        replicate_fsdp.apply(model, rank, ignored_params={model.get_parameter(ignored)})
        (model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)) * (1 + rank.index)).sum().backward()
        assert {name: isinstance(p, DTensor) for name, p in model.named_parameters()} == {
            "weight": ignored != "weight",
            "bias": ignored != "bias",
        }
        return {name: gradient.flatten().tolist() for name, gradient in replicate_fsdp.gradients(model).items()}

    for rank, gradients in enumerate(world.run(body)):
        own = {"weight": [(1.0 + rank) ** 2] * 2, "bias": [1.0 + rank]}
        average = {"weight": [2.5] * 2, "bias": [1.5]}
        assert gradients == {name: (own if name == ignored else average)[name] for name in own}


@requirement(
    "RFSDP-LIST-01",
    "Modules replicated as a list form one group, whose gradients are averaged in one collective.",
    source=SOURCE,
)
@pytest.mark.parametrize("tied", [False, True], ids=["own", "tied"])
@pytest.mark.world(2)
def test_list_of_modules(world: World, tied: bool) -> None:
    """List the first and third of three layers, with or without a shared weight, in two steps."""

    def body(rank: Rank) -> list[dict[str, list[float]]]:
        model = Sum().to(rank.device)
        if tied:
            model.third.weight = model.first.weight
        replicate_with_list([model.first, model.third], rank)
        replicate_fsdp.apply(model, rank, groups=False)
        gradients = []
        for _ in range(2):
            gradients.append(backward(rank, model))
            model.zero_grad()
        assert not tied or model.third.weight is model.first.weight
        return gradients

    right = {"first.weight": [3.0 if tied else 1.5] * 4, "second.weight": [1.5] * 4}
    right |= {} if tied else {"third.weight": [1.5] * 4}
    assert_on_ranks([[right] * 2] * 2, world.run(body))


def replicate_with_list(modules: Any, rank: Rank) -> None:
    replicate_fsdp.replicate(modules, mesh=rank.mesh())


@requirement(
    "RFSDP-MESH-01",
    "Gradients are averaged over the given mesh dimension only.",
    source="torch/distributed/_composable/replicate_with_fsdp.py: replicate, mesh",
)
@pytest.mark.parametrize("shape", ["2x2", "4x1", "1x4"])
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.world(4)
def test_meshes(world: World, shape: str, dimension: int) -> None:
    """Use either dimension of a two-dimensional mesh, including dimensions of one rank."""
    sizes = [int(size) for size in shape.split("x")]

    def body(rank: Rank) -> dict[str, list[float]]:
        mesh = rank.mesh(*sizes, names=("first", "second"))
        return backward(rank, replicate_fsdp.apply(layer(), rank, mesh=mesh[("first", "second")[dimension]]))

    lines = torch.arange(4).view(*sizes)
    for rank, gradients in enumerate(world.run(body)):
        row, column = divmod(rank, sizes[1])
        line = lines[:, column] if dimension == 0 else lines[row]
        assert gradients == {"weight": [1.0 + float(line.double().mean())] * 4}


@requirement(
    "RFSDP-CONTRACT-01",
    "replicate raises an error for a two-dimensional mesh, or for a module that is already sharded or replicated.",
    source=SOURCE,
)
@pytest.mark.parametrize("what", ["mesh", "sharded", "replicated"])
@pytest.mark.world(2)
def test_refused(world: World, what: str) -> None:
    """Each case raises an error on every rank."""

    def body(rank: Rank) -> str:
        model, options = layer(rank.device), {}
        if what == "sharded":
            fully_shard(model, mesh=rank.mesh())
        elif what == "replicated":
            replicate_fsdp.apply(model, rank)
        else:
            options["mesh"] = rank.mesh(2, 1, names=("first", "second"))
        try:
            replicate_fsdp.apply(model, rank, **options)
        except (AssertionError, RuntimeError, ValueError) as e:
            return type(e).__name__
        return "taken"

    right = {"mesh": "ValueError", "sharded": "RuntimeError", "replicated": "AssertionError"}[what]
    assert_on_ranks([right] * 2, world.run(body))


def tensor_parallel(rank: Rank, *, groups: bool) -> tuple[nn.Module, int]:
    """Create two layers, column-wise and row-wise over pairs of ranks, and replicate them over the pairs.

    Returns the model, and the index of this rank's part of the batch.
    """
    mesh = rank.mesh(rank.size // 2, 2, names=("data", "tensor"))
    model = layers(rank.device).double()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return replicate_fsdp.apply(model, rank, groups=groups, mesh=mesh["data"]), mesh["data"].get_local_rank()


@requirement(
    "RFSDP-TP-01",
    "A model that is tensor parallel over one mesh dimension and replicated over another trains as on one device.",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_param.py: _init_sharding_spec_tp",
)
@pytest.mark.parametrize("groups", [True, False], ids=["own-groups", "one-group"])
@pytest.mark.world(2, 4)
def test_tensor_parallel(world: World, groups: bool) -> None:
    """Compare parameters after three steps; two layers, column-wise and row-wise, on two tensor-parallel ranks."""
    data = world.size // 2

    def body(rank: Rank) -> list[list[list[float]]]:
        model, part = tensor_parallel(rank, groups=groups)
        assert [len(p.placements) for p in model.parameters() if isinstance(p, DTensor)] == [2, 2]
        return steps(model, [part])

    assert_on_ranks([steps(layers().double(), list(range(data)))] * world.size, world.run(body))


@requirement(
    "RFSDP-TP-153",
    "With a reduce_dtype, gradients of tensor-parallel replicas are summed in it over the tensor-parallel ranks.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: reduce_dtype",
)
@pytest.mark.parametrize("batches", [1, 2], ids=["at-once", "accumulated"])
@pytest.mark.world(2)
def test_reduce_dtype_of_replicas(world: World, batches: int) -> None:
    """The gradients of a norm's bias are 512 and 2, whose sum bfloat16 lacks, in one micro-batch or in two."""

    def body(rank: Rank) -> list[float]:
        mesh = rank.mesh(1, 2, names=("data", "tensor"))
        model: Any = nn.Sequential(nn.LayerNorm(4)).to(rank.device)
        parallelize_module(model, mesh["tensor"], {"0": SequenceParallel()})
        fully_shard(model, mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        for batch in range(batches):
            model.set_requires_gradient_sync(batch == batches - 1)
            output = model(torch.ones(1, 4, 4, device=rank.device)).to_local()
            output.backward(torch.full_like(output, (0.5 if rank.index else 128.0) / batches))
        gradient: list[float] = model[0].bias.grad.full_tensor().tolist()
        return gradient

    assert_on_ranks([[514.0] * 4] * world.size, world.run(body))


@requirement(
    "RFSDP-TP-02",
    "Gradients of a replicated model with tensor-parallel layers are clipped by the norm of all gradients.",
    source="torch.nn.utils.clip_grad_norm_; pytorch/pytorch#170862",
)
@pytest.mark.world(2, 4)
def test_clipping(world: World) -> None:
    """Compare the returned norm and the clipped gradients of two layers, column-wise and row-wise."""
    data = world.size // 2

    def clipped(model: nn.Module, parts: list[int]) -> tuple[float, list[list[float]]]:
        backward_of(model, parts)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 8.0)
        gradients = replicate_fsdp.gradients(model).values()
        return float(replicate_fsdp.whole(norm)), [g.flatten().tolist() for g in gradients]

    def body(rank: Rank) -> tuple[float, list[list[float]]]:
        model, part = tensor_parallel(rank, groups=False)
        return clipped(model, [part])

    norm, gradients = clipped(layers().double(), list(range(data)))
    assert norm > 8
    for own_norm, clipped_gradients in world.run(body):
        assert own_norm == pytest.approx(norm, rel=1e-12)
        for own, right in zip(clipped_gradients, gradients, strict=True):
            assert own == pytest.approx(right, rel=1e-12)


def backward_of(model: nn.Module, parts: list[int]) -> None:
    """Run a backward of the mean over parts on the model's device."""
    device = next(model.parameters()).device
    output = torch.cat([model(row(part).double().to(device)) for part in parts])
    (output.sum() / len(parts)).backward()


def steps(model: nn.Module, parts: list[int]) -> list[list[list[float]]]:
    """Return the parameters after each of three SGD steps on the mean over parts, one per rank or all on one device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    parameters = []
    for _ in range(3):
        optimizer.zero_grad()
        backward_of(model, parts)
        optimizer.step()
        parameters.append([p.flatten().tolist() for p in replicate_fsdp.parameters(model).values()])
    return parameters


@requirement(
    "RFSDP-MESH-02",
    "With dp_mesh_dims, gradients of DTensors on the whole mesh are averaged over the named dimensions.",
    source="torch.distributed.fsdp.DataParallelMeshDims",
)
@requirement(
    "RFSDP-MESH-04",
    "With dp_mesh_dims, a parameter that is not a DTensor on the whole mesh raises an error.",
    source="torch.distributed.fsdp.DataParallelMeshDims",
)
@pytest.mark.parametrize("how", ["distributed", "divided", "plain", "both-dimensions"])
@pytest.mark.world(2, 4)
def test_whole_mesh(world: World, how: str) -> None:
    """A weight is replicated over both dimensions, sharded over the second, or plain; one or both are named."""
    if not hasattr(fsdp, "DataParallelMeshDims"):
        unsupported(TorchLacks("dp_mesh_dims"))
    data = world.size // 2
    both = how == "both-dimensions"

    def body(rank: Rank) -> list[float] | str:
        mesh = rank.mesh(data, 2, names=("data", "tensor"))
        model = layer(rank.device)
        if how != "plain":
            placements = [Replicate(), Shard(0) if how == "divided" else Replicate()]
            model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, placements))
        dimensions = fsdp.DataParallelMeshDims(replicate=("data", "tensor") if both else "data")
        try:
            replicate_fsdp.apply(model, rank, groups=False, mesh=mesh, dp_mesh_dims=dimensions)
        except ValueError as e:
            return "refused" if "DTensor" in str(e) else str(e)
        part = rank.index if both else mesh["data"].get_local_rank()
        own = torch.full((1, 2), 1.0 + part, device=rank.device)
        x = DTensor.from_local(own, mesh, [Shard(0), Shard(0) if both else Replicate()], run_check=False)
        model(x).sum().backward()
        return replicate_fsdp.gradients(model)["weight"].flatten().tolist()

    parts = world.size if both else data
    average = sum(range(1, parts + 1)) / parts
    assert_on_ranks(["refused" if how == "plain" else [average] * 4] * world.size, world.run(body))
