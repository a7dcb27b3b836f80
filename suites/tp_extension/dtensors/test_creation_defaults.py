"""What a DTensor has where nothing else is said: its dtype, device, source, mesh, and what of it cannot be changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dtensors
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import implicit_replication, local_map
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fixtures.placements import laid_out, part
from fixtures.tensors import numbers
from harness import Rank, World, assert_same, requirement

SOURCE = "torch.distributed.tensor"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make a dtype the default one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


FACTORIES: dict[str, Callable[..., DTensor]] = {
    "zeros": lambda **options: dtensors.zeros(5, 3, **options),
    "ones": lambda **options: dtensors.ones(5, 3, **options),
    "empty": lambda **options: dtensors.empty(5, 3, **options),
    "full": lambda **options: dtensors.full((5, 3), 1.5, **options),
}


@requirement(
    "TP-MAKE-5523",
    "A factory without a dtype makes a DTensor of the default dtype, on the mesh's device, in every surrounding.",
    source=f"{SOURCE}: zeros, ones, full, empty: dtype: 'uses a global default (see torch.set_default_dtype)'",
)
@requirement(
    "TP-MAKE-5524",
    "distribute_tensor, from_local and styles leave data on the mesh's device, whatever device is the default one.",
    source=f"{SOURCE}: distribute_tensor, DTensor.from_local; {SOURCE}.parallel.parallelize_module",
)
@pytest.mark.world(2)
def test_surroundings(world: World) -> None:
    """Change the default dtype, the default device, or neither; give a dtype as well."""

    def body(rank: Rank) -> None:
        mesh, whole = rank.mesh(), numbers(5, 3).to(rank.device)
        layer = nn.Linear(3, 4, device=rank.device)
        kinds = torch.float64, torch.bfloat16, torch.float32
        for kind, default, layout in itertools.product(kinds, ("meta", None), (Replicate(), Shard(0), Shard(1))):
            with default_dtype(kind), torch.device(default) if default else nullcontext():
                made = {name: factory(device_mesh=mesh, placements=[layout]) for name, factory in FACTORIES.items()}
                given = FACTORIES["ones"](device_mesh=mesh, placements=[layout], dtype=torch.int32)
                cut = [distribute_tensor(whole, mesh, [layout], src_data_rank=source) for source in (0, None)]
                cut.append(
                    DTensor.from_local(part(whole, rank, layout), mesh, [layout], shape=whole.shape, stride=(3, 1))
                )
            what = f"{kind}, {default}, {layout}"
            assert given.dtype == torch.int32, what
            for name, found in made.items():
                assert (found.dtype, found.to_local().dtype) == (kind, kind), f"{name}, {what}"
                assert found.to_local().device == rank.device, f"{name}, {what}"
                assert found.to_local().shape == part(whole, rank, layout).shape, f"{name}, {what}"
            for found in cut:
                assert_same(part(whole, rank, layout), found.to_local(), what)
        with torch.device("meta"):
            parallelize_module(layer, mesh, ColwiseParallel())
        assert {parameter.to_local().device for parameter in layer.parameters()} == {rank.device}  # type: ignore[operator]

    world.run(body)


@requirement(
    "TP-MAKE-5525",
    "distribute_tensor takes the data of the rank that is at src_data_rank in each dimension of the mesh.",
    source=f"{SOURCE}.distribute_tensor: src_data_rank: 'group_rank=0 on each DeviceMesh dimension'",
)
@pytest.mark.world(4)
def test_sources(world: World) -> None:
    """Each rank has its own data, on meshes of one dimension and two, of all ranks or of some."""

    def body(rank: Rank) -> None:
        device = rank.device.type
        meshes = [rank.mesh(2, 2, names=("dp", "tp")), *(DeviceMesh(device, ranks) for ranks in ([1, 3], [[1, 3]]))]
        own = (numbers(5, 4) + 100 * rank.index).to(rank.device)
        for mesh, source in itertools.product(meshes, (0, 1, None)):
            ranks = mesh.mesh.tolist()
            kinds: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
            for placements in itertools.product(kinds, repeat=mesh.ndim):
                if source and 1 in mesh.shape:
                    break  # where there is no such rank in a dimension
                found = distribute_tensor(own.clone(), mesh, placements, src_data_rank=source)
                if mesh.get_coordinate() is None:
                    continue
                at: Any = ranks
                for _ in range(mesh.ndim):
                    at = at[source or 0]
                whole = (numbers(5, 4) + 100 * (rank.index if source is None else at)).to(rank.device)
                right = laid_out(whole, mesh, [Replicate() if p == Partial() else p for p in placements])
                first = all(
                    c == 0 for c, p in zip(mesh.get_coordinate() or (), placements, strict=True) if p == Partial()
                )
                what = f"{placements} of rank {source} on {ranks}"
                if Partial() not in placements:
                    assert_same(right, found.to_local(), what)
                elif source is not None:
                    summed = found.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
                    assert_same(whole, summed + 0, f"{what}, {first=}")

    world.run(body)


@requirement(
    "TP-MAKE-5526",
    "The mesh and the placements of a DTensor cannot be set.",
    source=f"{SOURCE}.DTensor: device_mesh, placements: 'a read-only property, it can not be set'",
)
@requirement(
    "TP-LOCAL-5527",
    "Each call of a function of local_map is for the mesh of its own DTensors, or for plain tensors.",
    source=f"{SOURCE}.experimental.local_map: device_mesh: 'inferred from the first input DTensor's device mesh'",
)
@requirement(
    "TP-MIX-5528",
    "In implicit_replication, plain tensors in the lists of an operator count as replicated, too.",
    source=f"{SOURCE}.experimental.implicit_replication",
)
@pytest.mark.world(2)
def test_of_each_tensor(world: World) -> None:
    """Set both of tensors and parameters; map tensors on three meshes and plain ones in turn; join lists."""

    def body(rank: Rank) -> None:
        flat, named, deep = rank.mesh(), rank.mesh(2, names=("other",)), rank.mesh(1, 2, names=("dp", "tp"))
        whole = numbers(4, 6).to(rank.device)
        sharded = distribute_tensor(whole, flat, [Shard(0)])
        for each in sharded, nn.Parameter(sharded.detach()), sharded * 2:
            tensor: Any = each
            for name, value in ("placements", (Replicate(),)), ("device_mesh", named):
                with pytest.raises(AttributeError):
                    setattr(tensor, name, value)
            assert (tensor.placements, tensor.device_mesh) == ((Shard(0),), flat)
        double = local_map(lambda x: x * 2, [Shard(0)])
        deeper = local_map(lambda x: x * 2, [Replicate(), Shard(0)])
        for mesh in flat, named, None, deep, named, flat:
            if mesh is None:
                plain: Any = double(whole)
                assert type(plain) is torch.Tensor
                assert_same(whole * 2, plain, "a plain tensor")
                continue
            layout = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
            found: Any = (double if mesh.ndim == 1 else deeper)(distribute_tensor(whole, mesh, layout))
            assert (found.device_mesh, found.placements) == (mesh, tuple(layout)), f"{mesh}"
            assert_same(whole * 2, found.full_tensor(), f"{mesh}")
        for layout, position in itertools.product((Replicate(), Shard(0), Shard(1)), (0, 1)):
            mixed: list[Any] = [whole + 1, whole + 1]
            mixed[position] = distribute_tensor(whole, flat, [layout])
            alone = [whole if i == position else whole + 1 for i in range(2)]
            with implicit_replication():
                results = [torch.cat(mixed, dim) for dim in (0, 1)] + [torch.stack(mixed)]
            rights = [torch.cat(alone, dim) for dim in (0, 1)] + [torch.stack(alone)]
            for right, joined in zip(rights, results, strict=True):
                assert_same(right, joined.full_tensor() + 0, f"{layout} at {position}")  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="mixed"):
                torch.cat(mixed)

    world.run(body)


@requirement(
    "TP-MAKE-5529",
    "distribute_module replicates a module over every dimension of a mesh, with the gradients that it had on one.",
    source=f"{SOURCE}.distribute_module: 'by default we replicate all module parameters of module across the mesh'",
)
@pytest.mark.world(2)
def test_modules_on_two_dimensions(world: World) -> None:
    """Nested layers with a buffer and a frozen parameter, on meshes of one to three dimensions; take a step."""

    def body(rank: Rank) -> None:
        for mesh in rank.mesh(), rank.mesh(1, 2, names=("dp", "tp")), rank.mesh(1, 2, 1, names=("a", "b", "c")):

            def made() -> nn.Sequential:
                model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2)))
                for parameter in model.parameters():
                    nn.init.constant_(parameter, 0.5)
                model[0].bias.requires_grad_(False)
                model[1].register_buffer("held", torch.ones(2))
                return model.to(rank.device).eval()

            plain, module = made(), made()
            assert distribute_module(module, mesh) is module
            values: list[Any] = [*module.parameters(), *module.buffers()]
            for value in values:
                assert (value.placements, value.device_mesh) == ((Replicate(),) * mesh.ndim, mesh), f"{mesh}"
            x = numbers(4, 3).to(rank.device)
            for model, given in (plain, x), (module, distribute_tensor(x, mesh, [Replicate()] * mesh.ndim)):
                model(given).sum().backward()
                torch.optim.SGD(model.parameters(), lr=0.5).step()
            for (name, right), found in zip(plain.named_parameters(), module.parameters(), strict=True):
                owned: Any = found
                assert owned.requires_grad == right.requires_grad, f"{name} on {mesh}"
                torch.testing.assert_close(owned.full_tensor(), right, msg=f"{name} on {mesh}")

    world.run(body)
