"""DTensors that compiled code changes in place, and gradients for DTensors that it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with

ROWS, COLUMNS, WHOLE, SUM = Shard(0), Shard(1), Replicate(), Partial()


class Counts(nn.Module):
    """A module with a buffer, a parameter and a list, which its forward changes."""

    def __init__(self, buffer: DTensor, parameter: DTensor, listed: DTensor) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)
        self.parameter, self.listed = nn.Parameter(parameter), [listed]

    def forward(self, x: Any) -> Any:
        self.buffer += x
        self.listed[0].mul_(2)
        with torch.no_grad():
            self.parameter.sub_(x * 2)
        return x + 1


def changed(x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Change all arguments but the first one, each by another operation."""
    a.mul_(2)
    b.add_(x)
    c.copy_(a)
    d.zero_()
    a.add_(b, alpha=2)
    return x + a


def read_and_changed(w: Any, v: Any, a: Any) -> Any:
    """Change the last argument between uses of the others, one of which is multiplied by it."""
    y = w.sin() * v
    a.add_(2)
    return y + w * a, v * 2


@requirement(
    "DYN-DT-71",
    "Compiled code that changes a DTensor in place has the gradients of uncompiled code for the other DTensors.",
    source="torch.compile; torch/_functorch/_aot_autograd: mutations of inputs; torch.distributed.tensor.DTensor",
)
@requirement(
    "DYN-DT-11",
    "Operations in place on DTensors that compiled code is given or reads change these as uncompiled code does.",
    source="torch.compile; torch/_functorch/_aot_autograd: mutations of inputs; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("placement", [ROWS, COLUMNS, WHOLE], ids=str)
@pytest.mark.world(2)
def test_changed_in_place(world: World, placement: Placement) -> None:
    """Change arguments, and a module's buffer, parameter and list; what refers to their local tensors sees it."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)

        def made(*key: Any) -> DTensor:
            local = dyadic(2, 2, key=(rank.index, *key), dtype=torch.float32).to(rank.device)
            return DTensor.from_local(local, mesh, [placement], run_check=False)

        def run(compiles: bool) -> list[torch.Tensor]:
            tensors = [made(number) for number in range(8)]
            module = Counts(tensors[5], tensors[6], tensors[7])
            function, forward = changed, module
            if compiles:
                function, first = dynamo.compiled(changed)
                forward, second = dynamo.compiled(module)
            references = [tensor.to_local() for tensor in tensors]
            results = []
            for _ in range(2):
                results += [function(*tensors[:5]), forward(tensors[0])]
            assert not compiles or (first.graphs, second.graphs) == (1, 1)
            assert all(result.placements == (placement,) for result in results)
            held = [*tensors[:5], module.buffer, module.parameter, module.listed[0], *results]
            return [*(each.detach().to_local() for each in held), *references]  # type: ignore[union-attr]

        for number, (right, found) in enumerate(zip(run(compiles=False), run(compiles=True), strict=True)):
            assert_same(right, found, f"tensor {number}")

        def gradients(compiles: bool) -> list[torch.Tensor]:
            w, v, a = made("w").requires_grad_(), made("v").requires_grad_(), made("a")
            function = dynamo.compiled(read_and_changed)[0] if compiles else read_and_changed
            for _ in range(2):
                y, z = function(w, v, a)
                (y.to_local() * 2 + z.to_local()).sum().backward()
            assert not a.requires_grad
            return [each.to_local().detach() for each in (w.grad, v.grad, a)]  # type: ignore[union-attr]

        for number, (right, found) in enumerate(zip(gradients(compiles=False), gradients(compiles=True), strict=True)):
            assert_same(right, found, f"gradient {number}")

    world.run(body)


CHANGES: dict[str, list[Callable[[Any, Any], Any]]] = {
    "made": [
        lambda d, other: (e := d * 1).mul_(3) + e,
    ],
    "given": [
        lambda d, other: d.mul_(3) * 2,
        lambda d, other: d.copy_(other) + other,
    ],
}
"""Functions that change a DTensor in place that requires a gradient, by where it is from."""


@requirement(
    "DYN-DT-1303",
    "Compiled code that changes a DTensor in place that requires a gradient has the gradient of uncompiled code.",
    source="torch.compile; torch/_functorch/_aot_autograd: mutations of inputs; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("of", CHANGES)
@pytest.mark.world(2)
def test_changed_with_gradient(world: World, of: str) -> None:
    """Change an argument, or what the code makes of it, and use both the argument and the result in a loss."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2), []

        def gradient(call: Callable[[Any, Any], Any]) -> list[float] | str:
            local = torch.arange(4.0, device=rank.device).requires_grad_()
            other = DTensor.from_local(torch.ones(4, device=rank.device), mesh, [ROWS], run_check=False)
            given = DTensor.from_local(local, mesh, [ROWS], run_check=False) * 1
            try:
                result = call(given, other)
                (result.to_local().sum() + 5 * given.to_local().sum()).backward()
            except RuntimeError as error:
                return " ".join(str(error).split())
            assert local.grad is not None
            return local.grad.tolist()

        for number, function in enumerate(CHANGES[of]):
            right, found = (gradient(call) for call in (function, dynamo.compiled(function, backend="aot_eager")[0]))
            assert isinstance(right, list), right
            if right != found:
                wrong.append(f"{number}: {right} became {found}")
        return wrong

    assert_on_ranks([[]] * 2, world.run(body))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "every second column": lambda x: x[:, ::2],
    "rows apart": lambda x: x[:, :2],
}
"""Local tensors that are not contiguous, as views of one of four rows and four columns."""

WRITES: tuple[Callable[[Any, Any], Any], ...] = (
    lambda d, e: d.add_(1),
    lambda d, e: d.mul_(e),
    lambda d, e: d.copy_(e),
    lambda d, e: d.zero_(),
    lambda d, e: d.add_(e, alpha=2).sub_(3),
)
"""Changes of a DTensor by itself or by a contiguous one."""


def every_write(changed: list[Any], others: list[Any]) -> list[Any]:
    """Change each of some DTensors by another operation, and return their doubles."""
    for write, d, e in zip(WRITES, changed, others, strict=True):
        write(d, e)
    return [d * 2 for d in changed]


@requirement(
    "DYN-DT-1805",
    "Compiled code may change DTensors in place whose local tensors are not contiguous.",
    source="torch.compile; torch/_functorch/_aot_autograd: mutations of inputs; torch.distributed.tensor.DTensor",
)
@pytest.mark.parametrize("how", ["local", "view"])
@pytest.mark.world(2)
def test_strided_arguments_are_changed(world: World, how: str) -> None:
    """Change DTensors that are made of strided local tensors, or are transposed views, by five operations each."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)

        def made(layout: str, *key: Any) -> DTensor:
            local = dyadic(4, 4, key=(rank.index, *key), dtype=torch.float32).to(rank.device)
            if how == "view":
                return DTensor.from_local(local, mesh, [ROWS], run_check=False).t()
            strided = LAYOUTS[layout](local)
            shape = torch.Size((2 * strided.shape[0], strided.shape[1]))
            return DTensor.from_local(strided, mesh, [ROWS], run_check=False, shape=shape, stride=strided.stride())

        for layout in LAYOUTS if how == "local" else ["transposed"]:
            found = []
            for run in every_write, dynamo.compiled(every_write)[0]:
                changed = [made(layout, n) for n in range(len(WRITES))]
                others = [made(layout, "e", n) for n in range(len(WRITES))]
                assert not any(d.to_local().is_contiguous() for d in changed)
                results = [run(changed, others) for _ in range(2)]
                found.append([d.to_local() for d in [*changed, *results[0], *results[1]]])
            for number, (right, other) in enumerate(zip(*found, strict=True)):
                assert_same(right + 0, other + 0, f"{layout}, tensor {number}")

    world.run(body)


CHANGED: dict[str, Callable[[Any, Any], Any]] = {
    "scaled": lambda d, x: (d.mul_(3), x * 2)[1],
    "shifted": lambda d, x: (d.add_(1), x.sin())[1],
    "twice": lambda d, x: (d.mul_(3), d.sub_(1), x * 5)[2],
}
"""Functions that change the first of two DTensors, and return another tensor."""


@requirement(
    "DYN-DT-1806",
    "After compiled code changed a DTensor that has a history in place, the backward of its results need not use that "
    "DTensor.",
    source="torch.compile; torch/_functorch/_aot_autograd: mutations of inputs; torch.distributed.tensor.DTensor",
)
@pytest.mark.world(2)
def test_changed_with_history(world: World) -> None:
    """Change a product of a leaf by three functions, and take the gradient of their results for the other input."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2), []
        for name, function in CHANGED.items():
            found: list[Any] = []
            for run in function, dynamo.compiled(function)[0]:
                w, x = (
                    DTensor.from_local(
                        dyadic(2, 2, key=(rank.index, key), dtype=torch.float32).to(rank.device),
                        mesh,
                        [ROWS],
                        run_check=False,
                    ).requires_grad_()
                    for key in range(2)
                )
                d = w * 1
                try:
                    result = run(d, x)
                    result.to_local().sum().backward()
                except (RuntimeError, AssertionError) as error:
                    found.append(f"{error!r:.120}")
                    continue
                gradient: Any = x.grad
                found.append([y.to_local().tolist() for y in (d.detach(), result.detach(), gradient)])
            if found[0] != found[1]:
                wrong.append(f"{name}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


USED: dict[str, list[tuple[Callable[[Any], Any], list[int]]]] = {
    "all": [
        (lambda d: (d * 2, d.sin()), [0, 1]),
        (lambda d: (d * 2, d.sin().to_local()), [0, 1]),
    ],
    "not-a-tensor": [(lambda d: (d * 2, d.sin().to_local()), [0])],
    "not-a-dtensor": [
        (lambda d: (d * 2, d.sin()), [0]),
        (lambda d: (d * 2, d.sin()), [1]),
        (lambda d: (d * 2, d.sin().to_local()), [1]),
    ],
}
"""Functions and which of their results are used, by what is not used."""


@requirement(
    "DYN-DT-197",
    "If some results of compiled code are not used, the gradients of the others are those of uncompiled code.",
    source="torch.compile; torch/_functorch/_aot_autograd: tangents; pytorch/pytorch#173123",
)
@pytest.mark.parametrize("left", USED)
@pytest.mark.world(2)
def test_unused_results(world: World, left: str) -> None:
    """Return two DTensors, or a DTensor and a tensor, and take the gradient of both or of one of them."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        for number, (function, used) in enumerate(USED[left]):
            gradients = []
            for run in function, dynamo.compiled(function)[0]:
                local = dyadic(2, 4, key=rank.index, dtype=torch.float32).to(rank.device).requires_grad_()
                results = run(DTensor.from_local(local, mesh, [ROWS], run_check=False))
                total: Any = 0
                for i in used:
                    result = results[i].full_tensor() if isinstance(results[i], DTensor) else results[i]
                    total = total + (result * (i + 3)).sum()
                total.backward()
                gradients.append(local.grad)
            assert_same(*gradients, f"function {number}, {used}")

    world.run(body)


@requirement(
    "DYN-DT-8702",
    "The error about a plain gradient for a DTensor of several that compiled code returned says which of them it is.",
    source="torch/_functorch/_aot_autograd/runtime_wrappers.py: tangents; pytorch/pytorch#172556",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, the error says nothing of results")
@pytest.mark.world(1)
def test_plain_gradients(world: World) -> None:
    """Give a plain gradient for one of three DTensors, and DTensors for the others."""

    def body(rank: Rank) -> list[str]:
        mesh, found = rank.mesh(1), []
        for wrong in range(3):
            function, _ = dynamo.compiled(lambda d: (d.sin(), d * 2, d + 1))
            plain = dyadic(2, 4, key=0, dtype=torch.float32).to(rank.device)
            d = DTensor.from_local(plain, mesh, [ROWS], run_check=False)
            results = function(d.detach().requires_grad_())
            with pytest.raises(RuntimeError) as raised:
                torch.autograd.backward(results, [plain if i == wrong else d for i in range(3)])
            found += [line for line in str(raised.value).splitlines() if "output" in line and "index" in line]
        return found

    (found,) = world.run(body)
    assert len(found) == 3, found
    for number, line in enumerate(found):
        assert f"index {number} " in line, line


def _cut(d: Any, count: Any) -> Any:
    """Return as many columns of a DTensor as the tensor says."""
    return d[:, : dynamo.read(count, 2, 4)]


READ: dict[str, dict[str, tuple[bool, Callable[[Any, Any], Any]]]] = {
    "others": {
        "sums": (True, lambda d, count: _cut(d, count).sum(1).to_local() * 2),
        "no gradient": (False, lambda d, count: _cut(d, count).to_local() * 2),
    },
    "local-tensors": {"local tensor": (True, lambda d, count: _cut(d, count).to_local() * 2)},
}
"""Functions of a DTensor and a number of columns by name, with whether the DTensor requires a gradient."""


@requirement(
    "DYN-DT-199",
    "In compiled code, the gradient of to_local is that of uncompiled code, also for sizes that are read from tensors.",
    source="torch.compile; torch/_dynamo/config.py: capture_scalar_outputs; torch.distributed.tensor.DTensor.to_local; "
    "pytorch/pytorch#187025",
)
@pytest.mark.parametrize("of", READ)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, compiled code cannot cut DTensors to such sizes")
@pytest.mark.world(2)
def test_sizes_from_data(world: World, of: str) -> None:
    """Cut a DTensor to as many columns as a tensor says, and take the gradient of its local tensor or of its sum."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)
        for name, (trained, function) in READ[of].items():
            found = []
            for run in function, dynamo.compiled(function)[0]:
                local = dyadic(2, 4, key=rank.index, dtype=torch.float32).to(rank.device)
                given = DTensor.from_local(local, mesh, [ROWS], run_check=False).requires_grad_(trained)
                with dynamo.data_in_graphs():
                    result = run(given, torch.tensor(3))
                if trained:
                    (result * 3).sum().backward()
                gradient: Any = given.grad
                found.append((result.detach(), gradient.to_local() if trained else result.detach()))
            (right, gradient), (observed, other) = found
            assert_same(right, observed, name)
            assert_same(gradient, other, f"gradient of {name}")

    world.run(body)


@requirement(
    "DYN-DT-436",
    "Compiled code that changes a DTensor or its local tensor sees the change in the other one.",
    source="torch.compile; torch/_functorch/_aot_autograd: aliased inputs; DTensor.from_local, DTensor.to_local",
)
@pytest.mark.parametrize("local", ["inside", "given"])
@pytest.mark.world(2)
def test_local_tensor_is_changed(world: World, local: str) -> None:
    """Compiled code is given both, or calls to_local itself; it adds to one of them and returns sums of the other."""

    def of_local(part: Any, whole: Any) -> Any:
        part = part if local == "given" else whole.to_local()
        part.add_(1)
        return whole.to_local().sum()

    def of_whole(part: Any, whole: Any) -> Any:
        part = part if local == "given" else whole.to_local()
        whole.add_(1)
        return part.sum()

    def body(rank: Rank) -> list[list[float]]:
        found = []
        for function in of_local, of_whole:
            for run in function, dynamo.compiled(function)[0]:
                part = torch.ones(2, 4, device=rank.device)
                whole = DTensor.from_local(part, rank.mesh(2), [ROWS], run_check=False)
                found.append([float(run(part, whole)), part.sum().item()])
        return found

    for first, compiled_first, second, compiled_second in world.run(body):
        compiled = [compiled_first, compiled_second]
        assert compiled == [first, second], f"sums: {compiled}"


def _found(of: str) -> dict[str, tuple[bool, Callable[[Any], Any]]]:
    """Return functions of a DTensor by name, with whether it requires a gradient: results that share memory."""

    def local(d: Any) -> Any:
        made = DTensor.from_local(d.to_local().sin(), d.device_mesh, [ROWS])
        return made, made.detach()

    if of == "detached":
        return {"of a local tensor": (True, local)}
    made: dict[str, Callable[[Any], Any]] = {
        "columns": lambda d: ((y := d + 1), y[:, :1]),
        "transposed": lambda d: ((y := d + 1), y.t()),
    }
    if of == "views":
        return {
            **{name: (True, f) for name, f in made.items()},
            "of the argument": (False, lambda d: (d[:, :1], d + 1)),
        }
    return {
        "columns without a gradient": (False, made["columns"]),
        "detached": (True, lambda d: ((y := d.sin()), y.detach())),
        "twice": (True, lambda d: ((y := d + 1), y)),
        "local": (True, lambda d: ((y := d + 1), y.to_local())),
    }


@requirement(
    "DYN-DT-198",
    "Compiled code may return DTensors that share memory, as uncompiled code may.",
    source="torch.compile; torch.distributed.tensor.DTensor; pytorch/pytorch#184002, pytorch/pytorch#172549",
)
@pytest.mark.parametrize("of", ["others", "views", "detached"])
@pytest.mark.world(2)
def test_results_in_shared_memory(world: World, of: str) -> None:
    """Return a DTensor with a view of it, with itself or detached, or a view of the argument."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2), []
        for name, (trained, function) in _found(of).items():
            found = []
            for run in function, dynamo.compiled(function)[0]:
                local = dyadic(2, 4, key=rank.index, dtype=torch.float32).to(rank.device)
                given = DTensor.from_local(local, mesh, [ROWS], run_check=False).requires_grad_(trained)
                try:
                    results = run(given)
                    parts = [x.to_local() if isinstance(x, DTensor) else x for x in results]
                    if trained:
                        torch.stack([x.sum() for x in parts if x.requires_grad]).sum().backward()
                except (RuntimeError, AssertionError) as error:
                    wrong.append(f"{name}: {error!r:.180}")
                    break
                gradient: Any = given.grad
                end = gradient.to_local().tolist() if trained else None
                found.append([*((x.tolist(), x.requires_grad) for x in parts), end])
            if found[0] != found[-1]:
                wrong.append(f"{name}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda d: d * 3,
    "summed": lambda d: d.sum(0),
    "both": lambda d: (d * 2, d.sum(1)),
}


@requirement(
    "DYN-DT-12",
    "Compiled code takes each gradient that uncompiled code takes for a DTensor that it returns, of whatever "
    "placements the two are.",
    source="torch.compile; torch/distributed/tensor/_api.py: __coerce_tangent_metadata__",
)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.world(2)
def test_gradients_of_results(world: World, name: str) -> None:
    """Give gradients of each placement, and those of to_local and full_tensor, to results of each placement."""
    function = FUNCTIONS[name]

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2)

        def placed(given: Any, target: Placement, *key: Any) -> DTensor:
            shape = list(given.shape)
            if isinstance(target, Shard):
                shape[target.dim] //= 2
            local = dyadic(*shape, key=(key, rank.index), dtype=torch.float32).to(rank.device)
            return DTensor.from_local(local, mesh, [target], run_check=False)

        def gradient(call: Callable[[Any], Any], source: Placement, how: Any) -> torch.Tensor:
            local = dyadic(2, 4, key=rank.index, dtype=torch.float32).to(rank.device).requires_grad_()
            results = call(DTensor.from_local(local, mesh, [source], run_check=False))
            ends, gradients = [], []
            for number, result in enumerate(results if isinstance(results, tuple) else [results]):
                if isinstance(how, Placement):
                    ends.append(result)
                    gradients.append(placed(result, how, number))
                else:
                    ends.append(result.full_tensor() if how == "full_tensor" else result.to_local())
                    key = how, number
                    gradients.append(dyadic(*ends[-1].shape, key=key, dtype=torch.float32).to(rank.device))
            torch.autograd.backward(ends, gradients)
            assert local.grad is not None
            return local.grad

        for source in (ROWS, COLUMNS, WHOLE, SUM):
            compiled, counter = dynamo.compiled(function)
            for how in ("to_local", "full_tensor", ROWS, WHOLE, SUM):
                what = f"gradient of {source}, from {how}"
                assert_same(gradient(function, source, how) + 0, gradient(compiled, source, how) + 0, what)
            assert counter.graphs == 1, source

    world.run(body)
