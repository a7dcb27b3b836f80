"""local_map: what its function is given, what its results become, and which inputs it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map

from fixtures.placements import part
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages
from harness.stacks.collectives import functional

SOURCE = "torch.distributed.tensor.experimental.local_map"
LAYOUTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())


def laid_out(whole: torch.Tensor, rank: Rank, layout: Placement) -> DTensor:
    """Return a DTensor of this rank's part in new memory, for which the ranks do not communicate."""
    return DTensor.from_local(part(whole, rank, layout).clone(), rank.mesh(), [layout])


@requirement(
    "TP-LOCAL-01",
    "local_map refuses a DTensor in placements other than required, without calling its function or communicating.",
    source=f"{SOURCE}: in_placements, redistribute_inputs",
)
@requirement(
    "TP-LOCAL-02",
    "With redistribute_inputs=True, the function of local_map gets its inputs in the placements of in_placements.",
    source=f"{SOURCE}: in_placements, redistribute_inputs",
)
@pytest.mark.world(2)
def test_inputs(world: World) -> None:
    """Give each of two inputs every layout where another is required; leave redistribute_inputs out, or set it."""

    def body(rank: Rank) -> None:
        whole, seen = (numbers(4, 6) * 2).to(rank.device), list[Any]()

        def run(*inputs: Any) -> torch.Tensor:
            seen.append(inputs)
            return inputs[0] * 3

        for given, wanted, at, decorated in itertools.product(LAYOUTS, LAYOUTS[:3], (0, 1), (False, True)):
            what = f"{given} for {wanted}, input {at}, {decorated=}"
            inputs: list[Any] = [laid_out(whole, rank, Shard(0)), laid_out(whole, rank, Shard(0)), 7]
            inputs[at] = laid_out(whole, rank, given)
            required: list[Any] = [[Shard(0)], (Shard(0),), None]
            required[at] = [wanted]
            layouts: Any = {"out_placements": required[0], "in_placements": tuple(required)}
            for options in {}, {"redistribute_inputs": False}, {"redistribute_inputs": True}:
                mapped = local_map(**layouts, **options)(run) if decorated else local_map(run, **layouts, **options)
                start = messages.mark()
                seen.clear()
                if given != wanted and not options.get("redistribute_inputs"):
                    with pytest.raises(ValueError, match="placements"):
                        mapped(*inputs)
                    assert (len(seen), len(messages.since(start))) == (0, 0), what
                    continue
                result: Any = mapped(*inputs)
                ((*locals_, number),) = seen
                assert number == 7, what
                for i, local in enumerate(locals_):
                    assert not isinstance(local, DTensor), what
                    assert_same(part(whole, rank, wanted if i == at else Shard(0)), local, f"{what}: {i}")
                assert inputs[at].placements == (given,), what
                assert result.placements == tuple(required[0]), what
                assert_same(part(whole * 3, rank, result.placements[0]), result.to_local(), what)
            assert_same(part(whole, rank, given), inputs[at].to_local(), f"{what}: input afterwards")

    world.run(body)


@requirement(
    "TP-LOCAL-03",
    "Each result of local_map's function becomes a DTensor in its out_placements, and what is no tensor stays.",
    source=f"{SOURCE}: out_placements, device_mesh",
)
@requirement(
    "TP-LOCAL-04",
    "local_map of plain tensors returns what its function returns.",
    source=f"{SOURCE}: out_placements",
)
@pytest.mark.world(2)
def test_results(world: World) -> None:
    """Return one tensor, several in a list or a dict, and a number; leave out in_placements, or the mesh."""

    def body(rank: Rank) -> None:
        whole = (numbers(4, 6) * 2).to(rank.device)
        start = messages.mark()
        for layout, mesh, checked in itertools.product(LAYOUTS, (None, rank.mesh()), (False, True)):
            what = f"{layout}, {mesh=}, {checked=}"
            given, plain = laid_out(whole, rank, layout), numbers(2).to(rank.device)
            options: Any = {"device_mesh": mesh, "in_placements": ([layout], [Replicate()]) if checked else None}
            one: Any = local_map(lambda x, y: x * 2, [layout], **options)(given, plain)
            assert (one.placements, one.device_mesh) == ((layout,), rank.mesh()), what
            assert_same(part(whole * 2, rank, layout), one.to_local(), what)
            places: Any = ([layout], None, [Partial()])

            def several(x: Any, y: Any, *, scale: int) -> Any:
                return {"a": x * scale, "b": [scale, y]}

            found = local_map(several, places, **options)(given, plain, scale=5)
            assert (found["a"].placements, found["b"][0], found["b"][1].placements) == ((layout,), 5, (Partial(),)), (
                what
            )
            assert_same(part(whole * 5, rank, layout), found["a"].to_local(), what)
            assert_same(plain, found["b"][1].to_local(), what)
            alone = local_map(several, places, **options)(whole, plain, scale=5)
            assert not isinstance(alone["a"], DTensor), what
            assert_same(whole * 5, alone["a"], what)
            for wrong in (places[:2], ([layout], [layout], [layout]), ([layout], None, None, None)):
                with pytest.raises(AssertionError):
                    local_map(several, wrong, **options)(given, plain, scale=5)
            for bad in ([layout],), (None, None), ([layout], None, None):
                with pytest.raises(AssertionError):
                    local_map(several, places, in_placements=bad)(given, plain, scale=5)
        assert not messages.since(start)

    world.run(body)


@requirement(
    "TP-LOCAL-2702",
    "in_placements of local_map may count a dimension from the end, as those of from_local may.",
    source=f"{SOURCE}: in_placements; torch.distributed.tensor.Shard: can be used by all DTensor APIs",
)
@pytest.mark.parametrize("moved", [False, True], ids=["as-they-are", "redistributed"])
@pytest.mark.world(2)
def test_dimensions_from_the_end(world: World, moved: bool) -> None:
    """Give a matrix that is sharded by columns, with redistribute_inputs or without it."""

    def body(rank: Rank) -> None:
        whole = numbers(4, 6).to(rank.device)
        for dim in -1, -2:
            double = local_map(lambda x: x * 2, [Shard(dim)], ([Shard(dim)],), redistribute_inputs=moved)
            found: Any = double(laid_out(whole, rank, Shard(dim + 2)))
            assert found.placements == (Shard(dim + 2),)
            assert_same(whole * 2, found.full_tensor(), f"dimension {dim}")

    world.run(body)


@requirement(
    "TP-LOCAL-186",
    "A result of local_map has the shape of the whole on every rank, also if its shards differ in size.",
    source=f"{SOURCE}: out_placements; pytorch/pytorch#172812",
)
@pytest.mark.parametrize("rows", [4, 5], ids=["even", "uneven"])
@pytest.mark.world(2)
def test_shapes_of_results(world: World, rows: int) -> None:
    """Double a matrix that is sharded by rows, which are even or not; give in_placements or leave it out."""

    def body(rank: Rank) -> list[tuple[int, ...]]:
        whole = numbers(rows, 2).to(rank.device)
        own = distribute_tensor(whole, rank.mesh(), [Shard(0)], src_data_rank=None)
        found: list[Any] = []
        for layouts in None, ([Shard(0)],):
            found.append(local_map(lambda x: x * 2, [Shard(0)], layouts)(own))
            assert_same(part(whole * 2, rank, Shard(0)), found[-1].to_local(), f"{layouts}")
        return [tuple(result.shape) for result in found]

    assert_on_ranks([[(rows, 2)] * 2] * world.size, world.run(body))


@requirement(
    "TP-LOCAL-05",
    "A gradient through local_map has its input's placements, into which it comes from those of in_grad_placements.",
    source=f"{SOURCE}: in_grad_placements; torch.distributed.tensor.DTensor.to_local: grad_placements",
)
@pytest.mark.world(2)
def test_gradients(world: World) -> None:
    """Multiply replicated weights with shards of rows, so that the ranks have parts of the weights' gradient."""

    def body(rank: Rank) -> None:
        rows, weights = numbers(4, 6).to(rank.device), (numbers(6, 3) % 4).to(rank.device)
        plain_rows, plain_weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        ((plain_rows @ plain_weights) * (plain_rows.detach() @ weights)).sum().backward()
        for moved in (False, True):
            x = laid_out(rows, rank, Shard(1) if moved else Shard(0)).requires_grad_()
            w = laid_out(weights, rank, Shard(0) if moved else Replicate()).requires_grad_()
            product: Any = local_map(
                torch.mm,
                [Shard(0)],
                ([Shard(0)], [Replicate()]),
                ([Shard(0)], [Partial()]),
                redistribute_inputs=moved,
            )(x, w)
            (product * product.detach()).sum().full_tensor().backward()
            for name, own, right in ("rows", x, plain_rows), ("weights", w, plain_weights):
                gradient: Any = own.grad
                assert gradient is not None, name
                assert right.grad is not None, name
                if name == "rows":
                    assert gradient.placements == own.placements, name
                assert_same(right.grad, gradient.full_tensor(), f"gradient of {name}, {moved=}")

    world.run(body)


@requirement(
    "TP-LOCAL-06",
    "local_map takes DTensors on different meshes, each in its own placements, and gives results on device_mesh.",
    source=f"{SOURCE}: device_mesh; test_local_map.py: test_multi_mesh_inputs",
)
@requirement(
    "TP-LOCAL-03",
    "Each result of local_map's function becomes a DTensor in its out_placements, and what is no tensor stays.",
    source=f"{SOURCE}: out_placements, device_mesh",
)
@pytest.mark.world(2)
def test_meshes_and_collectives(world: World) -> None:
    """Inputs are on a mesh of one and on one of two dimensions, in either order; then the function sums over ranks."""

    def body(rank: Rank) -> None:
        flat, deep = rank.mesh(), rank.mesh(1, 2, names=("dp", "tp"))
        whole, rows = (numbers(4, 6) * 2).to(rank.device), (numbers(6, 4) % 5).to(rank.device)
        x = laid_out(whole, rank, Shard(1))
        y = DTensor.from_local(part(rows, rank, Shard(0)).clone(), deep, [Replicate(), Shard(0)])
        given: dict[str, tuple[Any, ...]] = {
            "one dimension first": (torch.mm, (x, y), (flat, [Partial()])),
            "two dimensions first": (lambda b, a: a @ b, (y, x), (deep, [Replicate(), Partial()])),
        }
        for name, (product, inputs, own) in given.items():
            layouts: Any = tuple(each.placements for each in inputs)
            for mesh, placements in (None, own[1]), (flat, [Partial()]), (deep, [Replicate(), Partial()]):
                what, start = f"{name}, {mesh}", messages.mark()
                result: Any = local_map(product, placements, layouts, device_mesh=mesh)(*inputs)
                assert not messages.since(start), what
                assert (result.device_mesh, result.placements) == (mesh or own[0], tuple(placements)), what
                assert_same(whole @ rows, result.full_tensor() + 0, what)
        for wait in False, True:

            def summed(a: torch.Tensor, b: torch.Tensor, wait: bool = wait) -> torch.Tensor:
                total = functional.all_reduce(a @ b, "sum", flat)
                return functional.wait_tensor(total) if wait else total

            z = laid_out(rows, rank, Shard(0))
            total: Any = local_map(summed, [Replicate()], ([Shard(1)], [Shard(0)]))(x, z)
            assert total.placements == (Replicate(),)
            assert_same(whole @ rows * 2, (total * 2).to_local() + 0, f"sum, {wait=}")
            nothing = local_map(lambda a: a.shape, (None, None))(x)
            assert nothing == (4, 3)

    world.run(body)
