"""DTensors of several kinds through one compiled function: when it is compiled again, and what it computes then."""

from __future__ import annotations

import gc
import inspect
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fixtures.tensors import numbers
from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

ROWS, COLUMNS, WHOLE, SUM = Shard(0), Shard(1), Replicate(), Partial()
FROM_LOCAL_KNOWS_GRADIENTS = "grad_placements" in inspect.signature(DTensor.from_local).parameters
"""Whether from_local has grad_placements, which it has not in PyTorch 2.11."""


def made(
    rank: Rank, mesh: Any, placement: Placement, *key: Any, rows: int = 2, dtype: torch.dtype = torch.float32
) -> Any:
    """Return a DTensor whose local tensors have that many rows and two columns, and differ by rank and key."""
    local = dyadic(rows, 2, key=(rank.index, *key), dtype=dtype).to(rank.device)
    return DTensor.from_local(local, mesh, [placement], run_check=False)


@requirement(
    "DYN-DT-04",
    "A function that was compiled for a DTensor with or without requires_grad gives the other kind its gradient too.",
    source="torch.compile: guards of DTensor; torch/_dynamo/variables/builder.py: wrap_tensor",
)
@requirement(
    "DYN-DT-05",
    "A function of DTensors is compiled again for another requires_grad, gradient mode or dtype, and only then.",
    source="torch.compile: guards of DTensor",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", ["plain", "trained"])
@pytest.mark.world(2, timeout=180)
@pytest.mark.each_choice
def test_gradients_in_turn(world: World, first: str, backend: str) -> None:
    """Call with and without requires_grad, without gradients, and with another dtype, and then again in that order."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        kinds = [(False, True, torch.float32), (True, True, torch.float32)]
        kinds = kinds[::-1] if first == "trained" else kinds
        kinds += [(True, False, torch.float32), (True, True, torch.float64)]

        def function(d: Any) -> Any:
            return d * d

        compiled, counter = dynamo.compiled(function, backend=backend)
        for number, (trained, enabled, dtype) in enumerate(kinds * 2):
            what = f"call {number}: requires_grad={trained}, gradients {enabled}, {dtype}"
            results = []
            for run in (function, compiled):
                given = made(rank, mesh, ROWS, number, dtype=dtype).requires_grad_(trained)
                with torch.set_grad_enabled(enabled):
                    result = run(given)
                assert isinstance(result, DTensor), what
                assert result.placements == (ROWS,), what
                assert result.dtype == dtype, what
                assert result.requires_grad == (trained and enabled), what
                if result.requires_grad:
                    result.to_local().sum().backward()
                    assert isinstance(given.grad, DTensor), what
                    assert given.grad.placements == (ROWS,), what
                    assert given.grad.dtype == dtype, what
                results.append((result.to_local().detach(), given.grad))
            (right, gradient), (observed, other) = results
            assert_same(right, observed, what)
            assert (gradient is None) == (other is None), what
            if gradient is not None:
                assert_same(gradient.to_local(), other.to_local(), f"gradient of {what}")
            assert counter.graphs == min(number + 1, len(kinds)), what

    world.run(body)


@requirement(
    "DYN-DT-06",
    "With dynamic shapes, a function is compiled at most twice for DTensors of any size.",
    source="torch.compile: dynamic; torch/_dynamo/guards.py: DTENSOR_SPEC_MATCH",
)
@pytest.mark.parametrize("placement", [ROWS, COLUMNS, WHOLE, SUM], ids=str)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, compiled code has other strides")
@pytest.mark.world(2)
def test_sizes(world: World, placement: Placement) -> None:
    """Call with five sizes and the first one again: dynamic from the first call on, or from the second by itself."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        for dynamic, most in ((True, 2), (None, 2), (False, 5)):
            compiled, counter = dynamo.compiled(lambda d: d + d, dynamic=dynamic)
            for number, rows in enumerate((4, 6, 10, 3, 12, 4)):
                given = made(rank, mesh, placement, number, rows=rows)
                result = compiled(given)
                assert result.shape == given.shape
                assert result.stride() == given.stride()
                assert result.placements == given.placements
                assert_same(given.to_local() * 2, result.to_local(), f"{rows} rows, dynamic={dynamic}")
            assert counter.graphs <= most, f"dynamic={dynamic}"

    world.run(body)


READINGS: dict[str, Callable[[Any], Any]] = {
    "size": lambda d: d * d.size(0),
    "shape": lambda d: d + d.shape[0],
    "number of elements": lambda d: d - d.numel(),
    "length": lambda d: d * len(d),
}
"""Functions that compute with a size that they read from a DTensor."""


@requirement(
    "DYN-DT-17",
    "Compiled code that computes with the size of a DTensor reads the size anew in each call, on every rank.",
    source="torch.compile: dynamic; torch.distributed.tensor.DTensor: its size is that of the whole tensor",
)
@pytest.mark.parametrize("rows", [(4, 6, 2, 4), (7, 6, 7)], ids=["everywhere", "elsewhere"])
@pytest.mark.world(2)
def test_sizes_that_are_read(world: World, rows: tuple[int, ...]) -> None:
    """Give DTensors in turn of which every rank's shard has another size, or only the first rank's."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        for name, function in READINGS.items():
            compiled, counter = dynamo.compiled(function)
            for number, count in enumerate(rows):
                rows_of_all = dyadic(count, 2, key=number, dtype=torch.float32).to(rank.device)
                given = distribute_tensor(rows_of_all, mesh, [ROWS], src_data_rank=None)
                right, result = function(given), compiled(given)
                assert_same(right.to_local(), result.to_local(), f"{name} of {count} rows")
            assert counter.graphs >= 1

    world.run(body)


def whole(d: Any) -> torch.Tensor:
    """Make a DTensor whole."""
    result: torch.Tensor = d.full_tensor()
    return result


def scattered(d: Any) -> Any:
    """Shard a DTensor by rows."""
    return d.redistribute(placements=[ROWS])


def itself(d: Any) -> Any:
    """Return a DTensor with its placements."""
    return d.view(d.shape)


@requirement(
    "DYN-DT-07",
    "Compiled code that the caches keep over torch.compiler.reset() is used only for DTensors of the same mesh, "
    "placements and dtype.",
    source="torch.compiler.reset; DTensorSpec._stable_hash; AOTAutogradCache",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.parametrize("function", [whole, scattered, itself], ids=lambda f: f.__name__)
@pytest.mark.world(2, timeout=180)
def test_after_reset(world: World, function: Callable[[Any], Any]) -> None:
    """Reset the compiler before each of the calls, whose local tensors have one shape; begin with empty caches."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        placements = [SUM, WHOLE, Partial("max"), Partial("min"), ROWS, COLUMNS]
        with dynamo.cached_as(f"{tag} of rank {rank.index}"):
            for number, placement in enumerate([*placements, *placements[::-1]]):
                given = made(rank, mesh, placement, number)
                right, result = function(given), dynamo.compiled(function, backend="inductor")[0](given)
                if isinstance(right, DTensor):
                    assert result.placements == right.placements
                    assert result.shape == right.shape
                    right, result = right.to_local(), result.to_local()
                assert_same(right + 0, result + 0, f"call {number}, {placement}")

    world.run(body)


@requirement(
    "DYN-DT-13",
    "Compiled code that the caches keep over torch.compiler.reset() is used only for DTensors of a mesh of the same "
    "ranks.",
    source="torch.compiler.reset; DTensorSpec._stable_hash; AOTAutogradCache",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(3, timeout=60)
def test_other_meshes_after_reset(world: World) -> None:
    """Each rank is in two of three meshes of two ranks, whose DTensors are made whole in turn and again."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        meshes = [DeviceMesh(rank.device.type, members) for members in ([0, 1], [1, 2], [0, 2])]
        with dynamo.cached_as(f"{tag} of rank {rank.index}"):
            for number, mesh in enumerate(meshes * 2):
                members = mesh.mesh.tolist()
                if rank.index not in members:
                    continue
                parts = [dyadic(2, 2, key=(i,), dtype=torch.float32) for i in members]
                result = dynamo.compiled(whole, backend="inductor")[0](made(rank, mesh, ROWS))
                assert_same(torch.cat(parts), result + 0, f"call {number}, rows of {members}")
                result = dynamo.compiled(scattered, backend="inductor")[0](made(rank, mesh, SUM))
                assert result.device_mesh == mesh
                right = sum(parts)[[members.index(rank.index)]]  # type: ignore[index]
                assert_same(right, result.to_local() + 0, f"call {number}, sum of {members}")

    world.run(body)


def converted(d: Any, e: Any, w: torch.Tensor) -> list[Any]:
    """Return a product with the local tensor of a DTensor."""
    return [d.to_local(grad_placements=[ROWS]) @ w]


def mixed(d: Any, e: Any, w: torch.Tensor) -> list[Any]:
    """Return products of local tensors, of DTensors, and of the results of functional collectives.

    They need no kernels, whose compilation takes seconds.
    """
    mesh = d.device_mesh
    return [
        d.to_local() @ w,
        e @ DTensor.from_local(w, mesh, [WHOLE], run_check=False),
        DTensor.from_local(w @ w, mesh, (ROWS,), run_check=False).redistribute(placements=[WHOLE]),
        d.redistribute(placements=[WHOLE]) @ e,
        e.full_tensor() @ w,
        functional.all_gather_tensor(w, 0, dist.group.WORLD) @ w,
        functional.reduce_scatter_tensor(w, "sum", 0, (mesh, 0)) @ w,
    ]


@requirement(
    "DYN-DT-286",
    "Compiled code that makes DTensors and local tensors of each other, or calls collectives, is found in the cache "
    "after torch.compiler.reset().",
    source="AOTAutogradCache; torch.compiler.reset; torch.distributed.tensor.DTensor: to_local, from_local, "
    "redistribute, full_tensor; pytorch/pytorch#167349",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, code with meshes is not saved")
@pytest.mark.world(2, timeout=120)
def test_saved_in_caches(world: World) -> None:
    """Compile two functions twice, one of them with its backward; begin with an empty cache for each rank."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        with dynamo.cached_as(f"{tag} of rank {rank.index}"):
            for function, trained in ((mixed, False), (converted, True)):
                d, e = (made(rank, mesh, placement).requires_grad_(trained) for placement in (ROWS, WHOLE))
                w = numbers(2, 2).to(rank.device)
                rights = function(d, e, w)
                for call, wanted in enumerate(({"miss": 1, "saved": 1}, {"hit": 1})):
                    before = dynamo.cache_counts()
                    results = dynamo.compiled(function, backend="inductor")[0](d, e, w)
                    if trained:
                        parts = [y.to_local() if isinstance(y, DTensor) else y for y in results]
                        torch.stack([y.sum() for y in parts]).sum().backward()
                    after = dynamo.cache_counts()
                    counts = {what: n - before[what] for what, n in after.items() if n > before[what]}
                    assert counts == wanted, f"compilation {call}, {function.__name__}"
                    for number, (one, other) in enumerate(zip(rights, results, strict=True)):
                        right, result = (y.full_tensor() if isinstance(y, DTensor) else y + 0 for y in (one, other))
                        what = f"compilation {call}, {function.__name__}, tensor {number}"
                        assert_same(right.detach(), result.detach(), what)

    world.run(body)


def cut(d: Any) -> Any:
    """Cut each rank's part out of a whole tensor."""
    return d.redistribute(placements=[ROWS])


@requirement(
    "DYN-DT-09",
    "Each rank computes its own part of a DTensor with compiled code, also if another rank put its code into the "
    "caches before.",
    source="AOTAutogradCache; torch._inductor.config: fx_graph_cache",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.parametrize("function", [itself, cut], ids=lambda f: f.__name__)
@pytest.mark.world(2, timeout=180)
def test_shared_caches(world: World, function: Callable[[Any], Any]) -> None:
    """One rank compiles code that depends on the rank or that does not, and the other one compiles it afterwards."""
    tag = uuid.uuid4().hex

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        for first in range(2):
            local = numbers(2, 2).to(rank.device) + (10 * rank.index if function is itself else 0)
            given = DTensor.from_local(local, mesh, [ROWS if function is itself else WHOLE], run_check=False)
            with dynamo.cached_as(f"{tag} {first}"):
                if rank.index != first:
                    dist.barrier()
                result = dynamo.compiled(function, backend="inductor")[0](given).to_local() + 0
                if rank.index == first:
                    dist.barrier()
            assert_same(function(given).to_local(), result, f"rank {first} was first")

    world.run(body)


GRADIENTS: list[tuple[Placement, Placement]] = [
    *((p, q) for p in (WHOLE, SUM) for q in (WHOLE, SUM)),
    *((p, p) for p in (ROWS, COLUMNS)),
]
"""Placements of a DTensor and those that its gradient may be given: the shapes of local tensors stay the same."""


@requirement(
    "DYN-DT-08",
    "In compiled code, from_local and to_local give gradients the placements in grad_placements.",
    source="torch.distributed.tensor.DTensor: from_local, to_local",
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.world(2)
def test_placements_of_gradients(world: World, backend: str) -> None:
    """Compare the gradient of a local tensor with uncompiled code, for each pair and without grad_placements."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        weights = dyadic(2, 2, key=("weights", rank.index), dtype=torch.float32).to(rank.device)

        def taken(x: torch.Tensor, of: Placement, wanted: Any) -> torch.Tensor:
            return (DTensor.from_local(x, mesh, [of], run_check=False) * 2).to_local(grad_placements=wanted)

        def given(x: torch.Tensor, of: Placement, wanted: Any) -> torch.Tensor:
            return DTensor.from_local(x, mesh, [of], run_check=False, grad_placements=wanted).to_local()

        for function in (taken, given) if FROM_LOCAL_KNOWS_GRADIENTS else (taken,):
            for of, wanted in [*GRADIENTS, (WHOLE, None), (SUM, None), (ROWS, None)]:
                compiled, counter = dynamo.compiled(function, backend=backend)
                gradients = []
                for run in (function, compiled):
                    x = dyadic(2, 2, key=rank.index, dtype=torch.float32).to(rank.device).requires_grad_()
                    (run(x, of, wanted and [wanted]) * weights).sum().backward()
                    gradients.append(x.grad)
                right, gradient = gradients
                assert right is not None
                assert gradient is not None
                assert_same(right, gradient, f"gradient of {of}, as {wanted}: {function.__name__}")
                assert counter.graphs == 1

    world.run(body)


@dataclass
class Held:
    """An object with a DTensor."""

    d: Any


GIVEN: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "argument": ("aot_eager", lambda d: d * 2, lambda d: d),
    "list": ("eager", lambda given: given[0] * 2, lambda d: [d]),
    "dictionary": ("eager", lambda given: given["d"] * 2, lambda d: {"d": d}),
    "object": ("eager", lambda given: given.d * 2, Held),
    "redistributed": ("aot_eager", lambda d: d.redistribute(placements=[WHOLE]) * 2, lambda d: d),
}
"""For each way to give a DTensor: a backend, a function, and a function that makes its argument of the DTensor."""


@requirement(
    "DYN-DT-10",
    "Compiled code keeps neither the DTensors that it was given nor their local tensors, gradients or results alive.",
    source="torch.compile; torch/_dynamo/guards.py: weak references; torch/_dynamo/variables/builder.py: wrap_tensor",
)
@pytest.mark.world(2)
def test_inputs_are_freed(world: World) -> None:
    """Compile for DTensors of two placements and sizes, one of them with gradients, and call again with each."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)

        def called(compiled: Any, wrap: Callable[[Any], Any], *kind: Any) -> list[Any]:
            placement, rows, trained = kind
            given = made(rank, mesh, placement, rows=rows).requires_grad_(trained)
            result = compiled(wrap(given))
            kept = [given, given.to_local(), result, result.to_local()]
            if trained:
                result.to_local().sum().backward()
                kept += [given.grad, given.grad.to_local()]
            return [weakref.ref(each) for each in kept]

        kinds = [(ROWS, 2, False), (COLUMNS, 4, True)]
        for how, (backend, function, wrap) in GIVEN.items():
            compiled, counter = dynamo.compiled(function, backend=backend)
            references = [called(compiled, wrap, *kind) for kind in kinds * 2]
            assert counter.graphs > 1
            gc.collect()
            alive = [[i for i, each in enumerate(tensors) if each() is not None] for tensors in references]
            assert alive == [[]] * len(references), f"{how}: what is alive of each call"

    world.run(body)
