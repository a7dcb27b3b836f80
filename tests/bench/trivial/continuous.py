"""One all_reduce of four floats, six times, on PyTorch's MultiProcContinuousTest: the same ranks for all of a class."""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

SIZE = int(os.environ["BENCH_RANKS"])


class TestTrivial(MultiProcContinuousTest):
    world_size = SIZE

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def all_reduce(self):
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.tolist(), [SIZE] * 4)

    def test_0(self):
        self.all_reduce()

    def test_1(self):
        self.all_reduce()

    def test_2(self):
        self.all_reduce()

    def test_3(self):
        self.all_reduce()

    def test_4(self):
        self.all_reduce()

    def test_5(self):
        self.all_reduce()
