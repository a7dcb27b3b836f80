"""Views and detached aliases that compiled code returns together, and the strides of gradients through views."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness import Rank, World, assert_on_ranks, dyadic, requirement
from harness.oracles.collectives import lay
from harness.stacks import dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda y: y.view(-1),
    "transposed": lambda y: y.t(),
    "row": lambda y: y[1],
    "itself": lambda y: y,
    "detached": lambda y: y.detach(),
}
"""Ways to share the memory of a tensor of two dimensions."""

ALONE = ("transposed", "row")
"""Views that healthy PyTorch cannot return with detached aliases of them."""


def based(x: torch.Tensor) -> torch.Tensor:
    """Return a product, whose detached alias is summed over ranks."""
    y = x * 2
    dist.all_reduce(y.detach())
    return y


def returned() -> dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]]:
    """Return functions of a tensor by name, each of which returns a view with an alias of it or of its base."""

    def both(view: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = view(based(x))
        return a, a.detach()

    def again(view: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = view(based(x))
        return a.detach(), a, a.view_as(a)

    def of_base(view: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = based(x)
        return view(y), y.detach(), y

    forms = {"view, view detached": both, "view detached, view, view": again, "view, base detached, base": of_base}
    return {
        f"{form}, {name}": partial(function, view)
        for form, function in forms.items()
        for name, view in VIEWS.items()
        if function is of_base or name not in ALONE
    }


def described(results: tuple[torch.Tensor, ...], x: torch.Tensor) -> list[Any]:
    """Return what each result is, which of them share memory, and the gradient of those that require one."""
    starts = [y.untyped_storage().data_ptr() for y in results]
    facts = [
        (y.tolist(), y.stride(), y.requires_grad, [start == other for other in starts])
        for y, start in zip(results, starts, strict=True)
    ]
    losses = [(y * (n + 3)).sum() for n, y in enumerate(results) if y.requires_grad]
    gradients = torch.autograd.grad(losses, x) if losses else ()
    return [facts, [g.tolist() for g in gradients]]


@requirement(
    "DYN-RESULT-1802",
    "Results of compiled code that share memory have the values, memory and gradients of uncompiled code.",
    source="torch.compile; torch/_functorch/_aot_autograd: aliases of intermediates; torch.Tensor: detach, view",
)
@pytest.mark.world(2)
def test_aliases(world: World) -> None:
    """Return views of a product, whose detached alias an all_reduce changes, with other views or detached aliases."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for name, function in returned().items():
            found: list[Any] = []
            for run in function, dynamo.compiled(function)[0]:
                x = dyadic(2, 3, key=rank.index, dtype=torch.float32).to(rank.device).requires_grad_()
                try:
                    found.append(described(run(x), x))
                except (RuntimeError, AssertionError, TypeError) as error:
                    found.append(f"{error!r:.120}")
            if found[0] != found[1]:
                wrong.append(f"{name}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "DYN-RESULT-1802",
    "Results of compiled code that share memory have the values, memory and gradients of uncompiled code.",
    source="torch.compile; torch/_functorch/_aot_autograd: aliases of intermediates; torch.Tensor: detach, view",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(2, timeout=120)
def test_aliases_of_generated_code(world: World) -> None:
    """Return tensors and their detached aliases from code that Inductor generates."""

    def body(rank: Rank) -> None:
        def pairs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y, z = based(x), based(x + 1)
            return y, y.detach(), z.detach(), z

        found = []
        for run in pairs, dynamo.compiled(pairs, backend="inductor")[0]:
            x = dyadic(2, 3, key=rank.index, dtype=torch.float32).to(rank.device).requires_grad_()
            found.append(described(run(x), x))
        assert found[0] == found[1]

    world.run(body)


@requirement(
    "DYN-RESULT-8201",
    "Compiled code that sets a new tensor to the storage of a result returns it with the values and memory of that.",
    source="torch.compile; torch.Tensor.set_",
)
@pytest.mark.world(2)
def test_set_results(world: World) -> None:
    """Set a tensor to a sum over ranks, or to twice the sum, and return it with what is computed from it."""

    def body(rank: Rank) -> None:
        def code(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            total = based(x)
            new, other = x + 1, x + 2
            with torch.no_grad():
                new.set_(total)
                other.set_(total * 2)
            return new, other, new + other

        found = []
        for run in code, dynamo.compiled(code)[0]:
            x = dyadic(2, 3, key=rank.index, dtype=torch.float32).to(rank.device)
            found.append(described(run(x), x))
        assert found[0] == found[1]

    world.run(body)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "rotated": lambda x: x.permute(1, 2, 0),
    "transposed": lambda x: x.transpose(0, 2),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
}
"""Tensors of three or four dimensions."""

THROUGH: dict[str, Callable[[torch.Tensor], Any]] = {
    "product": lambda x: x * 2,
    "sine": lambda x: x.sin(),
    "two": lambda x: (x * 2, x + 1),
    "permuted": lambda x: (x * 2).transpose(0, 1),
}


@requirement(
    "DYN-GRAD-1803",
    "The gradient of compiled code has the strides of that of uncompiled code, whatever the layout of its results.",
    source="torch.compile; torch/_functorch/_aot_autograd: tangents; torch.autograd.grad",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, compiled code makes gradients contiguous")
@pytest.mark.world(1)
def test_strides_of_gradients(world: World) -> None:
    """Give gradients with the strides of the results, and compare those of the argument, in four layouts."""

    def body(rank: Rank) -> list[str]:
        wrong = []

        def every_function(xs: list[torch.Tensor]) -> list[Any]:
            return [function(x) for function, x in zip(THROUGH.values(), xs, strict=True)]

        for layout, arranged in LAYOUTS.items():
            found = []
            for run in every_function, dynamo.compiled(every_function)[0]:
                given = dyadic(4, 2, 3, key=0, dtype=torch.float32).to(rank.device)
                xs = [arranged(given).detach().requires_grad_() for _ in THROUGH]
                ends = [y for result in run(xs) for y in (result if isinstance(result, tuple) else (result,))]
                gradients = torch.autograd.grad(ends, xs, [torch.ones_like(y) for y in ends])
                found.append([(g.stride(), g.tolist()) for g in gradients])
            for name, right, other in zip(THROUGH, *found, strict=True):
                if right != other:
                    wrong.append(f"{name}, {layout}: {right[0]} uncompiled, {other[0]} compiled")
        return wrong

    assert_on_ranks([[]], world.run(body))


@requirement(
    "DYN-GRAD-1803",
    "The gradient of compiled code has the strides of that of uncompiled code, whatever the layout of its results.",
    source="torch.compile; torch/_functorch/_aot_autograd: tangents; torch.autograd.grad",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, compiled code makes gradients contiguous")
@pytest.mark.world(2)
def test_strides_of_gradients_of_dtensors(world: World) -> None:
    """Give gradients with the strides of the results, and compare those of a DTensor, in two layouts."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        mesh = rank.mesh(rank.size)
        for layout in ("contiguous", "channels last"):
            arranged = LAYOUTS[layout]
            for placement in (Shard(0), Replicate()):
                for name in ("product", "sine", "two"):
                    function, found = THROUGH[name], []
                    for run in function, dynamo.compiled(function)[0]:
                        local = arranged(dyadic(4, 2, 3, key=0, dtype=torch.float32).to(rank.device))
                        x = DTensor.from_local(local, mesh, [placement], run_check=False).requires_grad_()
                        result = run(x)
                        ends = result if isinstance(result, tuple) else (result,)
                        (gradient,) = torch.autograd.grad(ends, x, [torch.ones_like(y) for y in ends])
                        part = gradient.to_local()
                        found.append((gradient.stride(), part.stride(), part.tolist()))
                    if found[0] != found[1]:
                        wrong.append(f"{name}, {layout}, {placement}: {found[0]} uncompiled, {found[1]} compiled")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


LAST = torch.channels_last
FORMATTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "viewed": lambda x: x.flatten(1).view(x.shape).sin(),
    "viewed, made channels last": lambda x: x.sin().flatten(1).view(x.shape).contiguous(memory_format=LAST),
    "viewed as channels last": lambda x: x.flatten(1).view(len(x), 4, 4, 3).permute(0, 3, 1, 2) * 2,
    "permuted": lambda x: x.flatten(1).sin().view(len(x), 4, 4, 3).permute(0, 3, 1, 2),
}
"""Functions of images whose results have one of two memory formats."""


@requirement(
    "DYN-GRAD-8700",
    "With dynamic sizes, compiled code takes the gradients that uncompiled code takes, of whatever memory format "
    "results and gradients are.",
    source="torch.compile: dynamic; torch/_functorch/_aot_autograd: tangents; torch.channels_last",
)
@pytest.mark.world(1)
def test_formats_of_gradients(world: World) -> None:
    """Give contiguous gradients, and ones whose channels are last, for images that were viewed."""

    def body(rank: Rank) -> None:
        def every_function(xs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [function(x) for function, x in zip(FORMATTED.values(), xs, strict=True)]

        compiled, _ = dynamo.compiled(every_function, dynamic=True)
        for given in (torch.contiguous_format, LAST):
            found = []
            for run in every_function, compiled:
                image = dyadic(2, 3, 4, 4, key=0, dtype=torch.float32).to(rank.device)
                xs = [image.clone().requires_grad_() for _ in FORMATTED]
                ends = run(xs)
                weights = [
                    dyadic(*y.shape, key=1, dtype=torch.float32).to(rank.device).contiguous(memory_format=given)
                    for y in ends
                ]
                gradients = torch.autograd.grad(ends, xs, weights)
                found.append([(y.stride(), g.tolist()) for y, g in zip(ends, gradients, strict=True)])
            for name, right, other in zip(FORMATTED, *found, strict=True):
                assert right == other, f"{name}, {given}"

    world.run(body)


ENDS: dict[str, Callable[[torch.Tensor], Any]] = {
    **THROUGH,
    "viewed": lambda x: x.reshape(-1).sin().view(4, 6),
    "viewed again": lambda x: (x.sin().reshape(2, -1) * 2).view(-1, 2, 2).square(),
    "flattened": lambda x: x.cos().flatten(1),
    "product of matrices": lambda x: x.reshape(6, 4) @ x.reshape(4, 6),
    "scalar": lambda x: x.square().sum(),
    "summed over ranks": lambda x: functional.all_reduce(x.sin(), "sum", dist.group.WORLD) * 2,
    "gathered": lambda x: functional.all_gather_tensor_autograd(x * 3, 0, dist.group.WORLD),
    "scattered": lambda x: functional.reduce_scatter_tensor_autograd(x * 3, "sum", 0, dist.group.WORLD),
}
"""Functions whose backward needs gradients of some strides, or makes such of them."""
if runs_with("<2.12"):  # functional collectives refuse what is not contiguous
    ENDS = {
        name: function for name, function in ENDS.items() if name not in ("summed over ranks", "gathered", "scattered")
    }

GIVEN = ("contiguous", "offset", "column", "transposed", "expanded", "negative")
"""The layouts of gradients; in an expanded one all rows are the same."""


def pulled_back(rank: Rank, run: Callable[[list[torch.Tensor]], list[Any]], layout: str) -> list[list[Any]]:
    """Return the gradients of the arguments of ``ENDS``, for gradients of a layout, which a backward may not change."""
    value = dyadic(4, 2, 3, key=rank.index, dtype=torch.float32).to(rank.device)
    xs = [LAYOUTS["rotated"](value).detach().requires_grad_() for _ in ENDS]
    ends = [y for result in run(xs) for y in (result if isinstance(result, tuple) else (result,))]
    weights = [dyadic(*y.shape, key=(rank.index, n), dtype=torch.float32) for n, y in enumerate(ends)]
    if layout == "expanded":
        weights = [w[:1].expand(w.shape) if w.dim() else w for w in weights]
    pairs = [lay(w.to(rank.device), layout if w.dim() else "offset") for w in weights]
    gradients = torch.autograd.grad(ends, xs, [g for g, _ in pairs])
    assert [g.tolist() for g, _ in pairs] == [w.tolist() for w in weights], f"given gradients, {layout}"
    return [g.tolist() for g in gradients]


@requirement(
    "DYN-GRAD-9252",
    "Compiled code takes a gradient of any strides for each of its results, with the gradients of uncompiled code.",
    source="torch.compile; torch/_functorch/_aot_autograd: tangents; torch.autograd.grad: grad_outputs",
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.world(2)
def test_strides_of_given_gradients(world: World, dynamic: bool) -> None:
    """Give gradients of six layouts for the results of views, products and collectives of rotated arguments."""

    def body(rank: Rank) -> None:
        def every_function(xs: list[torch.Tensor]) -> list[Any]:
            return [function(x) for function, x in zip(ENDS.values(), xs, strict=True)]

        compiled, counter = dynamo.compiled(every_function, dynamic=dynamic)
        for layout in GIVEN:
            right, found = (pulled_back(rank, run, layout) for run in (every_function, compiled))
            for name, one, other in zip(ENDS, right, found, strict=True):
                assert one == other, f"{name}, gradients {layout}"
        assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-GRAD-9252",
    "Compiled code takes a gradient of any strides for each of its results, with the gradients of uncompiled code.",
    source="torch.compile; torch/_functorch/_aot_autograd: tangents; torch.autograd.grad: grad_outputs",
)
@pytest.mark.needs(features=["inductor"])
@pytest.mark.world(2, timeout=120)
def test_strides_of_gradients_given_to_generated_code(world: World) -> None:
    """Give gradients of six layouts to one backward that Inductor generates."""

    def body(rank: Rank) -> None:
        def code(x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x.sin(), "sum", dist.group.WORLD) * 2

        with dynamo.inductor_options({"fallback_by_default": True}):
            compiled, _ = dynamo.compiled(code, backend="inductor")
            for layout in GIVEN:
                found = []
                for run in code, compiled:
                    x = dyadic(3, 5, key=rank.index, dtype=torch.float32).to(rank.device).requires_grad_()
                    weight = dyadic(3, 5, key=layout, dtype=torch.float32).to(rank.device)
                    weight = weight[:1].expand(3, 5) if layout == "expanded" else weight
                    (gradient,) = torch.autograd.grad(run(x), x, lay(weight, layout)[0])
                    found.append(gradient.tolist())
                assert found[0] == found[1], layout

    world.run(body)
