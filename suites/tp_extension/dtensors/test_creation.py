"""How DTensors are made: factories, distribute_tensor, distribute_module and from_local with all of their arguments."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
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

from fixtures.placements import MORE_OPERATORS, REDUCED, laid_out, part
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.tensor"
LAYOUTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1))


@requirement(
    "TP-MAKE-01",
    "A factory makes a DTensor with the given size, value, dtype, placements and requires_grad, without communication.",
    source=f"{SOURCE}: zeros, ones, full, empty",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2)
def test_factories(world: World) -> None:
    """Give sizes as numbers, a list or a tuple, and the mesh as an argument or by its context."""

    def body(rank: Rank) -> None:
        mesh, at = rank.mesh(), messages.mark()
        for shape, layout, dtype, grad in itertools.product(
            ((4, 6), (5, 3), (1, 1)), (None, *LAYOUTS), (None, torch.float64, torch.int32), (False, True)
        ):
            if grad and dtype == torch.int32:
                continue
            options: Any = {"dtype": dtype, "requires_grad": grad, "placements": layout and [layout]}
            if not grad:
                del options["requires_grad"]
            made: dict[str, tuple[float | None, Any]] = {
                "zeros": (0, dtensors.zeros(*shape, device_mesh=mesh, **options)),
                "ones": (1, dtensors.ones(list(shape), device_mesh=mesh, **options)),
                "full": (7.0, dtensors.full(shape, 7.0, device_mesh=mesh, **options)),
                "empty": (None, dtensors.empty(shape, device_mesh=mesh, **options)),
            }
            with mesh:
                made["context"] = 1, dtensors.ones(shape, **options)
            for name, (value, found) in made.items():
                what = f"{name} of {shape}, {layout}, {dtype}, {grad=}"
                kind = torch.get_default_dtype() if dtype is None else dtype
                plain = torch.full(shape, value or 0, dtype=kind, device=rank.device)
                assert isinstance(found, DTensor), what
                assert (found.shape, found.stride(), found.dtype) == (plain.shape, plain.stride(), kind), what
                assert (found.placements, found.device_mesh) == ((layout or Replicate(),), mesh), what
                assert (found.requires_grad, found.is_leaf) == (grad, True), what
                local = found.to_local().detach()
                assert local.shape == part(plain, rank, layout or Replicate()).shape, what
                if value is not None:
                    assert_same(part(plain, rank, layout or Replicate()), local, what)
                if grad:
                    (found.to_local() * 3).sum().backward()
                    gradient: Any = found.grad
                    assert isinstance(gradient, DTensor), what
                    assert (gradient.to_local() == 3).all(), what
        assert not messages.since(at)
        with pytest.raises(AssertionError):
            dtensors.ones(2, 2, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        with pytest.raises(AssertionError):
            dtensors.ones(2, 2, device_mesh=mesh, placements=[Shard(0)], layout=torch.sparse_coo)

    world.run(body)


@requirement(
    "TP-MAKE-09",
    "A factory makes DTensors of any number of dimensions, none included, on a mesh of any number of dimensions.",
    source=f"{SOURCE}: zeros, ones, full, empty",
)
@requirement(
    "TP-MAKE-10",
    "On a mesh of some ranks, a factory gives each of these its part, and the others the whole size without elements.",
    source=f"{SOURCE}: zeros, ones, full, empty; DTensor",
)
@pytest.mark.world(4)
def test_factories_on_meshes(world: World) -> None:
    """Make tensors with every pair of placements, and on meshes that leave out ranks, one of them the first."""

    def body(rank: Rank) -> None:
        meshes = [rank.mesh(), rank.mesh(2, 2, names=("dp", "tp"))]
        meshes += [DeviceMesh(rank.device.type, ranks) for ranks in ([0, 3], [1, 2, 3], [[0], [3]])]
        for mesh, shape in itertools.product(meshes, ((), (5,), (5, 4), (4, 5, 3))):
            layouts: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
            for placements in itertools.product(layouts, repeat=mesh.ndim):
                what = f"{shape} on {mesh.mesh.tolist()}, {placements}"
                options: Any = {"device_mesh": mesh, "placements": placements}
                inside = mesh.get_coordinate() is not None
                for value, found in (
                    (0.0, dtensors.zeros(shape, **options)),
                    (1.0, dtensors.ones(shape, **options)),
                    (7.0, dtensors.full(shape, 7.0, **options)),
                    (None, dtensors.empty(shape, **options)),
                ):
                    assert (found.shape, found.placements, found.device_mesh) == (shape, placements, mesh), what
                    local = found.to_local()
                    if not inside:
                        assert local.numel() == 0, what
                        continue
                    right = laid_out(torch.full(shape, value or 0.0, device=rank.device), mesh, placements)
                    assert local.shape == right.shape, what
                    if value is not None:
                        assert torch.equal(local, right), what
                if inside:
                    filled: Any = nn.init.constant_(dtensors.empty(shape, **options), 2.5)
                    assert (filled.placements, filled.to_local().shape) == (placements, right.shape), what
                    assert (filled.to_local() == 2.5).all(), what

    world.run(body)


FROM_THE_END: dict[str, dict[str, Callable[[torch.Tensor, DeviceMesh, Placement], Any]]] = {
    "tensors": {
        "distribute_tensor": lambda x, mesh, p: distribute_tensor(x, mesh, [p]),
        "from_local": lambda x, mesh, p: DTensor.from_local(_own(x, mesh, p), mesh, [p]),
        "redistribute": lambda x, mesh, p: distribute_tensor(x, mesh, [Replicate()]).redistribute(placements=[p]),
    },
    "factories": {
        "ones": lambda x, mesh, p: dtensors.ones(x.shape, device_mesh=mesh, placements=[p]),
        "zeros": lambda x, mesh, p: dtensors.zeros(x.shape, device_mesh=mesh, placements=[p]) + 1,
        "full": lambda x, mesh, p: dtensors.full(x.shape, 1.0, device_mesh=mesh, placements=[p]),
        "empty": lambda x, mesh, p: dtensors.empty(x.shape, device_mesh=mesh, placements=[p]).fill_(1),
    },
    "gradients": {"to_local": lambda x, mesh, p: _gradient_of_part(x, mesh, p)},
    "gradients-of-from_local": {"from_local": lambda x, mesh, p: _gradient_of_whole(x, mesh, p)},
}
"""What gives a matrix, or ones, as a DTensor in a placement; for gradients it describes the result's."""
GRADIENT_PLACEMENTS = "torch.distributed.tensor.DTensor.from_local(grad_placements)"


def _own(x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
    """Return this rank's part of a matrix."""
    assert isinstance(placement, Shard)
    return x.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()


def _gradient_of_part(x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> Any:
    """Return the gradient of a DTensor whose local tensor is multiplied by this rank's part of a matrix."""
    leaf = distribute_tensor(torch.zeros_like(x), mesh, [Replicate()]).requires_grad_()
    part_of_it: Any = leaf.redistribute(placements=[placement])
    (part_of_it.to_local(grad_placements=[placement]) * _own(x, mesh, placement)).sum().backward()
    gradient: Any = leaf.grad
    return gradient.redistribute(placements=[placement])


def _gradient_of_whole(x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> Any:
    """Return the gradient of this rank's part of a matrix that is multiplied by another matrix as a DTensor."""
    own = torch.zeros_like(_own(x, mesh, placement)).requires_grad_()
    whole = DTensor.from_local(own, mesh, [placement], grad_placements=[placement])
    (whole.full_tensor() * x).sum().backward()
    assert own.grad is not None
    return DTensor.from_local(own.grad, mesh, [placement])


@requirement(
    "TP-MAKE-2701",
    "Wherever DTensors are made or converted, Shard(-1) names the last dimension, as it does for distribute_tensor.",
    source=f"{SOURCE}.Shard: can be used by all DTensor APIs; pytorch/pytorch#111750",
)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.needs(torch=GRADIENT_PLACEMENTS)] if kind.endswith("from_local") else [])
        for kind in FROM_THE_END
    ],
)
@pytest.mark.world(2)
def test_dimensions_from_the_end(world: World, kind: str) -> None:
    """Shard the last dimension and the one before it, in what is made, and in what a gradient is said to have."""

    def body(rank: Rank) -> None:
        mesh, whole = rank.mesh(), numbers(4, 6).to(rank.device)
        expected = torch.ones_like(whole) if kind == "factories" else whole
        for (name, function), dim in itertools.product(FROM_THE_END[kind].items(), (-1, -2)):
            found = function(whole, mesh, Shard(dim))
            assert found.placements == (Shard(dim + 2),), f"{name}: {found.placements}"
            assert_same(part(expected, rank, Shard(dim + 2)), found.to_local().detach(), name)

    world.run(body)


RANDOM: dict[str, Callable[..., DTensor]] = {
    "rand": lambda like, **options: dtensors.rand(like.shape, **options),
    "randn": lambda like, **options: dtensors.randn(like.shape, **options),
    "rand_like": lambda like, dtype, requires_grad, **_: torch.rand_like(
        like, dtype=dtype, requires_grad=requires_grad
    ),
    "randn_like": lambda like, dtype, requires_grad, **_: torch.randn_like(
        like, dtype=dtype, requires_grad=requires_grad
    ),
}


@requirement(
    "TP-MAKE-3605",
    "A factory of random numbers makes a DTensor with the given size, dtype, placements and requires_grad.",
    source=f"{SOURCE}: rand, randn; torch.rand_like, torch.randn_like",
)
@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize("factory", RANDOM)
@pytest.mark.world(2)
def test_random_factories(world: World, factory: str) -> None:
    """Make matrices of numbers that differ, in each layout, with and without a dtype and gradients."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh()
        for layout, dtype, grad in itertools.product(LAYOUTS, (None, torch.float64), (False, True)):
            like = dtensors.zeros(5, 3, device_mesh=mesh, placements=[layout])
            made = RANDOM[factory](like, device_mesh=mesh, placements=[layout], dtype=dtype, requires_grad=grad)
            what = f"{layout}, {dtype}, {grad=}"
            assert (made.shape, made.placements, made.requires_grad) == (like.shape, (layout,), grad), what
            assert made.dtype == (dtype or torch.float32), what
            local = made.to_local().detach()
            assert local.shape == like.to_local().shape, what
            assert local.unique().numel() == local.numel(), what

    world.run(body)


@requirement(
    "TP-MAKE-02",
    "distribute_tensor refuses a tensor that is no leaf, and a DTensor in other placements or on another mesh.",
    source=f"{SOURCE}.distribute_tensor",
)
@requirement(
    "TP-MAKE-03",
    "distribute_tensor gives a leaf that requires a gradient as its input does, and leaves its input as it was.",
    source=f"{SOURCE}.distribute_tensor",
)
@pytest.mark.world(2)
def test_distribute_tensor(world: World) -> None:
    """Give leaves, views, results and DTensors; leave out the mesh and the placements."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh()
        whole = numbers(5, 3).to(rank.device)
        for layout, grad, source in itertools.product((*LAYOUTS, Shard(-1), Shard(-2)), (False, True), (0, 1, None)):
            what = f"{layout}, {grad=}, {source=}"
            own = whole + 100 * rank.index
            given = own.clone().requires_grad_(grad)
            at = messages.mark()
            found = distribute_tensor(given, mesh, [layout], src_data_rank=source)
            assert len(messages.since(at)) == (source is not None), what
            positive = Shard(layout.dim % 2) if isinstance(layout, Shard) else layout
            assert found.placements == (positive,), what
            assert (found.requires_grad, found.is_leaf) == (grad, True), what
            right = whole + 100 * (rank.index if source is None else source)
            assert_same(part(right, rank, positive), found.to_local().detach(), what)
            if grad:
                found.to_local().sum().backward()
                assert isinstance(found.grad, DTensor), what
            assert (given.grad, given.requires_grad) == (None, grad), what
            with torch.no_grad():
                found.to_local().add_(1)
                assert_same(own, given.detach(), f"{what}: input") if layout != Replicate() else None
            assert distribute_tensor(found, mesh, [positive]) is found, what
        with mesh:
            assert_same(whole, distribute_tensor(whole + rank.index).to_local(), "context")
            with rank.mesh(1, 2) as inner:
                assert distribute_tensor(whole, placements=[Replicate(), Shard(0)]).device_mesh == inner
            assert distribute_tensor(whole, placements=[Shard(0)]).device_mesh == mesh
        places: list[Placement] = [Shard(0)]
        sharded = distribute_tensor(whole, mesh, places)
        kept = (sharded, sharded.redistribute(placements=places), DTensor.from_local(sharded.to_local(), mesh, places))
        places[0] = Replicate()
        assert [made.placements for made in kept] == [(Shard(0),)] * 3
        leaf = whole.clone().requires_grad_()
        for wrong in (leaf * 2, leaf[1:], leaf.t(), leaf.to(torch.float64)):
            for layout in LAYOUTS:
                with pytest.raises(RuntimeError, match="leaf"):
                    distribute_tensor(wrong, mesh, [layout])
        distribute_tensor((leaf * 2).detach(), mesh, [Shard(0)])
        with torch.no_grad():
            distribute_tensor(leaf * 2, mesh, [Shard(0)])
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        for bad in [Replicate()], [Shard(1)]:
            with pytest.raises(ValueError, match="placements"):
                distribute_tensor(sharded, mesh, bad)
        flat = rank.mesh(1, 2)
        with pytest.raises(ValueError, match="mesh"):
            distribute_tensor(sharded, flat, [Shard(0), Shard(0)])
        for kept, other in itertools.product(itertools.product((Shard(0), Shard(1), Replicate()), repeat=2), repeat=2):
            given = distribute_tensor(whole, flat, kept)
            if kept == other:
                assert distribute_tensor(given, flat, other) is given, kept
                continue
            with pytest.raises(ValueError, match="placements"):
                distribute_tensor(given, flat, other)
        for bad in [], [Shard(0), Replicate()]:
            with pytest.raises(ValueError, match="length"):
                distribute_tensor(whole, mesh, bad)
        with pytest.raises(ValueError, match="Partial"):
            distribute_tensor(whole, mesh, [Partial("product")])

    world.run(body)


class Net(nn.Module):
    """A module with a child; both have parameters, one of them frozen, and buffers, one of them None."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(4, 3) + offset)
        self.register_parameter("none", None)
        self.register_buffer("scale", numbers(3) + offset)
        self.register_buffer("nothing", None)
        self.child = nn.Linear(3, 3)
        with torch.no_grad():
            for parameter in self.child.parameters():
                parameter.copy_(numbers(*parameter.shape) + offset)
        self.child.bias.requires_grad_(False)
        self.child.register_buffer("count", torch.tensor([3 + int(offset)]), persistent=False)

    def forward(self, x: torch.Tensor, more: Any = None) -> torch.Tensor:
        """Return a product with all of the parameters in it."""
        result: torch.Tensor = self.child(x * self.scale) @ self.weight.t()
        return result


@requirement(
    "TP-MAKE-04",
    "distribute_module replicates the first rank's parameters and buffers, but for those its function has distributed.",
    source=f"{SOURCE}.distribute_module",
)
@requirement(
    "TP-MAKE-05",
    "distribute_module gives its functions each module, or the forward's inputs and outputs, with the mesh.",
    source=f"{SOURCE}.distribute_module: partition_fn, input_fn, output_fn",
)
@pytest.mark.world(2)
def test_distribute_module(world: World) -> None:
    """Ranks have different values; distribute no parameter, a parameter or a buffer with a function."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh()
        right = Net(0).to(rank.device)
        for chosen in (None, "", "weight", "child.weight", "scale"):
            calls: list[tuple[str, int]] = []

            def partition(name: str, module: nn.Module, given: Any, chosen: Any = chosen, calls: Any = calls) -> None:
                assert given is mesh
                calls.append((name, id(module)))
                owner, _, leaf = chosen.rpartition(".")
                if owner != name or not leaf:
                    return
                value = getattr(module, leaf)
                sharded = distribute_tensor(value.detach(), mesh, [Shard(0)])
                if isinstance(value, nn.Parameter):
                    module.register_parameter(leaf, nn.Parameter(sharded))
                else:
                    module.register_buffer(leaf, sharded)

            module = Net(100.0 * rank.index).to(rank.device)
            before = {name for name, _ in module.named_buffers()}
            options: Any = {} if chosen is None else {"partition_fn": partition}
            if chosen == "weight":
                with mesh:
                    assert distribute_module(module, **options) is module
            else:
                assert distribute_module(module, mesh, **options) is module
            assert calls == ([] if chosen is None else [(n, id(m)) for n, m in module.named_modules()]), chosen
            assert {name for name, _ in module.named_buffers()} == before
            assert sorted(module.state_dict()) == sorted(right.state_dict())
            assert (module.none, module.nothing, type(module.child.bias)) == (None, None, type(module.weight))
            values: list[Any] = [*module.named_parameters(), *module.named_buffers()]
            for (name, value), (_, expected) in zip(
                values, [*right.named_parameters(), *right.named_buffers()], strict=True
            ):
                what = f"{name}, {chosen=}"
                assert isinstance(value, DTensor), what
                assert value.placements == ((Shard(0),) if name == chosen else (Replicate(),)), what
                assert value.requires_grad == expected.requires_grad, what
                layout = value.placements[0]
                assert_same(part(expected.detach(), rank, layout), value.to_local().detach(), what)
            with pytest.raises(RuntimeError, match="once"):
                distribute_module(module, mesh)

        x = numbers(2, 3).to(rank.device)
        seen: list[Any] = []

        def given(of: Any, inputs: Any, on: Any) -> Any:
            seen.append((of, len(inputs), on))
            return (DTensor.from_local(inputs[0], on, [Replicate()]), *inputs[1:])

        def taken(of: Any, outputs: Any, on: Any) -> Any:
            seen.append((of, type(outputs), on))
            return outputs.to_local()

        module = distribute_module(Net(0).to(rank.device), mesh, input_fn=given, output_fn=taken)
        for more in ((), (3,)):
            assert_same(right(x).detach(), module(x, *more).detach(), "output")
        assert seen == [(module, 1, mesh), (module, DTensor, mesh), (module, 2, mesh), (module, DTensor, mesh)]
        with pytest.warns(FutureWarning):
            module = distribute_module(
                Net(0).to(rank.device),
                mesh,
                input_fn=lambda inputs, on: given(None, inputs, on),
                output_fn=lambda outputs, on: outputs.to_local(),
            )
        assert_same(right(x).detach(), module(x).detach(), "output with functions of two arguments")
        plain = nn.Linear(3, 5).to(rank.device)
        layer = distribute_module(copy.deepcopy(plain), mesh)
        replicas = DTensor.from_local(x, mesh, [Replicate()])
        with torch.autocast(rank.device.type, dtype=torch.bfloat16):
            output = layer(replicas)
            assert output.dtype == torch.bfloat16
            assert_same(plain(x).detach(), output.to_local().detach(), "autocast")
        for parameter, original in zip(layer.to(torch.bfloat16).parameters(), plain.parameters(), strict=True):
            converted: Any = parameter
            assert (converted.dtype, converted.placements) == (torch.bfloat16, (Replicate(),))
            assert_same(original.detach().to(torch.bfloat16), converted.to_local().detach(), "converted")
        for name in "input_fn", "output_fn":
            for wrong in (lambda a: a), (lambda a, b, c, d: a):
                with pytest.raises(ValueError, match="argument"):
                    distribute_module(Net(0).to(rank.device), mesh, **{name: wrong})

    world.run(body)


@requirement(
    "TP-MAKE-9011",
    "The functions of distribute_module get the module that is called, be it the one that was distributed or a copy.",
    source=f"{SOURCE}.distribute_module: input_fn, output_fn: 'installed as a module forward_pre_hook'; "
    "torch.nn.Module.register_forward_pre_hook: hook(module, args)",
)
@pytest.mark.world(2)
def test_functions_of_copies(world: World) -> None:
    """Functions that use a factor of their module, on a child and its parent, which are copied deep or flat."""

    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module | None, factor: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(numbers(3))
            self.inner = inner
            self.factor = factor

        def forward(self, x: Any) -> Any:
            return (x if self.inner is None else self.inner(x)) * self.weight

    def body(rank: Rank) -> None:
        mesh, x = rank.mesh(), numbers(2, 3).to(rank.device)
        seen: list[Any] = []

        def given(of: Any, inputs: Any, on: Any) -> Any:
            seen.append(of)
            return (inputs[0] if isinstance(inputs[0], DTensor) else DTensor.from_local(inputs[0], on)) * of.factor

        def taken(of: Any, outputs: Any, on: Any) -> Any:
            seen.append(of)
            return outputs + of.factor

        options: dict[str, Any] = {"input_fn": given, "output_fn": taken}
        inner = distribute_module(Scaled(None, 2.0).to(rank.device), mesh, **options)
        model: Any = Scaled(inner, 3.0).to(rank.device)
        distribute_module(model, mesh, **options)
        copies: list[Any] = [model, copy.deepcopy(model), copy.copy(model), copy.deepcopy(copy.copy(model))]
        for number, module in enumerate(copies):
            module.factor += number
            if module.inner is not inner:
                module.inner.factor += number
        for module in [*copies, *copies]:
            seen.clear()
            found = module(x).full_tensor().detach()
            assert list(map(id, seen)) == list(map(id, [module, module.inner, module.inner, module]))
            outer, within = module.factor, module.inner.factor
            weight = numbers(3).to(rank.device)
            assert_same((x * outer * within * weight + within) * weight + outer, found, f"{outer}, {within}")

    world.run(body)


@requirement(
    "TP-MAKE-06",
    "from_local with run_check=True gives the replicas on each mesh dimension the data of its first rank.",
    source=f"{SOURCE}.DTensor.from_local: run_check",
)
@requirement(
    "TP-MAKE-07",
    "from_local without run_check, or of shards, communicates no data and shares the memory of its input.",
    source=f"{SOURCE}.DTensor.from_local: run_check",
)
@pytest.mark.world(4)
def test_run_check(world: World) -> None:
    """Replicate over each dimension of a mesh, over both or over none; each rank has its own data, or cuts them."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("dp", "tp"))
        at = messages.mark()
        for layouts in itertools.product((Replicate(), Shard(0), Shard(1), Partial()), repeat=2):
            own = numbers(2, 2).to(rank.device) + 100 * rank.index
            found = DTensor.from_local(own, mesh, layouts)
            assert found.to_local().data_ptr() == own.data_ptr()
            assert_same(numbers(2, 2).to(rank.device) + 100 * rank.index, found.to_local(), f"{layouts}, unchecked")
        assert not messages.since(at)
        for cut, *layouts in itertools.product((False, True), *[(Replicate(), Shard(0), Partial())] * 2):
            own = numbers(2, 2).to(rank.device) + 100 * rank.index
            coordinates = [
                0 if layout == Replicate() else at for layout, at in zip(layouts, divmod(rank.index, 2), strict=True)
            ]
            source = 2 * coordinates[0] + coordinates[1]
            checked = DTensor.from_local(own.repeat(1, 2)[:, :2] if cut else own, mesh, layouts, run_check=True)
            expected = numbers(2, 2).to(rank.device) + 100 * source
            assert_same(expected, checked.to_local(), f"{layouts}, checked, {cut=}")

    world.run(body)


@requirement(
    "TP-MAKE-08",
    "from_local refuses a DTensor, a shape without a stride, and, with run_check, parts of another size, stride, "
    "dtype or requires_grad.",
    source=f"{SOURCE}.DTensor.from_local",
)
@pytest.mark.world(2)
def test_refused_parts(world: World) -> None:
    """Ranks have different numbers of rows, dtypes, strides or requires_grad, which is not seen without run_check."""

    def body(rank: Rank) -> None:
        mesh, x = rank.mesh(), numbers(2, 3).to(rank.device)
        with mesh:
            assert DTensor.from_local(x).placements == (Replicate(),)
        assert DTensor.from_local(x, mesh, [Shard(-1)]).placements == (Shard(1),)
        with pytest.raises(RuntimeError, match="DTensor"):
            DTensor.from_local(DTensor.from_local(x, mesh, [Shard(0)]), mesh, [Shard(0)])
        for options in {"shape": torch.Size((4, 3))}, {"stride": (3, 1)}:
            with pytest.raises(RuntimeError, match="shape and stride"):
                DTensor.from_local(x, mesh, [Shard(0)], **options)  # type: ignore[arg-type]
        square = numbers(3, 3).to(rank.device)
        wrongs = (
            x[rank.index :],
            x.double() if rank.index else x,
            square.t() if rank.index else square,
            x.clone().requires_grad_(rank.index == 0),
        )
        for wrong in wrongs:
            DTensor.from_local(wrong, mesh, [Shard(0)])
            with pytest.raises((ValueError, RuntimeError, AssertionError)):
                DTensor.from_local(wrong, mesh, [Shard(0)], run_check=True)

    world.run(body)


@requirement(
    "TP-MAKE-1400",
    "from_local or distribute_tensor refuses to make values pending by two operations on two mesh dimensions, but for "
    "a sum with an average.",
    source=f"{SOURCE}: DTensor.from_local, distribute_tensor; pytorch/pytorch#172609",
)
@pytest.mark.world(2)
def test_pending_by_two_operations(world: World) -> None:
    """Combine each two operations on two of three mesh dimensions, the other one replicated or sharded."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(2, 1, 1, names=("dp", "cp", "tp")), []
        for (first, second), between in itertools.product(
            itertools.product(REDUCED, repeat=2), (Replicate(), Shard(0))
        ):
            allowed = first == second or {first, second} == {"sum", "avg"}
            for placements in (Partial(first), between, Partial(second)), (Partial(first), Partial(second), between):
                for make in DTensor.from_local, distribute_tensor:
                    if allowed and make is distribute_tensor and "product" in (first, second):
                        continue  # which are never distributed
                    try:
                        make(numbers(2, 3).to(rank.device), mesh, placements)
                    except ValueError:
                        if allowed:
                            wrong.append(f"{make.__name__} refuses {placements}")
                    else:
                        if not allowed:
                            wrong.append(f"{make.__name__} takes {placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-MAKE-06",
    "from_local with run_check=True gives the replicas on each mesh dimension the data of its first rank.",
    source=f"{SOURCE}.DTensor.from_local: run_check",
)
@pytest.mark.world(2)
def test_checks_of_other_meshes(world: World) -> None:
    """Each rank has a mesh of its own, and a part of another dtype, size or requires_grad than the other rank."""

    def body(rank: Rank) -> None:
        mesh = [DeviceMesh(rank.device.type, [i]) for i in range(rank.size)][rank.index]
        x = numbers(3, 3).to(rank.device)
        parts = (x.double() if rank.index else x, x[rank.index :], x.clone().requires_grad_(rank.index == 0))
        for own in parts:
            for layout in Replicate(), Shard(0), Partial():
                checked = DTensor.from_local(own, mesh, [layout], run_check=True)
                assert_same(own.detach().cpu(), checked.to_local().detach(), f"{layout}")

    world.run(body)


@requirement(
    "TP-MAKE-40",
    "new_empty_strided of a DTensor keeps its placements for its own size, is replicated for another, with the "
    "given strides, dtype and requires_grad.",
    source="torch.Tensor.new_empty_strided; torch.distributed.tensor.DTensor; test_tensor_ops.py: "
    "test_new_empty_strided",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2)
def test_new_with_strides(world: World) -> None:
    """Order the dimensions in memory in each way; each rank's part lies in the same order."""

    def body(rank: Rank) -> None:
        mesh, at = rank.mesh(), messages.mark()
        layouts = [*LAYOUTS, *([Partial()] if runs_with(">=2.13") else [])]  # replicas before
        for layout, dtype, grad in itertools.product(layouts, (None, torch.float64), (False, True)):
            own = part(torch.ones(5, 3, device=rank.device), rank, layout).clone()
            given = DTensor.from_local(own, mesh, [layout], shape=torch.Size((5, 3)), stride=(3, 1))
            for size, turned in itertools.product(((5, 3), (3, 4), (5, 3, 2)), (False, True)):
                plain = torch.ones(size[::-1] if turned else size)
                plain = plain.permute(*reversed(range(plain.dim()))) if turned else plain
                what = f"{size} of {layout}, {dtype}, {grad=}, {turned=}"
                made: Any = given.new_empty_strided(size, plain.stride(), dtype=dtype, requires_grad=grad)
                kept = layout if size == (5, 3) else Replicate()
                assert (made.placements, made.device_mesh) == ((kept,), mesh), what
                assert (made.shape, made.stride()) == (plain.shape, plain.stride()), what
                assert (made.dtype, made.requires_grad, made.is_leaf) == (dtype or torch.float32, grad, True), what
                local = made.to_local().detach()
                assert local.shape == part(plain, rank, kept).shape, what
                assert (local.permute(*reversed(range(local.dim()))) if turned else local).is_contiguous(), what
                if grad:
                    made.detach().fill_(2)
                    (made.to_local() * 3).sum().backward()
                    gradient: Any = made.grad
                    assert (gradient.to_local() == 3).all(), what
        assert not messages.since(at)

    world.run(body)
