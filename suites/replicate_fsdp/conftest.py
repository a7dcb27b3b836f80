"""What the tests of FSDP-replicate share."""

from __future__ import annotations

import pytest

from fixtures.subjects import unless_reference


@pytest.fixture
def with_reducer(pytestconfig: pytest.Config) -> None:
    """Skip a test on Concord's reference, whose DistributedDataParallel lacks private methods that the test calls."""
    unless_reference(pytestconfig, "DDP's private methods or its reducer, which pipelines call")


@pytest.fixture
def with_early_averages(pytestconfig: pytest.Config) -> None:
    """Skip a test on Concord's reference, which averages the gradients of all modules at the end of a backward."""
    unless_reference(pytestconfig, "averages in the middle of a backward")


@pytest.fixture
def with_transforms(pytestconfig: pytest.Config) -> None:
    """Skip a test on Concord's reference, which raises an error where torch.func transforms a module."""
    unless_reference(pytestconfig, "torch.func of managed modules")


@pytest.fixture
def with_refusals(pytestconfig: pytest.Config) -> None:
    """Skip a test on Concord's reference, on whose modules fully_shard fails without naming the problem."""
    unless_reference(pytestconfig, "clear refusals of fully_shard on its modules")
