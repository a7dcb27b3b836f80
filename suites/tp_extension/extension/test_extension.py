"""DTensorExtensions as FSDP1 uses it: flattening, and sharding and gathering for state dicts."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fixtures.tensors import chunk, numbers
from harness import Rank, World, assert_same, requirement
from harness.stacks.tp_extension import (
    MODULE,
    AsyncCollectiveTensor,
    DTensorExtensions,
    Unsupported,
    device_count,
    extensions,
    is_flattened,
)

SOURCE = "torch/distributed/tensor/parallel/fsdp.py: DTensorExtensions"
ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
MESHES = {2: ((2, 1), (1, 2)), 3: ((3, 1), (1, 3)), 4: ((2, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2)), 6: ((3, 2), (2, 3))}
"""Mesh shapes by the number of ranks. The last dimension is tensor parallel, and the one before it is FSDP's."""
GIVEN: tuple[Placement | None, ...] = (None, ROWS, COLUMNS, WHOLE)
"""Placements of parameters on the mesh of tensor parallelism; plain parameters have none."""


def meshes(rank: Rank) -> Any:
    """Yield each mesh for this number of ranks, with its FSDP dimensions and its tensor-parallel dimension."""
    for shape in MESHES[rank.size]:
        names = ("replicas", "dp", "tp")[-len(shape) :]
        mesh = rank.mesh(*shape, names=names)
        yield mesh, mesh[names[:-1]] if len(names) > 2 else mesh["dp"], mesh["tp"]


def sharded(shape: tuple[int, ...], mesh: Any, placement: Placement, dtype: torch.dtype = torch.float32) -> DTensor:
    return distribute_tensor(numbers(*shape, dtype=dtype), mesh, [placement])


@requirement(
    "TP-EXT-01",
    "A flattened tensor-parallel parameter has its original size, stride, mesh, placement and values after "
    "unflattening.",
    source=f"{SOURCE}.pre_flatten_transform, post_unflatten_transform",
)
@requirement(
    "TP-EXT-11",
    "Flattening a plain tensor is a no-op.",
    source=f"{SOURCE}.pre_flatten_transform, post_unflatten_transform",
)
@pytest.mark.parametrize("placement", [ROWS, COLUMNS, WHOLE], ids=str)
@pytest.mark.world(1, 2, 3)
def test_flattening(world: World, placement: Placement) -> None:
    """Use sizes that ranks divide or not, one that leaves a rank without elements, and a transposed tensor."""

    def body(rank: Rank) -> None:
        extension, mesh = extensions(rank), rank.mesh(rank.size)
        plain = numbers(3)
        assert extension.pre_flatten_transform(plain) == (plain, None)
        for shape in ((6, 6), (5, 7), (1, 2)):
            for tensor in (numbers(*shape), numbers(*reversed(shape)).t()):
                parameter = distribute_tensor(tensor, mesh, [placement])
                local, spec = extension.pre_flatten_transform(parameter)
                assert_same(parameter.to_local(), local, "flattened")
                flat = local.detach().reshape(-1).clone()
                unflattened: Any = extension.post_unflatten_transform(flat.view(local.shape), spec)
                assert type(unflattened) is DTensor
                assert (unflattened.shape, unflattened.stride()) == (tensor.shape, parameter.stride())
                assert (unflattened.device_mesh, unflattened.placements) == (mesh, (placement,))
                assert_same(tensor, unflattened.full_tensor(), "whole")

    world.run(body)


@requirement(
    "TP-EXT-10",
    "The extension module can be imported by itself.",
    source="torch/distributed/tensor/parallel/fsdp.py: __all__",
)
def test_import() -> None:
    """Import it in a fresh interpreter, before anything else of FSDP."""
    result = subprocess.run([sys.executable, "-c", f"import {MODULE}"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@requirement(
    "TP-EXT-02",
    "A gradient from an asynchronous collective is complete when it reaches the flat parameter.",
    source=f"{SOURCE}.post_unflatten_transform; torch/distributed/tensor/parallel/_data_parallel_utils.py",
)
@pytest.mark.world(2, 3)
def test_gradient_is_waited_for(world: World) -> None:
    """A replicated parameter is used in shards, so that its gradient is gathered."""

    def body(rank: Rank) -> None:
        extension, mesh = extensions(rank), rank.mesh(rank.size)
        _, spec = extension.pre_flatten_transform(sharded((6, 2), mesh, WHOLE))
        flat = numbers(6, 2).to(rank.device).requires_grad_()
        arrived: list[type] = []
        parameter: Any = extension.post_unflatten_transform(flat, spec)
        flat.register_hook(lambda gradient: arrived.append(type(gradient)))
        parameter.redistribute(placements=[ROWS], async_op=True).to_local().mul(
            chunk(numbers(6, 2), rank.size, rank.index).to(rank.device)
        ).sum().backward()
        assert arrived == [torch.Tensor]
        assert flat.grad is not None
        assert_same(numbers(6, 2), flat.grad, "gradient")

    world.run(body)


class Handle:
    """A fake device handle that keeps track of the current stream."""

    def __init__(self) -> None:
        self.streams = ["current"]

    def current_stream(self) -> str:
        return self.streams[-1]

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()


@requirement(
    "TP-EXT-08",
    "Parameters are unflattened, and their gradients waited for, on FSDP's compute stream or else on the current "
    "stream.",
    source=f"{SOURCE}.post_unflatten_transform",
)
@pytest.mark.parametrize("compute", ["compute", None])
@pytest.mark.world(2)
def test_streams(world: World, compute: str | None) -> None:
    """Fake streams with names, on any device, record the current one, also while a gradient is waited for."""

    def body(rank: Rank) -> None:
        handle, mesh, seen = Handle(), rank.mesh(rank.size), []
        extension: Any = DTensorExtensions(handle)
        assert extension.compute_stream is None
        extension.compute_stream = compute
        _, parameter = extension.pre_flatten_transform(sharded((4, 2), mesh, WHOLE))
        flat = numbers(4, 2).to(rank.device).requires_grad_()

        def watched(self: Any, right: Any = AsyncCollectiveTensor.wait) -> Any:
            seen.append(handle.current_stream())
            return right(self)

        def laid(*args: Any, right: Any = DTensor.from_local, **kwargs: Any) -> Any:
            seen.append(handle.current_stream())
            return right(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "from_local", staticmethod(laid))
            patch.setattr(AsyncCollectiveTensor, "wait", watched)
            unflattened = extension.post_unflatten_transform(flat, parameter)
            used = unflattened.redistribute(placements=[ROWS], async_op=True).to_local()
            used.mul(chunk(numbers(4, 2), rank.size, rank.index).to(rank.device)).sum().backward()
        assert seen[:1] == [compute or "current"]
        assert seen[-1] == (compute or "current")
        assert handle.streams == ["current"]

    world.run(body)


@requirement(
    "TP-EXT-09",
    "FSDP recognizes an unflattened parameter as already flattened.",
    source=f"{SOURCE}.post_unflatten_transform",
)
@requirement(
    "TP-EXT-12",
    "Dynamo does not trace into unflattening.",
    source=f"{SOURCE}.post_unflatten_transform",
)
@pytest.mark.world(1)
def test_marked_and_not_compiled(world: World) -> None:
    """The graph breaks around unflattening and has no mesh operation."""

    def body(rank: Rank) -> None:
        extension: Any = extensions(rank)
        flat = numbers(4, 2).to(rank.device)
        _, parameter = extension.pre_flatten_transform(sharded((4, 2), rank.mesh(1), ROWS))
        assert is_flattened(extension.post_unflatten_transform(flat, parameter))

        def unflattened(flat: torch.Tensor) -> Any:
            return extension.post_unflatten_transform(flat * 2, parameter).to_local() + 1

        with pytest.raises(Unsupported, match=r"torch\.compiler\.disable"):
            torch.compile(unflattened, backend="eager", fullgraph=True)(flat)
        assert_same(flat * 2 + 1, torch.compile(unflattened, backend="eager")(flat), "compiled")

    world.run(body)


@requirement(
    "TP-EXT-03",
    "For a state dict, FSDP shards a parameter once along dimension 0, beneath tensor parallelism, on the whole mesh.",
    source=f"{SOURCE}.chunk_dtensor",
)
@requirement(
    "TP-EXT-13",
    "A parameter sharded for a state dict has memory of its own and does not require gradients.",
    source=f"{SOURCE}.chunk_dtensor",
)
@pytest.mark.world(2, 3, 4, 6)
def test_chunks(world: World) -> None:
    """Shard matrices and vectors into even, uneven or empty parts; one of them is in bfloat16."""

    def body(rank: Rank) -> None:
        extension = extensions(rank)
        for (mesh, fsdp, tensor_parallel), placement in itertools.product(meshes(rank), GIVEN):
            count = tensor_parallel.size()
            for shape in ((6 * count, 4 * count), (5 * count, 3 * count), (count, 2 * count), (6 * count,)):
                if placement == COLUMNS and len(shape) == 1:
                    continue
                dtype = torch.bfloat16 if shape[0] == 6 * count else torch.float32
                whole = numbers(*shape, dtype=dtype).to(rank.device)
                given = whole.clone() if placement is None else sharded(shape, tensor_parallel, placement, dtype)
                given.requires_grad_()
                chunked: Any = extension.chunk_dtensor(
                    given, fsdp.get_local_rank("dp" if fsdp.ndim > 1 else None), fsdp
                )
                assert (chunked.device_mesh, chunked.shape, chunked.requires_grad) == (mesh, whole.shape, False)
                assert chunked.placements[-1] == (placement or WHOLE)
                assert [p for p in chunked.placements[:-1] if p != WHOLE] == [ROWS]
                at = chunked.placements.index(ROWS)
                local = chunk(whole, mesh.size(at), mesh.get_local_rank(at))
                if isinstance(placement, Shard):
                    local = chunk(local, count, tensor_parallel.get_local_rank(), placement.dim)
                assert_same(local, chunked.to_local(), f"local part, {placement}")
                with torch.no_grad():
                    (given.to_local() if isinstance(given, DTensor) else given).zero_()
                assert_same(local, chunked.to_local(), "local part, once the parameter is another")

    world.run(body)


@requirement(
    "TP-EXT-04",
    "Loading a parameter that was sharded for a state dict gives each rank its tensor-parallel part.",
    source=f"{SOURCE}.all_gather_dtensor",
)
@pytest.mark.world(2, 3, 4, 6)
def test_gathering(world: World) -> None:
    """Parts are even, uneven or empty."""

    def body(rank: Rank) -> None:
        extension = extensions(rank)
        for (mesh, fsdp, tensor_parallel), placement in itertools.product(meshes(rank), GIVEN):
            count = tensor_parallel.size()
            for shape in ((6 * count, 4 * count), (5 * count, 3 * count), (count, 2 * count)):
                given = (
                    numbers(*shape).to(rank.device) if placement is None else sharded(shape, tensor_parallel, placement)
                )
                expected = given.to_local() if isinstance(given, DTensor) else given
                gathered = extension.all_gather_dtensor(extension.chunk_dtensor(given, 0, fsdp), mesh)  # type: ignore[arg-type]
                assert type(gathered) is torch.Tensor
                assert_same(expected, gathered, f"{shape} on {mesh}, {placement}")

    world.run(body)


@requirement(
    "TP-EXT-05",
    "An unsupported mesh raises an error: none, a one-dimensional one, or another than the tensor's.",
    source=f"{SOURCE}.chunk_dtensor, all_gather_dtensor, chunk_tensor",
)
@requirement(
    "TP-EXT-14",
    "Saving a parameter that is sharded over two mesh dimensions raises an error.",
    source=f"{SOURCE}.chunk_dtensor, all_gather_dtensor, chunk_tensor",
)
@pytest.mark.world(2)
def test_meshes_refused(world: World) -> None:
    """Pass no mesh, a one-dimensional one, or one of the same ranks in another shape."""

    def body(rank: Rank) -> None:
        extension, mesh = extensions(rank), rank.mesh(2, 1, names=("dp", "tp"))
        given = numbers(4, 2).to(rank.device)
        with pytest.raises(RuntimeError):
            extension.chunk_dtensor(given, rank.index, None)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="at least 2D"):
            extension.chunk_dtensor(given, rank.index, rank.mesh(2))
        chunked: Any = extension.chunk_dtensor(given, rank.index, mesh["dp"])
        with pytest.raises(AssertionError):
            extension.all_gather_dtensor(chunked, rank.mesh(1, 2, names=("dp", "tp")))
        of_both = distribute_tensor(given, mesh, [ROWS, COLUMNS])
        with pytest.raises(AssertionError):
            extension.chunk_tensor(of_both, rank.index, 2, 1, mesh["dp"].get_group())

    world.run(body)


@requirement(
    "TP-EXT-06",
    "A plain tensor is saved as one correctly described shard for each rank that has rows.",
    source=f"{SOURCE}.chunk_tensor, pre_load_state_dict_transform",
)
@requirement(
    "TP-EXT-17",
    "A plain tensor is saved alike whether chunk_tensor is given the tensor's device or none.",
    source="torch/distributed/fsdp/_fsdp_extensions.py: FSDPExtensions.chunk_tensor",
)
@requirement(
    "TP-EXT-15",
    "A plain tensor saved as a ShardedTensor can be gathered and loaded.",
    source=f"{SOURCE}.chunk_tensor, pre_load_state_dict_transform",
)
@pytest.mark.world(1, 2, 3, exclusive=True)
def test_sharded_tensor(world: World) -> None:
    """Use more rows than ranks, divided evenly or not, or fewer."""

    def body(rank: Rank) -> None:
        extension = extensions(rank)
        for rows, given in ((1, None), (2, rank.device), (5, None), (6, rank.device), (5, rank.device)):
            tensor = numbers(rows, 3).to(rank.device)
            expected = [chunk(tensor, rank.size, i) for i in range(rank.size)]
            expected = [rows for rows in expected if rows.size(0)]
            count = device_count(rank)
            saved: Any = extension.chunk_tensor(tensor, rank.index, rank.size, count, rank.group, device=given)
            meta = saved.metadata()
            assert meta.size == tensor.shape
            assert not meta.tensor_properties.requires_grad
            starts = [0]
            for part in expected:
                starts.append(starts[-1] + part.size(0))
            assert [s.shard_offsets for s in meta.shards_metadata] == [[start, 0] for start in starts[:-1]]
            assert [s.shard_sizes for s in meta.shards_metadata] == [list(chunk.shape) for chunk in expected]
            assert [s.placement.rank() for s in meta.shards_metadata] == list(range(len(expected)))
            out = torch.empty_like(tensor) if rank.index == 0 else None
            saved.gather(0, out)
            assert out is None or torch.equal(out, tensor)
            loaded, shards = extension.pre_load_state_dict_transform(saved)
            assert loaded is saved
            assert len(shards) == (rank.index < len(expected))
            for shard in shards:
                assert_same(expected[rank.index], shard.tensor, "shard")
                assert shard.metadata == meta.shards_metadata[rank.index]

    world.run(body)


@requirement(
    "TP-EXT-07",
    "A tensor-parallel parameter is saved as a ShardedTensor whose local shard is sharded over FSDP's ranks.",
    source=f"{SOURCE}.chunk_tensor, pre_load_state_dict_transform",
)
@requirement(
    "TP-EXT-18",
    "The inner shards of a saved tensor-parallel parameter are on the devices of FSDP's ranks.",
    source=f"{SOURCE}.chunk_tensor: _create_chunk_sharded_tensor",
)
@requirement(
    "TP-EXT-16",
    "A nested ShardedTensor is loaded from its inner shards.",
    source=f"{SOURCE}.chunk_tensor, pre_load_state_dict_transform",
)
@pytest.mark.parametrize("placement", [ROWS, COLUMNS, WHOLE], ids=str)
@pytest.mark.world(2, 4, exclusive=True)
def test_nested_sharded_tensor(world: World, placement: Placement) -> None:
    """Use two tensor-parallel ranks and sizes that they divide."""

    def body(rank: Rank) -> None:
        extension, mesh = extensions(rank), rank.mesh(rank.size // 2, 2, names=("dp", "tp"))
        data, member = mesh["dp"], mesh["tp"].get_local_rank()
        for shape in ((4, 6), (6, 2), (2, 4)):
            parameter = sharded(shape, mesh["tp"], placement, torch.float64).requires_grad_()
            local = parameter.to_local().detach()
            sizes = list(local.shape)
            dim = placement.dim if isinstance(placement, Shard) else None
            offsets = [[sizes[d] * i if d == dim else 0 for d in range(2)] for i in range(1 if dim is None else 2)]

            group, count = data.get_group(), device_count(rank)
            saved: Any = extension.chunk_tensor(parameter, data.get_local_rank(), data.size(), count, group)
            meta = saved.metadata()
            assert (meta.size, meta.tensor_properties.requires_grad) == (torch.Size(shape), False)
            assert meta.tensor_properties.dtype == parameter.dtype
            assert [s.shard_offsets for s in meta.shards_metadata] == offsets
            assert [s.shard_sizes for s in meta.shards_metadata] == [sizes] * len(offsets)
            (outer,) = saved.local_shards()
            assert outer.metadata.shard_offsets == offsets[0 if dim is None else member]
            assert outer.metadata.shard_sizes == sizes

            inner, shards = extension.pre_load_state_dict_transform(saved)
            assert inner is outer.tensor
            expected = chunk(local, data.size(), data.get_local_rank())
            assert len(shards) == bool(expected.size(0))
            for shard in shards:
                assert_same(expected, shard.tensor, "shard")
                assert shard.tensor.device == rank.device
            placed = [shard.placement for shard in inner.metadata().shards_metadata]
            assert [place.device().type for place in placed] == [rank.device.type] * len(placed)
            assert [place.device() for place in placed if place.rank() == rank.index] == [rank.device] * len(shards)

    world.run(body)
