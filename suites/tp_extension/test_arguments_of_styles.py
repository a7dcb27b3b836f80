"""Arguments of modules to which parallel styles are applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from harness import Rank, World, requirement


class Scaled(nn.Linear):
    """A linear layer that multiplies its result by an argument."""

    def forward(self, x: Any, factor: float = 1.0, shift: float = 0.0) -> Any:  # type: ignore[override]
        return super().forward(x) * factor + shift


STYLES: dict[str, Any] = {
    "columns": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rows": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequences": lambda: SequenceParallel(use_local_output=True),
}
CALLS: dict[str, Callable[..., Any]] = {
    "numbers by name": lambda module, x: module(x, factor=3.0, shift=0.5),
    "by position": lambda module, x: module(x, 3.0, 0.5),
    "input by name": lambda module, x: module(x=x, factor=3.0, shift=0.5),
}
"""Forms of a call."""


@requirement(
    "TP-STYLE-5385",
    "A parallelized module gets every argument of a call.",
    source="torch.distributed.tensor.parallel: ColwiseParallel, RowwiseParallel, SequenceParallel; torch.nn.Module",
)
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.world(2)
def test_arguments(world: World, how: str) -> None:
    """Call a module with its input and two numbers, in each style and form."""

    def body(rank: Rank) -> None:
        for name, style in STYLES.items():
            module: Any = Scaled(2, 2).to(rank.device)
            for parameter in module.parameters():
                nn.init.ones_(parameter)
            x = torch.ones(1, 1, 2, device=rank.device)
            expected = module(x, 3.0, shift=0.5)
            parallelize_module(module, rank.mesh(), style())
            found = CALLS[how](module, x)
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(found, expected), f"{name}: {found.tolist()}, expected {expected.tolist()}"

    world.run(body)
