"""input_reshard and loss_parallel: one device's numbers, and nothing that stays when they are over."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel, implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.parallel.input_reshard import input_reshard

from fixtures.placements import MORE_OPERATORS, laid_out, part
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages

SOURCE = "torch.distributed.tensor.parallel"


@requirement(
    "TP-RESHARD-01",
    "With input_reshard over any dimension, a module has the output and gradients that it has without.",
    source=f"{SOURCE}.input_reshard",
)
@requirement(
    "TP-RESHARD-02",
    "input_reshard shards what its module saves for the backward, and nothing that other modules save.",
    source=f"{SOURCE}.input_reshard",
)
@pytest.mark.world(2, 3)
def test_input_reshard(world: World) -> None:
    """Shard each dimension that ranks divide, or none, for the inputs of plain and of tensor-parallel modules."""

    class Product(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(numbers(*shape) % 3 + 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x * self.weight

    def trained(model: nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], int]:
        leaf = x.clone().requires_grad_()
        output = model(leaf)
        at = messages.mark()
        (output * output).sum().backward()
        gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        found = [t for t in (output.detach(), leaf.grad, *gradients) if t is not None]
        return found, len(messages.since(at))

    def body(rank: Rank) -> None:
        for shape in (6, 6), (6, 4, 6), (5, 6):
            x = (numbers(*shape) % 5 + 1).to(rank.device)
            for dim in (None, *range(len(shape)), -1):
                plain = nn.Sequential(Product(*shape), Product(*shape), Product(*shape)).to(rank.device)
                expected, _ = trained(plain, x)
                for where in (0, 1, 2), (1,), ():
                    what = f"shape {shape}, dim {dim}, modules {where}"
                    if dim is not None and shape[dim] % rank.size:
                        continue  # input_reshard_uneven: these are restored to a wrong size
                    model = nn.Sequential(Product(*shape), Product(*shape), Product(*shape)).to(rank.device)
                    for i in where:
                        assert input_reshard(model[i], rank.mesh(), dim) is model[i], what
                    for _ in range(2):
                        model.zero_grad()
                        found, collectives = trained(model, x)
                        for i, (right, tensor) in enumerate(zip(expected, found, strict=True)):
                            assert_same(right, tensor, f"{what}: {i}")
                        if dim is None or not where:
                            assert collectives == 0, what
                        else:
                            assert collectives, what
                            assert collectives % len(where) == 0, f"{what}: {collectives}"
        if rank.size == 2:
            x = (numbers(4, 6) % 5).to(rank.device)
            for style in ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate()):
                results = []
                for dim in None, 0, 1:
                    layer = nn.Linear(6, 6, device=rank.device)
                    with torch.no_grad():
                        for parameter in layer.parameters():
                            parameter.copy_(numbers(*parameter.shape) % 5 - 2)
                    layer = parallelize_module(layer, rank.mesh(), style)
                    results.append(trained(input_reshard(layer, rank.mesh(), dim), x)[0])
                for result in results[1:]:
                    for right, found in zip(results[0], result, strict=True):
                        assert_same(right, found, "tensor-parallel layer")

    world.run(body)


@requirement(
    "TP-RESHARD-01",
    "With input_reshard over any dimension, a module has the output and gradients that it has without.",
    source=f"{SOURCE}.input_reshard",
)
@pytest.mark.parametrize("saved", ["activations of a rank", "unequal parts", "few elements", "a vector", "a matrix"])
@pytest.mark.world(2)
def test_input_reshard_of_parts(world: World, saved: str) -> None:
    """A module saves what each rank has of its own, what ranks don't divide, as many elements as ranks, or a vector."""

    class Product(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(numbers(*shape) % 3 + 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    shapes = {"unequal parts": (3, 6), "few elements": (2, 1), "a matrix": (2, 6)}
    dims = {"unequal parts": (None, 0), "few elements": (None, 0), "a vector": (None, 1)}

    def body(rank: Rank) -> None:
        for dim in dims.get(saved, (None, 0, 1)):
            shape = shapes.get(saved, (3, 6))
            model: nn.Module = nn.Sigmoid() if saved == "unequal parts" else Product(*shape[saved == "a vector" :])
            model.to(rank.device)
            x = (numbers(*shape) % 5 / 4).to(rank.device)
            if saved == "activations of a rank":
                layers = [nn.Linear(6, 6, bias=False, device=rank.device) for _ in range(2)]
                for layer in layers:
                    nn.init.constant_(layer.weight, 0.125)
                model, x = nn.Sequential(layers[0], nn.Tanh(), layers[1]), torch.cat([x, x + 1])
                with torch.no_grad():
                    layers[0].weight += numbers(6, 6).to(rank.device) / 64
                parallelize_module(model, rank.mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
            leaf = x.clone().requires_grad_()
            input_reshard(model, rank.mesh(), dim)(leaf).square().sum().backward()
            found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
            gradients = [leaf.grad, *found]
            if dim is None:
                expected = gradients
            for one, other in zip(expected, gradients, strict=True):
                assert one is not None
                assert other is not None
                assert torch.allclose(one, other), f"gradients differ if dimension {dim} is sharded"

    world.run(body)


@requirement(
    "TP-RESHARD-9303",
    "After a module with input_reshard has raised an error, other modules' gradients are what they would be without.",
    source=f"{SOURCE}.input_reshard: 'Register hooks to an nn.Module'",
)
@requirement(
    "TP-RESHARD-9304",
    "After a module with input_reshard has raised an error, other modules on the rank send no messages.",
    source=f"{SOURCE}.input_reshard: 'Register hooks to an nn.Module'",
)
@pytest.mark.parametrize("where", ["nowhere", "before", "inside"])
@pytest.mark.world(2)
def test_input_reshard_left(world: World, where: str) -> None:
    """Raise an error before the module, in it, or not at all, and take a step of a plain module, or of another one."""

    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where == "inside":
                raise LookupError
            return x * x

    def fail(*_: Any) -> None:
        if where == "before":
            raise LookupError

    def body(rank: Rank) -> list[Any]:
        model = nn.Sequential(nn.Identity(), input_reshard(Failing(), rank.mesh(), 0))
        model[0].register_forward_hook(fail)
        with suppress(LookupError):
            model(torch.ones(4, 2, device=rank.device))
        at, found = messages.mark(), []
        for other in nn.Tanh(), input_reshard(nn.Tanh(), rank.mesh(), None):
            x = torch.full((4,), 0.0 + rank.index, device=rank.device, requires_grad=True)
            other(x).sum().backward()
            assert x.grad is not None
            found.append([round(value, 2) for value in x.grad.tolist()])
        return [found, len(messages.since(at))]

    right = [[[[gradient] * 4] * 2, 0] for gradient in (1.0, 0.42)]  # 1 - tanh(x)^2
    assert_on_ranks(right, world.run(body))


@requirement(
    "TP-LOSS-01",
    "After loss_parallel has ended, softmax and losses of DTensors are what they were before it.",
    source=f"{SOURCE}.loss_parallel",
)
@requirement(
    "TP-LOSS-02",
    "In loss_parallel, the loss of logits that are sharded over classes never gathers the logits.",
    source=f"{SOURCE}.loss_parallel",
)
@requirement(
    "TP-LOSS-38",
    "In loss_parallel, the forward of a loss takes three collectives: a maximum, a sum of exponentials, and the loss.",
    source=f"{SOURCE}.loss_parallel; test_tp_examples.py: test_loss_parallel",
)
@pytest.mark.world(2)
def test_loss_parallel_ends(world: World) -> None:
    """Compare log_softmax and cross_entropy before, between and after two uses, on logits in every layout."""

    def body(rank: Rank) -> None:
        logits = (numbers(4, 6) % 5 / 4).double().to(rank.device)
        targets = torch.tensor([0, 5, 2, 3], device=rank.device)

        before = outcomes(rank, logits, targets)
        assert sum(not isinstance(outcome, str) for outcome in before) >= 6, before
        for _ in range(2):
            with loss_parallel():
                at = messages.mark()
                sharded = DTensor.from_local(part(logits, rank, Shard(1)).contiguous(), rank.mesh(), [Shard(1)])
                sharded.requires_grad_()
                loss: Any = nn.functional.cross_entropy(sharded, targets)
                assert len(messages.since(at)) == 3, "the maximum, the sum of exponentials, and the loss"
                loss.backward()
                assert all(message.bytes <= 4 * 8 for message in messages.since(at)), messages.since(at)
            assert loss.placements == (Replicate(),)
            assert sharded.grad.placements == (Shard(1),)  # type: ignore[union-attr]
            assert outcomes(rank, logits, targets) == before

    world.run(body)


def outcomes(rank: Rank, logits: torch.Tensor, targets: torch.Tensor) -> list[Any]:
    """Return the results of functions on logits in every layout, or the names of their errors."""
    found: list[Any] = []
    for layout, name in itertools.product((Replicate(), Shard(0), Shard(1)), ("classes", "rows", "loss")):
        sharded = DTensor.from_local(part(logits, rank, layout).contiguous(), rank.mesh(), [layout])
        at = messages.mark()
        try:
            if name == "loss":
                result: Any = nn.functional.cross_entropy(sharded, distributed(rank, targets, layout))
            else:
                result = nn.functional.log_softmax(sharded, 1 if name == "classes" else 0)
        except (RuntimeError, ValueError, NotImplementedError) as e:
            found.append(type(e).__name__)
        else:
            whole = result.full_tensor() if isinstance(result, DTensor) else result
            found.append((str(getattr(result, "placements", "")), whole.tolist(), len(messages.since(at))))
    return found


def distributed(rank: Rank, targets: torch.Tensor, layout: Placement) -> DTensor:
    """Return targets in the layout that belongs to logits in a layout."""
    at = layout if layout == Shard(0) else Replicate()
    return DTensor.from_local(part(targets, rank, at), rank.mesh(), [at])


LOSSES: dict[str, dict[str, Callable[[Any, Any, Any], Any]]] = {
    "of-targets": {
        "cross_entropy": lambda x, w, i: nn.functional.cross_entropy(x, i),
        "nll_loss": lambda x, w, i: nn.functional.nll_loss(nn.functional.log_softmax(x, 1), i, reduction="sum"),
        "softmax": lambda x, w, i: (nn.functional.softmax(x, 1) * w).sum(),
    },
    "of-log-probabilities": {
        "product": lambda x, w, i: (nn.functional.log_softmax(x, 1) * w).sum(),
        "both": lambda x, w, i: (nn.functional.log_softmax(x, 1) * w).sum() + nn.functional.cross_entropy(x, i),
        "kl_div": lambda x, w, i: nn.functional.kl_div(nn.functional.log_softmax(x, 1), w, reduction="sum"),
    },
}
"""Functions of logits, weights and targets, by what they compute with."""


@requirement(
    "TP-LOSS-188",
    "In loss_parallel, any function of log_softmax has one device's gradient, not only the cross-entropy.",
    source=f"{SOURCE}.loss_parallel; pytorch/pytorch#190746",
)
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.world(2)
def test_functions_of_log_softmax(world: World, kind: str) -> None:
    """Shard logits and weights over classes; take the loss of targets, and sums and divergences without targets."""

    def body(rank: Rank) -> list[str]:
        logits = (numbers(4, 6) % 5 / 4).double().to(rank.device)
        weights, targets = (logits + 1).softmax(1), torch.tensor([0, 5, 2, 3], device=rank.device)
        wrong = []
        for name, function in LOSSES[kind].items():
            plain = logits.clone().requires_grad_()
            expected = function(plain, weights, targets)
            expected.backward()
            own, by = (distribute_tensor(x, rank.mesh(), [Shard(1)], src_data_rank=None) for x in (logits, weights))
            own.requires_grad_()
            with loss_parallel():
                found = function(own, by, distributed(rank, targets, Shard(1)))
                found.backward()
            gradient: Any = own.grad
            for what, right, seen in ("", expected.detach(), found), ("gradient of ", plain.grad, gradient):
                if not torch.allclose(right, seen.detach().full_tensor()):  # type: ignore[arg-type]
                    wrong.append(f"{what}{name} differs")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


GIVEN: dict[str, Callable[[Any, Any, Any], Any]] = {
    "cross_entropy": lambda x, t, w: nn.functional.cross_entropy(x, t),
    "sum of cross_entropy": lambda x, t, w: nn.functional.cross_entropy(x, t, reduction="sum"),
    "each cross_entropy": lambda x, t, w: nn.functional.cross_entropy(x, t, reduction="none"),
    "weighted cross_entropy": lambda x, t, w: nn.functional.cross_entropy(x, t, weight=w),
    "ignored target": lambda x, t, w: nn.functional.cross_entropy(x, t, ignore_index=2),
    "log_softmax": lambda x, t, w: nn.functional.log_softmax(x, 1),
    "nll_loss": lambda x, t, w: nn.functional.nll_loss(nn.functional.log_softmax(x, 1), t, weight=w),
}
"""Functions of logits, targets and weights of classes."""


@requirement(
    "TP-LOSS-8550",
    "In loss_parallel, a loss leaves logits, targets, weights and the gradient that comes to it unchanged, in forward "
    "as in backward.",
    source=f"{SOURCE}.loss_parallel; torch.nn.functional: cross_entropy, log_softmax, nll_loss",
)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
@pytest.mark.world(2)
def test_given_to_losses(world: World, dtype: torch.dtype) -> None:
    """Logits are made by an operator, or are a leaf around a tensor of the user's own."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for (name, function), leaf in itertools.product(GIVEN.items(), (True, False)):
            own = part(numbers(4, 6).to(rank.device, dtype), rank, Shard(1)).contiguous()
            logits = DTensor.from_local(own, rank.mesh(), [Shard(1)]).requires_grad_()
            logits = logits if leaf else logits * 2
            targets, weight = (
                torch.tensor([0, 5, 2, 3], device=rank.device),
                torch.ones(6, device=rank.device, dtype=dtype),
            )
            given = {"own": own, "logits": logits.to_local().detach(), "targets": targets, "weight": weight}
            before = {what: tensor.clone() for what, tensor in given.items()}
            with loss_parallel():
                loss = function(logits, targets, weight)
                gradient = torch.ones_like(loss)
                given["gradient"], before["gradient"] = gradient.to_local(), gradient.to_local().clone()
                seen = {what: tensor.clone() for what, tensor in given.items()}
                loss.backward(gradient)
            for when, tensors in ("forward", seen), ("backward", given):
                changed = [what for what, tensor in tensors.items() if not torch.equal(before[what], tensor)]
                wrong += [f"{name}, {leaf=}: {what} in {when}" for what in changed]
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


SPELLINGS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "function": lambda x, dim: nn.functional.log_softmax(x, dim),
    "method": lambda x, dim: x.log_softmax(dim),
    "operator": lambda x, dim: torch.log_softmax(x, dim=dim),
    "module": lambda x, dim: nn.LogSoftmax(dim)(x),
    "dtype": lambda x, dim: nn.functional.log_softmax(x, dim, dtype=torch.float32),
}
"""Calls that take log_softmax along a dimension."""


@requirement(
    "TP-LOSS-1400",
    "In loss_parallel, log_softmax along the sharded dimension, counted from either end, has one device's values in "
    "the same placements.",
    source=f"{SOURCE}.loss_parallel; torch.nn.functional.log_softmax: dim",
)
@requirement(
    "TP-LOSS-1401",
    "In loss_parallel, the nll_loss of log_softmax along the classes, counted from either end, has one device's loss "
    "and gradient.",
    source=f"{SOURCE}.loss_parallel; torch.nn.functional: log_softmax, nll_loss",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(2)
def test_dimensions_of_log_softmax(world: World) -> None:
    """Shard each dimension of logits of one to three, evenly or not; name it from the start and from the end."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        for shape in (6,), (3, 5), (2, 6, 4):
            logits = (numbers(*shape) * 7 % 11 / 4).double().to(rank.device)
            calls = [("function", dim) for dim in range(-len(shape), len(shape))]
            for name, dim in (*calls, *itertools.product(SPELLINGS, (-1, 0))):
                function = SPELLINGS[name]
                sharded = distribute_tensor(logits, rank.mesh(), [Shard(dim % len(shape))], src_data_rank=None)
                with loss_parallel():
                    found: Any = function(sharded, dim)
                right = function(logits, dim)
                if found.placements != sharded.placements or (found.dtype, found.shape) != (right.dtype, right.shape):
                    wrong.append(f"{name} along {dim} of {shape}: {found.placements}, {found.dtype}, {found.shape}")
                elif not torch.allclose(found.full_tensor(), right):
                    wrong.append(f"{name} along {dim} of {shape} differs")
            classes = min(1, len(shape) - 1)
            targets = (numbers(*shape[:classes], *shape[classes + 1 :]) * 5 % shape[classes]).long().to(rank.device)
            for dim in classes, classes - len(shape):
                plain = logits.clone().requires_grad_()
                right = nn.functional.nll_loss(plain.log_softmax(dim), targets, reduction="sum")
                right.backward()
                sharded = distribute_tensor(logits, rank.mesh(), [Shard(classes)], src_data_rank=None).requires_grad_()
                with loss_parallel():
                    probabilities = sharded.log_softmax(dim)
                    found = nn.functional.nll_loss(
                        probabilities, distributed(rank, targets, Replicate()), reduction="sum"
                    )
                    found.backward()
                gradient: Any = sharded.grad
                for what, one, other in (("loss", found, right), ("gradient", gradient, plain.grad)):
                    if not torch.allclose(one.detach().full_tensor(), other.detach()):
                        wrong.append(f"{what} of classes along {dim} of {shape} differs")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-LOSS-01",
    "After loss_parallel has ended, softmax and losses of DTensors are what they were before it.",
    source=f"{SOURCE}.loss_parallel",
)
@pytest.mark.parametrize("error", [True, False], ids=["error", "end"])
@pytest.mark.world(2)
def test_loss_parallel_left(world: World, error: bool) -> None:
    """Leave a block in which a loss was computed by an error, or at its end, and compute the loss of replicas."""

    def body(rank: Rank) -> None:
        given = (numbers(4, 6) % 5 / 4).to(rank.device), torch.tensor([0, 5, 2, 3], device=rank.device)
        expected = nn.functional.cross_entropy(*given)
        try:
            with loss_parallel():
                nn.functional.cross_entropy(distribute_tensor(given[0], rank.mesh(), [Shard(1)]), given[1])
                if error:
                    raise LookupError
        except LookupError:
            pass
        logits, targets = (distribute_tensor(x, rank.mesh(), [Replicate()]) for x in given)
        found: Any = nn.functional.cross_entropy(logits, targets)
        assert torch.allclose(expected, found.full_tensor())

    world.run(body)


@requirement(
    "TP-LOSS-01",
    "After loss_parallel has ended, softmax and losses of DTensors are what they were before it.",
    source=f"{SOURCE}.loss_parallel",
)
@pytest.mark.parametrize("error", [True, False], ids=["error", "end"])
@pytest.mark.world(2)
def test_gradients_after_loss_parallel(world: World, error: bool) -> None:
    """Leave a block by an error, or at its end, and compute gradients of log_softmax, softmax and their mixtures."""
    ways: dict[str, Any] = {
        "log_softmax": lambda x: nn.functional.log_softmax(x, -1) * x.detach(),
        "softmax": lambda x: nn.functional.softmax(x, -1) * x.detach(),
        "entropy": lambda x: nn.functional.softmax(x, -1) * nn.functional.log_softmax(x, -1),
    }

    def body(rank: Rank) -> list[str]:
        wrong, given = [], (numbers(4, 6) % 5 / 4).to(rank.device)
        try:
            with loss_parallel():
                if error:
                    raise LookupError
        except LookupError:
            pass
        for (name, way), placement in itertools.product(ways.items(), (Shard(0), Shard(1), Replicate())):
            plain = given.clone().requires_grad_()
            way(plain).sum().backward()
            own: Any = distribute_tensor(given, rank.mesh(), [placement]).requires_grad_()
            try:
                way(own).sum().backward()
            except ValueError as e:
                wrong.append(f"{name} of {placement} raises {e}")
                continue
            assert plain.grad is not None
            if not torch.allclose(plain.grad, own.grad.full_tensor()):
                wrong.append(f"the gradient of {name} of {placement} differs")
        with loss_parallel():
            pass  # its end takes away what an error has left behind
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-PLAN-09",
    "In loss_parallel, the cross-entropy of logits sharded over classes has one device's loss and gradient.",
    source=f"{SOURCE}: loss_parallel",
)
@pytest.mark.parametrize("classes", [5, 4], ids=["fewer", "none"])
@pytest.mark.world(3)
def test_uneven_classes(world: World, classes: int) -> None:
    """The last of three ranks has one of five classes, or none of four."""

    def body(rank: Rank) -> None:
        given = (numbers(2, classes) % 5 / 4).to(rank.device), torch.tensor([3, 0], device=rank.device)
        plain = given[0].clone().requires_grad_()
        own = distribute_tensor(given[0], rank.mesh(), [Shard(1)]).requires_grad_()
        expected = nn.functional.cross_entropy(plain, given[1])
        expected.backward()
        with loss_parallel():
            found: Any = nn.functional.cross_entropy(own, given[1])
            found.backward()
        assert torch.allclose(expected, found.full_tensor())
        assert plain.grad is not None
        assert torch.allclose(plain.grad, own.grad.full_tensor())  # type: ignore[union-attr]

    world.run(body)


MASKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the first rank's classes": lambda x: x[:, :4].fill_(-torch.inf),
    "the last rank's classes": lambda x: x[:, 4:].fill_(-torch.inf),
    "a rank's classes in a row": lambda x: x[1, 4:].fill_(-torch.inf),
    "either rank's in turn": lambda x: (x[::2, 4:].fill_(-torch.inf), x[1::2, :4].fill_(-torch.inf)),
    "every third class": lambda x: x[:, ::3].fill_(-torch.inf),
    "all classes but one": lambda x: (x[0, :5].fill_(-torch.inf), x[0, 6:].fill_(-torch.inf)),
    "the target": lambda x: x[1, 5].fill_(-torch.inf),
    "all classes of a row": lambda x: x[0].fill_(-torch.inf),
    "infinity": lambda x: x[0, 6].fill_(torch.inf),
    "nan": lambda x: x[0, 6].fill_(torch.nan),
    "large numbers": lambda x: x.mul_(1e4),
}
"""What is done to four rows of eight logits before their loss: masks, and numbers whose exponentials are too large."""
LOSSES_OF_TARGETS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "none": lambda x, t, w: nn.functional.cross_entropy(x, t, reduction="none"),
    "mean": lambda x, t, w: nn.functional.cross_entropy(x, t),
    "weighted sum": lambda x, t, w: nn.functional.cross_entropy(x, t, weight=w, reduction="sum"),
    "log_softmax": lambda x, t, w: nn.functional.nll_loss(nn.functional.log_softmax(x, 1), t),
}


@requirement(
    "TP-LOSS-9131",
    "In loss_parallel, logits that are masked by minus infinity, infinite, nan or very large give one device's loss "
    "and gradient.",
    source=f"{SOURCE}.loss_parallel: 'cross-entropy loss'; torch.nn.functional: cross_entropy, log_softmax, nll_loss",
)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)
@pytest.mark.world(2)
def test_masked_logits(world: World, dtype: torch.dtype) -> None:
    """Mask single classes, all those of a rank in each row or in some, a target or a row; other targets are kept."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        weight = (numbers(8) % 3 + 1).to(rank.device, dtype)
        for (name, mask), (kind, function) in itertools.product(MASKS.items(), LOSSES_OF_TARGETS.items()):
            logits = (numbers(4, 8) * 7 % 11 / 4).to(rank.device, dtype)
            mask(logits)
            targets = torch.tensor([0, 1, 2, 3] if name.startswith("the last") else [6, 5, 7, 4], device=rank.device)
            if name.startswith("either"):
                targets = torch.tensor([0, 5, 2, 7], device=rank.device)
            plain = logits.clone().requires_grad_()
            expected = function(plain, targets, weight)
            expected.sum().backward()
            own: Any = distribute_tensor(logits, rank.mesh(), [Shard(1)], src_data_rank=None).requires_grad_()
            with loss_parallel():
                found = function(own, targets, weight)
                found.sum().backward()
            near = 4 * torch.finfo(dtype).eps
            for what, one, other in ("loss", expected, found), ("gradient", plain.grad, own.grad):
                right, seen = one.detach(), other.detach().full_tensor()
                if not torch.allclose(right, seen, rtol=near, atol=near, equal_nan=True):
                    wrong.append(f"{name}, {kind}: the {what} is {seen.tolist()} and not {right.tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-CONTEXT-151",
    "Within context_parallel each buffer has this rank's part of its elements, and afterwards all of them again.",
    source="torch.distributed.tensor.experimental.context_parallel: 'The buffers will be restored'",
)
@pytest.mark.parametrize("memory", ["one", "two"])
@pytest.mark.world(2)
def test_context_parallel(world: World, memory: str) -> None:
    """Inputs and labels are views of one tensor, or in memory of their own; in both, labels are the next tokens."""

    def body(rank: Rank) -> None:
        tokens = torch.arange(18, device=rank.device).reshape(2, 9)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        if memory == "two":
            inputs, labels = inputs.clone(), labels.clone()
        with context_parallel(rank.mesh(), buffers=[inputs, labels], buffer_seq_dims=[1, 1]):
            assert inputs.shape == labels.shape == (2, 4)
            assert torch.equal(labels, inputs + 1), f"within, inputs are {inputs.tolist()}"
        assert torch.equal(inputs, torch.arange(18, device=rank.device).reshape(2, 9)[:, :-1])
        assert torch.equal(labels, inputs + 1)

    world.run(body)


@requirement(
    "TP-LOSS-03",
    "In loss_parallel, class weights, ignored targets or more dimensions give one device's loss and gradient.",
    source=f"{SOURCE}.loss_parallel",
)
@pytest.mark.parametrize("targets_of", ["classes", "no-class-weighted"])
@pytest.mark.world(2)
def test_losses(world: World, targets_of: str) -> None:
    """Combine each reduction with weights or none, an ignore_index or the default, and shapes of logits."""
    outside = targets_of != "classes"  # ignored targets that are no class, with weights

    def body(rank: Rank) -> None:
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {(5, 6): (5,), (3, 7): (3,), (2, 6, 4): (2, 4), (6,): ()}
        for (shape, of), weighted, ignored, reduction, as_dtensor in itertools.product(
            shapes.items(), (False, True), (-100, 1), ("mean", "sum", "none"), (False, True)
        ):
            what = f"{shape}, {weighted=}, {ignored=}, {reduction}, {as_dtensor=}"
            classes = 0 if len(shape) == 1 else 1
            logits = ((numbers(*shape) * 7) % 11 * 3).double().to(rank.device) - 9
            targets = ((numbers(*of) * 5) % shape[classes]).long().to(rank.device)
            if outside and not (targets.dim() and weighted and ignored < 0):
                continue
            if targets.dim() and (outside or not (weighted and ignored < 0)):
                targets.view(-1)[1] = ignored
            weight = numbers(shape[classes]).double().to(rank.device) if weighted else None
            options: Any = {"reduction": reduction, "ignore_index": ignored}
            plain = logits.clone().requires_grad_()
            expected = nn.functional.cross_entropy(plain, targets, weight=weight, **options)
            expected.sum().backward()
            assert plain.grad is not None
            own = part(logits, rank, Shard(classes)).clone().requires_grad_()
            with loss_parallel():
                sharded = DTensor.from_local(
                    own, rank.mesh(), [Shard(classes)], shape=logits.shape, stride=logits.stride()
                )
                given = distributed(rank, targets, Replicate()) if as_dtensor else targets
                loss: Any = nn.functional.cross_entropy(sharded, given, weight=weight, **options)
                loss.sum().backward()
            assert loss.placements == (Replicate(),), what
            torch.testing.assert_close(loss.to_local(), expected.detach(), rtol=1e-12, atol=1e-12, msg=what)
            right = part(plain.grad, rank, Shard(classes))
            torch.testing.assert_close(own.grad, right, rtol=1e-12, atol=1e-12, msg=f"gradient of {what}")

    world.run(body)


@requirement(
    "TP-LOSS-04",
    "In loss_parallel on two mesh dimensions, a summed or unreduced loss has one device's value and gradient.",
    source=f"{SOURCE}.loss_parallel",
)
@requirement(
    "TP-LOSS-05",
    "On two mesh dimensions, a mean loss in loss_parallel is one device's, or raises the same error on every rank.",
    source=f"{SOURCE}.loss_parallel",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(4)
def test_losses_on_two_dimensions(world: World) -> None:
    """Shard the classes by either mesh dimension, and the batch or the sequence by the other, or by none."""

    def body(rank: Rank) -> list[str]:
        mesh, refused = rank.mesh(2, 2, names=("dp", "tp")), []
        for others, first, weighted, reduction in itertools.product(
            (Shard(0), Shard(2), Replicate()), (False, True), (False, True), ("sum", "none", "mean")
        ):
            shape = (4, 6, 4) if others == Shard(2) else (4, 6)
            placements: list[Placement] = [Shard(1), others] if first else [others, Shard(1)]
            what = f"{placements}, {weighted=}, {reduction}"
            logits = ((numbers(*shape) * 7) % 11 * 3).double().to(rank.device) - 9
            targets = ((numbers(4, *shape[2:]) * 5) % 6).long().to(rank.device)
            targets.view(-1)[1] = 1
            weight = numbers(6).double().to(rank.device) if weighted else None
            options: Any = {"weight": weight, "reduction": reduction, "ignore_index": 1}
            plain = logits.clone().requires_grad_()
            expected = nn.functional.cross_entropy(plain, targets, **options)
            scale = numbers(*expected.shape).double().to(rank.device)
            (expected * scale).sum().backward()
            assert plain.grad is not None
            sharded = distribute_tensor(logits, mesh, placements, src_data_rank=None).requires_grad_()
            at = [
                Replicate() if p == Shard(1) else Shard(p.dim // 2) if isinstance(p, Shard) else p for p in placements
            ]
            scales = at if reduction == "none" else [Replicate()] * 2
            with loss_parallel():
                try:
                    loss: Any = nn.functional.cross_entropy(
                        sharded, distribute_tensor(targets, mesh, at, src_data_rank=None), **options
                    )
                except NotImplementedError:
                    assert reduction == "mean", what
                    refused.append(what)
                    continue
                (loss * distribute_tensor(scale, mesh, scales, src_data_rank=None)).sum().backward()
            torch.testing.assert_close(loss.full_tensor(), expected.detach(), rtol=1e-12, atol=1e-12, msg=what)
            gradient: Any = sharded.grad
            torch.testing.assert_close(
                gradient.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12, msg=f"gradient of {what}"
            )
        return refused

    results = world.run(body)
    assert_on_ranks([results[0]] * world.size, results)


@requirement(
    "TP-LOSS-06",
    "In loss_parallel, logits that are pending or not sharded over classes raise an error, as plain targets of a "
    "sharded batch do.",
    source=f"{SOURCE}.loss_parallel",
)
@requirement(
    "TP-LOSS-07",
    "In loss_parallel, an unreduced loss takes a gradient in any placements.",
    source=f"{SOURCE}.loss_parallel",
)
@requirement(
    "TP-LOSS-08",
    "In loss_parallel, the backward of a loss does not communicate.",
    source=f"{SOURCE}.loss_parallel",
)
@pytest.mark.needs(torch=MORE_OPERATORS)
@pytest.mark.world(4)
def test_refused_losses(world: World) -> None:
    """Give logits in each pair of layouts, with and without a sequence, and gradients of a loss in each layout."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh(2, 2, names=("dp", "tp"))
        layouts: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(2), Partial())
        for sequence, pair, reduction in itertools.product(
            (False, True), itertools.product(layouts, repeat=2), ("sum", "none")
        ):
            others = [p for p in pair if p != Shard(1)]
            if len(others) == 0 or (Shard(2) in pair and not sequence):
                continue
            if len(others) == 2 and (Shard(2) in pair) != sequence:
                continue
            what = f"{pair}, {sequence=}, {reduction}"
            shape = (4, 6, 4) if sequence else (4, 6)
            logits = ((numbers(*shape) * 7) % 11).double().to(rank.device) - 5
            targets = ((numbers(4, *shape[2:]) * 5) % 6).long().to(rank.device)
            own = DTensor.from_local(
                laid_out(logits, mesh, pair).clone(), mesh, pair, shape=logits.shape, stride=logits.stride()
            )
            (other,) = others if len(others) == 1 else (Partial(),)
            refused = isinstance(other, Partial)
            plain = not refused and isinstance(other, Shard)
            at = [Replicate() if p == Shard(1) or refused else Shard(p.dim // 2) if p.is_shard() else p for p in pair]
            given = DTensor.from_local(
                laid_out(targets, mesh, at), mesh, at, shape=targets.shape, stride=targets.stride()
            )
            own.requires_grad_()
            with loss_parallel():
                if refused or plain:
                    with pytest.raises(ValueError, match=r"loss_parallel|Shard|DTensor"):
                        nn.functional.cross_entropy(own, targets if plain else given, reduction=reduction)
                if refused:
                    continue
                loss: Any = nn.functional.cross_entropy(own, given, reduction=reduction)
                expected = nn.functional.cross_entropy(logits, targets, reduction=reduction)
                torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-12, atol=1e-12, msg=what)
                if reduction == "sum":
                    with CommDebugMode() as counts:
                        loss.backward()
                    assert counts.get_total_counts() == 0, what
                    continue
                leaf = logits.clone().requires_grad_()
                scale = (numbers(*expected.shape) % 5).double().to(rank.device)
                nn.functional.cross_entropy(leaf, targets, reduction=reduction).backward(scale)
                for placements in itertools.product((Replicate(), Shard(0)), repeat=2):
                    gradient = distribute_tensor(scale, mesh, placements, src_data_rank=None)
                    (found,) = torch.autograd.grad(loss, own, gradient, retain_graph=True)
                    assert found.placements == pair, what
                    torch.testing.assert_close(
                        found.full_tensor(), leaf.grad, rtol=1e-12, atol=1e-12, msg=f"{what}: {placements}"
                    )

    world.run(body)


@requirement(
    "TP-MIX-01",
    "In implicit_replication, a plain tensor with a DTensor counts as replicated, in results and gradients.",
    source="torch.distributed.tensor.experimental.implicit_replication",
)
@requirement(
    "TP-MIX-02",
    "Before and after implicit_replication, also after an exception, an operator on a DTensor refuses a plain tensor.",
    source="torch.distributed.tensor: DTensor requires every Tensor argument of the operator be DTensor",
)
@pytest.mark.world(2)
def test_implicit_replication(world: World) -> None:
    """Mix them on either side for each layout; use the context twice, and leave it by an exception."""

    def body(rank: Rank) -> None:
        plain = (numbers(4, 6) % 5).to(rank.device)

        def refused(sharded: DTensor) -> None:
            for mixed in (lambda: sharded + plain, lambda: plain * sharded, lambda: torch.where(plain > 2, sharded, 1)):
                with pytest.raises(RuntimeError, match="mixed"):
                    mixed()

        for layout in Replicate(), Shard(0), Shard(1):
            own = part(numbers(4, 6).to(rank.device), rank, layout).contiguous().requires_grad_()
            sharded = DTensor.from_local(own, rank.mesh(), [layout])
            refused(sharded)
            for _ in range(2):
                own.grad = None
                with implicit_replication():
                    results: list[Any] = [sharded + plain, plain * sharded, sharded * plain]
                    (sharded * plain).sum().backward(retain_graph=True)
                assert_same(part(plain, rank, layout), own.grad, f"gradient of {layout}")  # type: ignore[arg-type]
                x = numbers(4, 6).to(rank.device)
                for right, found in zip((x + plain, x * plain, x * plain), results, strict=True):
                    assert_same(right, found.full_tensor().detach(), f"{layout}")
                refused(sharded)
            with pytest.raises(KeyError), implicit_replication():
                raise KeyError
            refused(sharded)

    world.run(body)


@requirement(
    "TP-MIX-01",
    "In implicit_replication, a plain tensor with a DTensor counts as replicated, in results and gradients.",
    source="torch.distributed.tensor.experimental.implicit_replication",
)
@pytest.mark.parametrize("when", ["inside", "before", "after", "after-an-error"])
@pytest.mark.world(2)
def test_nested_implicit_replication(world: World, when: str) -> None:
    """Mix them inside of a second context, or in the first one before or after a second one."""

    def body(rank: Rank) -> Any:
        plain = numbers(4, 6).to(rank.device)
        sharded = DTensor.from_local(part(plain, rank, Shard(0)).contiguous(), rank.mesh(), [Shard(0)])
        with implicit_replication():
            if when == "before":
                found = sharded + plain
            with suppress(KeyError), implicit_replication():
                if when == "inside":
                    found = sharded + plain
                if when == "after-an-error":
                    raise KeyError
            if when.startswith("after"):
                found = sharded + plain
        with pytest.raises(RuntimeError, match="mixed"):
            sharded + plain
        return found.full_tensor().tolist()

    assert_on_ranks([(numbers(4, 6) * 2).tolist()] * world.size, world.run(body))


@requirement(
    "TP-MIX-03",
    "Beside a DTensor, a plain tensor of one element counts as replicated without any context, and no other one does.",
    source="torch/distributed/tensor/_dispatch.py: implicitly creating a replicated DTensor; test_dtensor.py: "
    "test_auto_implicit_replication",
)
@requirement(
    "TP-MIX-01",
    "In implicit_replication, a plain tensor with a DTensor counts as replicated, in results and gradients.",
    source="torch.distributed.tensor.experimental.implicit_replication",
)
@pytest.mark.world(2)
def test_one_element(world: World) -> None:
    """Mix them on either side and in place, with tensors in every layout; two elements are refused."""

    def body(rank: Rank) -> None:
        warnings.filterwarnings("ignore", message="Found a non-scalar tensor")
        whole = (numbers(4, 6) * 2).to(rank.device)
        layouts: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())

        def made(layout: Placement) -> Any:
            return DTensor.from_local(part(whole, rank, layout).clone(), rank.mesh(), [layout])

        for i, (layout, shape) in enumerate(itertools.product(layouts, ((), (1,), (1, 1)))):
            what, one = f"{layout}, {shape}", torch.full(shape, 3.0, device=rank.device)
            for name, operator in [*MIXED.items()][i % 3 :: 3]:
                if name == "in place" and layout == Partial():
                    continue
                right, found = operator(whole.clone(), one), operator(made(layout), one)
                assert_same(right, found.full_tensor() + 0, f"{what}, {name}")
        for i, (layout, shape) in enumerate(itertools.product(layouts, ((6,), (1, 6), (4, 1)))):
            other = (numbers(*shape) * 3).to(rank.device)
            for name, operator in [*MIXED.items()][i % 4 : -1 : 4]:
                with pytest.raises(RuntimeError, match="mixed"):
                    operator(made(layout), other)
                with implicit_replication():
                    found = operator(made(layout), other)
                assert_same(operator(whole, other), found.full_tensor() + 0, f"{layout}, {shape}, {name}")

    world.run(body)


MIXED: dict[str, Any] = {
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: y - x,
    "product": lambda x, y: y * x,
    "quotient": lambda x, y: x / y,
    "maximum": torch.maximum,
    "comparison": lambda x, y: (x > y).int(),
    "choice": lambda x, y: torch.where(x > 8, x, y),
    "in place": lambda x, y: x.add_(y),
}
"""Functions of a DTensor and a plain tensor."""
