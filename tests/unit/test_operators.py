"""The one table of operators that both oracles read."""

from __future__ import annotations

import pytest
import torch

from harness.oracles.operators import OPERATORS, Operator
from harness.oracles.proof_rules import FOLLOWED


def test_in_order() -> None:
    """Names are in alphabetical order, so that nothing has two entries."""
    assert list(OPERATORS) == sorted(OPERATORS, key=lambda name: (name.lstrip("_"), name))


@pytest.mark.parametrize("name", OPERATORS)
def test_entry(name: str) -> None:
    """An entry is of an operator that torch has, says something, and names a rule that there is."""
    assert hasattr(torch.ops.aten, name)
    assert OPERATORS[name] != Operator()
    assert OPERATORS[name].proof in {"", "empty", "view", "moves", "whole", *FOLLOWED}
