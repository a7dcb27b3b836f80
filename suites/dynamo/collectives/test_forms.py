"""Compiled distributed code in the forms, sizes and options that differ from the plain ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import layer
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import dynamo, replicate, replicate_fsdp, tp_extension
from harness.stacks.collectives import functional, reduction, unwaited
from harness.stacks.limit import runs_with


@requirement(
    "DYN-FORM-01",
    "A compiled reduction has the operation that it is given, or is refused.",
    source="torch/distributed/_functional_collectives.py: REDUCE_OP_TO_STR",
)
@pytest.mark.needs(collective="all_reduce")
@pytest.mark.parametrize("op", ["AVG", "PRODUCT", "MAX"])
@pytest.mark.world(2, 3)
@pytest.mark.each_choice
def test_operation(world: World, op: str) -> None:
    """Reduce numbers whose sum, mean, product and maximum differ; what the backend refuses, compiled code refuses."""

    def body(rank: Rank, compiles: bool) -> list[float] | str:
        given = torch.full((2,), 2.0 * (rank.index + 1), device=rank.device)

        def reduce(x: torch.Tensor) -> None:
            dist.all_reduce(x, op=reduction(op))

        function = dynamo.compiled(reduce, fullgraph=False)[0] if compiles else reduce
        try:
            function(given)
        except (RuntimeError, ValueError):
            return "refused"
        return given.tolist()

    assert world.run(body, True) == world.run(body, False)


@requirement(
    "DYN-FORM-02",
    "A compiled all_reduce with an operation that has no functional form does not sum.",
    source="torch/_dynamo/variables/functions.py: CollectiveFunctionRewriteVariable",
)
@pytest.mark.needs(collective="all_reduce")
@pytest.mark.world(2)
def test_unknown_operation(world: World) -> None:
    """Scale before the sum; the result is right, or every rank raises."""

    def body(rank: Rank) -> list[float] | str:
        given = torch.full((2,), 1.0 + rank.index, device=rank.device)
        scaled = reduction("PREMUL_SUM")  # by two
        function, _ = dynamo.compiled(lambda x: dist.all_reduce(x, op=scaled), fullgraph=False)
        try:
            function(given)
        except Exception:
            return "refused"
        return given.tolist()

    assert world.run(body) in (["refused"] * 2, [[6.0, 6.0]] * 2)


@requirement(
    "DYN-FORM-03",
    "A compiled exchange of other lengths has the length that is received.",
    source="torch/distributed/_functional_collectives.py: all_to_all_single",
)
@pytest.mark.needs(collective="all_to_all_single")
@pytest.mark.world(2, 3)
def test_received_length(world: World) -> None:
    """Rank i sends j + 1 numbers to rank j, and uses the length of what it receives."""

    def body(rank: Rank) -> tuple[int, list[float]]:
        sent, received = [j + 1 for j in range(rank.size)], [rank.index + 1] * rank.size

        def exchange(x: torch.Tensor) -> tuple[int, torch.Tensor]:
            y = functional.all_to_all_single(x, received, sent, dist.group.WORLD)
            return y.shape[0], y + torch.ones(y.shape, device=x.device)

        function, _ = dynamo.compiled(exchange)
        length, result = function(torch.full((sum(sent),), 1.0 + rank.index, device=rank.device))
        return length, result.tolist()

    expected = [
        (world.size * (r + 1), [2.0 + i for i in range(world.size) for _ in range(r + 1)]) for r in range(world.size)
    ]
    assert_on_ranks(expected, world.run(body))


@requirement(
    "DYN-FORM-04",
    "A compiled gather of a list gives each tensor its own shape and dtype.",
    source="torch/distributed/_functional_collectives.py: all_gather_into_tensor_coalesced",
)
@pytest.mark.needs(collective="all_gather_into_tensor")
@pytest.mark.world(2)
def test_gathered_list(world: World) -> None:
    """Gather tensors of two shapes and two dtypes, and use their shapes."""

    def body(rank: Rank) -> list[Any]:
        def gather(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            both = functional.all_gather_into_tensor_coalesced([x, y], dist.group.WORLD)
            return [each + torch.ones(each.shape, dtype=each.dtype, device=each.device) for each in both]

        function, _ = dynamo.compiled(gather)
        x = torch.full((2, 3), float(rank.index), device=rank.device)
        y = torch.full((1,), rank.index, dtype=torch.int64, device=rank.device)
        return [(str(each.dtype), each.flatten().tolist()) for each in function(x, y)]

    expected = [("torch.float32", [1.0] * 6 + [2.0] * 6), ("torch.int64", [1, 2])]
    assert_on_ranks([expected] * 2, world.run(body))


@requirement(
    "DYN-FORM-05",
    "Compiled code asks the group that it is given by keyword for the rank and the size.",
    source="torch/_dynamo/variables/torch.py; torch.distributed: get_rank, get_world_size",
)
@pytest.mark.world(3)
def test_group_by_keyword(world: World) -> None:
    """Ask the default group, and one without rank 0, by position and by keyword."""

    def body(rank: Rank) -> list[float]:
        group = dist.new_group([1, 2])
        if rank.index == 0:
            return []

        def ask(x: torch.Tensor) -> torch.Tensor:
            numbers = [dist.get_rank(group=group), dist.get_world_size(group=group)]
            return x + torch.tensor([*numbers, dist.get_rank(group), dist.get_rank(), dist.get_world_size()])

        function, _ = dynamo.compiled(ask, fullgraph=False)
        result: list[float] = function(torch.zeros(5)).tolist()
        return result

    assert_on_ranks([[], [0, 2, 0, 1, 3], [1, 2, 1, 2, 3]], world.run(body))


@requirement(
    "DYN-FORM-06",
    "Compiled code asks each mesh that it is given, also if another of the same shape came before.",
    source="torch.distributed.device_mesh: DeviceMesh; torch.compile: guards",
)
@pytest.mark.world(4)
def test_another_mesh(world: World) -> None:
    """The same four ranks are by rows in one mesh, and by columns in the other."""

    def body(rank: Rank) -> list[float]:
        meshes = [
            DeviceMesh(rank.device.type, torch.tensor(order), mesh_dim_names=("a", "b"))
            for order in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
        ]
        function, _ = dynamo.compiled(lambda x, mesh: x + mesh.get_local_rank("a"), fullgraph=False)
        return [float(function(torch.zeros(()), mesh)) for mesh in (*meshes, meshes[0])]

    assert_on_ranks([[0, 0, 0], [0, 1, 0], [1, 0, 1], [1, 1, 1]], world.run(body))


@requirement(
    "DYN-FORM-07",
    "Compiled code reduces a partial DTensor by its own operation, also if another came before.",
    source="torch/_dynamo/guards.py: check_dtensor_spec; torch.distributed.tensor: Partial",
)
@pytest.mark.world(2)
def test_another_partial(world: World) -> None:
    """Make DTensors whole that are partial sums, maxima and sums again."""

    def body(rank: Rank) -> list[float]:
        mesh = rank.mesh(2)
        function, _ = dynamo.compiled(lambda d: d.redistribute(placements=[Replicate()]).to_local() + 0)
        local = torch.full((2,), 1.0 + rank.index, device=rank.device)
        return [
            float(function(DTensor.from_local(local, mesh, [Partial(op)], run_check=False))[0])
            for op in ("sum", "max", "sum")
        ]

    assert_on_ranks([[3, 2, 3]] * 2, world.run(body))


@requirement(
    "DYN-FORM-08",
    "A compiled function gives a DTensor the global shape of each call, with dynamic sizes, too.",
    source="torch.distributed.tensor: DTensor; torch.compile: dynamic",
)
@pytest.mark.world(2)
def test_dynamic_shape(world: World) -> None:
    """Return DTensors of seven lengths, of which four are uneven, from two functions."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        weight = DTensor.from_local(torch.ones(3, 2, device=rank.device), mesh, [Replicate()], run_check=False)
        for columns, call in ((3, lambda d: d * 2), (2, lambda d: d @ weight)):
            function, _ = dynamo.compiled(call, dynamic=True)
            for rows in (8, 12, 20, 7, 6, 1, 3):
                local = torch.ones((rows + 1 - rank.index) // 2, 3, device=rank.device)
                whole = {"shape": torch.Size([rows, 3]), "stride": (3, 1)}
                given = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **whole)
                right, result = call(given), function(given)
                assert result.shape == (rows, columns)
                assert_same(right.to_local(), result.to_local(), f"{rows} rows")

    world.run(body)


@requirement(
    "DYN-FORM-09",
    "Compiled from_local takes the global shape that it is given.",
    source="torch.distributed.tensor.DTensor: from_local",
)
@pytest.mark.world(2)
def test_given_shape(world: World) -> None:
    """Shards are of three rows and of two."""

    def body(rank: Rank) -> list[int]:
        mesh = rank.mesh(2)

        def make(x: torch.Tensor) -> Any:
            return DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=torch.Size([5, 2]), stride=(2, 1)) * 2

        function, _ = dynamo.compiled(make)
        return [*function(torch.ones(3 - rank.index, 2, device=rank.device)).shape]

    assert_on_ranks([[5, 2]] * 2, world.run(body))


@requirement(
    "DYN-FORM-10",
    "A gradient of other placements than a compiled function's DTensor output is redistributed.",
    source="torch.distributed.tensor.DTensor: __coerce_same_metadata_as_tangent__",
)
@pytest.mark.world(2)
def test_gradient_of_other_placements(world: World) -> None:
    """The output is sharded, and its gradient is replicated; each column has a weight of its own."""

    def body(rank: Rank) -> list[float]:
        mesh = rank.mesh(2)
        local = torch.ones(2, device=rank.device, requires_grad=True)
        function, _ = dynamo.compiled(lambda d: d * 3)
        output = function(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0], device=rank.device)
        output.backward(DTensor.from_local(weights, mesh, [Replicate()], run_check=False))
        assert local.grad is not None
        return local.grad.tolist()

    assert_on_ranks([[3, 6], [9, 12]], world.run(body))


@requirement(
    "DYN-FORM-11",
    "A compiled local_map gives gradients the placements that it is told.",
    source="torch.distributed.tensor.experimental.local_map: in_grad_placements",
)
@pytest.mark.world(2)
def test_local_map_gradients(world: World) -> None:
    """Each rank multiplies a replicated tensor by a number of its own, so its gradient is a partial sum."""

    def body(rank: Rank) -> list[float]:
        mesh = rank.mesh(2)
        factor = 1.0 + rank.index
        mapped = local_map(
            lambda x: x * factor,
            out_placements=[Shard(0)],
            in_placements=([Replicate()],),
            in_grad_placements=([Partial()],),
            device_mesh=mesh,
        )
        function, _ = dynamo.compiled(lambda d: mapped(d), fullgraph=False)
        given = DTensor.from_local(torch.ones(2, device=rank.device), mesh, [Replicate()], run_check=False)
        given.requires_grad_()
        function(given).to_local().sum().backward()
        assert isinstance(given.grad, DTensor)
        return given.grad.full_tensor().tolist()

    assert_on_ranks([[3, 3]] * 2, world.run(body))


@requirement(
    "DYN-FORM-12",
    "A compiled reduce-scatter of what the group cannot divide is refused.",
    source="torch/distributed/_functional_collectives.py: reduce_scatter_tensor",
)
@pytest.mark.needs(collective="reduce_scatter_tensor")
@pytest.mark.world(2)
def test_remainder(world: World) -> None:
    """Scatter three rows among two ranks."""

    def body(rank: Rank) -> str:
        def scatter(x: torch.Tensor) -> torch.Tensor:
            return functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0

        function, _ = dynamo.compiled(scatter, fullgraph=False)
        try:
            return f"{[*function(torch.ones(3, 2, device=rank.device)).shape]}"
        except Exception:
            return "refused"

    assert_on_ranks(["refused"] * 2, world.run(body))


@requirement(
    "DYN-FORM-13",
    "Compiled messages are matched by their tags, and are sent whether or not anything waits for them.",
    source="torch/distributed/_functional_collectives.py: isend_inplace, irecv_inplace",
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.parametrize("waits", [True, False], ids=["waited", "not-waited"])
@pytest.mark.world(2, timeout=15)
def test_tags(world: World, waits: bool) -> None:
    """Rank 0 sends two messages in a compiled function; rank 1 receives the second one first."""

    def body(rank: Rank) -> list[float]:
        if rank.index == 1:
            first, second = torch.zeros(2, device=rank.device), torch.zeros(2, device=rank.device)
            dist.recv(second, 0, tag=8)
            dist.recv(first, 0, tag=7)
            return [float(first[0]), float(second[0])]

        def send(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            works = [dist.isend(x, 1, tag=7), dist.isend(y, 1, tag=8)]
            if waits:
                for work in works:
                    work.wait()  # type: ignore[union-attr]
            return x + y

        with dynamo.compiled_messages():
            torch.compiler.reset()
            function = torch.compile(send, backend="aot_eager", fullgraph=True)
            x = torch.full((2,), 1.0, device=rank.device)
            result = float(function(x, x + 1)[0])
        return [result]

    assert_on_ranks([[3.0], [1.0, 2.0]], world.run(body))


@requirement(
    "DYN-FORM-14",
    "The backward of a compiled function waits for a gradient that is the pending result of a collective.",
    source="torch/distributed/_functional_collectives.py: AsyncCollectiveTensor",
)
@pytest.mark.needs(collective="all_reduce")
@pytest.mark.world(2)
def test_pending_gradient(world: World) -> None:
    """Rank 1 takes part in the sums late; the second gradient is a DTensor."""

    def body(rank: Rank) -> list[list[float]]:
        function, _ = dynamo.compiled(lambda x: x * 2)
        x = torch.ones(3, device=rank.device, requires_grad=True)
        output = function(x)
        if rank.index == 1:
            time.sleep(0.5)
        given = torch.full((3,), 1.0 + rank.index, device=rank.device)
        output.backward(functional.all_reduce(given, "sum", dist.group.WORLD))
        assert x.grad is not None
        found = [x.grad.tolist()]

        mesh = rank.mesh(2)
        local = torch.ones(3, device=rank.device, requires_grad=True)
        doubled = function(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
        if rank.index == 1:
            time.sleep(0.25)
        sums, before = DTensor.from_local(given, mesh, [Partial()], run_check=False), unwaited()
        pending = sums.redistribute(placements=[Replicate()], async_op=True)
        assert unwaited() == before + 1, "the backend has waited already, so that nothing is seen here"
        doubled.backward(pending)
        assert local.grad is not None
        return [*found, (local.grad + 0).tolist()]

    assert_on_ranks([[[6, 6, 6], [6, 6, 6]]] * 2, world.run(body))


class Scaled(nn.Module):
    """A layer whose output is multiplied by an attribute that is a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = layer(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        result: torch.Tensor = self.layer(x) * self.factor
        return result


@requirement(
    "DYN-FORM-15",
    "A compiled module that is on ranks uses the value that an attribute has at each call.",
    source="torch/_dynamo/guards.py; torch.distributed.fsdp.fully_shard; torch.distributed._composable.replicate",
)
@pytest.mark.parametrize("stack", ["replicate", "replicate_fsdp", "fully_shard", "FSDP"])
@pytest.mark.world(2)
def test_changed_attribute(world: World, stack: str) -> None:
    """Change a factor between two calls."""

    def body(rank: Rank) -> list[float]:
        model = Scaled()
        if stack == "replicate":
            replicate.apply(model, rank)
        elif stack == "replicate_fsdp":
            replicate_fsdp.apply(model, rank, groups=False)
        elif stack == "fully_shard":
            fully_shard(model.to(rank.device), mesh=rank.mesh())
        placed: Any = tp_extension.apply(model, rank, plan={}) if stack == "FSDP" else model
        function, _ = dynamo.compiled(placed, fullgraph=False)
        results = []
        for factor in (1.0, 3.0):
            model.factor = factor
            results.append(float(function(torch.ones(1, 2, device=rank.device)).sum()))
        return results

    assert_on_ranks([[4, 12]] * 2, world.run(body))


class Counting(nn.Module):
    """A layer whose forward sets attributes and uses them, and a layer that only its ``__dict__`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.state = layer(), 0, "new"
        self.__dict__["hidden"] = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[rows, 2] to float[rows, 2]."""
        self.calls += 1
        self.state = f"called {self.calls}"
        y = self.layer(x) * self.calls
        self.last = y.detach()
        return y + self.hidden(x) * self.hidden.weight.sum()


@requirement(
    "DYN-FORM-17",
    "A compiled module that is on ranks sets attributes in its forward and uses what only its __dict__ has, as "
    "uncompiled.",
    source="torch.compile: side effects; test_dynamo_distributed.py: test_fsdp_unspecialized_forced_getattr_inline",
)
@pytest.mark.world(2)
def test_attributes_set_in_forward(world: World) -> None:
    """Count calls, keep a text and a tensor; call three times on each stack."""

    def body(rank: Rank) -> list[Any]:
        found: list[Any] = []
        for stack in ("replicate", "replicate_fsdp", "fully_shard", "FSDP", "DDP"):
            model = Counting()
            model.__dict__["hidden"].to(rank.device)
            if stack == "replicate":
                replicate.apply(model, rank)
            elif stack == "replicate_fsdp":
                replicate_fsdp.apply(model, rank, groups=False)
            elif stack == "fully_shard":
                fully_shard(model.to(rank.device), mesh=rank.mesh())
            placed: Any = tp_extension.apply(model, rank, plan={}) if stack == "FSDP" else model
            placed = DistributedDataParallel(model.to(rank.device)) if stack == "DDP" else placed
            function, _ = dynamo.compiled(placed, fullgraph=False)
            for _ in range(3):
                result = float(function(torch.ones(1, 2, device=rank.device)).sum())
                found.append((stack, result, model.calls, model.state, float(model.last.sum())))
        return found

    stacks = ("replicate", "replicate_fsdp", "fully_shard", "FSDP", "DDP")
    right = [(stack, 4.0 * i + 16, i, f"called {i}", 4.0 * i) for stack in stacks for i in range(1, 4)]
    assert_on_ranks([right] * 2, world.run(body))


@requirement(
    "DYN-FORM-16",
    "DDP's reducer in Python averages gradients over its own group.",
    source="torch/nn/parallel/distributed.py: _register_accum_grad_hook; torch._dynamo.config.optimize_ddp",
)
@pytest.mark.world(3)
def test_python_reducer(world: World) -> None:
    """Train a layer on two of three ranks."""

    def body(rank: Rank) -> list[float]:
        group = dist.new_group([1, 2])
        if rank.index == 0:
            return []
        with dynamo.python_reducer():
            ddp = DistributedDataParallel(layer(rank.device), process_group=group)
            function, _ = dynamo.compiled(ddp, fullgraph=False)
            with dynamo.compiled_backward("aot_eager"):
                function(torch.full((1, 2), float(rank.index), device=rank.device)).sum().backward()
        gradient = ddp.module.weight.grad
        assert gradient is not None
        return gradient.flatten().tolist()

    assert_on_ranks([[], [1.5] * 4, [1.5] * 4], world.run(body))


FILLED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "floats": (torch.float32, {}),
    "told": (torch.int64, {"dtype": torch.int64}),
    "integers": (torch.int64, {}),
    "truths": (torch.bool, {}),
    "complex": (torch.complex64, {}),
}
"""The dtype of a number that ranks agree on, and more arguments of torch.full."""


@requirement(
    "DYN-FORM-1305",
    "In compiled code, torch.full with a tensor that ranks agreed on has the dtype of that tensor, as uncompiled.",
    source="torch.full: dtype, inferred from the dtype of fill_value; torch.compile",
)
@pytest.mark.parametrize("of", FILLED)
@pytest.mark.world(2)
def test_filled(world: World, of: str) -> None:
    """Fill a tensor with the sum or the conjunction of ranks' numbers."""
    dtype, options = FILLED[of]

    def fill(number: torch.Tensor) -> torch.Tensor:
        agreed = functional.all_gather_tensor(number, 0, dist.group.WORLD)
        return torch.full((2,), agreed.all() if dtype is torch.bool else agreed.sum(), **options)

    def body(rank: Rank) -> list[str]:
        number = torch.full((1,), rank.index + 1, dtype=dtype, device=rank.device)
        return [str(function(number)) for function in (fill, dynamo.compiled(fill, backend="eager")[0])]

    for right, found in world.run(body):
        assert found == right, f"{right} became {found}"


QUEUES: dict[str, Callable[[], deque[float]]] = {
    "unlimited": lambda: deque([1.0, 2.0]),
    "not full": lambda: deque([1.0, 2.0], maxlen=8),
    "full": lambda: deque([1.0, 2.0], maxlen=2),
}
"""Queues of numbers that a step keeps."""


def _added(queue: deque[float]) -> None:
    queue += [4.0]


APPENDED: list[Callable[[deque[float]], Any]] = [
    lambda queue: queue.append(4.0),
    lambda queue: queue.appendleft(4.0),
    lambda queue: queue.extend([4.0, 8.0]),
    *([] if runs_with("<2.13") else [_added]),  # before 2.13, += of deques can't be traced
]
"""How a number comes into a queue."""


@requirement(
    "DYN-FORM-1306",
    "Compiled code that puts numbers into a deque finds in it what uncompiled code does, also with a limited length.",
    source="torch.compile: side effects; collections.deque: maxlen",
)
@pytest.mark.parametrize("kind", QUEUES)
@pytest.mark.world(2)
def test_queues(world: World, kind: str) -> None:
    """Keep the last numbers in a deque, and multiply a sum over ranks by what it has."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for number, put in enumerate(APPENDED):

            def step(x: torch.Tensor, queue: deque[float], put: Any = put) -> list[torch.Tensor]:
                put(queue)
                total = functional.all_reduce(x, "sum", dist.group.WORLD)
                return [total * queue[0], total * queue[-1], total * len(queue)]

            outcomes = []
            for function in step, dynamo.compiled(step, backend="eager")[0]:
                queue = QUEUES[kind]()
                results = function(torch.ones(1, device=rank.device), queue)
                outcomes.append(([result.item() for result in results], list(queue), queue.maxlen))
            if outcomes[0] != outcomes[1]:
                wrong.append(f"{number}: {outcomes[0]} became {outcomes[1]}")
        return wrong

    assert_on_ranks([[]] * 2, world.run(body))
