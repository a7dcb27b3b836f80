"""Several meshes: another shape after a checkpoint, a mesh without the first rank, two models in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fixtures.placements import REDUCED
from harness import Rank, World, assert_on_ranks, assert_same_all, dyadic, requirement
from harness.stacks import tp_extension

SOURCE = "torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions"
PARTS = 12
"""The number of features and the length of sequences, which two, three and four ranks divide."""


class Scale(nn.Module):
    """A layer that accepts any part of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def layers() -> nn.Sequential:
    """Create layers of whole numbers, whose products and sums are exact for one step.

    DTensor gives each rank of a row-wise layer its share of the bias, and sums the shares together with the products.
    Biases are multiples of three, so that a third of a bias is exact, too.
    """
    sizes = ((PARTS, 3), None, (3, PARTS), (PARTS, 3), None, (3, PARTS), (PARTS, 2))
    modules = [Scale() if size is None else nn.Linear(*size, dtype=torch.float64) for size in sizes]
    model = nn.Sequential(*modules)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(dyadic(*parameter.shape, key=name, span=2, denominator=1))
            if name.endswith("bias"):
                parameter.mul_(3)
    return model


def styles() -> Mapping[str, ParallelStyle]:
    """Return row-wise, column-wise and sequence-parallel styles for all layers except the last."""
    return {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
        "4": SequenceParallel(use_local_output=True),
        "5": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def backward(model: nn.Module, parts: Sequence[int]) -> None:
    """Run a backward of the mean over parts of a batch on the model's device."""
    x = torch.cat([dyadic(1, PARTS, PARTS, key=("input", part), span=2, denominator=1) for part in parts])
    (model(x.to(next(model.parameters()).device)).sum() / len(parts)).backward()


def trained() -> dict[str, torch.Tensor]:
    """Train one step on two parts on a single device and return the parameters."""
    model = layers()
    backward(model, (0, 1))
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return {name: p.detach() for name, p in model.named_parameters()}


def sharded(module: nn.Module, mesh: Any, rank: Rank, **options: Any) -> Any:
    """Make a module tensor parallel over the mesh dimension ``tp``, and shard it with FSDP1 over ``dp``."""
    parallelize_module(module.to(rank.device), mesh["tp"], dict(styles()))
    options.setdefault("use_orig_params", True)
    return FullyShardedDataParallel(module, device_mesh=mesh["dp"], device_id=rank.device, **options)


def step(model: Any, part: int) -> None:
    backward(model, (part,))
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def saved(model: Any, *, offload: bool = False) -> dict[str, Any]:
    config = ShardedStateDictConfig(offload_to_cpu=offload)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        return dict(model.state_dict())


def load(model: Any, state: dict[str, Any]) -> None:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(state)


@requirement(
    "TP-GRAD-14",
    "Layers parallel by rows, columns or sequence train under FSDP as on one device, whatever the sharding strategy.",
    source=f"{SOURCE}; SequenceParallel; ShardingStrategy",
)
@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.world(4, 6, 8)
@pytest.mark.each_choice
def test_sequences(world: World, original: bool) -> None:
    """Train one step with each sharding strategy, on two data-parallel by two to four tensor-parallel ranks."""
    expected = trained()

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, rank.size // 2, names=("dp", "tp"))
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            model = sharded(layers(), mesh, rank, sharding_strategy=strategy, use_orig_params=original)
            step(model, mesh["dp"].get_local_rank())
            assert_same_all(expected, tp_extension.parameters(model), "parameter")

    world.run(body)


DATA = ("dp", "shards")
"""The names of the data-parallel dimensions of a mesh; of two, the first has replicas."""
WIDE, NARROW = torch.float64, torch.float32
SYNC, ALL_REDUCE = "set_requires_gradient_sync", "set_requires_all_reduce"
SHARDED: list[tuple[tuple[int, ...], bool, str, tuple[torch.dtype | None, ...]]] = [
    ((2,), True, "", ()),
    ((2,), False, SYNC, ()),
    ((4,), True, SYNC, ()),
    ((2,), True, SYNC, (None, NARROW)),
    ((2,), False, SYNC, (NARROW, WIDE)),
    ((2, 1), True, ALL_REDUCE, (None, NARROW)),
]
"""The sizes of the data-parallel dimensions, whether to shard again after a forward, what the first of two backwards
leaves out, if there are two, and param_dtype and reduce_dtype."""


@requirement(
    "TP-GRAD-18",
    "Layers parallel by rows, columns or sequence train under fully_shard as on one device, also if they accumulate.",
    source="torch.distributed.fsdp.fully_shard; torch.distributed.tensor.parallel",
)
@requirement(
    "TP-GRAD-9210",
    "With a reduce_dtype, tensor-parallel layers under fully_shard have one device's gradients in their own dtype, "
    "also if they accumulate.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: reduce_dtype; FSDPModule: set_requires_gradient_sync, "
    "set_requires_all_reduce",
)
@pytest.mark.world(4)
def test_fully_sharded(world: World) -> None:
    """Average over two ranks, four or replicas; synchronize each backward or only the second; reduce in any dtype."""
    expected = trained()

    def body(rank: Rank) -> None:
        for ranks, reshard, later, dtypes in SHARDED:
            what = f"{ranks} data-parallel ranks, {reshard=}, {later=}, {dtypes}"
            mesh = rank.mesh(*ranks, rank.size // math.prod(ranks), names=(*DATA[: len(ranks)], "tp"))
            model: Any = parallelize_module(layers().to(rank.device), mesh["tp"], dict(styles()))
            policy = MixedPrecisionPolicy(*dtypes)
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh[DATA[: len(ranks)]], reshard_after_forward=reshard, mp_policy=policy)
            part = mesh["dp"].get_local_rank() % 2
            if later:
                getattr(model, later)(False)
                backward(model, (1 - part,))
                getattr(model, later)(True)
            backward(model, (part,))
            for name, parameter in model.named_parameters():
                assert parameter.grad.placements == parameter.placements, f"{what}: {name}"
                assert parameter.grad.dtype is parameter.dtype, f"{what}: {name}"
            torch.optim.SGD(model.parameters(), lr=0.25 if later else 0.5, foreach=False).step()
            assert_same_all(expected, {name: p.full_tensor().detach() for name, p in model.named_parameters()}, what)

    world.run(body)


@requirement(
    "TP-GRAD-15",
    "A model under FSDP over tensor parallelism beside one under FSDP alone trains and saves as it does by itself.",
    source="pytorch/pytorch#113237",
)
@pytest.mark.world(4)
def test_beside_one_dimension(world: World) -> None:
    """Train them one after the other and in turn; a plain model is created first and last."""
    expected = trained()

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("dp", "tp"))

        def plain() -> Any:
            return FullyShardedDataParallel(layers().to(rank.device), device_id=rank.device, device_mesh=rank.mesh(4))

        first, both, last = plain(), sharded(layers(), mesh, rank), plain()
        parts = {first: rank.index % 2, both: mesh["dp"].get_local_rank(), last: rank.index % 2}
        for model, part in parts.items():
            step(model, part)
        for model in parts:
            assert_same_all(expected, tp_extension.parameters(model), "parameter")
            state = saved(model)
            meshes = [value.device_mesh for value in state.values()]
            assert meshes == [mesh if model is both else rank.mesh(4)] * len(expected)
            assert_same_all(expected, {name: value.full_tensor() for name, value in state.items()}, "saved")
            load(model, state)
            assert_same_all(expected, tp_extension.parameters(model), "loaded")

    world.run(body)


@requirement(
    "TP-GRAD-16",
    "A model on some ranks of the world, without rank 0, trains and saves as on all ranks.",
    source=SOURCE,
)
@pytest.mark.world(5)
def test_without_first_rank(world: World) -> None:
    """Use four ranks of five."""
    expected = trained()

    def body(rank: Rank) -> None:
        mesh = DeviceMesh(rank.device.type, [[1, 2], [3, 4]], mesh_dim_names=("dp", "tp"))
        if rank.index:
            model = sharded(layers(), mesh, rank)
            step(model, mesh["dp"].get_local_rank())
            assert_same_all(expected, tp_extension.parameters(model), "parameter")
            state = saved(model)
            assert_same_all(expected, {name: value.full_tensor() for name, value in state.items()}, "saved")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load(model, state)
            assert_same_all(expected, tp_extension.parameters(model), "loaded")

    world.run(body)


@requirement(
    "TP-STATE-13",
    "A distributed checkpoint saved on one mesh is loaded with the same values on a mesh of another shape.",
    source="torch.distributed.checkpoint",
)
@pytest.mark.parametrize("offload", [False, True], ids=["there", "offloaded"])
@pytest.mark.world(4, 6)
@pytest.mark.each_choice
def test_another_mesh(world: World, tmp_path: Path, offload: bool) -> None:
    """Tensor-parallel groups grow, shrink, or become one rank; saved from the device or offloaded to the host."""
    expected = {name: p.detach() for name, p in layers().named_parameters()}

    def body(rank: Rank) -> None:
        shapes = ((2, 2), (4, 1)) if rank.size == 4 else ((3, 2), (2, 3))
        for shape in shapes:
            state = saved(sharded(layers(), rank.mesh(*shape, names=("dp", "tp")), rank), offload=offload)
            assert all(type(value) is DTensor for value in state.values())
            checkpoint.save(state, checkpoint_id=tmp_path / str(shape[0]))
        for shape, other in zip(shapes, reversed(shapes), strict=True):
            module = layers()
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
            model = sharded(module, rank.mesh(*shape, names=("dp", "tp")), rank)
            state = saved(model)
            checkpoint.load(state, checkpoint_id=tmp_path / str(other[0]))
            load(model, state)
            assert_same_all(expected, tp_extension.parameters(model), "parameter")

    world.run(body)


@requirement(
    "TP-STATE-21",
    "A distributed checkpoint refuses to save or load a DTensor with a pending reduction on every rank.",
    source="torch/distributed/tensor/_api.py: DTensor",
)
@pytest.mark.world(2)
def test_pending(world: World, tmp_path: Path) -> None:
    """Any reduction is pending, over one mesh dimension or one of two; once reduced, the tensor is saved and loaded."""

    def body(rank: Rank) -> None:
        flat, deep = rank.mesh(), rank.mesh(1, 2, names=("dp", "tp"))
        layouts: list[tuple[DeviceMesh, list[Placement]]] = [(flat, [Partial(op)]) for op in REDUCED]
        layouts += [
            (deep, [Shard(0), Partial()]),
            (deep, [Partial(), Shard(0)]),
            (deep, [Partial("max"), Partial("max")]),
        ]
        whole = {"w": DTensor.from_local(torch.ones(2, 3), flat, [Replicate()])}
        checkpoint.save(whole, checkpoint_id=tmp_path / "whole")
        for i, (mesh, placements) in enumerate(layouts):
            state = {"w": DTensor.from_local(torch.full((2, 3), 1.0 + rank.index), mesh, placements)}
            before = state["w"].to_local().clone()
            with pytest.raises(checkpoint.CheckpointException, match="partial placements"):
                checkpoint.save(state, checkpoint_id=tmp_path / str(i))
            assert not (tmp_path / str(i) / ".metadata").exists(), placements
            with pytest.raises(checkpoint.CheckpointException, match="ValueError"):
                checkpoint.load(state, checkpoint_id=tmp_path / "whole")
            assert torch.equal(state["w"].to_local(), before), placements
        reduced = {"w": state["w"].redistribute(placements=[Replicate(), Replicate()])}
        checkpoint.save(reduced, checkpoint_id=tmp_path / "reduced")
        loaded = {"w": torch.zeros(2, 3)}
        checkpoint.load(loaded, checkpoint_id=tmp_path / "reduced")
        assert torch.equal(loaded["w"], torch.full((2, 3), 2.0))

    world.run(body)


@requirement(
    "TP-MESH-01",
    "FSDP averages over the dimension of the mesh that it is given, whichever place it has in the whole mesh.",
    source="torch/distributed/fsdp/_init_utils.py: _init_process_group_state",
)
@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.world(4)
def test_place_of_the_dimension(world: World, place: str) -> None:
    """The other dimension is of ranks that have the same data."""

    def body(rank: Rank) -> list[float]:
        names = ("dp", "other") if place == "first" else ("other", "dp")
        mesh = rank.mesh(2, 2, names=names)["dp"]
        layer = nn.Linear(2, 1, bias=False).to(rank.device)
        model = FullyShardedDataParallel(layer, device_mesh=mesh, device_id=rank.device, use_orig_params=True)
        part = mesh.get_local_rank()
        model(torch.full((1, 2), 1.0 + part * part, device=rank.device)).sum().backward()
        with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
            return [float(x) for p in model.parameters() if p.grad is not None for x in p.grad.flatten()]

    assert_on_ranks([[1.5, 1.5]] * 4, world.run(body))
