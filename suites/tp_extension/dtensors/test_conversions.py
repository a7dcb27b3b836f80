"""redistribute's collectives and dtypes, local tensors of parameters, and what a rank may do with a DTensor alone."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fixtures.copying import reloaded
from fixtures.placements import part
from fixtures.tensors import numbers
from harness import Rank, World, assert_same, requirement
from harness.stacks import messages
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.tensor.DTensor"
TARGETS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1))
SOURCES: tuple[Placement, ...] = (*TARGETS, Partial())


def laid_out(whole: torch.Tensor, rank: Rank, layout: Placement) -> DTensor:
    """Return a DTensor of this rank's part, for which the ranks do not communicate."""
    local = part(whole, rank, layout).clone()
    return DTensor.from_local(local, rank.mesh(), [layout], shape=whole.shape, stride=whole.stride())


def issued(mode: Any) -> dict[str, int]:
    """Return how often each functional collective was called, by its name without what it is called on."""
    counts: dict[str, int] = {}
    for op, count in mode.get_comm_counts().items():
        called = str(op).replace("alltoall", "all_to_all")  # on accelerators, shard_dim_alltoall of DTensor's own
        kinds = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
        name = next((kind for kind in kinds if kind in called), called)
        counts[name] = counts.get(name, 0) + count
    return counts


def needed(source: Placement, target: Placement) -> tuple[dict[str, int], ...]:
    """Return the collectives, one of which brings a tensor from one layout into another."""
    if source == target or isinstance(source, Replicate):
        return ({},)
    if isinstance(source, Partial):
        return ({"all_reduce" if isinstance(target, Replicate) else "reduce_scatter": 1},)
    gathered = {"all_gather": 1}  # also instead of an all_to_all that a group does not have
    return (gathered,) if isinstance(target, Replicate) else ({"all_to_all": 1}, gathered)


@requirement(
    "TP-MOVE-01",
    "redistribute issues the one collective that its documentation names for two placements, and none to cut replicas.",
    source=f"{SOURCE}.redistribute: all_gather, all_to_all, all_reduce, reduce_scatter or local chunking",
)
@requirement(
    "TP-MOVE-02",
    "The backward of redistribute issues the collective of the way back, and none from a replica to partial values.",
    source=f"{SOURCE}.redistribute",
)
@pytest.mark.world(2)
def test_collectives(world: World) -> None:
    """Move even and uneven tensors between any two placements, synchronously and asynchronously."""

    def body(rank: Rank) -> None:
        for shape, source, target, late in itertools.product(((4, 6), (5, 3)), SOURCES, TARGETS, (False, True)):
            what = f"{shape}, {source} to {target}, {late=}"
            whole = (numbers(*shape) * 2).to(rank.device)
            given = laid_out(whole, rank, source).requires_grad_()
            before = given.to_local().detach().clone()
            with CommDebugMode() as forward:
                moved = given.redistribute(placements=[target], async_op=late)
            assert issued(forward) in needed(source, target), what
            assert_same(part(whole, rank, target), moved.to_local().detach() + 0, what)
            assert_same(before, given.to_local().detach(), f"{what}: input")
            gradient = laid_out(whole, rank, target)
            with CommDebugMode() as backward:
                moved.backward(gradient)
            assert issued(backward) in needed(target, source), what
            found: Any = given.grad
            assert found.placements == ((Replicate(),) if source == Partial() else (source,)), what
            assert_same(whole, found.full_tensor(), f"{what}: gradient")

    world.run(body)


@requirement(
    "TP-MOVE-284",
    "redistribute to a dimension counted from the end takes the collectives of the same dimension counted from the "
    "start, and none if the tensor is sharded on it.",
    source=f"{SOURCE}.redistribute: placements; torch.distributed.tensor.Shard; pytorch/pytorch#111750",
)
@requirement(
    "TP-MOVE-285",
    "The gradient of a sharded or replicated tensor that is redistributed has the tensor's placements, in whatever "
    "layout the result's gradient comes, also if redistribute changes nothing.",
    source=f"{SOURCE}.redistribute; pytorch/pytorch#121653",
)
@pytest.mark.world(2)
def test_to_any_spelling(world: World) -> None:
    """Move tensors of two and three dimensions between any two layouts; gradients come in each layout in turn."""

    def body(rank: Rank) -> None:
        for shape in (4, 6), (2, 4, 6):
            whole, dims = (numbers(*shape) * 2).to(rank.device), len(shape)
            layouts: list[Placement] = [Replicate(), *map(Shard, range(dims))]
            spelled = [(layout, layout) for layout in layouts]
            spelled += [(Shard(i), Shard(i - dims)) for i in range(dims)]
            for source, (target, name) in itertools.product((*layouts, Partial()), spelled):
                given = laid_out(whole, rank, source).requires_grad_()
                with CommDebugMode() as mode:
                    moved = given.redistribute(placements=[name])
                assert issued(mode) in needed(source, target), f"{shape}, {source} to {name}"
                assert moved.placements == (target,), f"{shape}, {source} to {name}"
                assert_same(part(whole, rank, target), moved.to_local().detach(), f"{shape}, {source} to {name}")
                for arriving in (*layouts, Partial()) if source in (target, Partial()) else (Partial(), target):
                    what = f"{shape}, {source} to {name}, whose gradient is {arriving}"
                    given.grad = None
                    given.redistribute(placements=[name]).backward(laid_out(whole, rank, arriving))
                    found: Any = given.grad
                    assert source == Partial() or found.placements == (source,), what
                    assert_same(whole, found.full_tensor() + 0, what)

    world.run(body)


@requirement(
    "TP-MOVE-03",
    "redistribute with forward_dtype communicates in that dtype and returns it, while the input keeps its own.",
    source=f"{SOURCE}.redistribute: forward_dtype",
)
@requirement(
    "TP-MOVE-04",
    "The gradient of redistribute is communicated in backward_dtype, or in the input's dtype if none is given.",
    source=f"{SOURCE}.redistribute: backward_dtype",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, the gradient is communicated in forward_dtype")
@pytest.mark.world(2)
def test_dtypes(world: World) -> None:
    """Values and gradients need more bits than bfloat16 has; give each dtype, the other, both or none."""
    low = torch.bfloat16

    def body(rank: Rank) -> None:
        fine = torch.tensor(1 + 2.0**-12)
        dtypes = ((None, None), (low, None), (None, low), (low, torch.float32), (torch.float64, low), (low, low))
        for source, target, (forward, backward) in itertools.product(SOURCES, TARGETS, dtypes):
            late = backward is low
            what = f"{source} to {target}, {forward=}, {backward=}, {late=}"
            whole = (numbers(4, 6) * 2 * fine).to(rank.device)
            given = laid_out(whole, rank, source).requires_grad_()
            at = messages.mark()
            moved = given.redistribute(
                placements=[target], async_op=late, forward_dtype=forward, backward_dtype=backward
            )
            local = moved.to_local().detach() + 0
            kind = forward or torch.float32
            assert (moved.dtype, given.dtype) == (kind, torch.float32), what
            assert_same(part(whole.to(kind), rank, target), local, what)
            moved.backward(laid_out(whole.to(kind), rank, target))
            found: Any = given.grad
            sent = backward or torch.float32
            there, back = (
                [messages.RECORDED[kind]] * (needed(*way) != ({},))
                for kind, way in ((kind, (source, target)), (sent, (target, source)))
            )
            assert [message.dtype for message in messages.since(at)] == [*there, *back], what
            assert found.dtype == torch.float32, what
            assert_same(whole.to(kind).to(sent).float(), found.full_tensor(), f"{what}: gradient")

    world.run(body)


@requirement(
    "TP-MOVE-05",
    "to_local() of a parameter is a parameter that shares its memory, with gradients and without, unlike a tensor's.",
    source=f"{SOURCE}.to_local; pytorch/pytorch#166156",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, the local tensor of a parameter is no parameter")
@pytest.mark.world(2)
def test_local_parameters(world: World) -> None:
    """Use parameters that require a gradient or not, and tensors, in each layout."""

    def body(rank: Rank) -> None:
        for layout, grad, recording in itertools.product(TARGETS, (True, False), (True, False)):
            what = f"{layout}, {grad=}, {recording=}"
            whole = numbers(5, 3).to(rank.device)
            parameter = nn.Parameter(laid_out(whole, rank, layout), requires_grad=grad)
            tensor = laid_out(whole, rank, layout).requires_grad_(grad)
            with torch.set_grad_enabled(recording):
                local, other = parameter.to_local(), tensor.to_local()  # type: ignore[attr-defined]
            assert isinstance(local, nn.Parameter), what
            assert not isinstance(other, nn.Parameter), what
            assert not isinstance(local, DTensor), what
            assert isinstance(parameter, nn.Parameter) == isinstance(parameter, DTensor), what
            assert_same(part(whole, rank, layout), local.detach(), what)
            if recording:
                assert (local.requires_grad, other.requires_grad) == (grad, grad), what
            if grad and recording:
                (local * 2).sum().backward()
                gradient: Any = parameter.grad
                assert gradient.placements == (layout,), what
                assert (gradient.to_local() == 2).all(), what
            with torch.no_grad():
                local.zero_()
                assert not parameter.to_local().any(), what  # type: ignore[attr-defined]

    world.run(body)


@requirement(
    "TP-MOVE-06",
    "Printing, inspecting, copying or pickling a DTensor takes this rank alone.",
    source=f"{SOURCE}; torch.Tensor.__deepcopy__, torch.save",
)
@requirement(
    "TP-MOVE-07",
    "A copy or an unpickled DTensor has the local tensor, placements and requires_grad of the original in new memory.",
    source="torch.Tensor.__deepcopy__, torch.save, torch.load",
)
@pytest.mark.world(2)
def test_alone(world: World) -> None:
    """One rank does everything, for tensors, parameters and modules in each layout; then both use the tensor."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh()
        for layout, grad, parameter in itertools.product(SOURCES, (False, True), (False, True)):
            what = f"{layout}, {grad=}, {parameter=}"
            whole = (numbers(5, 3) * 2).to(rank.device)
            x: Any = laid_out(whole, rank, layout).requires_grad_(grad)
            x = nn.Parameter(x, requires_grad=grad) if parameter else x
            local, at = part(whole, rank, layout), messages.mark()
            if rank.index == 0:
                texts = repr(x), str(x), f"{x}", f"{[x]}"
                assert all("DTensor" in text for text in texts), what
                assert x.shape == whole.shape == x.size(), what
                assert (x.dim(), x.numel(), len(x), x.dtype, x.device) == (2, 15, 5, whole.dtype, whole.device), what
                assert (x.stride(), x.is_contiguous(), x.placements) == ((3, 1), True, (layout,)), what
                assert hash(x) == hash(x), what
                assert x in (x,), what
                assert (x.requires_grad, x.is_leaf, x.grad) == (grad, True, None), what
                assert x.to_local().shape == local.shape, what
                assert x.detach().placements == (layout,), what
                copies = [pickle.loads(pickle.dumps(x)), reloaded(x, weights_only=True), reloaded(x)]
                if layout != Partial():  # PyTorch copies the sum of partial values
                    copies.append(copy.deepcopy(x))
                for i, other in enumerate(copies):
                    assert type(other) is type(x), (what, i)
                    assert (other.shape, other.placements, other.device_mesh) == (x.shape, x.placements, mesh), (
                        what,
                        i,
                    )
                    assert isinstance(other, nn.Parameter) == parameter, (what, i)
                    assert other.requires_grad == grad, (what, i)
                    assert_same(local, other.to_local().detach(), f"{what}: copy {i}")
                    assert other.to_local().data_ptr() != x.to_local().data_ptr(), (what, i)
            assert not messages.since(at), what
            assert_same(whole, x.full_tensor().detach(), what)
        module = nn.Linear(3, 5, device=rank.device)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
        at = messages.mark()
        if rank.index == 0:
            assert "Linear" in repr(module)
            copied: Any = copy.deepcopy(module)
            assert copied.weight.placements == (Shard(0),)
            assert copied.weight.to_local().data_ptr() != module.weight.to_local().data_ptr()  # type: ignore[operator]
        assert not messages.since(at)

    world.run(body)


@requirement(
    "TP-MOVE-2200",
    "A deep copy or an unpickled copy of a slice of a DTensor has its values and placements in memory of its own.",
    source="torch.Tensor.__deepcopy__, torch.save, torch.load",
)
@pytest.mark.parametrize("taken", ["first", "last"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.world(2)
def test_copies_of_slices(world: World, way: str, taken: str) -> None:
    """Copy the first or the last rows and columns of replicas, and of tensors with a shard of the other dimension."""

    def body(rank: Rank) -> None:
        whole = numbers(4, 4).to(rank.device)
        for layout, dim in ((Replicate(), 0), (Replicate(), 1), (Shard(1), 0), (Shard(0), 1)):
            start = 2 if taken == "last" else 0
            x: Any = laid_out(whole, rank, layout).narrow(dim, start, 2)
            made = copy.deepcopy(x) if way == "deepcopy" else pickle.loads(pickle.dumps(x))
            what = f"{layout}, {dim=}"
            assert made.placements == x.placements == (layout,), what
            assert made.to_local().data_ptr() != x.to_local().data_ptr(), what
            assert_same(whole.narrow(dim, start, 2), made.full_tensor(), what)

    world.run(body)


@requirement(
    "TP-MOVE-08",
    "torch.load with weights_only loads a DTensor on a mesh of two dimensions with its placements, mesh and values.",
    source="torch.load: weights_only; torch/distributed/tensor/__init__.py: add_safe_globals",
)
@requirement(
    "TP-MOVE-09",
    "A rank alone can redistribute a DTensor to the placements it has, and get the full tensor of replicas.",
    source=f"{SOURCE}: redistribute, full_tensor",
)
@pytest.mark.world(2)
def test_alone_on_two_dimensions(world: World) -> None:
    """One rank loads and redistributes tensors in any layout, and gets the full tensor of those that are replicated."""

    def body(rank: Rank) -> None:
        whole = (numbers(4, 6) * 2).to(rank.device)
        flat, deep = rank.mesh(), rank.mesh(1, 2, names=("dp", "tp"))
        layouts: list[tuple[Any, tuple[Placement, ...]]] = [(flat, (layout,)) for layout in SOURCES]
        layouts += [(deep, pair) for pair in itertools.product(SOURCES, repeat=2)]
        for mesh, placements in layouts:
            what = f"{placements}"
            given = DTensor.from_local(part(whole, rank, placements[-1]).clone(), mesh, placements).requires_grad_()
            local, replicated = given.to_local().detach().clone(), all(p == Replicate() for p in placements)
            at = messages.mark()
            if rank.index == 1:
                (loaded,) = reloaded({"state": [given]}, weights_only=True)["state"]
                assert (loaded.placements, loaded.device_mesh) == (placements, mesh), what
                assert loaded.device_mesh.mesh_dim_names == mesh.mesh_dim_names, what
                assert_same(local, loaded.to_local().detach(), f"{what}: loaded")
                moved = [given.redistribute(placements=placements, async_op=late) for late in (False, True)]
                for same in moved:
                    assert same.placements == placements, what
                    assert_same(local, same.to_local().detach() + 0, f"{what}: redistributed")
                if replicated:
                    with torch.no_grad():
                        assert_same(local, given.full_tensor() + 0, f"{what}: without gradients")
                    full = given.full_tensor()
                    assert_same(whole, full.detach() + 0, f"{what}: full")
                    (full * 3).sum().backward()
                    gradient: Any = given.grad
                    assert gradient.placements == placements, what
                    assert (gradient.to_local() == 3).all(), what
            assert not messages.since(at), what

    world.run(body)


@requirement(
    "TP-MOVE-45",
    "Loading a DTensor before anything allowed its classes raises an error that names torch.distributed.tensor.",
    source="torch.load: weights_only; torch.serialization.clear_safe_globals; test_dtensor.py: "
    "test_dtensor_save_load_import",
)
@pytest.mark.world(2)
def test_load_without_import(world: World) -> None:
    """Forget what importing the module has allowed, and allow it again; one rank does, for a tensor in each layout."""

    def body(rank: Rank) -> None:
        for layout in SOURCES:
            given = laid_out(numbers(4, 6).to(rank.device), rank, layout)
            file = io.BytesIO()
            torch.save({"state": given}, file)
            if rank.index:
                continue
            allowed = torch.serialization.get_safe_globals()
            torch.serialization.clear_safe_globals()
            try:
                file.seek(0)
                with pytest.raises(pickle.UnpicklingError, match=r"torch\.distributed\.tensor.* must be imported"):
                    torch.load(file)
            finally:
                torch.serialization.add_safe_globals(allowed)
            file.seek(0)
            loaded = torch.load(file)["state"]
            assert loaded.placements == (layout,)
            assert_same(given.to_local(), loaded.to_local(), f"{layout}")

    world.run(body)


@requirement(
    "TP-COMM-01",
    "A CommDebugMode counts the collectives of its last use, and neither those before nor those after it.",
    source="torch.distributed.tensor.debug.CommDebugMode: get_comm_counts, get_total_counts",
)
@requirement(
    "TP-COMM-02",
    "A CommDebugMode inside another counts its own collectives, which the outer one counts as well.",
    source="torch.distributed.tensor.debug.CommDebugMode",
)
@pytest.mark.world(2)
def test_counts(world: World) -> None:
    """Use one mode several times, for different collectives, for none, and until an exception; use one in another."""

    def body(rank: Rank) -> None:
        whole = numbers(4, 6).to(rank.device)
        sharded, partial = laid_out(whole, rank, Shard(0)), laid_out(whole, rank, Partial())

        def move(gathers: int, reductions: int) -> None:
            for tensor, count in (sharded, gathers), (partial, reductions):
                for _ in range(count):
                    tensor.redistribute(placements=[Replicate()]).to_local()

        mode, other = CommDebugMode(), CommDebugMode()
        assert (mode.get_total_counts(), issued(mode)) == (0, {})
        for again, (gathers, reductions) in enumerate([(2, 1), (1, 0), (0, 0), (0, 3), (1, 1)]):
            right = {kind: n for kind, n in (("all_gather", gathers), ("all_reduce", reductions)) if n}
            with pytest.raises(ZeroDivisionError) if again == 3 else nullcontext(), mode:
                move(gathers, reductions)
                assert (mode.get_total_counts(), issued(mode)) == (gathers + reductions, right), f"in use {again}"
                if again == 3:
                    raise ZeroDivisionError
            move(1, 2)
            assert (mode.get_total_counts(), issued(mode)) == (gathers + reductions, right), f"after use {again}"
            with mode, other:
                move(gathers, reductions)
            assert issued(mode) == issued(other) == right, f"both, {again}"
            with mode:
                move(1, 0)
                with other:
                    move(gathers, reductions)
            assert issued(other) == right, f"inner, {again}"
            assert mode.get_total_counts() == gathers + reductions + 1, f"outer, {again}"

    world.run(body)


@requirement(
    "TP-COMM-03",
    "A CommDebugMode counts each collective of torch.distributed and each functional one once, by its kind.",
    source="torch.distributed.tensor.debug.CommDebugMode: get_comm_counts",
)
@pytest.mark.needs(collective="all_to_all")
@pytest.mark.world(2, keeps="results that nothing uses")
def test_kinds_of_collectives(world: World) -> None:
    """Call every collective alone and then all of them in one use; barriers and waiting count for nothing."""

    def body(rank: Rank) -> None:
        x, first, group = torch.ones(4, 2, device=rank.device), rank.index == 0, dist.group.WORLD
        both = [torch.empty_like(x) for _ in range(2)]
        calls: dict[str, Any] = {
            "allreduce_": lambda: dist.all_reduce(x.clone()),
            "broadcast_": lambda: dist.broadcast(x, 0),
            "reduce_": lambda: dist.reduce(x.clone(), 0),
            "gather_": lambda: dist.gather(x, both if first else None),
            "scatter_": lambda: dist.scatter(both[0], [x, x] if first else None),
            "allgather_": lambda: dist.all_gather(both, x),
            "_allgather_base_": lambda: dist.all_gather_into_tensor(x.new_empty(8, 2), x),
            "reduce_scatter_": lambda: dist.reduce_scatter(both[0], [x, x]),
            "_reduce_scatter_base_": lambda: dist.reduce_scatter_tensor(x.new_empty(2, 2), x),
            "alltoall_": lambda: dist.all_to_all(both, [x, x]),
            "alltoall_base_": lambda: dist.all_to_all_single(both[0], x),
            "all_reduce": lambda: functional.all_reduce(x, "sum", group) + 0,
            "all_gather_into_tensor": lambda: functional.all_gather_tensor(x, 0, group) + 0,
            "reduce_scatter_tensor": lambda: functional.reduce_scatter_tensor(x, "sum", 0, group) + 0,
            "all_to_all_single": lambda: functional.all_to_all_single(x, None, None, group) + 0,
            "all_reduce_coalesced": lambda: functional.all_reduce_coalesced([x, x], "sum", group)[1] + 0,
        }

        def names(mode: CommDebugMode) -> dict[str, int]:
            return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()}

        mode = CommDebugMode()
        for times, (name, call) in enumerate(calls.items()):
            with mode:
                for _ in range(1 + times % 2):
                    call()
                dist.barrier()
            assert (names(mode), mode.get_total_counts()) == ({name: 1 + times % 2}, 1 + times % 2), name
        with mode:
            for call in calls.values():
                call()
        assert names(mode) == dict.fromkeys(calls, 1)

    world.run(body)


@requirement(
    "TP-COMM-04",
    "A CommDebugMode counts collectives for each module within which they were called, and lists these modules' "
    "parameters with their placements.",
    source="torch.distributed.tensor.debug.CommDebugMode: comm_module_counts, generate_comm_debug_tracing_table",
)
@pytest.mark.world(2, keeps="results that nothing uses")
def test_counts_of_modules(world: World) -> None:
    """Use one mode for a model of nested layers and then for a smaller one; both are partly tensor parallel."""

    def body(rank: Rank) -> None:
        def layers() -> nn.Sequential:
            return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))

        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        deep = nn.Sequential(layers(), nn.Linear(4, 4), layers()).to(rank.device)
        for inner in "0", "2":
            parallelize_module(deep.get_submodule(inner), rank.mesh(), plan)
        flat = parallelize_module(layers().to(rank.device), rank.mesh(), plan)
        mode = CommDebugMode()
        for model, parts in (deep, ["Sequential.0", "Sequential.2"]), (flat, ["Sequential"]):
            with mode:
                assert (mode.get_parameter_info(), mode.get_sharding_info()) == ({}, {})
                model(torch.ones(2, 4, device=rank.device, requires_grad=True)).sum().backward()
            found = {
                name: tuple(sum(counts[way].values()) for way in ("forward", "backward"))
                for name, counts in mode.comm_module_counts.items()
            }
            reduced = {f"{part}.2": (1, 0) for part in parts}
            outer = {"Global": (len(parts), len(parts)), "Sequential": (len(parts), len(parts))}
            columns = {f"{part}.0": (0, 1) for part in parts}
            inner = dict.fromkeys(parts, (1, 1))
            assert found == {**reduced, **columns, **inner, **outer}
            named = [(f"Sequential.{name}", p) for name, p in model.named_parameters()]
            listed = {f"{of}.{name}": p for of, each in mode.get_parameter_info().items() for name, p in each.items()}
            assert {*listed} == {name for name, _ in named}
            placements = {name: p.placements for name, p in named if isinstance(p, DTensor)}
            assert mode.get_sharding_info() == placements
            table = mode.generate_comm_debug_tracing_table(noise_level=0)
            assert [line.strip() for line in table.splitlines() if "*" not in line and "PASS" not in line] == [
                "Global",
                *(f"Sequential.{name}".rstrip(".") for name, _ in model.named_modules()),
            ]

    world.run(body)


@requirement(
    "TP-COMM-01",
    "A CommDebugMode counts the collectives of its last use, and neither those before nor those after it.",
    source="torch.distributed.tensor.debug.CommDebugMode: get_comm_counts, get_total_counts",
)
@pytest.mark.world(2)
def test_several_calls(world: World) -> None:
    """Call the outermost module twice, and again after the mode."""

    def body(rank: Rank) -> None:
        plan: Any = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).to(rank.device)
        parallelize_module(model, rank.mesh(), plan)
        x = torch.ones(2, 4, device=rank.device)
        with CommDebugMode() as mode:
            outputs = [model(x) for _ in range(2)]
        outputs.append(model(x))
        assert mode.get_total_counts() == 2
        assert issued(mode) == {"all_reduce": 2}
        for output in outputs[1:]:
            assert_same(outputs[0].detach().cpu(), output.detach(), "output")

    world.run(body)
