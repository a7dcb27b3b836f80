"""The single-device baseline: one training loop, run alone on the whole batch and on ranks on their parts of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from harness.oracles.exact import assert_same, assert_same_all

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """What one step of training gave, all on the CPU and whole, however the stack keeps it."""

    outputs: torch.Tensor
    """Of this rank's part of the batch: float[rows, features]."""
    gradients: Tensors | None
    """After backward, by parameter name; None where the stack has no way to show them whole."""
    parameters: Tensors
    """After the optimizer's step, by name."""


@dataclass(frozen=True)
class Batch:
    """Inputs float[rows, features in], and the weight of every output in the loss, float[rows, features out]."""

    inputs: torch.Tensor
    weights: torch.Tensor

    def part(self, index: int, of: int) -> Batch:
        """Rank ``index``'s rows when ``of`` ranks share the batch; as even as rows allow."""
        return Batch(self.inputs.tensor_split(of)[index], self.weights.tensor_split(of)[index])


def plain_gradients(module: nn.Module) -> Tensors:
    """Gradients of an ordinary module, by parameter name."""
    return {n: p.grad.detach().clone() for n, p in module.named_parameters() if p.grad is not None}


def plain_parameters(module: nn.Module) -> Tensors:
    """Parameters of an ordinary module, by name."""
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def train(
    module: nn.Module,
    batches: Sequence[Batch],
    *,
    scale: float = 1.0,
    learning_rate: float = 1 / 16,
    gradients: Callable[[nn.Module], Tensors | None] = plain_gradients,
    parameters: Callable[[nn.Module], Tensors] = plain_parameters,
) -> list[Step]:
    """Take one step of plain SGD for each batch; return what each gave.

    The loss is the weighted sum of the outputs, times ``scale``.  On N ranks that average their gradients, ``scale=N``
    makes the average equal to the gradient of the whole batch.  Batches are sent to the module's device.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
    device = next(module.parameters()).device
    steps = []
    for batch in batches:
        outputs = module(batch.inputs.to(device))
        (scale * (outputs * batch.weights.to(device)).sum()).backward()
        seen = gradients(module)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(
            Step(
                outputs.detach().to("cpu", copy=True),
                None if seen is None else _on_host(seen),
                _on_host(parameters(module)),
            )
        )
    return steps


def _on_host(tensors: Tensors) -> Tensors:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def assert_same_training(
    alone: Sequence[Step], ranks: Sequence[Sequence[Step]], parts: Sequence[int] | None = None
) -> None:
    """Require that training on ranks was training alone, bit for bit, at every step.

    ``parts``: which part of the batch each rank had, in rank order; by default each its own.  Outputs are compared
    with the same rows of the single-device outputs; gradients and parameters whole, on every rank.
    Errors: :class:`~harness.oracles.exact.Mismatch`.
    """
    __tracebackhide__ = True
    parts = list(range(len(ranks))) if parts is None else list(parts)
    of = max(parts) + 1
    for index, steps in enumerate(ranks):
        if len(steps) != len(alone):
            raise AssertionError(f"rank {index} took {len(steps)} steps, {len(alone)} were asked for")
        for number, (expected, found) in enumerate(zip(alone, steps, strict=True), 1):
            where = f"rank {index}, step {number}"
            assert_same(expected.outputs.tensor_split(of)[parts[index]], found.outputs, f"{where}: outputs")
            if found.gradients is not None:
                assert_same_all(_known(expected.gradients), found.gradients, f"{where}: gradient of")
            assert_same_all(expected.parameters, found.parameters, f"{where}: parameter")


def _known(tensors: Mapping[str, torch.Tensor] | None) -> Mapping[str, torch.Tensor]:
    if tensors is None:
        raise AssertionError("the single-device run has no gradients to compare with")
    return tensors
