"""How DTensor places tensors on a mesh and redistributes them, in forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fixtures.placements import MORE_OPERATORS, REDUCED, laid_out
from fixtures.tensors import chunk, numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages
from harness.stacks.collectives import flattened
from harness.stacks.tp_extension import StridedShard, compute_local_shape_and_global_offset

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
SIZES = (1, 2, 3, 4, 5, 7, 9)


def distributed(tensor: torch.Tensor, rank: Rank, mesh: Any, placements: Any) -> DTensor:
    """Distribute the first rank's data, while other ranks' data differ; for strided shards, all ranks have the same."""
    if any(isinstance(p, StridedShard) for p in placements):
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return distribute_tensor(tensor + 100 * rank.index, mesh, placements)


@requirement(
    "TP-LAY-01",
    "distribute_tensor gives each rank its chunk of the first rank's data, in contiguous memory of its own.",
    source="torch.distributed.tensor.distribute_tensor; DTensor.full_tensor",
)
@requirement(
    "TP-LAY-09",
    "full_tensor() of a distributed tensor returns the original tensor.",
    source="torch.distributed.tensor.distribute_tensor; DTensor.full_tensor",
)
@pytest.mark.parametrize("placement", [ROWS, COLUMNS, StridedShard(0, split_factor=2), WHOLE], ids=str)
@pytest.mark.world(1, 2, 3, 4)
def test_distribution(world: World, placement: Placement) -> None:
    """Use sizes from one, which leaves some ranks without elements; ranks have different data."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)
        cases = [(size, placement, (size, 5) if placement != COLUMNS else (5, size)) for size in SIZES]
        cases += [(size, Shard(2), (2, 3, size)) for size in SIZES if placement == COLUMNS]
        for size, at, shape in cases:
            whole = numbers(*shape)
            dtensor = distributed(whole, rank, mesh, [at])
            local = dtensor.to_local()
            assert_same(laid_out(whole, mesh, [at]), local, f"part of {size}")
            assert local.is_contiguous()
            most = -(-whole.numel() // rank.size) if at != WHOLE else whole.numel()
            assert local.untyped_storage().nbytes() <= (most + whole.numel() // size * 2) * local.itemsize
            assert (dtensor.shape, dtensor.stride()) == (whole.shape, whole.stride())
            assert_same(whole, dtensor.full_tensor(), f"whole of {size}")
            alone = distribute_tensor(whole, mesh, [at], src_data_rank=None)
            assert_same(local, alone.to_local(), f"part of {size}, without communication")
            assert alone.to_local().is_contiguous()

    world.run(body)


@requirement(
    "TP-LAY-02",
    "On a two-dimensional mesh, a tensor is sharded first by the first mesh dimension, then by the second.",
    source="torch.distributed.tensor: DTensor; torch/distributed/tensor/_utils.py: "
    "compute_local_shape_and_global_offset",
)
@requirement(
    "TP-LAY-10",
    "The reported offset of a local shard is its position in the whole tensor.",
    source="torch.distributed.tensor: DTensor; torch/distributed/tensor/_utils.py: "
    "compute_local_shape_and_global_offset",
)
@pytest.mark.parametrize(
    "placements",
    [
        (ROWS, ROWS),
        (ROWS, COLUMNS),
        (COLUMNS, ROWS),
        (COLUMNS, COLUMNS),
        (WHOLE, COLUMNS),
        (COLUMNS, WHOLE),
        (WHOLE, WHOLE),
        (StridedShard(0, split_factor=2), ROWS),
        (StridedShard(1, split_factor=2), COLUMNS),
    ],
    ids=lambda p: "-".join(map(str, p)),
)
@pytest.mark.world(4, 6)
def test_two_dimensions(world: World, placements: tuple[Placement, Placement]) -> None:
    """Use even and uneven sizes; ranks have different data."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size // 2, 2, names=("dp", "tp"))
        shapes = [(4 * mesh.size(0), 8 * mesh.size(0)), (5, 7), (9, 2)]
        if placements[0] == StridedShard(1, split_factor=2):
            shapes[1:] = [(5, 11)]  # PyTorch 2.13 can't put columns together of which a rank has none
        for shape in shapes:
            whole = numbers(*shape)
            dtensor: Any = distributed(whole, rank, mesh, placements)
            expected = laid_out(whole, mesh, placements)
            assert_same(expected, dtensor.to_local(), f"part of {shape}")
            assert_same(whole, dtensor.full_tensor(), f"whole of {shape}")
            size, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
            assert tuple(size) == expected.shape
            if expected.numel():
                first = int(expected.flatten()[0]) - 1
                assert tuple(offset) == (first // shape[1], first % shape[1])
                chunks = dtensor.__create_chunk_list__() if not isinstance(placements[0], StridedShard) else []
                assert [(tuple(c.offsets), tuple(c.sizes)) for c in chunks] in ([], [(tuple(offset), tuple(size))])

    world.run(body)


@requirement(
    "TP-LAY-12",
    "Flattening a mesh does not change how tensors are sharded and gathered on it.",
    source="torch/distributed/tensor/_redistribute.py: one collective over several mesh dimensions; "
    "pytorch/pytorch#194457",
)
@pytest.mark.parametrize(
    "placements", list(itertools.product((ROWS, COLUMNS, WHOLE), repeat=2)), ids=lambda p: "-".join(map(str, p))
)
@pytest.mark.world(4, 6)
@pytest.mark.each_choice
def test_flattened(world: World, placements: tuple[Placement, Placement]) -> None:
    """Distribute a tensor, and scatter the sum of different tensors; use even and uneven sizes."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size // 2, 2, names=("dp", "tp"))
        flattened(mesh, "all")
        for shape in ((12, 12), (5, 7), (7, 5), (4, 2)):
            whole = numbers(*shape)
            dtensor = distributed(whole, rank, mesh, placements)
            assert_same(laid_out(whole, mesh, placements), dtensor.to_local(), f"part of {shape}")
            assert_same(whole, dtensor.full_tensor(), f"whole of {shape}")
            given = DTensor.from_local(whole + rank.index, mesh, [Partial(), Partial()])
            summed = whole * rank.size + sum(range(rank.size))
            scattered = given.redistribute(placements=placements)
            assert_same(laid_out(summed, mesh, placements), scattered.to_local(), f"part of the sum of {shape}")

    world.run(body)


MESHES = {"line": (4,), "square": (2, 2), "one at last": (4, 1), "one at first": (1, 4), "deep": (2, 1, 2)}
WHOLES = (
    ((8,), torch.int64),
    ((7,), torch.float32),
    ((1,), torch.bool),
    ((4, 6), torch.bfloat16),
    ((2, 5, 4), torch.float64),
    ((2, 4, 3, 60), torch.float32),
)
"""Sizes and dtypes of tensors of one to four dimensions, which ranks divide or not."""


@requirement(
    "TP-LAY-7101",
    "Tensors with any number of dimensions are distributed over and gathered from meshes with any number of them, some "
    "of one rank.",
    source="torch.distributed.tensor: distribute_tensor, DTensor.full_tensor, DTensor.redistribute",
)
@pytest.mark.parametrize("shape", MESHES.values(), ids=list(MESHES))
@pytest.mark.world(4)
def test_dimensions_of_tensors(world: World, shape: tuple[int, ...]) -> None:
    """Distribute whole tensors of several dtypes in each layout of the mesh, and scatter sums of them into it."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(*shape, names=("a", "b", "c")[: len(shape)]), []
        for size, dtype in WHOLES:
            whole = (numbers(*size) % 251).to(dtype)
            layouts = list(itertools.product((*map(Shard, range(len(size))), WHOLE), repeat=len(shape)))
            for placements in layouts[:: 1 + len(layouts) // 20]:
                case, right = f"{size} as {placements}", laid_out(whole, mesh, placements)
                x = distribute_tensor(whole.to(rank.device), mesh, placements)
                if x.placements != placements or not same(x.to_local(), right):
                    wrong.append(f"part of {case}")
                if not same(x.full_tensor(), whole):
                    wrong.append(f"whole of {case}")
                if dtype != torch.bool:
                    summed = DTensor.from_local(whole.to(rank.device), mesh, [Partial()] * len(shape))
                    if not same(summed.redistribute(placements=placements).to_local(), right * 4):
                        wrong.append(f"sum of {case}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


def same(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, size and elements."""
    return found.dtype == right.dtype and torch.equal(found.cpu(), right)


@requirement(
    "TP-LAY-17",
    "Values that are partial over several mesh dimensions are reduced by the operation of each, also once the mesh is "
    "flattened.",
    source="torch/distributed/tensor/_redistribute.py: one collective over several mesh dimensions; "
    "torch.distributed.tensor.Partial",
)
@pytest.mark.world(4)
def test_reduced_over_dimensions(world: World) -> None:
    """Combine sums and averages, or use one operation; reduce to whole tensors or shards, even and uneven ones."""
    # An average over a first dimension of one rank, beside a sum, is left out: PyTorch 2.13 averages over both.
    meshes = (((2, 2), False), ((2, 2), True), ((2, 1, 2), True))

    def body(rank: Rank) -> None:
        for sizes, flat in meshes:
            mesh = rank.mesh(*sizes, names=("a", "b", "c")[: len(sizes)])
            if flat:
                flattened(mesh, "all")
            mixed = itertools.product(("sum", "avg"), repeat=mesh.ndim)
            for ops in dict.fromkeys((*mixed, *((op,) * mesh.ndim for op in REDUCED))):
                check_reduced(rank, mesh, ops, f"{sizes}, {flat=}, {ops}")

    world.run(body)


def check_reduced(rank: Rank, mesh: DeviceMesh, ops: tuple[str, ...], what: str) -> None:
    """Reduce by an operation for each mesh dimension: to a whole tensor, to rows, to columns and to some of both."""
    for shape in (8, 8), (3, 5):
        parts = torch.stack([numbers(*shape).flip(0) * 16 + 16 * i for i in range(rank.size)]) % 64
        whole = parts.unflatten(0, tuple(mesh.shape))
        for op in ops:
            whole = REDUCED[op](whole, dim=0)
        placements = [Partial(op) for op in ops]
        for target in ((WHOLE,) * mesh.ndim, (ROWS,) * mesh.ndim, (COLUMNS, *[WHOLE] * (mesh.ndim - 1))):
            given = DTensor.from_local(parts[rank.index].to(rank.device), mesh, placements)
            moved = given.redistribute(placements=target)
            assert_same(laid_out(whole, mesh, target), moved.to_local() + 0, f"{what}, {shape} to {target}")


@requirement(
    "TP-LAY-13",
    "Each rank holds the shard of its mesh coordinate, in whatever order the mesh lists its ranks.",
    source="torch.distributed.device_mesh.DeviceMesh: mesh, preserve_rank_order; pytorch/pytorch#193224",
)
@pytest.mark.parametrize("placement", [ROWS, COLUMNS], ids=str)
@pytest.mark.parametrize(
    "order",
    [
        "ascending",
        "descending",
        pytest.param("preserved", marks=pytest.mark.needs(torch="torch.distributed.DeviceMesh(preserve_rank_order)")),
    ],
)
@pytest.mark.world(2, 3)
def test_order_of_ranks(world: World, order: str, placement: Shard) -> None:
    """Distribute a tensor, and redistribute a replicated one; use sizes that ranks divide or not."""

    def body(rank: Rank) -> None:
        ranks = list(range(rank.size))
        options: Any = {"preserve_rank_order": True} if order == "preserved" else {}
        mesh = DeviceMesh(rank.device.type, ranks if order == "ascending" else ranks[::-1], **options)
        (coordinate,) = mesh.get_coordinate() or ()
        for shape in ((6, 12), (5, 7), (1, 1)):
            whole = numbers(*shape)
            expected = chunk(whole, rank.size, coordinate, placement.dim)
            for dtensor in (
                distribute_tensor(whole, mesh, [placement]),
                distribute_tensor(whole, mesh, [WHOLE]).redistribute(placements=[placement]),
            ):
                assert_same(expected, dtensor.to_local(), f"part of {shape}")
                assert_same(whole, dtensor.full_tensor(), f"whole of {shape}")

    world.run(body)


@requirement(
    "TP-LAY-14",
    "An operator on a DTensor communicates on the groups of its own mesh, also if an equal mesh was used before.",
    source="torch.distributed.device_mesh.DeviceMesh: manages the underlying ProcessGroups of its dimensions",
)
@pytest.mark.parametrize("before", ["kept", "destroyed", "named otherwise"])
@pytest.mark.world(4)
def test_equal_meshes(world: World, before: str) -> None:
    """Two meshes of the same ranks; the first is kept, or its groups are destroyed, or it has other names."""

    def body(rank: Rank) -> list[tuple[str, float]]:
        used = []
        for first in ("dp", "rows" if before == "named otherwise" else "dp"):
            mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=(first, "tp"))
            groups = [mesh.get_group(name) for name in (first, "tp")]
            shards = DTensor.from_local(torch.full((2,), 10.0**rank.index, device=rank.device), mesh, [WHOLE, ROWS])
            result = shards.sum()
            own = result.device_mesh.get_group("tp").group_name == groups[1].group_name
            used.append(("its own groups" if own else "those of the mesh before", result.full_tensor().item()))
            if before == "destroyed":
                dist.barrier()
                for group in groups:
                    dist.destroy_process_group(group)
        return used

    sums = [22.0, 22.0, 2200.0, 2200.0]
    assert_on_ranks([[("its own groups", total)] * 2 for total in sums], world.run(body))


@requirement(
    "TP-LAY-03",
    "DTensor.from_local gives a tensor of the given size, or of equal parts if no size is given.",
    source="torch.distributed.tensor: DTensor.from_local",
)
@requirement(
    "TP-LAY-11",
    "DTensor.from_local with run_check=True replicates the first rank's data.",
    source="torch.distributed.tensor: DTensor.from_local",
)
@pytest.mark.world(2, 3, 4)
def test_local_parts(world: World) -> None:
    """Use equal and unequal parts, in either dimension."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)
        for dim, size in itertools.product((0, 1), SIZES):
            whole = numbers(size, 3) if dim == 0 else numbers(3, size)
            local = chunk(whole, rank.size, rank.index, dim).clone()
            dtensor = DTensor.from_local(local, mesh, [Shard(dim)], shape=whole.shape, stride=whole.stride())
            assert (dtensor.shape, dtensor.stride()) == (whole.shape, whole.stride())
            assert_same(whole, dtensor.full_tensor(), f"{size} in dimension {dim}")
            if size % rank.size == 0:
                assert DTensor.from_local(local, mesh, [Shard(dim)]).shape == whole.shape
        checked = DTensor.from_local(numbers(3) + rank.index, mesh, [WHOLE], run_check=True)
        assert_same(numbers(3), checked.to_local(), "checked")
        assert_same(numbers(3) + rank.index, DTensor.from_local(numbers(3) + rank.index, mesh, [WHOLE]).to_local(), "")

    world.run(body)


@requirement(
    "TP-LAY-04",
    "redistribute between any two placements keeps a tensor's value, reducing a partial one by its own operation.",
    source="torch.distributed.tensor: DTensor.redistribute",
)
@pytest.mark.parametrize("source", [ROWS, COLUMNS, WHOLE, *map(Partial, REDUCED)], ids=str)
@pytest.mark.world(2, 3)
def test_redistribution(world: World, source: Placement) -> None:
    """Use sizes that ranks divide or not, some of them too small; redistribute synchronously and asynchronously."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)
        for shape, late in itertools.product(((6, 12), (5, 7), (1, 4)), (False, True)):
            whole = numbers(*shape) * 6
            given = distribute_tensor(whole, mesh, [source if not source.is_partial() else WHOLE])
            if isinstance(source, Partial):
                parts = torch.stack([numbers(*shape).flip(0) * 6 + 6 * i for i in range(rank.size)]) % 64
                given = DTensor.from_local(parts[rank.index].clone(), mesh, [source])
                whole = REDUCED[source.reduce_op](parts, dim=0)
            for target in (ROWS, COLUMNS, WHOLE):
                moved = given.redistribute(placements=[target], async_op=late)
                assert (moved.shape, moved.placements) == (whole.shape, (target,))
                assert_same(laid_out(whole, mesh, [target]), moved.to_local() + 0, f"{shape} to {target}")

    world.run(body)


def unusual(dtype: torch.dtype) -> torch.Tensor:
    """Return infinities, no number, zeros of both signs and a number that two or three divide."""
    return torch.tensor([[torch.inf, -torch.inf, torch.nan], [0.0, -0.0, 6.0 * 2**9]], dtype=dtype)


@requirement(
    "TP-LAY-07",
    "A tensor distributed as partial values equals the original once they are reduced.",
    source="torch.distributed.tensor: distribute_tensor, Partial",
)
@pytest.mark.parametrize("operation", ["sum", "avg", "max", "min"])
@pytest.mark.world(1, 2, 3)
def test_parts(world: World, operation: str) -> None:
    """Use numbers that every world size divides, or infinite ones, from the first rank, the last one or each itself."""

    def body(rank: Rank) -> None:
        dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        for whole, source in itertools.product((numbers(2, 3) * 6, *map(unusual, dtypes)), (0, rank.size - 1, None)):
            given = whole if source in (None, rank.index) else whole.flip(0)
            dtensor = distribute_tensor(given, rank.mesh(rank.size), [Partial(operation)], src_data_rank=source)
            assert_same(whole, dtensor.full_tensor(), f"{operation} of {source}, {whole.dtype}")

    world.run(body)


@requirement(
    "TP-LAY-05",
    "Gradients through from_local, to_local, redistribute or full_tensor equal those of one device, following "
    "grad_placements.",
    source="torch.distributed.tensor: DTensor.from_local, to_local, redistribute, full_tensor",
)
@pytest.mark.parametrize("target", [ROWS, COLUMNS, WHOLE], ids=str)
@pytest.mark.parametrize("source", [ROWS, COLUMNS, WHOLE], ids=str)
@pytest.mark.world(2, 3)
def test_gradients(world: World, source: Placement, target: Placement) -> None:
    """Every element has a different gradient, and every rank has its part of it."""

    def body(rank: Rank) -> None:
        mesh, weights = rank.mesh(rank.size), numbers(6, 5).to(rank.device)
        leaf = distribute_tensor(numbers(6, 5), mesh, [source]).to_local().clone().requires_grad_()
        given = DTensor.from_local(leaf, mesh, [source], shape=weights.shape, stride=weights.stride())
        moved = given.redistribute(placements=[target])
        (moved.to_local() * laid_out(weights, mesh, [target])).sum().backward()
        assert leaf.grad is not None
        assert_same(laid_out(weights, mesh, [source]), leaf.grad + 0, "gradient")

        leaf.grad = None
        given = DTensor.from_local(leaf, mesh, [source], shape=weights.shape, stride=weights.stride())
        own = weights * (rank.index + 1)
        (given.full_tensor(grad_placements=[Partial()]) * own).sum().backward()
        assert leaf.grad is not None
        everyone = weights * sum(range(1, rank.size + 1))
        assert_same(laid_out(everyone, mesh, [source]), leaf.grad + 0, "gradient of parts")

        leaf.grad = None
        given = DTensor.from_local(leaf, mesh, [source], shape=weights.shape, stride=weights.stride())
        (given.redistribute(placements=[WHOLE]).to_local(grad_placements=[Partial()]) * own).sum().backward()
        assert leaf.grad is not None
        assert_same(laid_out(everyone, mesh, [source]), leaf.grad + 0, "gradient of local parts")

    world.run(body)


@requirement(
    "TP-LAY-15",
    "The gradients of from_local and to_local have the tensor's placements, but are replicated where it is partial.",
    source="torch.distributed.tensor: DTensor.from_local: gradient placement guarantees; DTensor.to_local",
)
@requirement(
    "TP-LAY-16",
    "The gradient of to_local or full_tensor has the placements in grad_placements, if they are given.",
    source="torch.distributed.tensor: DTensor.to_local, full_tensor: grad_placements",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(4)
def test_placements_of_gradients(world: World) -> None:
    """Combine layouts on two mesh dimensions; the DTensor is a leaf, or comes from a local tensor."""

    def body(rank: Rank) -> None:
        mesh, weights = rank.mesh(2, 2, names=("dp", "tp")), numbers(5, 3).to(rank.device)
        for layouts in itertools.product((WHOLE, ROWS, COLUMNS, Partial()), repeat=2):
            what = f"gradient of {layouts}"
            kept = tuple(WHOLE if layout.is_partial() else layout for layout in layouts)
            own = laid_out(weights, mesh, layouts).contiguous()
            leaf = torch.ones_like(own).requires_grad_()
            seen: list[Any] = []

            def made(leaf: Any = leaf, layouts: Any = layouts, seen: list[Any] = seen) -> DTensor:
                found = DTensor.from_local(leaf, mesh, layouts, shape=weights.shape, stride=weights.stride())
                found.register_hook(lambda gradient: seen.append(gradient.placements))
                return found

            at = messages.mark()
            (made().to_local() * own).sum().backward()
            assert_same(own, leaf.grad, what)  # type: ignore[arg-type]
            dtensor: Any = made().detach().requires_grad_()
            (dtensor.to_local() * own).sum().backward()
            assert_same(own, dtensor.grad.to_local(), f"{what}, which is a leaf")
            assert [*seen, dtensor.grad.placements] == [kept, kept], what
            assert not messages.since(at), what

            leaf.grad = None
            (made().full_tensor() * weights).sum().backward()
            assert_same(own, leaf.grad + 0, f"{what}, made whole")  # type: ignore[operator]

            # Each rank has its own gradient of what is the same on all ranks: the sum of these is asked for.
            leaf.grad = None
            asked = tuple(Partial() if layout == WHOLE else layout for layout in kept)
            own = own * (rank.index + 1)
            (made().to_local(grad_placements=asked) * own).sum().backward()
            assert seen[-1] == asked, what
            place = divmod(rank.index, 2)
            alike = (
                other + 1
                for other in range(rank.size)
                if all(layout == WHOLE or divmod(other, 2)[i] == place[i] for i, layout in enumerate(kept))
            )
            everyone = laid_out(weights, mesh, layouts) * sum(alike)
            assert_same(everyone, leaf.grad + 0, f"{what}, asked for")  # type: ignore[operator]

            leaf.grad = None
            (made().full_tensor(grad_placements=[Partial(), Partial()]) * weights * (rank.index + 1)).sum().backward()
            everyone = laid_out(weights, mesh, layouts) * sum(range(1, rank.size + 1))
            assert_same(everyone, leaf.grad + 0, f"{what}, made whole and asked for")  # type: ignore[operator]

    world.run(body)


@requirement(
    "TP-LAY-18",
    "The gradient of from_local has the placements in grad_placements, to which it is redistributed if need be.",
    source="torch.distributed.tensor: DTensor.from_local: grad_placements",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2)
def test_asked_placements_of_gradients(world: World) -> None:
    """The gradient of a replicated or partial tensor arrives as a replica or as parts, and is asked for as either."""

    def body(rank: Rank) -> None:
        mesh, weights = rank.mesh(), (numbers(5, 3) * 2).to(rank.device)
        for layout, arriving, asked in itertools.product((WHOLE, Partial()), repeat=3):
            what = f"gradient of {layout}, arriving as {arriving}, asked for as {asked}"
            leaf, own = torch.ones_like(weights).requires_grad_(), weights
            if arriving.is_partial():
                own = weights * (1 + 2 * rank.index) / 4  # a quarter and three quarters
            given = DTensor.from_local(leaf, mesh, [layout], grad_placements=[asked])
            at = messages.mark()
            (given.to_local(grad_placements=[arriving]) * own).sum().backward()
            gradient: Any = leaf.grad
            found = DTensor.from_local(gradient + 0, mesh, [asked])
            assert len(messages.since(at)) == (arriving.is_partial() and not asked.is_partial()), what
            assert_same(weights, found.full_tensor() + 0, what)
        for layout in ROWS, COLUMNS:
            own = laid_out(weights, mesh, [layout]).contiguous()
            leaf = torch.ones_like(own).requires_grad_()
            given = DTensor.from_local(
                leaf, mesh, [layout], shape=weights.shape, stride=weights.stride(), grad_placements=[layout]
            )
            (given.full_tensor() * weights).sum().backward()
            assert_same(own, leaf.grad + 0, f"gradient of {layout}")  # type: ignore[operator]

    world.run(body)


@requirement(
    "TP-LAY-08",
    "The gradients of a matrix product equal those of one device, whichever dimension of a factor is sharded.",
    source="torch.distributed.tensor: DTensor.from_local; matmul",
)
@pytest.mark.parametrize("placement", [ROWS, COLUMNS, WHOLE], ids=str)
@pytest.mark.world(2, 3)
def test_product(world: World, placement: Placement) -> None:
    """Multiply a replicated factor by a sharded one of uneven size."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)
        x, y, weights = (numbers(*shape).to(rank.device) for shape in ((2, 5), (5, 7), (2, 7)))
        leaf = x.clone().requires_grad_()
        factor = distribute_tensor(y, mesh, [placement]).requires_grad_()
        product: Any = DTensor.from_local(leaf, mesh, [WHOLE]) @ factor
        (product.full_tensor() * weights).sum().backward()
        gradient: Any = factor.grad
        assert leaf.grad is not None
        assert_same(x @ y, product.full_tensor() + 0, "product")
        assert_same(weights @ y.t(), leaf.grad + 0, "gradient of the replicated factor")
        assert_same((x.t() @ weights).contiguous(), gradient.full_tensor() + 0, "gradient of the other")

    world.run(body)


@requirement(
    "TP-LAY-06",
    "A row-wise sharded embedding looks up and trains each row on the rank that holds it.",
    source="torch.distributed.tensor.parallel: RowwiseParallel of Embedding",
)
@pytest.mark.parametrize("rows", [4, 6, 7])
@pytest.mark.world(1, 2, 3)
def test_rows_of_embedding(world: World, rows: int) -> None:
    """Look up every row once, some twice; ranks divide the rows or not, or have none."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)
        indices = torch.tensor([*range(rows), 0, rows // 2, rows - 1])
        weight = distribute_tensor(numbers(rows, 3), mesh, [ROWS]).requires_grad_()
        looked_up: Any = torch.nn.functional.embedding(distribute_tensor(indices, mesh, [WHOLE]), weight)
        whole = looked_up.full_tensor()
        assert_same(numbers(rows, 3)[indices], whole, f"{rows} rows")
        whole.sum().backward()
        counts = torch.bincount(indices, minlength=rows).float()[:, None].expand(rows, 3)
        gradient: Any = weight.grad
        assert_same(counts.contiguous(), gradient.full_tensor(), f"gradient of {rows} rows")

    world.run(body)
