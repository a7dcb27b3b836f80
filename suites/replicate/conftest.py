"""What the tests of composable DDP share."""

from __future__ import annotations

import pytest

from fixtures.subjects import unless_reference


@pytest.fixture
def with_buckets(pytestconfig: pytest.Config) -> None:
    """Skip a test on Concord's reference, which leaves out what DistributedDataParallel has besides averages."""
    unless_reference(pytestconfig, "DDP's private methods, buckets, hooks for buffers, joins or delayed reductions")
