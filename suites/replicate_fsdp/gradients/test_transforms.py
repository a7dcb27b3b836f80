"""Managed modules under torch.func's forward-mode derivatives and vmap, and training on the results."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fixtures.managed import ways
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.limit import runs_with

SOURCE = "torch.func: jvp, vmap; torch.distributed.fsdp.fully_shard"


class Square(nn.Module):
    """The square of the input times a weight, whose derivative is twice the product times the weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight) ** 2


def model(rank: Rank, managed: Any, nested: bool, kept: bool | None, policy: MixedPrecisionPolicy) -> Any:
    """Return the square of the square, times the weights 2 and 1."""
    made: Any = nn.Sequential(Square(2.0), Square(1.0)).to(rank.device)
    options: dict[str, Any] = {} if kept is None else {"reshard_after_forward": not kept}
    for part in made if nested else ():
        managed(part, mp_policy=policy, **options)
    return managed(made, mp_policy=policy, **options)


@requirement(
    "RFSDP-FUNC-01",
    "torch.func.jvp of a managed module has one device's outputs and derivatives, whose backward averages its "
    "gradients.",
    source=SOURCE,
)
@requirement(
    "RFSDP-FUNC-02",
    "torch.vmap of a managed module has one device's outputs, whose backward averages its gradients.",
    source=SOURCE,
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, hooks of managed modules take no part in torch.func")
@pytest.mark.usefixtures("with_transforms")
@pytest.mark.world(2)
def test_transforms(world: World) -> None:
    """Differentiate with respect to an input that needs gradients or not, and map over rows; train on the results."""
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)]

    def body(rank: Rank) -> None:
        every = ways(rank)
        settings = [("replicated", None), *itertools.product(("sharded", "hybrid"), (None, True))] * 2
        for (way, kept), (nested, policy) in zip(
            settings, itertools.cycle(itertools.product((True, False), policies)), strict=False
        ):
            managed = every[way]
            what = f"{way}, {nested=}, {kept=}, {policy}"
            made = model(rank, managed, nested, kept, policy)
            own = 1.0 + rank.index
            for requires, trained in ((False, "output"), (True, "derivative"), (True, "both")):
                x = torch.full((2,), own, device=rank.device, requires_grad=requires)
                output, derivative = torch.func.jvp(made, (x,), (torch.ones_like(x),))
                # y = (a x)^4 b^2 and dy = 4 a^4 x^3 b^2, with a = 2 and b = 1
                assert output.detach().tolist() == [16 * own**4] * 2, what
                assert derivative.detach().tolist() == [64 * own**3] * 2, what
                loss = {"output": output, "derivative": derivative, "both": output + derivative}[trained]
                loss.float().sum().backward()
                of_output, of_derivative = (sum(values) / 2 for values in (right(4, 32, 32), right(3, 128, 128)))
                expected = {"output": of_output, "derivative": of_derivative, "both": of_output + of_derivative}[
                    trained
                ]
                found = [g.unique().tolist() for g in replicate_fsdp.gradients(made).values()]
                assert found == [[expected]] * 2, f"{what}, {requires=}, {trained}"
                made.zero_grad()
            rows = torch.stack([torch.full((2,), own, device=rank.device)] * 3)
            output = torch.vmap(made)(rows)
            assert output.detach().tolist() == [[16 * own**4] * 2] * 3, what
            output.float().sum().backward()
            found = [g.unique().tolist() for g in replicate_fsdp.gradients(made).values()]
            assert found == [[3 * sum(right(4, 32, 32)) / 2]] * 2, f"{what}, vmap"
            made.zero_grad()

    def right(power: int, first: float, second: float) -> list[float]:
        """Return the derivative of either weight on each rank: they are equal, as 2 is the weight of the first."""
        assert first == second
        return [first * (1.0 + r) ** power for r in range(2)]

    world.run(body)
