"""A torch.autograd.Function with collectives, compiled: its arguments, its context, and when it reduces gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import Function

from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import dynamo
from harness.stacks.limit import runs_with
from harness.stacks.training import launched, since
from suites.dynamo.objects import summed

Outputs = tuple[torch.Tensor, ...]


class Scaled(Function):
    """Sum x * w * factor over ranks; the context keeps two tensors, a number and a shape."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.factor, ctx.shape = factor, x.shape
        return summed(x * w * factor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        gradient = summed(gradient) * ctx.factor
        return (gradient * w).view(ctx.shape), gradient * x, None


class Apart(Function):
    """The same, but the context is set apart from the forward, and has the output, too."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, factor: float) -> torch.Tensor:
        return summed(x * w * factor) + 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, w, ctx.factor = inputs
        ctx.save_for_backward(w, output, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        w, output, x = ctx.saved_tensors
        gradient = gradient * ctx.factor + output
        return gradient * w, gradient * x, None


class Twice(Function):
    """Multiply two tensors, and save tensors for the backward a second time, as a function and its base may do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.save_for_backward(w, x)
        return summed(x * w)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        w, x = ctx.saved_tensors[0], ctx.saved_tensors[-1]
        scale = len(ctx.saved_tensors)
        return gradient * w * scale, gradient * x, *(None for _ in ctx.needs_input_grad[2:])


class Needed(Function):
    """Sum those gradients over ranks that are needed, as tensor parallelism does, with one collective for each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        of_x = summed(gradient * w * ctx.factor) if ctx.needs_input_grad[0] else None
        of_w = summed(gradient * x * ctx.factor) if ctx.needs_input_grad[1] else None
        assert not ctx.needs_input_grad[2]
        return of_x, of_w, None


class Told(Function):
    """Return a product, and two sums over ranks that are marked as not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, factor: float) -> Outputs:
        ctx.save_for_backward(x, w)
        total, most = summed(x.detach() * factor) + 0, summed(w.detach()).sum()
        ctx.mark_non_differentiable(total, most)
        return total, x * w, most

    @staticmethod
    def backward(ctx: Any, first: Any, gradient: torch.Tensor, last: Any) -> Any:
        x, w = ctx.saved_tensors
        return gradient * w, gradient * x, None


class Reduced(Function):
    """Multiply, and sum the gradient that the backward is given over ranks in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        dist.all_reduce(gradient)
        return gradient * w, gradient * x


class Changed(Function):
    """Return two products, and change the gradients of both in place: a part of one, and one by the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Outputs:
        ctx.save_for_backward(x, w)
        return x * w, x * w * 2

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        first[:1].mul_(4)
        dist.all_reduce(first, dist.ReduceOp.MAX)
        second.add_(first)
        return first * w, second * x


class Dirty(Function):
    """Sum the first of two tensors over ranks in place."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, w: torch.Tensor) -> Outputs:
        ctx.save_for_backward(w)
        ctx.mark_dirty(h)
        dist.all_reduce(h)
        return h, w * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, other: torch.Tensor) -> Any:
        (w,) = ctx.saved_tensors
        return gradient * 10, other * w


class Same(Function):
    """Return the input itself, and multiply its gradient by ten."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return summed(gradient) * 10


def _marked_dirty(x: torch.Tensor, w: torch.Tensor) -> Outputs:
    h = x * w
    y, doubled = Dirty.apply(h, w)
    return y * 2 + h, doubled


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "saved": lambda x, w: (Scaled.apply(x, w, 3.0),),
    "setup_context": lambda x, w: (Apart.apply(x, w, 3.0),),
    "saved twice": lambda x, w: (Twice.apply(x, w, x + w), Twice.apply(x, w), Twice.apply(x, w, x * 2, x * 3, w * 2)),
    "needs_input_grad": lambda x, w: (Needed.apply(x, w, 3.0),),
    "mark_non_differentiable": lambda x, w: Told.apply(x, w, 3.0),
    "mark_dirty": _marked_dirty,
    "gradient reduced in place": lambda x, w: (Reduced.apply(x, w),),
    "gradients changed in place": lambda x, w: Changed.apply(x, w),
    "input returned": lambda x, w: (Same.apply(x) * w, x * 2),
}

BACKENDS = dict.fromkeys(("saved", "setup_context", "saved twice", "needs_input_grad"), ("eager",))
BACKENDS |= {name: ("aot_eager",) for name in CALLS if name.startswith("gradient")}
"""The backends of those that are not tried with each."""


@requirement(
    "DYN-AUTOFN-51",
    "A compiled autograd.Function with collectives has the outputs and the gradients of the uncompiled one.",
    source="torch.autograd.Function; torch.autograd.function.FunctionCtx: save_for_backward, mark_dirty",
)
@requirement(
    "DYN-AUTOFN-325",
    "The backward of a compiled autograd.Function may change the gradients that it is given in place, also by "
    "collectives.",
    source="torch.autograd.Function: backward; torch/_functorch/_aot_autograd: mutations; pytorch/pytorch#141111",
)
@requirement(
    "DYN-AUTOFN-52",
    "The outputs of a compiled autograd.Function require gradients exactly if those of the uncompiled one do.",
    source="torch.autograd.function.FunctionCtx: mark_non_differentiable",
)
@requirement(
    "DYN-AUTOFN-53",
    "A compiled autograd.Function launches in each pass the collectives that the uncompiled one launches.",
    source="torch.autograd.function.FunctionCtx: needs_input_grad",
)
@requirement(
    "DYN-AUTOFN-54",
    "If a compiled autograd.Function is called several times before the backwards, each backward has its own context.",
    source="torch.autograd.function.FunctionCtx: save_for_backward",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, gradients of such compiled functions are zeros")
@pytest.mark.world(2)
def test_contexts(world: World) -> None:
    """Both tensors need gradients, or either one does; call twice, and run the backwards in the order of the calls."""

    def body(rank: Rank) -> None:
        def tried(function: Callable[..., Any], needed: tuple[bool, bool]) -> tuple[list[Any], list[Any]]:
            before = launched()
            x, w = (torch.tensor([k, 3.0 + rank.index], device=rank.device).requires_grad_(needed[k]) for k in (0, 1))
            calls = [function(x + call, w) for call in range(2)]
            facts: list[Any] = [since(before), *(y.requires_grad for outputs in calls for y in outputs)]
            tensors: list[Any] = [y.detach() + 0 for outputs in calls for y in outputs]
            for call, outputs in enumerate(calls):
                before = launched()
                of_loss = [(y * (call + 1)).sum() for y in outputs if y.requires_grad]
                torch.stack(of_loss).sum().backward()
                gradients = [t.grad for t in (x, w)]
                facts += [since(before), *(g is None for g in gradients)]
                tensors += [g + 0 for g in gradients if g is not None]
            return facts, tensors

        for name, call in CALLS.items():
            if name == "mark_dirty" and runs_with("<2.13"):
                continue  # before 2.13, it has no effect on compiled code
            for backend in BACKENDS.get(name, ("eager", "aot_eager")):
                compiled, counter = dynamo.compiled(call, backend=backend)
                cases = [(True, True)]
                if backend == "eager" and name in ("needs_input_grad", "mark_non_differentiable"):
                    cases += [(True, False), (False, True)]
                for needed in cases:
                    what = f"{name}, {backend}, gradients needed {needed}"
                    facts, right = tried(call, needed)
                    found = tried(compiled, needed)
                    assert found[0] == facts, what
                    for one, other in zip(right, found[1], strict=True):
                        assert_same(one, other, what)
                assert counter.graphs == len(cases), name

    world.run(body)


class Shifted(Function):
    """Sum x * before over ranks and add two numbers of different weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, before: Any, after: float, last: float = 0.0) -> torch.Tensor:
        ctx.by = before * 2 + after * 100 + last * 10000
        return summed(x * before) + after * 100 + last * 10000

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.by, None, None, None


ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "positions": lambda x: Shifted.apply(x, 3.0, 5.0, 7.0),
    "in order": lambda x: Shifted.apply(x, 3.0, after=5.0, last=7.0),
    "reversed": lambda x: Shifted.apply(x, 3.0, last=7.0, after=5.0),
    "turned": lambda x: Shifted.apply(x, after=5.0, last=7.0, before=3.0),
    "tensor last": lambda x: Shifted.apply(last=7.0, before=3.0, after=5.0, x=x),
    "another tensor": lambda x: Shifted.apply(x, last=7.0, after=5.0, before=x.detach()),
}


@requirement(
    "DYN-AUTOFN-55",
    "A compiled autograd.Function has each argument under its name, in whatever order the call gives it.",
    source="torch.autograd.Function.apply",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, apply takes no keyword arguments")
@pytest.mark.world(2)
def test_names_of_arguments(world: World) -> None:
    """Give four arguments by position and by name, in orders that differ from the forward's."""

    def body(rank: Rank) -> None:
        for name, call in ORDERS.items():
            compiled, counter = dynamo.compiled(call, backend="eager")
            found = []
            for function in (call, compiled):
                x = torch.tensor([2.0, 3.0 + rank.index], device=rank.device, requires_grad=True)
                y = function(x)
                y.sum().backward()
                found.append((y.tolist(), [] if x.grad is None else x.grad.tolist()))
            assert found[0] == found[1], name
            assert counter.graphs == 1, name

    world.run(body)


class Kept(Function):
    """Multiply by a tensor that the context keeps as an attribute, not by save_for_backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.w = w
        return summed(x * w)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.w, None


class Dropped(Function):
    """Multiply by random numbers, which are the gradient, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Outputs:
        factors = torch.rand_like(x)
        ctx.save_for_backward(factors)
        ctx.mark_non_differentiable(factors)
        return summed(x * factors), factors

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        (factors,) = ctx.saved_tensors
        return gradient * factors


@requirement(
    "DYN-AUTOFN-2500",
    "A tensor that the context of a compiled autograd.Function keeps as an attribute has in the backward what it has "
    "then.",
    source="torch.autograd.function.FunctionCtx: attributes; torch.compile",
)
@requirement(
    "DYN-AUTOFN-2501",
    "The backward of a compiled autograd.Function has the random numbers that its forward has drawn.",
    source="torch.autograd.function.FunctionCtx: save_for_backward; torch.compile",
)
@pytest.mark.world(2)
def test_kept(world: World) -> None:
    """Change a tensor on the context before the backward, and draw random factors in the forward."""

    def body(rank: Rank) -> None:
        for call in Kept.apply, dynamo.compiled(lambda x, w: Kept.apply(x, w), backend="aot_eager")[0]:
            x = torch.ones(2, device=rank.device, requires_grad=True)
            w = torch.full((2,), 2.0, device=rank.device)
            y = call(x, w)
            w += 2
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.tolist() == [4.0, 4.0]
        for backend in "aot_eager", "aot_eager_decomp_partition":
            x = torch.ones(8, device=rank.device, requires_grad=True)
            y, factors = dynamo.compiled(lambda x: Dropped.apply(x), backend=backend)[0](x)
            y.sum().backward()
            assert_same(factors, x.grad, backend)

    world.run(body)


@requirement(
    "DYN-AUTOFN-2502",
    "The outputs of an autograd.Function require gradients within compiled code exactly if they do in uncompiled code, "
    "also under no_grad.",
    source="torch.autograd.Function; torch.no_grad; torch.compile",
)
@pytest.mark.world(2)
def test_needed_within(world: World) -> None:
    """Ask in the code whether the outputs require gradients, with and without them."""

    names = [name for name in CALLS if name != "mark_dirty"]

    def asked(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
        return [[(y * (2 if y.requires_grad else 3)).detach() for y in CALLS[name](x, w)] for name in names]

    def body(rank: Rank) -> None:
        x, w = (torch.tensor([k, 3.0 + rank.index], device=rank.device).requires_grad_() for k in (1.0, 2.0))
        for enabled in True, False:
            with torch.set_grad_enabled(enabled):
                right, found = asked(x, w), dynamo.compiled(asked, backend="eager")[0](x, w)
            for name, one, other in zip(names, right, found, strict=True):
                assert [y.tolist() for y in other] == [y.tolist() for y in one], (name, enabled)

    world.run(body)


class Optional(Function):
    """Return two products, and say by the gradient which of them have one; a rank uses only one of them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, materializes: bool) -> Outputs:
        ctx.set_materialize_grads(materializes)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        if first is None or second is None:
            used = second if first is None else first
            return used * (5 if first is None else 7), None
        return first * 2 + second * 3, None


@requirement(
    "DYN-AUTOFN-2900",
    "The backward of a compiled autograd.Function has None for outputs without gradient after "
    "set_materialize_grads(False), but zeros by default.",
    source="torch.autograd.function.FunctionCtx.set_materialize_grads; pytorch/pytorch#118396",
)
@pytest.mark.parametrize("gradients", ["materialized", "not-materialized"])
@pytest.mark.world(2)
def test_unused_outputs(world: World, gradients: str) -> None:
    """Use another output on each rank, and sum the gradients over ranks."""

    def call(x: torch.Tensor) -> Outputs:
        outputs: Outputs = Optional.apply(x, gradients == "materialized")
        return outputs

    def body(rank: Rank) -> list[list[float]]:
        found = []
        for function in (call, *(dynamo.compiled(call, backend=backend)[0] for backend in ("eager", "aot_eager"))):
            x = torch.ones(2, device=rank.device, requires_grad=True)
            function(x)[rank.index].sum().backward()
            assert x.grad is not None
            dist.all_reduce(x.grad)
            found.append(x.grad.tolist())
        return found

    right = [2.0 + 3.0] * 2 if gradients == "materialized" else [5.0 + 7.0] * 2
    assert_on_ranks([[right] * 3] * 2, world.run(body))
