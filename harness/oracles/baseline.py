"""The single-device baseline: a training loop that runs alone on the whole batch, and on ranks on their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from harness.oracles.exact import assert_same, assert_same_all

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """The results of a training step: whole tensors on the CPU, however the stack keeps them."""

    outputs: torch.Tensor
    """The outputs for this rank's part of the batch: float[rows, features]."""
    gradients: Tensors | None
    """The gradients after backward, by parameter name; None if the stack cannot show them whole."""
    parameters: Tensors
    """The parameters after the optimizer's step, by name."""


@dataclass(frozen=True)
class Batch:
    """A batch: inputs, float[rows, input features], and the weights of outputs in the loss, float[rows, outputs]."""

    inputs: torch.Tensor
    weights: torch.Tensor

    def part(self, index: int, of: int) -> Batch:
        """Return the rows of rank ``index`` if ``of`` ranks share the batch as evenly as possible."""
        return Batch(self.inputs.tensor_split(of)[index], self.weights.tensor_split(of)[index])


def plain_gradients(module: nn.Module) -> Tensors:
    """Return copies of an ordinary module's gradients, by parameter name."""
    return {n: p.grad.detach().clone() for n, p in module.named_parameters() if p.grad is not None}


def plain_parameters(module: nn.Module) -> Tensors:
    """Return copies of an ordinary module's parameters, by name."""
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
    """Take one step of plain SGD for each batch, and return the results of each step.

    The loss is the weighted sum of the outputs, times ``scale``.  On N ranks that average their gradients, ``scale=N``
    makes the average equal to the gradient of the whole batch.  Batches are moved to the module's device.

    ``gradients``, ``parameters``: functions that return the whole tensors of a module on a stack.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate)
    device = next(module.parameters()).device
    steps = []
    for batch in batches:
        outputs = module(batch.inputs.to(device))
        (scale * (outputs * batch.weights.to(device)).sum()).backward()
        whole_gradients = gradients(module)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(
            Step(
                outputs.detach().to("cpu", copy=True),
                None if whole_gradients is None else _on_host(whole_gradients),
                _on_host(parameters(module)),
            )
        )
    return steps


def _on_host(tensors: Tensors) -> Tensors:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def assert_same_training(
    alone: Sequence[Step], ranks: Sequence[Sequence[Step]], parts: Sequence[int] | None = None, what: str = ""
) -> None:
    """Require that training on ranks had the results of training alone, bit for bit, at every step.

    ``parts``: the index of each rank's part of the batch, in rank order; by default the rank itself.  Outputs are
    compared with the same rows of the single-device outputs, and gradients and parameters as a whole on every rank.
    ``what``: the run, for messages.
    Errors: :class:`~harness.oracles.exact.Mismatch`, and AssertionError for another number of steps or gradients
    that the single-device run lacks.
    """
    __tracebackhide__ = True
    parts = list(range(len(ranks))) if parts is None else list(parts)
    of = max(parts) + 1
    run = what and f"{what}: "
    for index, steps in enumerate(ranks):
        if len(steps) != len(alone):
            raise AssertionError(f"{run}rank {index} took {len(steps)} steps, {len(alone)} were asked for")
        for number, (expected, found) in enumerate(zip(alone, steps, strict=True), 1):
            where = f"{run}rank {index}, step {number}"
            assert_same(expected.outputs.tensor_split(of)[parts[index]], found.outputs, f"{where}: outputs")
            if found.gradients is not None:
                assert_same_all(_known(expected.gradients), found.gradients, f"{where}: gradient of")
            assert_same_all(expected.parameters, found.parameters, f"{where}: parameter")


def _known(tensors: Mapping[str, torch.Tensor] | None) -> Mapping[str, torch.Tensor]:
    if tensors is None:
        raise AssertionError("the single-device run has no gradients to compare with")
    return tensors
