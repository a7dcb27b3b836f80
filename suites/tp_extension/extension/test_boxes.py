"""Positions of a tensor's chunks according to their metadata, on meshes of any size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fixtures.tensors import chunk, numbers
from harness import Rank, World, assert_same, requirement
from harness.programs import examples
from harness.stacks.pretended import pretended
from harness.stacks.tp_extension import chunk_spec, device_count, extensions, group_of, listed_spec, rewrite_spec

SOURCE = "torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions"
ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
NAMES = ("replicas", "dp", "tp")
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and sizes of a chunk."""


def covered(size: Sequence[int], boxes: Sequence[Box]) -> set[int]:
    """Count how often boxes cover each element of a tensor, and return the set of these counts."""
    counts = torch.zeros(*size, dtype=torch.int64)
    for offsets, sizes in boxes:
        place = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
        assert counts[place].shape == sizes, f"{offsets}, {sizes} in {size}"
        counts[place] += 1
    return set(counts.flatten().tolist())


def in_worlds(shape: Sequence[int], ranks: Sequence[int] | None = None) -> Iterator[tuple[Any, Any, Any]]:
    """Pretend to be each rank of a mesh, or each of ``ranks``; yield the mesh and its FSDP and tensor-parallel part."""
    names = NAMES[-len(shape) :]
    for i in ranks if ranks is not None else range(math.prod(shape)):
        with pretended(i, math.prod(shape)):
            mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
            yield mesh, mesh[names[:-1]] if len(names) > 2 else mesh["dp"], mesh["tp"]


def part(size: Sequence[int], mesh: Any, placement: Placement | None, dtype: torch.dtype = torch.float32) -> Any:
    """Create a tensor without memory, which is tensor parallel if a placement is given."""
    whole = torch.empty(*size, device="meta", dtype=dtype)
    if placement is None:
        return whole
    dim = placement.dim if isinstance(placement, Shard) else None
    local = whole if dim is None else chunk(whole, mesh.size(), mesh.get_local_rank(), dim).contiguous()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def box(shard: Any) -> Box:
    return tuple(shard.shard_offsets), tuple(shard.shard_sizes)


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], Placement | None]:
    """Draw a mesh shape, a size that tensor-parallel ranks divide evenly, and a placement."""
    meshes = st.lists(st.integers(1, 4), min_size=2, max_size=3)
    mesh = draw(meshes.filter(lambda shape: 1 < math.prod(shape) <= 12))
    placement = draw(st.sampled_from([None, ROWS, COLUMNS, WHOLE]))
    size = draw(st.lists(st.integers(1, 7), min_size=1 + (placement == COLUMNS), max_size=3))
    if isinstance(placement, Shard):
        size[placement.dim] *= mesh[-1]
    return tuple(mesh), tuple(size), placement


def assert_tiled(shape: tuple[int, ...], size: tuple[int, ...], placement: Placement | None) -> None:
    """Assert that the chunks of a tensor that is saved as DTensors cover each of its elements equally often."""
    boxes: list[Box] = []
    for mesh, fsdp, tensor_parallel in in_worlds(shape):
        chunked: Any = extensions().chunk_dtensor(part(size, tensor_parallel, placement), 0, fsdp)
        assert (chunked.device_mesh, tuple(chunked.shape), chunked.placements[-1]) == (mesh, size, placement or WHOLE)
        (own,) = chunked.__create_chunk_list__() or [None]
        assert own is not None
        assert tuple(own.sizes) == tuple(chunked.to_local().shape)
        boxes.append((tuple(own.offsets), tuple(own.sizes)))
    times = covered(size, [of for of in boxes if math.prod(of[1])])
    assert len(times) == 1, f"covered {times} times by {boxes}"


def assert_metadata(saved: Any, size: tuple[int, ...], ranks: Sequence[int]) -> list[Box]:
    """Assert that shards cover a tensor once, each on its rank of a group, and return their boxes."""
    meta = saved.metadata()
    boxes = [box(shard) for shard in meta.shards_metadata]
    assert (tuple(meta.size), tuple(saved.size())) == (size, size)
    assert covered(size, boxes) == {1}
    assert all(math.prod(sizes) for _, sizes in boxes)
    assert [shard.placement.rank() for shard in meta.shards_metadata] == list(ranks[: len(boxes)])
    assert dist.get_process_group_ranks(group_of(saved)) == list(ranks)
    return boxes


@requirement(
    "TP-BOX-01",
    "The chunks of all ranks, as their metadata describes them, cover each element of a tensor equally often.",
    source=f"{SOURCE}.chunk_dtensor",
)
@pytest.mark.world(1)
@given(layout=layouts())
@examples(30)
def test_tiled(world: World, layout: Any) -> None:
    """Draw plain and tensor-parallel tensors of one to three dimensions, on meshes of up to twelve ranks."""
    world.run(lambda rank: assert_tiled(*layout))


@requirement(
    "TP-BOX-01",
    "The chunks of all ranks, as their metadata describes them, cover each element of a tensor equally often.",
    source=f"{SOURCE}.chunk_dtensor",
)
@pytest.mark.world(1)
def test_tiled_unevenly(world: World) -> None:
    """Tensor-parallel ranks have unequal parts, or none."""

    def body(rank: Rank) -> None:
        for shape, rows in itertools.product(((2, 2), (1, 3), (3, 4), (2, 2, 3)), (1, 3, 5, 13)):
            assert_tiled(shape, (rows, 3), ROWS)
            assert_tiled(shape, (3, rows), COLUMNS)
            assert_tiled(shape, (rows,), ROWS)

    world.run(body)


def _placed(shape: tuple[int, ...], placement: Placement | None) -> None:
    """Assert that a tensor is sharded for a state dict over FSDP's shards, and replicated over its replicas."""
    for _, fsdp, tensor_parallel in in_worlds(shape, [0, math.prod(shape) - 1]):
        count = tensor_parallel.size()
        chunked: Any = extensions().chunk_dtensor(part((6 * count, 4 * count), tensor_parallel, placement), 0, fsdp)
        expected = (*(WHOLE,) * (len(shape) - 2), ROWS, placement or WHOLE)
        assert chunked.placements == expected, f"{placement} on {shape}"


@requirement(
    "TP-BOX-10",
    "For a state dict, a tensor-parallel parameter is sharded over the mesh dimension of FSDP's shards, and whole over "
    "that of its replicas.",
    source=f"{SOURCE}.chunk_dtensor: HSDP + TP, [Replicate(), Shard(0), tp_placement]",
)
@pytest.mark.world(1)
def test_dimension_of_parameters(world: World) -> None:
    """Meshes of two and three dimensions have sizes that tell the dimensions apart, or only one rank in one."""

    def body(rank: Rank) -> None:
        for shape, placement in itertools.product(((3, 2), (3, 1), (2, 3, 2), (1, 2, 2), (2, 1, 2)), (ROWS, COLUMNS)):
            _placed(shape, placement)
        _placed((2, 3, 2), WHOLE)

    world.run(body)


@requirement(
    "TP-BOX-11",
    "For a state dict, a plain tensor is sharded over the mesh dimension of FSDP's shards, and whole over all others.",
    source=f"{SOURCE}.chunk_dtensor: replicated across tp dimension and sharded across FSDP dimension; "
    "torch/distributed/fsdp/_shard_utils.py: _create_chunk_dtensor",
)
@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2)], ids=["two-dimensions", "three-dimensions"])
@pytest.mark.world(1)
def test_dimension_of_plain_tensors(world: World, shape: tuple[int, ...]) -> None:
    """With three dimensions, the first one is that of the replicas."""
    world.run(lambda rank: _placed(shape, None))


@requirement(
    "TP-BOX-12",
    "On a rank outside the mesh of a tensor-parallel parameter, chunk_tensor raises an error.",
    source="torch/distributed/tensor/parallel/fsdp.py: _get_local_box",
)
@pytest.mark.world(1)
def test_outside_the_mesh(world: World) -> None:
    """Ranks 2 and 3 of 4 save a parameter of ranks 0 and 1, which save it themselves."""

    def body(rank: Rank) -> None:
        for i in range(4):
            with pretended(i, 4):
                mesh, data = DeviceMesh("cpu", [1, 0]), dist.new_group([i])
                parameter = DTensor.from_local(
                    torch.ones(2 * (i < 2), 3), mesh, [ROWS], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1)
                )
                if i < 2:
                    saved: Any = extensions().chunk_tensor(parameter, 0, 1, 1, data)
                    (outer,) = saved.local_shards()
                    assert box(outer.metadata) == ((2 * (1 - i), 0), (2, 3))
                else:
                    with pytest.raises((AssertionError, RuntimeError, IndexError, ValueError)):
                        extensions().chunk_tensor(parameter, 0, 1, 1, data)

    world.run(body)


@requirement(
    "TP-BOX-02",
    "The shards in a ShardedTensor's metadata cover the tensor once, each on its own rank of the world.",
    source=f"{SOURCE}.chunk_tensor",
)
@requirement(
    "TP-BOX-08",
    "A rank's local shard of a ShardedTensor is the shard that the metadata describes for this rank.",
    source=f"{SOURCE}.chunk_tensor",
)
@pytest.mark.world(1)
@given(layout=layouts())
@examples(20)
def test_rows(world: World, layout: Any) -> None:
    """Shard a plain tensor over groups that start at any rank."""

    def body(rank: Rank) -> None:
        shape, size, _ = layout
        for mesh, _, _ in in_worlds(shape):
            group = mesh.get_group(mesh.ndim - 2)
            ranks, here = dist.get_process_group_ranks(group), dist.get_rank(group)
            tensor = torch.arange(math.prod(size), dtype=torch.int64).reshape(size)
            saved: Any = extensions().chunk_tensor(tensor, here, len(ranks), 1, group)
            boxes = assert_metadata(saved, size, ranks)
            shards = saved.local_shards()
            assert [box(shard.metadata) for shard in shards] == boxes[here : here + 1]
            for shard, (offsets, sizes) in zip(shards, boxes[here:], strict=False):
                assert shard.tensor.equal(tensor.narrow(0, offsets[0], sizes[0]))

    world.run(body)


@requirement(
    "TP-BOX-03",
    "The local shards of a ShardedTensor, too, name ranks of the world.",
    source=f"{SOURCE}.chunk_tensor",
)
@pytest.mark.parametrize("ranks", ["first", "others"])
@pytest.mark.world(1)
def test_local_ranks(world: World, ranks: str) -> None:
    """Test two groups of two: the first ranks and the others."""

    def body(rank: Rank) -> None:
        for i in (0, 1) if ranks == "first" else (2, 3):
            for _, _, tensor_parallel in in_worlds((2, 2), [i]):
                saved: Any = extensions().chunk_tensor(torch.ones(4), i % 2, 2, 1, tensor_parallel.get_group())
                (shard,) = saved.local_shards()
                assert shard.metadata.placement.rank() == i

    world.run(body)


@requirement(
    "TP-BOX-04",
    "The shards of a saved tensor-parallel parameter cover it once over the tensor-parallel ranks.",
    source=f"{SOURCE}.chunk_tensor",
)
@requirement(
    "TP-BOX-09",
    "Each rank holds its own shard of a saved tensor-parallel parameter.",
    source=f"{SOURCE}.chunk_tensor",
)
@pytest.mark.parametrize("ranks", ["first", "others"])
@pytest.mark.parametrize("size", [(4, 6), (5, 7)], ids=["even", "uneven"])
@pytest.mark.world(1)
def test_parameters(world: World, ranks: str, size: tuple[int, int]) -> None:
    """Test two tensor-parallel groups of two ranks, with dtypes other than the default."""

    def body(rank: Rank) -> None:
        for placement, dtype in itertools.product((ROWS, COLUMNS, WHOLE), (torch.float64, torch.bfloat16)):
            for i in (0, 1) if ranks == "first" else (2, 3):
                for _, fsdp, tensor_parallel in in_worlds((2, 2), [i]):
                    parameter = part(size, tensor_parallel, placement, dtype).requires_grad_()
                    saved: Any = extensions().chunk_tensor(parameter, fsdp.get_local_rank(), 2, 1, fsdp.get_group())
                    meta = saved.metadata()
                    properties = meta.tensor_properties
                    assert (tuple(meta.size), properties.dtype, properties.layout) == (size, dtype, torch.strided)
                    boxes = [box(shard) for shard in meta.shards_metadata]
                    assert covered(size, boxes) == {1}, boxes
                    (outer,) = saved.local_shards()
                    assert box(outer.metadata) == boxes[0 if placement == WHOLE else i % 2]
                    assert outer.metadata.shard_sizes == list(parameter.to_local().shape)
                    assert group_of(saved) == tensor_parallel.get_group()

    world.run(body)


@requirement(
    "TP-BOX-05",
    "Every rank describes the shards of a tensor-parallel parameter alike, each on its own rank of the world.",
    source=f"{SOURCE}.chunk_tensor",
)
@pytest.mark.parametrize("tensor_parallel_ranks", [1, 2, 3, 4])
@pytest.mark.world(1)
def test_ranks_of_parameters(world: World, tensor_parallel_ranks: int) -> None:
    """Check the first tensor-parallel group."""

    def body(rank: Rank) -> None:
        ranks = []
        for _, fsdp, tensor_parallel in in_worlds((2, tensor_parallel_ranks), range(tensor_parallel_ranks)):
            parameter = part((12, 2), tensor_parallel, ROWS)
            saved: Any = extensions().chunk_tensor(parameter, 0, 2, 1, fsdp.get_group())
            ranks.append([shard.placement.rank() for shard in saved.metadata().shards_metadata])
        assert ranks == [list(range(tensor_parallel_ranks))] * tensor_parallel_ranks

    world.run(body)


@requirement(
    "TP-BOX-06",
    "A ShardedTensor that is sharded again keeps its shards and group, while its local shard is sharded over "
    "FSDP's ranks.",
    source=f"{SOURCE}.chunk_tensor",
)
@pytest.mark.world(4, exclusive=True)
def test_sharded_evenly_once_more(world: World) -> None:
    """Every rank has a row."""
    world.run(lambda rank: assert_sharded_twice(rank, rank.size))


@requirement(
    "TP-BOX-06",
    "A ShardedTensor that is sharded again keeps its shards and group, while its local shard is sharded over "
    "FSDP's ranks.",
    source=f"{SOURCE}.chunk_tensor",
)
@pytest.mark.world(4, 6, exclusive=True)
def test_sharded_once_more(world: World) -> None:
    """One rank has no row of its own, and some have none to shard again."""

    def body(rank: Rank) -> None:
        assert_sharded_twice(rank, rank.size - 1)
        count, devices = rank.size // 2, device_count(rank)
        extension, mesh = extensions(rank), rank.mesh(2, count, names=("dp", "tp"))
        here, rows = mesh["tp"].get_local_rank(), numbers(count - 1, 3).to(rank.device)
        few: Any = extension.chunk_tensor(rows, here, count, devices, mesh["tp"].get_group())
        if here == count - 1:
            assert extension.pre_load_state_dict_transform(few) == (few, [])
            with pytest.raises(AssertionError):
                extension.chunk_tensor(few, mesh["dp"].get_local_rank(), 2, devices, mesh["dp"].get_group())

    world.run(body)


def assert_sharded_twice(rank: Rank, size: int) -> None:
    """Shard rows over tensor-parallel ranks, then over two FSDP ranks, and check the metadata.

    The first ShardedTensor requires a gradient, and the second must not.
    """
    count, devices = rank.size // 2, device_count(rank)
    extension, mesh, whole = extensions(rank), rank.mesh(2, count, names=("dp", "tp")), numbers(size, 3).to(rank.device)
    group, data = mesh["tp"].get_group(), mesh["dp"].get_group()
    ranks, here, first = dist.get_process_group_ranks(group), dist.get_rank(group), dist.get_rank(data)
    given: Any = extension.chunk_tensor(whole, here, count, devices, group)
    given.metadata().tensor_properties.requires_grad = True
    saved: Any = extension.chunk_tensor(given, first, 2, devices, data)
    assert given.metadata().tensor_properties.requires_grad
    assert not saved.metadata().tensor_properties.requires_grad
    boxes = assert_metadata(saved, tuple(whole.shape), ranks)
    (outer,) = saved.local_shards()
    assert box(outer.metadata) == boxes[here]
    inner, shards = extension.pre_load_state_dict_transform(saved)
    assert inner is outer.tensor
    local = chunk(whole, count, here)
    rows = assert_metadata(inner, tuple(local.shape), dist.get_process_group_ranks(data))
    assert [box(shard.metadata) for shard in shards] == rows[first : first + 1]
    for shard in shards:
        assert_same(chunk(local, 2, first), shard.tensor, "shard")


def expected(size: Sequence[int], placements: Sequence[Placement], mesh: Any) -> Box:
    """Return this rank's box of a tensor that is sharded by one mesh dimension after the other."""
    offsets, sizes = [0] * len(size), [*size]
    for placement, count, index in zip(placements, mesh.shape, mesh.get_coordinate(), strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim
            step = -(-sizes[dim] // count)
            start = min(step * index, sizes[dim])
            offsets[dim], sizes[dim] = offsets[dim] + start, min(step, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


BIG: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "1024": ((64, 16), (2**20, 2**14)),
    "2048": ((256, 8), (2**14, 2**12, 2**34)),
    "4096-hybrid": ((4, 128, 8), (2**15 + 128, 2**13, 2**20)),
    "few-rows": ((512, 4), (100, 2**10, 2**34)),
    "many-rows": ((64, 16), (2**50, 16)),
}


@requirement(
    "TP-BOX-07",
    "On meshes of thousands of ranks, with more elements than 32 bits can count, each rank's chunk is at its "
    "correct offset.",
    source=f"{SOURCE}.chunk_dtensor, chunk_tensor",
)
@pytest.mark.parametrize("job", BIG)
@pytest.mark.world(1)
def test_big_jobs(world: World, job: str) -> None:
    """Check the first, last and some middle ranks, with tensors without memory."""

    def body(rank: Rank) -> None:
        shape, size = BIG[job]
        ranks = math.prod(shape)
        for mesh, fsdp, tensor_parallel in in_worlds(shape, (0, shape[-1] - 1, ranks // 2 + 1, ranks - 1)):
            for placement in (None, ROWS, COLUMNS):
                given = part(size, tensor_parallel, placement)
                chunked: Any = extensions().chunk_dtensor(given, 0, fsdp)
                offsets, sizes = expected(size, chunked.placements, mesh)
                assert (tuple(chunked.shape), tuple(chunked.to_local().shape)) == (size, sizes)
                (own,) = chunked.__create_chunk_list__()
                assert tuple(own.sizes) == sizes
                assert tuple(own.offsets) == offsets or not math.prod(sizes)
            group = mesh.get_group(mesh.ndim - 2)
            here, step = dist.get_rank(group), -(-size[0] // group.size())
            saved: Any = extensions().chunk_tensor(part(size, mesh, None), here, group.size(), 8, group)
            shards, starts = saved.metadata().shards_metadata, range(0, size[0], step)
            assert [shard.shard_offsets for shard in shards] == [[start, *[0] * (len(size) - 1)] for start in starts]
            own_sizes = [shard.shard_sizes for shard in shards[here : here + 1]]
            assert [list(shard.tensor.shape) for shard in saved.local_shards()] == own_sizes

    world.run(body)


@requirement(
    "TP-SPEC-01",
    "A rewritten sharding spec has the current device of this rank's tensor and keeps the other ranks' placements.",
    source="torch/distributed/tensor/parallel/fsdp.py: _rewrite_spec_if_needed",
)
@requirement(
    "TP-SPEC-02",
    "Rewriting a sharding spec leaves the original spec unchanged.",
    source="torch/distributed/tensor/parallel/fsdp.py: _rewrite_spec_if_needed",
)
@pytest.mark.world(1)
def test_rewritten_spec(world: World) -> None:
    """The tensor moved to the host or not, its spec is of another kind, or ranks have several shards."""

    def body(rank: Rank) -> None:
        here = torch.ones(1)
        for before, after in (
            (["rank:0/cuda:0", "rank:1/cuda:1"], ["rank:0/cuda:0", "rank:1/cpu"]),
            (["rank:1/cuda:1", "rank:0/cpu"], ["rank:1/cpu", "rank:0/cpu"]),
            (["rank:0/cuda:0", "rank:1/cpu"], ["rank:0/cuda:0", "rank:1/cpu"]),
            (["rank:0/cpu", "rank:2/cuda:1"], ["rank:0/cpu", "rank:2/cuda:1"]),
            (["rank:1/cpu", "rank:1/cuda:1", "rank:1/cuda:0"], ["rank:1/cpu"] * 3),
        ):
            given = chunk_spec(0, before)
            rewritten: Any = rewrite_spec(given, here, 1)
            assert [str(p) for p in rewritten.placements] == after
            assert [str(p) for p in given.placements] == before
            assert (type(rewritten), rewritten.dim) == (type(given), 0)
            assert (rewritten is given) <= (before == after)
        other = listed_spec([((0, 0), (2, 2), "rank:1/cuda:0")])
        assert rewrite_spec(other, here, 1) is other

    world.run(body)
