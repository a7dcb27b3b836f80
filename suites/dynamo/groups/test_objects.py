"""Placements, groups and meshes as values in compiled code: returned, kept over graph breaks, and held by objects."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from harness import Rank, World, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with
from suites.dynamo.objects import KINDS, Holder, known, replaced, things, unlike

TORCH_COMPILE = "torch.compile: the compiled function returns what the function returns"
Named = namedtuple("Named", "thing number")


class Keeper(nn.Module):
    """A module with an attribute that is no tensor."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.thing = thing

    def forward(self, x: torch.Tensor) -> Any:
        return x + 1, self.thing


def _passed_on(thing: Any) -> Any:
    """Return a function that returns an object in every way, from wherever it gets it, and its arguments."""
    module = Keeper(thing)

    def every_way(x: torch.Tensor, given: Any, items: Any, table: Any, named: Any, holder: Any) -> Any:
        found = {
            "given": given,
            "closed over": thing,
            "in containers": [[given, (given, 1)], {"k": given, 2: [given]}, Holder(given)],
            "from a list": (items[1], items[::-1]),
            "from a dictionary": (table["a"], table),
            "from a named tuple": (named.thing, named),
            "from an object": (holder.thing, holder),
            "from a module": module(x),
        }
        holder.other = given
        items.append(given)
        return x + 1, found

    return every_way, (thing, [1, thing], {"a": thing}, Named(thing, 3), Holder(thing))


def _made(x: torch.Tensor) -> Any:
    return x + 1, Shard(0), Shard(2), Shard(dim=1), Shard(-1), Replicate(), [Shard(dim=3)]


def _made_partial(x: torch.Tensor) -> Any:
    return x + 1, Partial(), Partial("avg"), Partial(reduce_op="max"), {"product": Partial("product")}


@requirement(
    "DYN-OBJ-01",
    "Compiled code returns the placements, groups and meshes that uncompiled code returns, alone or in containers.",
    source=TORCH_COMPILE,
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(3)
def test_returned(world: World, kind: str) -> None:
    """Return each object from an argument, a closure, containers and attributes, and store it in some."""

    def body(rank: Rank) -> None:
        assert unlike(rank, {name: _passed_on(thing) for name, thing in things(rank).of(kind).items()}) == []

    world.run(body)


def _sliced(x: torch.Tensor, mesh: Any) -> Any:
    return x + 1, mesh["b"], mesh["b"].get_local_rank()


def _group_of_mesh(x: torch.Tensor, mesh: Any) -> Any:
    return x + 1, mesh.get_group(1), mesh.get_group("b"), mesh.get_group(mesh_dim=0), mesh.get_group(mesh_dim="a")


def _the_world(x: torch.Tensor) -> Any:
    return x + 1, dist.group.WORLD, [dist.GroupMember.WORLD]


@requirement(
    "DYN-OBJ-05",
    "Compiled code returns the same slices of a mesh, groups of a mesh and default group as uncompiled code.",
    source="torch.compile; torch/distributed/device_mesh.py: DeviceMesh.__getitem__, get_group",
)
@pytest.mark.parametrize("which", ["slice", "group", "world"])
@pytest.mark.world(3)
def test_found(world: World, which: str) -> None:
    """Take a slice of a mesh, take the group of a mesh dimension, or read the default group."""

    def body(rank: Rank) -> None:
        mesh = things(rank).mesh
        case = {"slice": (_sliced, (mesh,)), "group": (_group_of_mesh, (mesh,)), "world": (_the_world, ())}[which]
        assert unlike(rank, {which: case}, least=0) == []

    world.run(body)


@requirement(
    "DYN-OBJ-02",
    "Placements that compiled code returns have the dimension or reduction with which it made them.",
    source=f"{TORCH_COMPILE}; torch.distributed.tensor: Shard, Replicate, Partial",
)
@pytest.mark.parametrize("made", [_made, _made_partial], ids=["shards", "partials"])
@pytest.mark.world(1)
def test_made(world: World, made: Any) -> None:
    """Give the arguments by position, by name or not at all."""

    def body(rank: Rank) -> None:
        assert unlike(rank, {"made": (made, ())}, fullgraph=True) == []

    world.run(body)


def _by_position(x: torch.Tensor, value: Any, make: Any) -> Any:
    return x + 1, make(value), [make(value)]


def _by_container(x: torch.Tensor, value: Any, make: Any) -> Any:
    items, table = [value, 3], {"k": (value,)}
    return x + 1, make(items[0]), {"made": make(*table["k"])}


def _by_computation(x: torch.Tensor, value: Any, make: Any) -> Any:
    return x + 1, make(value + value), make(value * 2)


def _used(x: torch.Tensor, value: Any, make: Any) -> Any:
    placement = make(value)
    return x + len(str(placement)), placement == make(value), placement.is_shard(1), placement.is_partial("avg")


def _held(x: torch.Tensor, holder: Holder, make: Any) -> Any:
    return x + 1, make(holder.thing)


@requirement(
    "DYN-OBJ-06",
    "A placement that compiled code makes of an argument has the dimension or the reduction of each call.",
    source=f"{TORCH_COMPILE}; torch.compile: guards",
)
@pytest.mark.world(1)
def test_made_of_arguments(world: World) -> None:
    """Give dimensions and reductions in turn and again: alone, in containers and objects, or computed with."""

    def body(rank: Rank) -> None:
        cases: list[tuple[Any, list[Any], bool | None]] = [
            (Shard, [0, 2, 1, -1], False),  # with dynamic sizes, healthy PyTorch takes no dimension that changes
            (Partial, ["avg", "sum", "max"], None),
        ]
        for make, values, dynamic in cases:
            for function in (_by_position, _by_container, _by_computation, _used, _held):
                if function is _by_computation and make is Partial:
                    continue
                compiled, _ = dynamo.compiled(function, backend="eager", dynamic=dynamic)
                for value in values * 2:
                    x = torch.arange(2.0, device=rank.device)
                    given = Holder(value) if function is _held else value
                    right, found = known(function(x, given, make)), known(compiled(x, given, make))
                    assert found == right, f"{function.__name__} with {value}: {right} uncompiled, {found} compiled"

    world.run(body)


def _broken(x: torch.Tensor, thing: Any) -> Any:
    items = [thing, {"k": thing}]
    y = x + 1
    dynamo.graph_break()
    return y * 2, thing, items


def _made_before(x: torch.Tensor) -> Any:
    rows, average, largest = Shard(dim=1), Partial("avg"), {"a": Partial("max")}
    y = x + rows.dim
    dynamo.graph_break()
    return y + rows.dim, rows, average, average.reduce_op, largest, average.is_partial("sum")


def _sliced_before(x: torch.Tensor, mesh: Any) -> Any:
    part, group = mesh["b"], mesh.get_group(1)
    y = x + 1
    dynamo.graph_break()
    return y + part.size(), part, group, dist.get_rank(group)


def _world_before(x: torch.Tensor) -> Any:
    everyone: Any = dist.group.WORLD
    y = x + 1
    dynamo.graph_break()
    return y + everyone.rank(), everyone, everyone.size()


@requirement(
    "DYN-OBJ-03",
    "Placements, groups and meshes are the same after a graph break as before it.",
    source="torch.compile: fullgraph=False",
)
@pytest.mark.parametrize("kind", [*KINDS, "made", "slice", "world"])
@pytest.mark.world(3)
def test_across_a_break(world: World, kind: str) -> None:
    """Carry objects that were given, made or found before the break, also in containers."""

    def body(rank: Rank) -> None:
        about = things(rank)
        cases: dict[str, Any] = {name: (_broken, (thing,)) for name, thing in about.of(kind).items()}
        if kind not in KINDS:
            cases = {
                "made": {"made": (_made_before, ())},
                "slice": {"slice": (_sliced_before, (about.mesh,))},
                "world": {"world": (_world_before, ())},
            }[kind]
        assert unlike(rank, cases, least=0 if kind == "world" else 1) == []

    world.run(body)


def _place_or_none(x: torch.Tensor, group: Any) -> Any:
    """Return rank and size, which are -1 for ranks beside the group."""
    where, size = dist.get_rank(group), dist.get_world_size(group)
    return (x + 1 if where < 0 else x * size), where, size


def _size_and_rank(x: torch.Tensor, group: Any) -> Any:
    return x + group.size() * 10 + group.rank(), group


def _name(x: torch.Tensor, group: Any) -> Any:
    return x + len(group.group_name), group.group_name, group


def _sizes_and_places(x: torch.Tensor, mesh: Any) -> Any:
    place = mesh.get_local_rank("b") if mesh.ndim > 1 else None
    return x + mesh.size(0) * 10 + mesh.ndim, place, mesh


def _dimension(x: torch.Tensor, placement: Any) -> Any:
    return x + placement.dim, placement


def _reduction(x: torch.Tensor, placement: Any) -> Any:
    return x + len(placement.reduce_op), placement


About = Callable[[torch.Tensor, Any], Any]
"""A function of a tensor and an object."""
Held = tuple[Callable[[torch.Tensor], Any], Callable[[Any], None]]
"""A function that reads an object from where it is held, and one that replaces the object there."""


def _in_attribute(thing: Any, about: About) -> Held:
    holder = Holder(thing)
    return lambda x: about(x, holder.thing), lambda new: setattr(holder, "thing", new)


def _in_list(thing: Any, about: About) -> Held:
    items = [3, thing]
    return lambda x: about(x, items[1]), lambda new: items.__setitem__(1, new)


def _in_dictionary(thing: Any, about: About) -> Held:
    items = {"k": thing}
    return lambda x: about(x, items["k"]), lambda new: items.update(k=new)


def _in_module(thing: Any, about: About) -> Held:
    module = Keeper(thing)
    return lambda x: about(x, module.thing), lambda new: setattr(module, "thing", new)


def _in_closure(thing: Any, about: About) -> Held:
    held = thing

    def replace(new: Any) -> None:
        nonlocal held
        held = new

    return lambda x: about(x, held), replace


def _in_default(thing: Any, about: About) -> Held:
    def read(x: torch.Tensor, given: Any = thing) -> Any:
        return about(x, given)

    return read, lambda new: setattr(read, "__defaults__", (new,))


def _in_keyword(thing: Any, about: About) -> Held:
    keywords = {"thing": thing}

    def named(x: torch.Tensor, *, thing: Any) -> Any:
        return about(x, thing)

    return lambda x: named(x, **keywords), lambda new: keywords.update(thing=new)


@requirement(
    "DYN-OBJ-04",
    "One compiled function uses the placement, group or mesh that an object, container, module or closure holds at "
    "each call.",
    source="torch.compile: guards",
)
@pytest.mark.parametrize("kind", ["groups", "names of groups", "meshes", "placements"])
@pytest.mark.world(3)
def test_replaced(world: World, kind: str) -> None:
    """Replace each object by others of its kind between calls, and put the first one back."""

    def body(rank: Rank) -> None:
        about, wrong = things(rank), []
        kinds: dict[str, list[tuple[tuple[Any, ...], Callable[..., Any]]]] = {
            "groups": [((about.pair, about.own), _size_and_rank)],
            "names of groups": [((about.pair, about.own), _name)],
            "meshes": [((about.mesh, about.line, about.beside, about.renamed), _sizes_and_places)],
            "placements": [((Shard(1), Shard(2)), _dimension), ((Partial("avg"), Partial("product")), _reduction)],
        }
        for objects, numbers_of in kinds[kind]:
            for hold in (_in_attribute, _in_list, _in_dictionary, _in_module, _in_closure):
                read, replace = hold(objects[0], numbers_of)
                wrong += [f"{hold.__name__}: {s}" for s in replaced(rank, read, replace, (*objects, objects[0]))]
        assert wrong == []

    world.run(body)


@requirement(
    "DYN-OBJ-65",
    "One compiled function sees at each call whether it has a group or NON_GROUP_MEMBER, given or held by something.",
    source="torch.compile: guards; torch.distributed: GroupMember; test_dynamo_distributed.py: test_get_pg_attr",
)
@pytest.mark.world(3)
def test_no_member(world: World) -> None:
    """Replace a group by what stands for none, and put it back, in everything that holds it."""

    def body(rank: Rank) -> None:
        about, wrong = things(rank), []
        groups = (about.pair, dist.GroupMember.NON_GROUP_MEMBER, about.pair, dist.GroupMember.NON_GROUP_MEMBER)
        for hold in (_in_attribute, _in_list, _in_dictionary, _in_module, _in_closure):
            for first in (0, 1):
                read, replace = hold(groups[first], _place_or_none)
                wrong += [f"{hold.__name__}: {s}" for s in replaced(rank, read, replace, groups[first:])]
        compiled, _ = dynamo.compiled(_place_or_none, backend="eager", fullgraph=False)
        for group in groups:
            given = torch.ones(1, device=rank.device), group
            assert compiled(*given) == _place_or_none(*given), "given"
        assert wrong == []

    world.run(body)


def _reduced(x: torch.Tensor, op: Any) -> torch.Tensor:
    y = x + dist.get_rank() + 1
    dist.all_reduce(y, op=op)
    return y


def _scattered(x: torch.Tensor, op: Any) -> torch.Tensor:
    y = x.new_zeros(1)
    dist.reduce_scatter_tensor(y, x[:1].repeat(3) + dist.get_rank() + 1, op)
    return y


def _reduced_by_name(x: torch.Tensor, op: str) -> torch.Tensor:
    return functional.all_reduce(x + dist.get_rank() + 1, op, dist.group.WORLD) + 0


def _sent_from(x: torch.Tensor, source: int) -> torch.Tensor:
    return functional.broadcast(x + dist.get_rank(), source, dist.group.WORLD) + 0


def _gathered_along(x: torch.Tensor, dim: int) -> torch.Tensor:
    return functional.all_gather_tensor(x.view(1, 2) + dist.get_rank(), dim, dist.group.WORLD) + 0


def _summed_over(x: torch.Tensor, group: Any) -> torch.Tensor:
    y = x + dist.get_rank()
    dist.all_reduce(y, group=group)
    return y


SUM, MAX, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT
VALUES: dict[str, tuple[tuple[Any, ...], tuple[About, ...]]] = {
    "operations": ((SUM, MAX, PRODUCT), (_reduced, _scattered)),
    "names of operations": (("sum", "max", "product"), (_reduced_by_name,)),
    "ranks": ((0, 2, 1), (_sent_from,)),
    "dimensions": ((0, 1), (_gathered_along,)),
}
"""Arguments of collectives, and collectives that take them."""


@requirement(
    "DYN-CALL-8608",
    "A compiled collective uses the operation, rank, dimension or group that an object, container, module, closure or "
    "default holds at each call.",
    source="torch.compile: guards; torch.distributed.ReduceOp",
)
@pytest.mark.parametrize("kind", [*VALUES, "groups"])
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, operations are not guarded")
@pytest.mark.world(3)
def test_replaced_arguments(world: World, kind: str) -> None:
    """Replace each argument by others of its kind between calls, and put the first one back."""

    def body(rank: Rank) -> None:
        wrong = []
        if kind == "groups":
            about = things(rank)
            values, functions = (about.own, dist.group.WORLD), (_summed_over,)
        else:
            values, functions = VALUES[kind]
        for function in functions:
            for hold in (_in_attribute, _in_list, _in_dictionary, _in_module, _in_closure, _in_default, _in_keyword):
                read, replace = hold(values[0], function)
                where = f"{function.__name__} {hold.__name__}"
                wrong += [f"{where}: {s}" for s in replaced(rank, read, replace, (*values, values[0]))]
        assert wrong == []

    world.run(body)
