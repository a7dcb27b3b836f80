"""What styles do with several inputs, keywords and outputs in every layout, and what stays of contexts that ended."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from fixtures.placements import part
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages

SOURCE = "torch.distributed.tensor.parallel"
GIVEN: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
WANTED: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Shard(-1))
PAIRS = tuple(itertools.product(GIVEN, WANTED))
"""Every layout that is given with every layout that is wanted."""


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
    """Pass each pair of layouts by position and by keyword in any order, local or as DTensors, and without layouts."""

    def body(rank: Rank) -> None:
        for use_local, as_dtensor in itertools.product((True, False), repeat=2):
            modules = Told(), Told()
            shared = prepared(style, use_local)  # a style may be used for several modules
            for module in modules:
                parallelize_module(module, rank.mesh(), shared)
            for module in (*modules, modules[0]):
                check_pairs(rank, module, style, use_local, as_dtensor)

    world.run(body)


def prepared(style: str, use_local: bool) -> ParallelStyle:
    """Create a style for all pairs of layouts, and for two values without layouts."""
    given = tuple(layout for layout, _ in PAIRS) + (None, None)
    desired = tuple(layout for _, layout in PAIRS) + (None, None)
    words = {f"k{i}": layout for i, (layout, _) in enumerate(PAIRS)} | {"absent": Shard(0)}
    desired_words = {f"k{i}": layout for i, (_, layout) in enumerate(PAIRS)} | {"absent": Replicate()}
    desired_words = dict(reversed(desired_words.items()))  # keywords count, and not their order
    inputs: Any = {"input_layouts": given, "desired_input_layouts": desired}
    inputs |= {"input_kwarg_layouts": words, "desired_input_kwarg_layouts": desired_words}
    outputs: Any = {"output_layouts": given, "desired_output_layouts": desired}
    if style == "input":
        return PrepareModuleInput(**inputs, use_local_output=use_local)
    if style == "output":
        return PrepareModuleOutput(**outputs, use_local_output=use_local)
    outputs = {"output_layouts": desired, "desired_output_layouts": tuple(map(back, given))}
    return PrepareModuleInputOutput(**inputs, **outputs, use_local_input=use_local, use_local_output=use_local)


def back(layout: Any) -> Any:
    """Return the layout that an input comes back in from a module that returns it."""
    return Replicate() if isinstance(layout, Partial) else layout


def check_pairs(rank: Rank, module: Told, style: str, use_local: bool, as_dtensor: bool) -> None:
    """Call a module with all pairs of layouts by position and by keyword, and check values and gradients."""
    what, device = f"{use_local=}, {as_dtensor=}", rank.device
    leaves = [part(whole(i, device), rank, layout).clone().requires_grad_() for i, (layout, _) in enumerate(PAIRS)]
    named = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    args, words = (
        [DTensor.from_local(leaf, rank.mesh(), [layout]) if as_dtensor else leaf for leaf, (layout, _) in given]
        for given in (list(zip(leaves, PAIRS, strict=True)), list(zip(named, PAIRS, strict=True)))
    )
    kwargs = {f"k{i}": words[i] for i in (*range(0, len(words), 2), *range(1, len(words), 2))}
    other, thing = torch.ones(3, device=device), object()
    result = module(*args, other, thing, **kwargs, other=other, thing=thing)
    assert list(module.kwargs) == [*kwargs, "other", "thing"], what
    for unchanged in (module.args[-2:], result[-2:], (module.kwargs["other"], module.kwargs["thing"])):
        assert unchanged[0] is other, what
        assert unchanged[1] is thing, what
    losses = []
    for i, (layout, wanted) in enumerate(PAIRS):
        kind = f"{what}: {layout} to {wanted}"
        found = [(result[i] if style == "output" else module.args[i], wanted)]
        if style == "output":
            assert module.kwargs[f"k{i}"] is kwargs[f"k{i}"], kind
        else:
            found.append((module.kwargs[f"k{i}"], wanted))
        if style == "both":
            found.append((result[i], back(layout)))
        for value, at in found:
            assert isinstance(value, DTensor) != use_local, kind
            if isinstance(value, DTensor):
                assert same_layout(value.placements[0], at, 2), kind
                assert value.shape == (4, 6), kind
            assert_same(part(whole(i, device), rank, at), local(value).detach(), kind)
        for value, at in [found[-1], *(found[1:2] if style == "both" else found[:-1])]:
            losses.append((local(value) * part(gradient(i, device), rank, at)).sum())
    torch.stack(losses).sum().backward()
    for i, (layout, wanted) in enumerate(PAIRS):
        expected = part(gradient(i, device), rank, back(layout))
        for leaf in (leaves[i], *([] if style == "output" else [named[i]])):
            assert_same(expected, leaf.grad, f"{what}: gradient of {layout} to {wanted}")


@requirement(
    "TP-PLAN-07",
    "Prepared inputs reach a module, and prepared outputs leave it, in the desired layouts.",
    source=f"{SOURCE}: PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput",
)
@pytest.mark.parametrize("told", ["equal layouts", "two layouts"])
@pytest.mark.world(2)
def test_in_another_layout(world: World, told: str) -> None:
    """Give a DTensor in a layout that the style was not told of; it is told of the desired one, or of a third."""

    def body(rank: Rank) -> list[str]:
        wrong = []
        x = whole(0, rank.device)
        for desired, given in ((Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(1), Shard(0))):
            for side, use_local in itertools.product(("input", "output"), (True, False)):
                named = desired if told == "equal layouts" else Shard(1) if desired == Shard(0) else Shard(0)
                style: ParallelStyle = (
                    PrepareModuleInput(input_layouts=named, desired_input_layouts=desired, use_local_output=use_local)
                    if side == "input"
                    else PrepareModuleOutput(
                        output_layouts=named, desired_output_layouts=desired, use_local_output=use_local
                    )
                )
                module = parallelize_module(nn.Identity(), rank.mesh(), style)
                found = module(distribute_tensor(x, rank.mesh(), [given], src_data_rank=None))
                case = f"{side} in {given} and not {desired}, {'local' if use_local else 'DTensor'}"
                if not torch.equal(part(x, rank, desired), local(found)):
                    wrong.append(f"{case}: has {list(local(found).shape)} of {list(x.shape)}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


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
    "A parallel linear layer has one device's output and gradients for every input layout with every output layout.",
    source=f"{SOURCE}: ColwiseParallel, RowwiseParallel: input_layouts, output_layouts, use_local_output",
)
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel], ids=["columns", "rows"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.world(2)
def test_linear_layouts(world: World, style: Any, bias: bool) -> None:
    """Give sequences, as local parts or as DTensors in turn; local outputs and DTensors in turn."""

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
        pairs = itertools.product(enumerate((None, *LINEAR_INPUTS)), enumerate(LINEAR_OUTPUTS))
        for (row, given), (column, wanted) in pairs:
            use_local = bool((row + column + bias) % 2)  # so that any two values of two settings come together
            as_dtensor = bool((row // 2 + column + bias) % 2)
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
