"""Whether a parameter is one of those of a module, as compiled code asks it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from harness import Rank, World, requirement
from suites.dynamo.objects import summed, unlike

CONTAINED: dict[str, Callable[[nn.Linear], bool]] = {
    "identity": lambda layer: any(each is layer.weight for each in layer.parameters()),
    "list": lambda layer: layer.weight in list(layer.parameters()),
}
"""How code asks for a parameter of a layer."""


@requirement(
    "DYN-CONTAINER-3767",
    "In compiled code, a parameter is in the list of its module's parameters, by identity.",
    source="Python: Membership test operations, 'any(x is e or x == e for e in y)'; torch.compile",
)
@pytest.mark.parametrize("way", CONTAINED)
@pytest.mark.world(2)
def test_contained(world: World, way: str) -> None:
    """Ask for the weight of a layer, beside a sum over ranks."""

    def body(rank: Rank) -> list[str]:
        layer = nn.Linear(2, 2, device=rank.device)
        return unlike(rank, {way: (lambda x: (summed(x), CONTAINED[way](layer)), ())})

    for wrong in world.run(body):
        assert not wrong, "\n".join(wrong)
