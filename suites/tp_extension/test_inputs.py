"""What styles do with several inputs, keywords and outputs in every layout, and what stays of contexts that ended."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.input_reshard import input_reshard

from fixtures.tensors import chunk, numbers
from harness import Rank, World, assert_same, requirement
from harness.stacks import messages

SOURCE = "torch.distributed.tensor.parallel"
GIVEN: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
WANTED: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(-1))
PAIRS = tuple(itertools.product(GIVEN, WANTED))
"""Every layout that is given with every layout that is wanted."""


def part(whole: torch.Tensor, rank: Rank, layout: Placement) -> torch.Tensor:
    """Return a rank's part of a tensor in a layout; a partial tensor's parts are equal."""
    if isinstance(layout, Shard):
        return chunk(whole, rank.size, rank.index, layout.dim % whole.dim())
    return whole / rank.size if isinstance(layout, Partial) else whole


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same_layout(found: Placement, wanted: Placement, dims: int) -> bool:
    """Return whether two layouts are equal, with dimensions counted from the end or not."""
    if isinstance(found, Shard) and isinstance(wanted, Shard):
        return found.dim % dims == wanted.dim % dims
    return found == wanted


class Told(nn.Module):
    """Remember the inputs and return the positional ones."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.args, self.kwargs = args, kwargs
        return args


def whole(index: int, device: torch.device) -> torch.Tensor:
    """Return an even whole number for each element, which differ by tensor."""
    return (numbers(4, 6) * 2 + 100 * index).to(device)


def gradient(index: int, device: torch.device) -> torch.Tensor:
    return ((numbers(4, 6) + index) % 5).to(device)


@requirement(
    "TP-PLAN-12",
    "Each of several inputs, keywords or outputs is brought from its own layout to its own desired layout.",
    source=f"{SOURCE}: PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput",
)
@requirement(
    "TP-PLAN-13",
    "Gradients of prepared inputs and outputs have the layouts that these were given in.",
    source=f"{SOURCE}: PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput",
)
@requirement(
    "TP-PLAN-14",
    "Positional and keyword inputs without a layout reach the module as they are, also where others have layouts.",
    source=f"{SOURCE}: PrepareModuleInput, PrepareModuleInputOutput",
)
@pytest.mark.parametrize("style", ["input", "output", "both"])
@pytest.mark.world(2)
def test_every_pair(world: World, style: str) -> None:
    """Pass each pair of layouts by position and by keyword, local or as DTensors, among some without layouts."""

    def body(rank: Rank) -> None:
        for use_local, as_dtensor in itertools.product((True, False), repeat=2):
            what = f"{use_local=}, {as_dtensor=}"
            module, again = Told(), Told()
            given = tuple(layout for layout, _ in PAIRS) + (None, None)
            desired = tuple(layout for _, layout in PAIRS) + (None, None)
            words = {f"k{i}": layout for i, (layout, _) in enumerate(PAIRS)} | {"absent": Shard(0)}
            desired_words = {f"k{i}": layout for i, (_, layout) in enumerate(PAIRS)} | {"absent": Replicate()}
            inputs: Any = {"input_layouts": given, "desired_input_layouts": desired}
            inputs |= {"input_kwarg_layouts": words, "desired_input_kwarg_layouts": desired_words}
            outputs: Any = {"output_layouts": given, "desired_output_layouts": desired}
            if style == "both":  # what it returns is what it was given: bring it back, where that is possible
                back = tuple(Replicate() if isinstance(layout, Partial) else layout for layout in given)
                outputs = {"output_layouts": desired, "desired_output_layouts": back}
            made = {
                "input": lambda: PrepareModuleInput(**inputs, use_local_output=use_local),
                "output": lambda: PrepareModuleOutput(**outputs, use_local_output=use_local),
                "both": lambda: PrepareModuleInputOutput(
                    **inputs, **outputs, use_local_input=use_local, use_local_output=use_local
                ),
            }[style]()
            for each in module, again:  # a style may be used for several modules
                parallelize_module(each, rank.mesh(), made)
            for each in module, again, module:
                leaves = [part(whole(i, rank.device), rank, layout).clone() for i, (layout, _) in enumerate(PAIRS)]
                named = [leaf.clone() for leaf in leaves]
                for leaf in (*leaves, *named):
                    leaf.requires_grad_()

                def passed(leaf: torch.Tensor, layout: Placement) -> torch.Tensor:
                    return DTensor.from_local(leaf, rank.mesh(), [layout]) if as_dtensor else leaf

                other, thing = torch.ones(3, device=rank.device), object()
                args = [passed(leaf, layout) for leaf, (layout, _) in zip(leaves, PAIRS, strict=True)]
                kwargs = {f"k{i}": passed(leaf, layout) for i, (leaf, (layout, _)) in enumerate(zip(named, PAIRS))}
                result = each(*args, other, thing, **kwargs, other=other, thing=thing)
                assert list(each.kwargs) == [*kwargs, "other", "thing"], what
                assert each.args[-2] is other and each.args[-1] is thing, what
                assert each.kwargs["other"] is other and each.kwargs["thing"] is thing, what
                assert result[-2] is other and result[-1] is thing, what
                values = result if style == "output" else each.args
                for i, (layout, wanted) in enumerate(PAIRS):
                    kind = f"{what}: {layout} to {wanted}"
                    for value in (values[i], *([each.kwargs[f"k{i}"]] if style != "output" else [])):
                        assert isinstance(value, DTensor) != use_local, kind
                        if isinstance(value, DTensor):
                            assert same_layout(value.placements[0], wanted, 2), kind
                            assert value.shape == (4, 6), kind
                        assert_same(part(whole(i, rank.device), rank, wanted), local(value).detach(), kind)
                    if style == "both":
                        back = Replicate() if isinstance(layout, Partial) else layout
                        assert_same(part(whole(i, rank.device), rank, back), local(result[i]).detach(), f"{kind} back")
                    if style == "output":
                        assert each.kwargs[f"k{i}"] is kwargs[f"k{i}"], kind
                losses = []
                for i, (layout, wanted) in enumerate(PAIRS):
                    back = Replicate() if isinstance(layout, Partial) else layout
                    at = back if style == "both" else wanted
                    losses.append((local(result[i]) * part(gradient(i, rank.device), rank, at)).sum())
                    if style != "output":
                        weights = part(gradient(i, rank.device), rank, wanted)
                        losses.append((local(each.kwargs[f"k{i}"]) * weights).sum())
                torch.stack(losses).sum().backward()
                for i, (layout, wanted) in enumerate(PAIRS):
                    grad = gradient(i, rank.device)
                    expected = grad if isinstance(layout, Partial) else part(grad, rank, layout)
                    assert_same(expected, leaves[i].grad, f"{what}: gradient of {layout} to {wanted}")
                    if style != "output":
                        assert_same(expected, named[i].grad, f"{what}: gradient of keyword {layout} to {wanted}")

    world.run(body)


@requirement(
    "TP-PLAN-15",
    "An input or output in its desired layout, or one that a rank can cut from what it has, is not communicated.",
    source=f"{SOURCE}: PrepareModuleInput, PrepareModuleOutput",
)
@requirement(
    "TP-PLAN-16",
    "A single layout stands for the only input or output, and layouts of another number raise an error.",
    source=f"{SOURCE}: PrepareModuleInput, PrepareModuleOutput",
)
@pytest.mark.world(2)
def test_single(world: World) -> None:
    """Count the collectives of each pair of layouts; give too many, too few, or a number where a tensor should be."""

    def body(rank: Rank) -> None:
        for layout, wanted in PAIRS:
            free = layout == wanted or layout == Replicate() or (layout, wanted) == (Shard(1), Shard(-1))
            styles = (
                PrepareModuleInput(input_layouts=layout, desired_input_layouts=wanted),
                PrepareModuleOutput(output_layouts=layout, desired_output_layouts=wanted),
                PrepareModuleInput(
                    input_kwarg_layouts={"x": layout}, desired_input_kwarg_layouts={"x": wanted}, use_local_output=True
                ),
            )
            for i, style in enumerate(styles):
                module = parallelize_module(Told() if i != 1 else nn.Identity(), rank.mesh(), style)
                x = part(whole(0, rank.device), rank, layout)
                at = messages.mark()
                result = module(x=x) and module.kwargs["x"] if i == 2 else module(x)
                result = local(result[0] if i == 0 else result).clone() if i != 2 else module.kwargs["x"].clone()
                if not (layout == Shard(1) and wanted == Shard(-1)):  # the same layout, which PyTorch may not see
                    count = len(messages.since(at))
                    assert count == (0 if free else 1), f"{layout} to {wanted}: {count} collectives"
                assert_same(part(whole(0, rank.device), rank, wanted), result, f"{layout} to {wanted}")
        x = torch.ones(2, 2, device=rank.device)
        module = Told()
        parallelize_module(
            module, rank.mesh(), PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        )
        for wrong in (x, x), ():
            with pytest.raises(ValueError, match="same length"):
                module(*wrong)
        with pytest.raises((AssertionError, TypeError, ValueError)):
            module(3)
        two = {"output_layouts": (Shard(0), Shard(0)), "desired_output_layouts": (Replicate(), Replicate())}
        module = parallelize_module(Told(), rank.mesh(), PrepareModuleOutput(**two))
        with pytest.raises(ValueError, match="same length"):
            module(x)
        for arguments in (
            {"input_layouts": (Shard(0), None), "desired_input_layouts": (Shard(0),)},
            {"input_layouts": Shard(0)},
            {"input_kwarg_layouts": {"x": Shard(0)}},
            {"input_kwarg_layouts": {"x": Shard(0)}, "desired_input_kwarg_layouts": {"x": Shard(0), "y": Shard(0)}},
        ):
            with pytest.raises((AssertionError, ValueError)):
                PrepareModuleInput(**arguments)
        with pytest.raises((AssertionError, ValueError)):
            PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=Shard(0))

    world.run(body)


LINEAR_INPUTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(-1))
LINEAR_OUTPUTS: tuple[Placement | None, ...] = (None, Replicate(), Shard(0), Shard(1), Shard(-1))


@requirement(
    "TP-PLAN-17",
    "A parallel linear layer has one device's output and gradients in every pair of input and output layouts.",
    source=f"{SOURCE}: ColwiseParallel, RowwiseParallel: input_layouts, output_layouts, use_local_output",
)
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel], ids=["columns", "rows"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.world(2)
def test_linear_layouts(world: World, style: Any, bias: bool) -> None:
    """Give sequences, as local parts or as DTensors; local outputs and DTensors."""

    def body(rank: Rank) -> None:
        x, weights = (numbers(4, 2, 6) % 7).to(rank.device), (numbers(4, 2, 8) % 3).to(rank.device)

        def made() -> nn.Linear:
            layer = nn.Linear(6, 8, bias=bias, device=rank.device)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.copy_(numbers(*parameter.shape) % 5 - 2)
            return layer

        plain, input_ = made(), x.clone().requires_grad_()
        expected = plain(input_)
        (expected * weights).sum().backward()
        assert input_.grad is not None
        for given, wanted, use_local, as_dtensor in itertools.product(
            (None, *LINEAR_INPUTS), LINEAR_OUTPUTS, (True, False), (True, False)
        ):
            what = f"{given} to {wanted}, {use_local=}, {as_dtensor=}"
            options: Any = {"input_layouts": given, "output_layouts": wanted, "use_local_output": use_local}
            module = parallelize_module(made(), rank.mesh(), style(**options))
            columns = style is ColwiseParallel
            at = given or (Replicate() if columns else Shard(-1))
            to = wanted or (Shard(-1) if columns else Replicate())
            leaf = part(x, rank, at).clone().requires_grad_()
            output = module(DTensor.from_local(leaf, rank.mesh(), [at]) if as_dtensor else leaf)
            assert isinstance(output, DTensor) != use_local, what
            if isinstance(output, DTensor):
                assert same_layout(output.placements[0], to, 3), what
                assert output.shape == expected.shape, what
            assert_same(part(expected.detach(), rank, to), local(output).detach(), what)
            (local(output) * part(weights, rank, to)).sum().backward()
            assert_same(part(input_.grad, rank, at), leaf.grad, f"{what}: gradient of the input")
            for name, parameter in module.named_parameters():
                assert isinstance(parameter.grad, DTensor), what
                assert parameter.grad.placements == parameter.placements, what  # type: ignore[attr-defined]
                right = plain.get_parameter(name).grad
                assert_same(right, parameter.grad.full_tensor(), f"{what}: gradient of {name}")

    world.run(body)


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
                        continue  # PyTorch up to 2.15 restores unequal parts to a wrong size
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
                            assert collectives > 0 and collectives % len(where) == 0, f"{what}: {collectives}"
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
    "TP-LOSS-01",
    "After loss_parallel has ended, softmax and losses of DTensors are what they were before it.",
    source=f"{SOURCE}.loss_parallel",
)
@requirement(
    "TP-LOSS-02",
    "In loss_parallel, the loss of logits that are sharded over classes never gathers the logits.",
    source=f"{SOURCE}.loss_parallel",
)
@pytest.mark.world(2)
def test_loss_parallel_ends(world: World) -> None:
    """Compare log_softmax and cross_entropy before, between and after two uses, on logits in every layout."""

    def body(rank: Rank) -> None:
        logits = (numbers(4, 6) % 5 / 4).double().to(rank.device)
        targets = torch.tensor([0, 5, 2, 3], device=rank.device)

        def outcomes() -> list[Any]:
            found: list[Any] = []
            for layout in GIVEN[:3]:
                sharded = DTensor.from_local(part(logits, rank, layout).contiguous(), rank.mesh(), [layout])
                for function in (
                    lambda t: nn.functional.log_softmax(t, 1),
                    lambda t: nn.functional.log_softmax(t, 0),
                    lambda t: nn.functional.cross_entropy(t, distributed(rank, targets, layout)),
                ):
                    at = messages.mark()
                    try:
                        result: Any = function(sharded)
                    except (RuntimeError, ValueError, NotImplementedError) as e:
                        found.append(type(e).__name__)
                    else:
                        whole = result.full_tensor() if isinstance(result, DTensor) else result
                        found.append((str(getattr(result, "placements", "")), whole.tolist(), len(messages.since(at))))
            return found

        before = outcomes()
        assert sum(not isinstance(outcome, str) for outcome in before) >= 6, before
        for _ in range(2):
            with loss_parallel():
                at = messages.mark()
                sharded = DTensor.from_local(part(logits, rank, Shard(1)).contiguous(), rank.mesh(), [Shard(1)])
                sharded.requires_grad_()
                loss: Any = nn.functional.cross_entropy(sharded, targets)
                loss.backward()
                assert all(message.bytes <= 4 * 8 for message in messages.since(at)), messages.since(at)
            assert loss.placements == (Replicate(),)
            assert sharded.grad.placements == (Shard(1),)  # type: ignore[union-attr]
            assert outcomes() == before

    world.run(body)


def distributed(rank: Rank, targets: torch.Tensor, layout: Placement) -> DTensor:
    """Return targets in the layout that belongs to logits in a layout."""
    at = layout if layout == Shard(0) else Replicate()
    return DTensor.from_local(part(targets, rank, at), rank.mesh(), [at])


@requirement(
    "TP-LOSS-03",
    "In loss_parallel, class weights, ignored targets and more dimensions give one device's loss and gradient.",
    source=f"{SOURCE}.loss_parallel",
)
@pytest.mark.world(2)
def test_losses(world: World) -> None:
    """Combine each reduction with weights or none, an ignore_index or the default, and shapes of logits."""

    def body(rank: Rank) -> None:
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {(5, 6): (5,), (3, 7): (3,), (2, 6, 4): (2, 4), (6,): ()}
        for (shape, of), weighted, ignored, reduction, as_dtensor in itertools.product(
            shapes.items(), (False, True), (-100, 1), ("mean", "sum", "none"), (False, True)
        ):
            what = f"{shape}, {weighted=}, {ignored=}, {reduction}, {as_dtensor=}"
            classes = 0 if len(shape) == 1 else 1
            logits = ((numbers(*shape) * 7) % 11 * 3).double().to(rank.device) - 9
            targets = ((numbers(*of) * 5) % shape[classes]).long().to(rank.device)
            if targets.dim() and not (weighted and ignored < 0):  # of these, PyTorch up to 2.15 has no gradient
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
