"""Functions that compiled code calls as a whole, takes for another one or for a constant, as users have marked them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import Rank, World, assert_same, dyadic, requirement
from harness.stacks import compiling, dynamo
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with
from harness.stacks.tracing import Tracer


class Scaled(nn.Module):
    """Multiplies by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0, 5.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float[n, 3] to float[n, 3]."""
        return x * self.weight


class Calls:
    """A function that sums over ranks, and how often it was called."""

    def __init__(self) -> None:
        self.count = 0

    def listed(self, x: torch.Tensor, rest: Any, k: float) -> Any:
        """Sum a product of tensors and a number."""
        self.count += 1
        y = functional.all_gather_tensor_autograd(x * rest[0], 0, dist.group.WORLD)
        return y * k, [y[:2] + rest[-1]]

    def nested(self, given: dict[str, Any], *, scale: Any, module: Any) -> Any:
        """Do so with containers and a module, and break the graph."""
        self.count += 1
        dynamo.graph_break()
        y = functional.all_gather_tensor_autograd(module(given["x"]) * given["rest"][0], 0, dist.group.WORLD)
        return {"all": y * scale["k"], "part": (y[:2] + given["rest"][1],)}


def allowed(calls: Calls, module: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Call functions that allow_in_graph was given in a list, with a list, a tuple and numbers."""
    first, second = torch.compiler.allow_in_graph([calls_of(calls), calls_of(calls)])

    def code(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole, (part,) = first(x * 2, [w, x], 3)
        again, (other,) = second(module(part), (w,), 0.5)
        return whole[:2] * again[2:] + other

    return code


def calls_of(calls: Calls) -> Callable[..., Any]:
    """Return a function of its own that calls the method."""
    return lambda x, rest, k: calls.listed(x, rest, k)


def traced(calls: Calls, module: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Call a function that nonstrict_trace was given, with containers, keywords and a module."""
    function = compiling.nonstrict(lambda given, **named: calls.nested(given, **named))

    def code(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = function({"x": x, "rest": [w, x]}, scale={"k": 3}, module=module)
        second = function({"x": first["part"][0], "rest": (w, w)}, module=module, scale={"k": 2})
        return first["all"][2:] * second["all"][:2] + second["part"][0]

    return code


def leaves(calls: Calls, module: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Call a function that leaf_function was given, with containers and a module."""
    function = compiling.leaf(
        lambda x, rest, module: calls.listed(module(x), rest, 3),
        lambda x, rest, module: (x.new_empty(4, 3), [torch.empty_like(x)]),
    )

    def code(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first, (part,) = function(x, [w * 1, x], module)
        second, (other,) = function(part * 2, (w * 2,), module)
        return first[:2] * second[2:] + other

    return code


MARKED = {"allow_in_graph": allowed, "nonstrict_trace": traced, "leaf_function": leaves}


@requirement(
    "DYN-OPAQUE-5560",
    "Compiled code calls a function of allow_in_graph, nonstrict_trace or leaf_function as a whole, with the results "
    "of uncompiled code.",
    source="torch.compiler.allow_in_graph; torch._dynamo.decorators: nonstrict_trace, leaf_function",
)
@requirement(
    "DYN-OPAQUE-5561",
    "A compiled step runs a function that leaf_function was given once for each call in the code, but not to compile.",
    source="torch._dynamo.decorators.leaf_function: 'at runtime, the original eager Python code is executed directly'",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, nonstrict_trace takes no modules")
@pytest.mark.world(2, timeout=120)
def test_marked(world: World) -> None:
    """Mark functions that gather, call each twice, and train two steps with another input."""

    def body(rank: Rank) -> None:
        def trained(mark: str, backend: str | None) -> tuple[list[torch.Tensor], list[int], list[int]]:
            torch.compiler.reset()
            calls, module = Calls(), Scaled().to(rank.device)
            code, tracer = MARKED[mark](calls, module), Tracer(backend or "eager")
            function: Any = torch.compile(code, backend=tracer, fullgraph=True) if backend else code
            found, counts = [], []
            for step in range(2):
                x, w = (
                    dyadic(*s, key=(step, rank.index, s), dtype=torch.float32, span=2).to(rank.device).requires_grad_()
                    for s in ((2, 3), (3,))
                )
                before = calls.count
                y = function(x, w)
                (y * x.detach()).sum().backward()
                counts.append(calls.count - before)
                assert x.grad is not None
                assert w.grad is not None
                assert module.weight.grad is not None
                found += [y.detach(), x.grad, w.grad, module.weight.grad.clone()]
            gathers = [sum("gather" in o.name for o in graph.operators) for graph in tracer.graphs]
            return found, counts, gathers

        for mark in MARKED:
            right, _, _ = trained(mark, None)
            for backend in ("eager", "aot_eager"):
                found, counts, gathers = trained(mark, backend)
                for number, (one, other) in enumerate(zip(right, found, strict=True)):
                    assert_same(one + 0, other + 0, f"{mark}: tensor {number} with {backend}")
                assert gathers == [0], f"{mark}: one graph from Dynamo, without what the function calls: {gathers}"
                if mark == "leaf_function":
                    assert counts == [2, 2], backend

    world.run(body)


@requirement(
    "DYN-OPAQUE-5562",
    "Compiled code changes the arguments that leaf_function was told of, and no others.",
    source="torch._dynamo.decorators.leaf_function: mutates_args, 'undeclared in-place mutations are detected'",
)
@requirement(
    "DYN-OPAQUE-5563",
    "In each compiled backward, the hook of a leaf_function gets once the gradients of its tensors that require them.",
    source="torch._dynamo.decorators.leaf_function: register_multi_grad_hook",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, hooks have no place in leaf functions")
@pytest.mark.world(2, timeout=120)
def test_leaves(world: World) -> None:
    """Sum into a buffer, in a list or not, which was named or not; sum gradients in a hook."""

    def body(rank: Rank) -> None:
        def into(x: torch.Tensor, buffers: Any) -> tuple[torch.Tensor]:
            buffers[0].add_(x.detach())
            dist.all_reduce(buffers[0])
            return (buffers[0] * x,)

        def like(x: torch.Tensor, buffers: Any) -> tuple[torch.Tensor]:
            return (torch.empty_like(x),)

        x = torch.tensor([1.0, 2.0], device=rank.device) + rank.index
        total = torch.tensor([3.0, 5.0], device=rank.device)
        for backend in ("eager", "aot_eager"):
            for mutates in ({"buffers"}, {"buffers[0]"}, None):
                torch.compiler.reset()
                function = compiling.leaf(into, like, mutates=mutates)
                code: Any = torch.compile(lambda x, *b, f=function: f(x, b)[0] + b[0], backend=backend, fullgraph=True)  # type: ignore[misc]
                first, second = torch.zeros(2, device=rank.device), torch.ones(2, device=rank.device)
                if mutates is None:
                    with pytest.raises(Exception, match=r"(?i)mutation"):
                        code(x, first, second)
                    continue
                for expected in (total, total * 3):
                    y = code(x, first, second)
                    assert_same(expected, first, f"buffer with {backend}")
                    assert_same(expected * x + expected, y, f"result with {backend}")
                assert second.tolist() == [1.0, 1.0]
            torch.compiler.reset()
            seen = list[list[torch.Tensor]]()

            def hook(*gradients: torch.Tensor, seen: list[list[torch.Tensor]] = seen) -> None:
                sums = [g.clone() for g in gradients]
                for each in sums:
                    dist.all_reduce(each)
                seen.append(sums)

            function = compiling.leaf(
                lambda a, constant, b: (a * constant + b,), lambda a, *_: (torch.empty_like(a),), hook=hook
            )
            code = torch.compile(
                lambda a, c, b, f=function: f(a * 1, c, b * 2)[0] * c,
                backend=backend,
                fullgraph=True,  # type: ignore[misc]
            )
            for step in range(2):
                a, b = (torch.ones(2, device=rank.device, requires_grad=True) for _ in range(2))
                code(a, x, b).sum().backward()
                assert len(seen) == step + 1, backend
                squares = torch.tensor([5.0, 13.0], device=rank.device)
                for right, found in zip([squares, total], seen[-1], strict=True):
                    assert_same(right, found, f"sum of gradients with {backend}")

    world.run(body)


def tripled(x: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, three times."""
    return functional.all_reduce(x, "sum", dist.group.WORLD) * 3


@requirement(
    "DYN-OPAQUE-5564",
    "Compiled code uses the function that substitute_in_graph was given for another one, which uncompiled code calls.",
    source="torch.compiler.substitute_in_graph",
)
@requirement(
    "DYN-OPAQUE-5565",
    "Compiled code calls a function that assume_constant_result was given when it is compiled only.",
    source="torch.compiler.assume_constant_result",
)
@requirement(
    "DYN-OPAQUE-5566",
    "torch.compiler.is_compiling() is true within code that is compiled or exported, be it in a module of it, and else "
    "false, also where compilation is disabled.",
    source="torch.compiler.is_compiling",
)
@requirement(
    "DYN-OPAQUE-5567",
    "With wrap_numpy, compiled code calls a function of NumPy arrays on tensors, with gradients.",
    source="torch.compiler.wrap_numpy",
)
@pytest.mark.world(2, timeout=120)
def test_taken_for_others(world: World) -> None:
    """Use each function of torch.compiler in one graph with a sum, for two inputs; break the graph once."""

    def body(rank: Rank) -> None:
        torch.compiler.reset()
        counted = list[int]()

        def original(x: torch.Tensor, k: int) -> torch.Tensor:
            counted.append(k)
            return x * k

        def other(x: torch.Tensor, k: int) -> torch.Tensor:
            return x * k + 1

        def one(x: torch.Tensor) -> torch.Tensor:
            return x

        with pytest.raises(Exception, match=r"(?i)signature"):
            torch.compiler.substitute_in_graph(original)(one)
        assert torch.compiler.substitute_in_graph(original)(other)(torch.ones(1), 2).tolist() == [2.0]
        assert counted.pop() == 2

        number = [5]

        @torch.compiler.assume_constant_result
        def constant() -> int:
            counted.append(-1)
            return number[0]

        asked = list[bool]()

        class Asking(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + 10 if torch.compiler.is_compiling() else x + 20

        module = Asking()

        @torch.compiler.disable
        def outside(x: torch.Tensor) -> torch.Tensor:
            asked.append(torch.compiler.is_compiling())
            return module(x)  # type: ignore[no-any-return]

        numpy = torch.compiler.wrap_numpy(lambda a: (a * a).sum(axis=0))

        def code(x: torch.Tensor) -> list[torch.Tensor]:
            y = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
            return [original(y, 2), y * constant(), module(y), numpy(y)]

        function, counter = dynamo.compiled(code)
        for step in range(2):
            number[0] = 5 + step
            x = (dyadic(2, 3, key=(rank.index, step), dtype=torch.float32) + 1).to(rank.device).requires_grad_()
            y = functional.all_gather_tensor(x.detach(), 0, dist.group.WORLD)
            results = function(x)
            for i, right in enumerate((y * 2 + 1, y * 5, y + 10, (y * y).sum(0))):
                assert_same(right + 0, results[i].detach() + 0, f"result {i} of step {step}")
            results[3].sum().backward()
            assert x.grad is not None
            assert_same(x.detach() * 2 * rank.size, x.grad, "gradient through NumPy")
        assert counted == [-1]
        assert counter.graphs == 1
        assert original(torch.ones(1), 4).tolist() == [4.0]
        assert counted == [-1, 4]
        broken, _ = dynamo.compiled(lambda x: outside(tripled(module(x))) + module(x), fullgraph=False)
        assert broken(torch.zeros(1, device=rank.device)).tolist() == [10.0 * rank.size * 3 + 20 + 10]
        assert asked == [False]
        assert not torch.compiler.is_compiling()
        assert module(torch.zeros(1)).tolist() == [20.0]

    world.run(body)
