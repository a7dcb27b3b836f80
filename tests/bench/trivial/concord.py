"""One all_reduce of four floats, twenty times, on Concord: fresh ranks for every test."""

import os

import pytest
import torch
import torch.distributed as dist

from harness import spmd

SIZE = int(os.environ["BENCH_RANKS"])


@pytest.mark.parametrize("number", range(20))
@spmd(SIZE)
def test_all_reduce(rank, number):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [SIZE] * 4
