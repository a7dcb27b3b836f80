"""Activations of a pipeline that the next stage uses in some steps, but not in others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from fixtures.pipelines import BATCHES, SCHEDULES, SINGLE, V_SHAPED, batch, total
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with

USES: dict[str, list[str]] = {
    "both-then-one": ["ab", "b", "ab"],
    "in-turn": ["a", "b", "a"],
}
"""Which of its two inputs each stage uses in the steps; the unused one has no gradient there."""


class Part(nn.Module):
    """A stage that takes one tensor or two and passes on two, each with a weight of its own; the last returns one."""

    def __init__(self, place: int, count: int) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.tensor([[first, 2.0 + place]], dtype=torch.float64)) for first in (1.0, -3.0)
        )
        self.last, self.uses = place == count - 1, "ab"

    def forward(self, *given: torch.Tensor) -> Any:
        """Map one or two of double[rows, 2] to two, or to one."""
        x: Any = sum(tensor for name, tensor in zip("ab", (given[0], given[-1]), strict=True) if name in self.uses)
        return x * self.a + x * self.b if self.last else (x * self.a, x * self.b)


def zeroed(parameter: torch.Tensor) -> list[Any]:
    """Return a gradient, or zeros for none."""
    found: list[Any] = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).tolist()
    return found


@requirement(
    "RFSDP-PIPE-8502",
    "A stage whose activation is not used in a step has the gradients of the other ones alone, whatever was used in "
    "the steps before.",
    source="torch.distributed.pipelining: PipelineStage, ScheduleGPipe.step; torch.Tensor.grad",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="unsupported: 2.12 raises for tensors that have no gradients")
@pytest.mark.parametrize("uses", USES)
@pytest.mark.world(1, 2)
def test_unused(world: World, uses: str) -> None:
    """Take three steps with each schedule, with neighboring stages on one rank or on two."""

    def body(rank: Rank) -> None:
        for schedule in SCHEDULES:
            each = 1 if schedule in SINGLE else 2
            count = each * rank.size
            places = [rank.index + rank.size * n for n in range(each)]
            if schedule in V_SHAPED:
                places[1] = count - 1 - rank.index
            model = [Part(place, count).to(rank.device) for place in range(count)]
            own = {place: Part(place, count).to(rank.device) for place in places}
            stages = [PipelineStage(module, place, count, rank.device) for place, module in own.items()]
            runs = schedule(stages[0] if schedule in SINGLE else stages, BATCHES, loss_fn=total, scale_grads=False)
            for step, used in enumerate(USES[uses]):
                x, y = batch(step, rank.device)
                for module in (*model, *own.values()):
                    module.uses = used
                    module.zero_grad()
                runs.step(*((x,) if 0 in own else ()), target=y if count - 1 in own else None)
                passed: Any = (x,)
                for module in model:
                    passed = module(*passed)
                total(passed, y).backward()
                for place, module in own.items():
                    for name, parameter in module.named_parameters():
                        what = f"{schedule.__name__}, step {step}, {name} of stage {place}"
                        assert zeroed(parameter) == zeroed(model[place].get_parameter(name)), what

    world.run(body)
