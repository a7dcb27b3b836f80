"""What the tests of composable DDP share."""

from __future__ import annotations

import pytest

from harness import unsupported
from harness.results import TorchLacks


@pytest.fixture
def with_buckets(pytestconfig: pytest.Config) -> None:
    """Skip a test on Concord's reference, which leaves out what DistributedDataParallel has besides averages."""
    if pytestconfig.getoption("subject") == "reference":
        lacks = "DDP's private methods, buckets, hooks for buffers, joins or delayed reductions"
        unsupported(TorchLacks(f"{lacks}: it is Concord's reference"))
