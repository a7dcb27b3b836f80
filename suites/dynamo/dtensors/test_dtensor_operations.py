"""DTensors in compiled code: operations of dynamic sizes, the ways to give arguments, strides, and parallel losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with

SOURCE = "torch/distributed/device_mesh.py: _register_distributed_opaque_types"
ROWS, COLUMNS, WHOLE, SUM = Shard(0), Shard(1), Replicate(), Partial()


def made(rank: Rank, mesh: Any, placement: Placement, *key: Any, rows: int = 4, columns: int = 4) -> Any:
    """Return a DTensor whose local tensors have that many rows and columns, and differ by rank and key."""
    local = dyadic(rows, columns, key=(rank.index, *key), dtype=torch.float32).to(rank.device)
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def pieces(result: Any) -> list[Any]:
    """Return the tensors of a result."""
    return [result] if isinstance(result, torch.Tensor) else [y for each in result for y in pieces(each)]


def assert_alike(right: Any, found: Any, what: str) -> None:
    """Compare results: class, placements, shape, strides and values."""
    rights, others = pieces(right), pieces(found)
    assert len(rights) == len(others), what
    for number, (one, other) in enumerate(zip(rights, others, strict=True)):
        where = f"{what}: tensor {number}"
        assert isinstance(one, DTensor) == isinstance(other, DTensor), where
        assert one.shape == other.shape, where
        assert one.requires_grad == other.requires_grad, where
        if isinstance(one, DTensor):
            assert one.placements == other.placements, f"{where}: {one.placements} and {other.placements}"
            assert one.stride() == other.stride(), where
            one, other = one.to_local(), other.to_local()
        assert_same((one + 0).detach(), (other + 0).detach(), where)


Operation = Callable[[Any, Any, int], Any]
CUTS: dict[str, Operation] = {
    "split": lambda d, e, n: [y + 1 for y in torch.split(d, n)],
    "tensor_split": lambda d, e, n: [y + 1 for y in torch.tensor_split(d, 2)],
    "slice": lambda d, e, n: d[1:n] + 1,
    "cat": lambda d, e, n: torch.cat([d, e * n, d]),
    "embedding": lambda d, e, n: nn.functional.embedding((d > 0).long(), e) * n,
    "by its placements": lambda d, e, n: (d * 2) + (1 if (d * 2).placements[0].is_shard() else 5),
    "by its mesh and size": lambda d, e, n: (d * 2) + (d * 2).device_mesh.size() * (d + e).shape[0],
}
"""Functions of two DTensors of one shape and a whole number, in which no input is returned as it is."""
PENDING: dict[str, Operation] = {
    "exponential": lambda d, e, n: torch.exp(d),
    "sigmoid of a relu": lambda d, e, n: torch.sigmoid(torch.relu(d)),
    "larger number": lambda d, e, n: d + n,
    "maximum": lambda d, e, n: torch.maximum(d, e),
    "negative": lambda d, e, n: -d,
}
"""Functions of DTensors with pending reductions, some of which do not change what is pending."""


def compare_each(
    rank: Rank, operations: dict[str, Operation], placements: Sequence[Placement], sizes: Sequence[int], **options: Any
) -> int:
    """Do operations for DTensors of each placement in one function, compiled and not. Return how many graphs it has."""
    mesh = rank.mesh(2)

    def everything(given: list[tuple[Any, Any]], n: int) -> list[dict[str, Any]]:
        return [{name: operation(d, e, n) for name, operation in operations.items()} for d, e in given]

    compiled, counter = dynamo.compiled(everything, **options)
    for call, rows in enumerate(sizes):
        given = [
            (made(rank, mesh, p, k, 0, call, rows=rows), made(rank, mesh, p, k, 1, call, rows=rows))
            for k, p in enumerate(placements)
        ]
        right, found = everything(given, call + 2), compiled(given, call + 2)
        for placement, one, other in zip(placements, right, found, strict=True):
            for name, result in one.items():
                assert_alike(result, other[name], f"{name}, {placement}, {rows} rows")
    return counter.graphs


@requirement(
    "DYN-DT-14",
    "Compiled code splits, slices, joins or looks up DTensors of dynamic sizes as uncompiled code does, even if it "
    "reads attributes of results.",
    source="torch.compile: dynamic; torch.distributed.tensor: sharding of operators; test_dtensor_compile.py",
)
@requirement(
    "DYN-DT-15",
    "Compiled operations on DTensors with pending reductions have the placements and values of uncompiled ones.",
    source="torch.distributed.tensor: Partial; test_monotonic_compile.py",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, some compiled operations on DTensors are wrong")
@pytest.mark.world(2)
def test_operations(world: World) -> None:
    """Split, slice, join and look up sharded rows of two sizes; apply functions to sums, maxima and averages."""

    def body(rank: Rank) -> None:
        assert compare_each(rank, CUTS, (ROWS,), (6, 10), dynamic=True) <= 2
        kinds = [Partial(kind) for kind in ("sum", "max", "avg")]
        assert compare_each(rank, PENDING, kinds, (4,), dynamic=False) == 1
        largest = made(rank, rank.mesh(2), Partial("max"))
        for name in ("exponential", "sigmoid of a relu", "maximum", "negative"):
            kind = "min" if name == "negative" else "max"
            assert PENDING[name](largest, largest, 2).placements == (Partial(kind),), name

    world.run(body)


Form = Callable[[torch.Tensor, Any], Any]
FORMS: dict[str, Form] = {
    "from_local by keyword": lambda x, m: DTensor.from_local(x, device_mesh=m, placements=[ROWS], run_check=False),
    "from_local by a tuple": lambda x, m: DTensor.from_local(x, m, (COLUMNS,), run_check=False),
    "from_local without a check": lambda x, m: DTensor.from_local(x, m, [ROWS], run_check=False),
    "redistribute by position": lambda x, m: DTensor.from_local(x, m, [ROWS]).redistribute(m, [WHOLE]),
    "redistribute by keyword": lambda x, m: DTensor.from_local(x, m, [ROWS]).redistribute(
        device_mesh=m, placements=(COLUMNS,)
    ),
    "to_local by a tuple": lambda x, m: DTensor.from_local(x, m, [WHOLE]).to_local(grad_placements=(SUM,)),
    "full_tensor by a list": lambda x, m: DTensor.from_local(x, m, [ROWS]).full_tensor(grad_placements=[SUM]),
    "by its own placements": lambda x, m: _again(DTensor.from_local(x, m, [COLUMNS]) * 2, m),
    "symbolic shape": lambda x, m: DTensor.from_local(
        x, m, [ROWS], run_check=False, shape=torch.Size((2 * x.shape[0], x.shape[1])), stride=x.stride()
    ),
    "symbolic shape, constant stride": lambda x, m: DTensor.from_local(
        x, m, [ROWS], run_check=False, shape=torch.Size((2 * x.shape[0], x.shape[1])), stride=(4, 1)
    ),
    "uneven symbolic shape": lambda x, m: DTensor.from_local(
        x[dist.get_rank() :],
        m,
        [ROWS],
        run_check=False,
        shape=torch.Size((2 * x.shape[0] - 1, x.shape[1])),
        stride=(x.shape[1], 1),
    ),
    "symbolic shape of columns": lambda x, m: DTensor.from_local(
        x, m, [COLUMNS], run_check=False, shape=torch.Size((x.shape[0], 8)), stride=(2 * x.stride(0), 1)
    ),
}
"""Functions of a local tensor of any number of rows and four columns, and a mesh."""


def _again(d: Any, mesh: Any) -> Any:
    local = d.to_local(grad_placements=d.placements) + 2
    return DTensor.from_local(local, d.device_mesh, d.placements, run_check=False)


@requirement(
    "DYN-CALL-04",
    "In compiled code, methods of DTensors take arguments by position or keyword, placements as a list or tuple, and "
    "dynamic or constant shapes.",
    source="torch.distributed.tensor.DTensor: from_local, redistribute, to_local, full_tensor; pytorch/pytorch#158381",
)
@requirement(
    "DYN-MESH-08",
    "A function that reads a mesh, but not its groups, is compiled once for all equal meshes.",
    source=f"{SOURCE}: guard_fn; DeviceMesh.__eq__",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, compiled code takes some meshes and placements not")
@pytest.mark.world(2)
def test_arguments(world: World) -> None:
    """Use each form with three sizes and two equal meshes; compare results and gradients with uncompiled code."""

    def body(rank: Rank) -> None:
        meshes = [DeviceMesh(rank.device.type, torch.arange(2)) for _ in range(2)]

        def every_form(xs: list[torch.Tensor], mesh: Any) -> list[Any]:
            return [form(x, mesh) for form, x in zip(FORMS.values(), xs, strict=True)]

        compiled, counter = dynamo.compiled(every_form, dynamic=True)
        for call, rows in enumerate((3, 5, 6)):
            found = []
            for run in (every_form, compiled):
                xs = [
                    dyadic(rows, 4, key=(name, rank.index, call), dtype=torch.float32).to(rank.device).requires_grad_()
                    for name in FORMS
                ]
                results = run(xs, meshes[call % 2])
                parts = [y.to_local() if isinstance(y, DTensor) else y for y in results]
                weights = [dyadic(*y.shape, key=("w", rank.index), dtype=torch.float32).to(rank.device) for y in parts]
                torch.stack([(y * w).sum() for y, w in zip(parts, weights, strict=True)]).sum().backward()
                found.append((results, [x.grad for x in xs]))
            (rights, gradients), (others, grads) = found
            for name, right, other, gradient, grad in zip(FORMS, rights, others, gradients, grads, strict=True):
                assert_alike(right, other, f"{name}, call {call}")
                assert gradient is not None
                assert grad is not None
                assert_same(gradient + 0, grad + 0, f"gradient, {name}, call {call}")
            assert counter.graphs == 1, f"call {call}"

    world.run(body)


class Placements(list[Any]):
    """A list of a class of its own."""


@requirement(
    "DYN-CALL-3666",
    "In compiled code, methods of DTensors take placements in any sequence, made inside or outside, without a graph "
    "break.",
    source="torch.distributed.tensor.DTensor: placements, grad_placements; pytorch/pytorch#168149",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, compiled code takes some meshes and placements not")
@pytest.mark.parametrize("kind", [list, tuple, Placements], ids=["list", "tuple", "own"])
@pytest.mark.world(2)
def test_sequences(world: World, kind: Callable[[Any], Any]) -> None:
    """Give placements to each method that takes them, by position or keyword, and compare results and gradients."""

    def body(rank: Rank) -> None:
        mesh, rows, whole, pending = rank.mesh(2), kind([ROWS]), kind([WHOLE]), kind([SUM])

        def inside(x: torch.Tensor) -> Any:
            y = DTensor.from_local(x, mesh, kind([ROWS]), run_check=False).redistribute(mesh, kind([WHOLE]))
            return (y * 2).to_local(grad_placements=kind([SUM]))

        def outside(x: torch.Tensor) -> Any:
            y = DTensor.from_local(x, device_mesh=mesh, placements=rows, run_check=False)
            return (y.redistribute(placements=whole) * 3).to_local(grad_placements=pending)

        def whole_of(x: torch.Tensor) -> Any:
            return (DTensor.from_local(x, mesh, rows, run_check=False) * 5).full_tensor(grad_placements=kind([SUM]))

        for code in inside, outside, whole_of:
            compiled, counter = dynamo.compiled(code)
            found = []
            for run in code, compiled:
                x = dyadic(3, 4, key=rank.index, dtype=torch.float32).to(rank.device).requires_grad_()
                result = run(x)
                (result * dyadic(6, 4, key=("w", rank.index), dtype=torch.float32).to(rank.device)).sum().backward()
                assert x.grad is not None
                found.append((result.detach() + 0, x.grad + 0))
            for right, other in zip(*found, strict=True):
                assert_same(right, other, code.__name__)
            assert counter.graphs == 1, code.__name__

    world.run(body)


def _local_and_back(y: Any) -> Any:
    return DTensor.from_local(
        y.to_local(grad_placements=y.placements) + 2, y.device_mesh, placements=y.placements, run_check=False
    )


@requirement(
    "DYN-CALL-64",
    "Forward hooks of a compiled module that convert DTensors to local tensors, or back, work as uncompiled.",
    source="torch.nn.Module: register_forward_pre_hook, register_forward_hook; torch.distributed.tensor.DTensor: "
    "to_local, from_local; test_dtensor_compile.py: test_dynamo_to_local_kwargs_forward_hook",
)
@pytest.mark.world(2)
def test_in_hooks(world: World) -> None:
    """Convert inputs and outputs of a layer in hooks before and after it, for each placement of its weight."""
    cases: list[tuple[Placement, Placement]] = [(WHOLE, WHOLE), (ROWS, WHOLE), (WHOLE, COLUMNS)]

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)

        def trained(given: Placement, placement: Placement, compiles: bool) -> list[Any]:
            layer = nn.Linear(4, 4)
            for name in ("weight", "bias"):
                whole = dyadic(*getattr(layer, name).shape, key=name, dtype=torch.float32).to(rank.device)
                dim = ROWS if placement is COLUMNS else WHOLE
                setattr(layer, name, nn.Parameter(distribute_tensor(whole, mesh, [dim], src_data_rank=None)))
            layer.register_forward_pre_hook(lambda _, args: tuple(_local_and_back(x) for x in args))
            layer.register_forward_hook(lambda _, args, y: _local_and_back(y) * args[0].shape[0])
            function, counter = dynamo.compiled(layer)
            results = []
            for step in range(2):
                x = made(rank, mesh, given, step).requires_grad_()
                y = function(x) if compiles else layer(x)
                y.to_local().square().sum().backward()
                results += [y, x.grad, *(p.grad for p in layer.parameters())]
            assert counter.graphs == int(compiles)
            return results

        for case in cases:
            assert_alike(trained(*case, compiles=False), trained(*case, compiles=True), f"{case}")

    world.run(body)


STRIDED: dict[str, tuple[Placement, int, Callable[[Any], Any]]] = {
    "permuted rows": (ROWS, 4, lambda d: (d * 2).t()),
    "permuted columns": (COLUMNS, 4, lambda d: (d * 2).t()),
    "every second column": (ROWS, 4, lambda d: (d * 3)[:, ::2]),
    "three dimensions": (ROWS, 4, lambda d: (d * 2).view(-1, 2, 2).permute(1, 2, 0)),
    "the input itself": (ROWS, 4, lambda d: d),
    "scattered columns": (SUM, 4, lambda d: d.redistribute(placements=[COLUMNS])),
    "uneven columns": (SUM, 5, lambda d: d.redistribute(placements=[COLUMNS])),
    "exchanged": (ROWS, 4, lambda d: (d.redistribute(placements=[COLUMNS]) * 2).t()),
    "two": (COLUMNS, 4, lambda d: ((d * 2).t(), d + 1)),
}
"""The placement and the columns of a DTensor, and a function that returns it with other strides.

With healthy PyTorch, compiled code can't return a view of a DTensor that it is given.
"""


@requirement(
    "DYN-DT-16",
    "Compiled code returns DTensors with the strides of uncompiled code, and takes gradients of any strides for them.",
    source="torch.compile; torch/_functorch/_aot_autograd: tangents; torch.distributed.tensor.DTensor",
)
@pytest.mark.world(2)
def test_strided_results(world: World) -> None:
    """Return transposed, sliced and scattered DTensors of even and uneven sizes; give gradients of both layouts."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)

        def every_way(given: dict[str, Any]) -> dict[str, Any]:
            return {name: function(given[name]) for name, (_, _, function) in STRIDED.items()}

        def used(run: Callable[[dict[str, Any]], dict[str, Any]], how: str) -> tuple[dict[str, Any], dict[str, Any]]:
            given = {
                name: made(rank, mesh, placement, name, columns=columns).requires_grad_()
                for name, (placement, columns, _) in STRIDED.items()
            }
            results = run(given)
            ends, gradients = [], []
            for number, y in enumerate(pieces(list(results.values()))):
                local = y.to_local()
                weight = dyadic(*local.shape, key=(number, rank.index), dtype=torch.float32).to(rank.device)
                if how == "strided" and weight.dim() == 2:
                    weight = weight.t().contiguous().t()
                if how != "local":
                    shape = {"shape": y.shape, "stride": y.stride()}
                    weight = DTensor.from_local(weight, mesh, y.placements, run_check=False, **shape)
                ends.append(local if how == "local" else y)
                gradients.append(weight)
            torch.autograd.backward(ends, gradients)
            return results, {name: d.grad for name, d in given.items()}

        compiled, counter = dynamo.compiled(every_way)
        for how in ("local", "contiguous", "strided"):
            rights, others = used(every_way, how), used(compiled, how)
            for name in STRIDED:
                assert_alike(rights[0][name], others[0][name], f"{name}, {how} gradient")
                assert_alike(rights[1][name], others[1][name], f"gradient of {name}, {how} gradient")
        assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-TP-05",
    "Compiled code within loss_parallel has the losses and gradients of uncompiled code, also with dynamic sizes.",
    source="torch.distributed.tensor.parallel.loss_parallel; torch.compile: dynamic",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, compiled losses of sharded classes are wrong")
@pytest.mark.world(2)
def test_losses(world: World) -> None:
    """Compute a cross entropy that ignores a class, and a log_softmax, of sharded logits in two sizes."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        losses: dict[str, Callable[[Any, torch.Tensor], Any]] = {
            "sum": lambda d, t: nn.functional.cross_entropy(d, t, ignore_index=2, reduction="sum"),
            "log_softmax": lambda d, t: nn.functional.log_softmax(d, -1, dtype=torch.float32),
        }

        def every_loss(given: list[Any], targets: torch.Tensor) -> list[Any]:
            return [loss(d, targets) for loss, d in zip(losses.values(), given, strict=True)]

        compiled, counter = dynamo.compiled(every_loss, dynamic=True)
        for call, rows in enumerate((5, 7)):
            found = []
            for run in (every_loss, compiled):
                given = [made(rank, mesh, COLUMNS, call, rows=rows, columns=3).requires_grad_() for _ in losses]
                targets = (torch.arange(rows, device=rank.device) + call) % 6
                with loss_parallel():
                    results = run(given, targets)
                    *parts, last = results
                    torch.autograd.backward([*(y.to_local().sum() for y in parts), last.to_local().square().sum()])
                found.append((results, [d.grad for d in given]))
            for name, *four in zip(losses, *found[0], *found[1], strict=True):
                assert_alike(four[0], four[2], f"{name}, {rows} rows")
                assert_alike(four[1], four[3], f"gradient, {name}, {rows} rows")
        assert counter.graphs <= 2

    world.run(body)


@requirement(
    "DYN-TP-06",
    "Compiled autograd captures the backward of a tensor-parallel module with the gradients of uncompiled code.",
    source="torch._dynamo.compiled_autograd; torch.distributed.tensor.parallel",
)
@pytest.mark.world(2)
def test_captured_backward(world: World) -> None:
    """Train columns and rows of a sequence for two steps without clearing gradients."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        plan: dict[str, Any] = {
            "": PrepareModuleInput(input_layouts=ROWS, desired_input_layouts=WHOLE),
            "0": ColwiseParallel(),
            "2": RowwiseParallel(output_layouts=ROWS),
        }

        def model() -> nn.Module:
            layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
            for key, parameter in enumerate(layers.parameters()):
                with torch.no_grad():
                    parameter.copy_(dyadic(*parameter.shape, key=key, dtype=torch.float32, span=2))
            return parallelize_module(layers.to(rank.device), mesh, plan)

        plain, other = model(), model()
        function, counter = dynamo.compiled(other)
        for step in range(2):
            x = dyadic(4, 4, key=(step, rank.index), dtype=torch.float32).to(rank.device)
            right, found = plain(x), function(x)
            assert_same(right.detach() + 0, found.detach() + 0, f"output of step {step}")
            (right * x).sum().backward()
            with dynamo.compiled_backward("aot_eager"):
                (found * x).sum().backward()
            for one, two in zip(plain.parameters(), other.parameters(), strict=True):
                assert_alike(one.grad, two.grad, f"gradient of step {step}")
        assert counter.graphs == 1

    world.run(body)


def _turned(d: Any) -> list[Any]:
    return [d + 1, d.t() + 1, (d + 1).t(), d.unsqueeze(0) * 2, d.sum(0), (d.t() * 2).contiguous()]


@requirement(
    "DYN-DT-2500",
    "DTensors that code compiled for all sizes returns have the strides of uncompiled results, and their values.",
    source="torch.compile: dynamic; torch.distributed.tensor.DTensor: stride",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, such DTensors have their sizes for strides")
@pytest.mark.world(2)
def test_strides_of_all_sizes(world: World) -> None:
    """Turn and combine matrices of two shapes, by rows and by columns."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        compiled, counter = dynamo.compiled(_turned, dynamic=True)
        for shape in (4, 6), (8, 10):
            for placement in ROWS, COLUMNS:
                whole = torch.arange(float(shape[0] * shape[1]), device=rank.device).view(shape)
                d = distribute_tensor(whole, mesh, [placement])
                assert_alike(_turned(d), compiled(d), f"{shape}, {placement}")
        assert counter.graphs == 2

    world.run(body)
