"""One all_reduce of four floats, three times, on PyTorch's MultiProcessTestCase."""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

SIZE = int(os.environ["BENCH_RANKS"])


class TestTrivial(MultiProcessTestCase):
    @property
    def world_size(self):
        return SIZE

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def all_reduce(self):
        store = dist.FileStore(self.file_name, SIZE)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=SIZE)
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.tolist(), [SIZE] * 4)
        dist.destroy_process_group()

    def test_0(self):
        self.all_reduce()

    def test_1(self):
        self.all_reduce()

    def test_2(self):
        self.all_reduce()
