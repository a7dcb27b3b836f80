"""Sizes, strides and offsets of DTensors on meshes of any size, placements as values, and DTensors without memory."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fixtures.placements import MORE_OPERATORS, REDUCED, laid_out, part
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages
from harness.stacks.limit import runs_with
from harness.stacks.pretended import FakeTensorMode, pretended
from harness.stacks.tp_extension import StridedShard, compute_local_shape_and_global_offset

pytestmark = pytest.mark.needs(torch=MORE_OPERATORS)
SOURCE = "torch.distributed.tensor.DTensor"
WHOLE, ROWS, COLUMNS, SLICES, SUM = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
ORDERS = (0, 1, 2), (2, 0, 1), (1, 0, 2)
"""Orders of the dimensions of tensors in memory, the last one first to vary."""


def in_order(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """Return a dense tensor whose dimensions lie in memory in an order."""
    return torch.zeros([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])


@requirement(
    "TP-LAY-22",
    "The local tensor into which shards are gathered is contiguous, whatever their dimension and their sizes.",
    source="torch.distributed.tensor.DTensor: redistribute, full_tensor, to_local",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, uneven shards of an inner dimension were gathered strided")
@pytest.mark.world(2, 3)
def test_gathered_is_contiguous(world: World) -> None:
    """Gather even and uneven shards of each dimension."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for shape, dim in itertools.product(((2, 5), (6, 6), (3, 4, 7)), (0, 1, -1)):
            whole = torch.arange(float(torch.Size(shape).numel()), device=rank.device).reshape(shape)
            x = distribute_tensor(whole, mesh, [Shard(dim)])
            for name, local in (
                ("redistribute", x.redistribute(placements=[Replicate()]).to_local()),
                ("full_tensor", x.full_tensor()),
            ):
                if local.stride() != whole.stride() or not torch.equal(local, whole):
                    wrong.append(f"{name} of {shape} along {dim}: strides {local.stride()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def parallelized(tensor: torch.Tensor, mesh: Any, dim: int) -> Any:
    """Return the weight of a column-wise or row-wise layer that had a tensor as its weight."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(tensor)
    return parallelize_module(layer, mesh, (ColwiseParallel, RowwiseParallel)[dim](), src_data_rank=None).weight


def partitioned(tensor: torch.Tensor, mesh: Any, dim: int) -> Any:
    """Return the parameter of a module whose parameter a function of distribute_module has sharded."""

    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        given: Any = module.weight
        module.weight = nn.Parameter(distribute_tensor(given.data, mesh, [Shard(dim)], src_data_rank=None))

    module = nn.Module()
    module.weight = nn.Parameter(tensor)
    return distribute_module(module, mesh, partition).weight


CUTS: dict[str, Callable[[torch.Tensor, Any, int], Any]] = {
    "distribute_tensor": lambda x, mesh, dim: distribute_tensor(x, mesh, [Shard(dim)], src_data_rank=None),
    "from the end": lambda x, mesh, dim: distribute_tensor(x, mesh, [Shard(dim - 2)], src_data_rank=None),
    "redistribute": lambda x, mesh, dim: DTensor.from_local(x, mesh, [WHOLE]).redistribute(placements=[Shard(dim)]),
    "parallelize_module": parallelized,
    "distribute_module": partitioned,
}
"""Ways to shard a tensor of which each rank has the whole, along one of two dimensions, without communication."""


@requirement(
    "TP-LAY-1400",
    "A shard that a rank cuts from its own tensor has memory for its own elements alone, and stays when the tensor "
    "changes.",
    source="torch.distributed.tensor: distribute_tensor, DTensor.redistribute, distribute_module; "
    "torch.distributed.tensor.parallel.parallelize_module: src_data_rank",
)
@pytest.mark.world(2, 3)
def test_memory_of_shards(world: World) -> None:
    """Cut rows and columns that ranks divide or not, or of which some ranks have none, then change the whole."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for (name, cut), shape, dim in itertools.product(CUTS.items(), ((6, 6), (7, 5), (1, 12)), (0, 1)):
            whole = torch.arange(float(math.prod(shape)), device=rank.device).reshape(shape)
            right = laid_out(whole, mesh, [Shard(dim)]).clone()
            local = cut(whole, mesh, dim).to_local().detach()
            whole.add_(1000)
            case = f"{name}: {shape} along {dim}"
            if local.untyped_storage().nbytes() != right.numel() * right.itemsize:
                wrong.append(f"{case}: {local.untyped_storage().nbytes()} bytes")
            if not torch.equal(local, right):
                wrong.append(f"{case}: changed")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-LAY-19",
    "from_local without a size gives equal parts the whole's size and strides, for any layout on any mesh dimensions.",
    source=f"{SOURCE}.from_local: computed assuming the given distributed tensor is evenly sharded",
)
@pytest.mark.world(1)
def test_sizes_and_strides(world: World) -> None:
    """Place contiguous and transposed parts by every layout on one to three mesh dimensions; cut the whole again."""

    def body(rank: Rank) -> None:
        shape = (2, 3, 4)
        for sizes in (3,), (2, 4), (2, 3, 2):
            with pretended(1, math.prod(sizes)):
                mesh = init_device_mesh("cpu", sizes)
                for placements in itertools.product((WHOLE, ROWS, COLUMNS, SLICES, SUM), repeat=len(sizes)):
                    whole = list(shape)
                    for placement, count in zip(placements, sizes, strict=True):
                        if isinstance(placement, Shard):
                            whole[placement.dim] *= count
                    for order in ORDERS:
                        what = f"{placements} on {sizes}, {order}"
                        made = DTensor.from_local(in_order(shape, order), mesh, placements)
                        right = in_order(tuple(whole), order)
                        assert (made.shape, made.stride()) == (right.shape, right.stride()), what
                        if SUM not in placements and order == ORDERS[0]:
                            again = DTensor.from_local(right, mesh, [WHOLE] * len(sizes))
                            cut = again.redistribute(placements=placements)
                            assert (cut.shape, cut.to_local().shape) == (right.shape, shape), what

    world.run(body)


def first(length: int, mesh: Any, placements: list[Placement]) -> tuple[int, int]:
    """Return how many of some positions this rank has, and the first of them, or the length if it has none."""
    found = laid_out(torch.arange(length), mesh, placements)
    return found.numel(), int(found[0]) if found.numel() else length


@requirement(
    "TP-LAY-20",
    "The reported offset of a shard is its first position, strided or not, and of an empty one the whole's length.",
    source="torch/distributed/tensor/_utils.py: compute_local_shape_and_global_offset; test_utils.py: "
    "test_compute_local_shape_and_global_offset_uneven",
)
@pytest.mark.world(1)
def test_offsets(world: World) -> None:
    """Ask every rank of meshes of one to four dimensions, for sizes that they divide or not, or too small ones."""

    def body(rank: Rank) -> None:
        strided = StridedShard(0, split_factor=2), StridedShard(0, split_factor=3), StridedShard(1, split_factor=2)
        for sizes, every in ((3,), 1), ((4, 2), 2), ((2, 3, 2), 17), ((1, 2, 2, 2), 131):
            layouts = list(itertools.product((WHOLE, ROWS, COLUMNS, *strided), repeat=len(sizes)))[::every]
            for index in range(math.prod(sizes)):
                with pretended(index, math.prod(sizes)):
                    mesh = init_device_mesh("cpu", sizes)
                    for placements, shape in itertools.product(layouts, ((39, 2), (4, 13), (1, 5))):
                        found = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
                        right = []
                        for dim, length in enumerate(shape):
                            line: list[Placement] = [WHOLE] * len(sizes)
                            for i, placement in enumerate(placements):
                                if isinstance(placement, StridedShard) and placement.dim == dim:
                                    line[i] = StridedShard(0, split_factor=placement.split_factor)
                                elif isinstance(placement, Shard) and placement.dim == dim:
                                    line[i] = ROWS
                            right.append(first(length, mesh, line))
                        what = f"{placements} of {shape} on rank {index} of {sizes}"
                        assert list(zip(*found, strict=True)) == right, what

    world.run(body)


KINDS: tuple[Placement, ...] = (
    *map(Shard, range(4)),
    Replicate(),
    *map(Partial, REDUCED),
    *(StridedShard(dim, split_factor=factor) for dim in (0, 1) for factor in (1, 2, 3)),
)
"""Placements that all differ."""


@requirement(
    "TP-LAY-21",
    "Placements are equal, also as copies, exactly if they are of one kind with the same dimension and operation.",
    source="torch.distributed.tensor: Shard, Replicate, Partial",
)
@pytest.mark.world(1)
def test_equal_placements(world: World) -> None:
    """Compare placements with each other, with copies and with unpickled ones; ask each of which kind it is."""

    def body(rank: Rank) -> None:
        for placement in KINDS:
            copies = [copy.copy(placement), copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))]
            for other in KINDS:
                same = other is placement
                assert (placement == other, placement != other) == (same, not same), f"{placement}, {other}"
                for each in copies:
                    assert (each == other) == same, f"copy of {placement}, {other}"
                    assert (hash(each), type(each)) == (hash(placement), type(placement)), f"{placement}"
            plain = type(placement) is Shard
            dims = [plain and placement == Shard(dim) for dim in range(4)]
            assert [placement.is_shard(dim) for dim in range(4)] == dims, f"{placement}"
            assert placement.is_shard() == plain, f"{placement}"
            assert placement.is_replicate() == isinstance(placement, Replicate), f"{placement}"
            assert placement.is_partial() == isinstance(placement, Partial), f"{placement}"
        assert Partial() == Partial("sum")

    world.run(body)


@requirement(
    "TP-META-01",
    "A DTensor or module on the meta device gets its layout without communication, and trains as another once it has "
    "values.",
    source="torch.distributed.tensor: distribute_tensor, DTensor.from_local; torch.empty_like",
)
@pytest.mark.world(2)
def test_without_memory(world: World) -> None:
    """Make tensors by each function in each layout; give modules memory by to_empty or in the function of a module."""

    def body(rank: Rank) -> None:
        mesh, at = rank.mesh(), messages.mark()
        for layout in WHOLE, ROWS, COLUMNS:
            whole = torch.empty(5, 3, device="meta", requires_grad=True)
            own = part(whole, rank, layout)
            for made in (
                distribute_tensor(whole, mesh, [layout]),
                DTensor.from_local(own, mesh, [layout], shape=whole.shape, stride=whole.stride()),
            ):
                assert (made.is_meta, made.to_local().is_meta, made.placements) == (True, True, (layout,))
                assert made.requires_grad
                filled: Any = torch.empty_like(made, device=rank.device)
                assert (filled.is_meta, filled.device, filled.shape) == (False, rank.device, whole.shape)
                assert (filled.placements, filled.stride()) == ((layout,), whole.stride())
                nn.init.constant_(filled, 1.25)
                assert_same(torch.full(own.shape, 1.25, device=rank.device), filled.to_local().detach(), f"{layout}")
        assert not messages.since(at)

        def layers(device: Any) -> nn.Sequential:
            return nn.Sequential(nn.Linear(3, 4, device=device), nn.Linear(4, 3, device=device))

        def given_memory(name: str, module: nn.Module, on: Any) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                sharded = torch.empty_like(distribute_tensor(parameter, on, [ROWS]), device=rank.device)
                module.register_parameter(key, nn.Parameter(sharded))

        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        late = parallelize_module(layers("meta"), mesh, plan).to_empty(device=rank.device)
        early = parallelize_module(layers(rank.device), mesh, plan)
        sharded = distribute_module(layers("meta"), mesh, given_memory)
        plain = layers(rank.device)
        x = numbers(2, 3).to(rank.device) % 4
        results = []
        for model in late, early, sharded, plain:
            for parameter in model.parameters():
                assert parameter.device == rank.device
                with torch.no_grad():
                    value: Any = numbers(*parameter.shape).to(rank.device) % 5 - 2
                    if isinstance(parameter, DTensor):
                        value = distribute_tensor(value, mesh, parameter.placements)
                    parameter.copy_(value)
            given: Any = DTensor.from_local(x, mesh, [WHOLE]) if model is sharded else x
            output = model(given)
            output = output.full_tensor() if isinstance(output, DTensor) else output
            output.sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            values: list[Any] = [output, *model.parameters()]
            results.append([v.full_tensor() if isinstance(v, DTensor) else v for v in values])
        for name, found in zip(("late", "early", "sharded"), results, strict=False):
            for right, tensor in zip(results[-1], found, strict=True):
                assert_same(right.detach(), tensor.detach() + 0, name)

    world.run(body)


@requirement(
    "TP-META-31",
    "A module or DTensor on the meta device keeps its placements, pending ones too, when it is given memory.",
    source="torch.nn.Module.to_empty; torch.empty_like; test_tensor_ops.py: test_meta_init_partial",
)
@requirement(
    "TP-META-32",
    "DTensors of fake tensors have the parts and placements of real ones, without communication.",
    source=f"{SOURCE}; torch.compiler: fake tensors; test_fake.py: test_fake_dtensor_operations",
)
@pytest.mark.world(2)
def test_given_memory(world: World) -> None:
    """Parameters and buffers in each layout, on one mesh dimension or two; products and moves of fake tensors."""

    class Held(nn.Module):
        def __init__(self, mesh: Any, placements: Any) -> None:
            super().__init__()
            self.weight = nn.Parameter(DTensor.from_local(torch.empty(3, 4, device="meta"), mesh, placements))
            self.register_buffer("held", DTensor.from_local(torch.empty(2, 5, device="meta"), mesh, placements))

    def body(rank: Rank) -> None:
        flat, deep = rank.mesh(), rank.mesh(1, 2, names=("dp", "tp"))
        kept = [op for op in REDUCED if op != "product" or runs_with("<2.14")]  # which keeps no product pending
        kinds: list[Placement] = [WHOLE, ROWS, COLUMNS, *map(Partial, kept)]
        pairs = [(Partial(), Partial()), (SUM, ROWS), (ROWS, Partial("max")), (Partial("avg"), WHOLE)]
        layouts: list[Any] = [*((flat, (kind,)) for kind in kinds), *((deep, pair) for pair in pairs)]
        for mesh, placements in layouts:
            empty = Held(mesh, placements)
            tensors = {name: (t.shape, t.to_local().shape) for name, t in empty.state_dict().items()}
            alike = {name: torch.empty_like(t, device=rank.device) for name, t in empty.state_dict().items()}
            module = empty.to_empty(device=rank.device)
            assert isinstance(module.weight, nn.Parameter)
            for state in module.state_dict(), alike:
                assert list(state) == list(tensors), f"{placements}"
                for name, found in state.items():
                    assert (found.placements, found.device_mesh) == (placements, mesh), f"{name} of {placements}"
                    assert (found.shape, found.to_local().shape) == tensors[name], f"{name} of {placements}"
                    assert not found.is_meta, f"{name} of {placements}"

        def computed() -> list[Any]:
            rows = distribute_tensor(torch.ones(5, 3), flat, [ROWS], src_data_rank=None)
            even = DTensor.from_local(torch.ones(2, 3), flat, [ROWS]).requires_grad_()
            product = even @ distribute_tensor(torch.ones(3, 4), flat, [WHOLE], src_data_rank=None)
            product.sum().backward()
            gathered = rows.redistribute(placements=[WHOLE])
            return [rows, even, product, rows.sum(0), rows.t(), gathered, even.grad, gathered + rows]

        at = messages.mark()
        with FakeTensorMode():
            fake = computed()
        assert not messages.since(at)
        for i, (one, real) in enumerate(zip(fake, computed(), strict=True)):
            assert (one.placements, one.shape, one.stride()) == (real.placements, real.shape, real.stride()), i
            assert one.to_local().shape == real.to_local().shape, i

    world.run(body)
