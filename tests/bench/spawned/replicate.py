"""Gradients under composable DDP, as suites/replicate/test_gradients.py has them, on PyTorch's MultiProcessTestCase."""

import os

import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.testing._internal.common_distributed import MultiProcessTestCase

from fixtures.models import TwoLayers, batch
from harness.audit import mutants
from harness.oracles.baseline import assert_same_training, train


class Gradients(MultiProcessTestCase):
    size = 1

    @property
    def world_size(self):
        return self.size

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_gradients(self):
        store = dist.FileStore(self.file_name, self.size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
        mutants.put(os.environ["BENCH_MUTANT"])
        parts = [batch(2 * self.size, step).part(self.rank, self.size) for step in range(3)]
        found = train(replicate(TwoLayers()), parts, scale=self.size)
        alone = train(TwoLayers(), [batch(2 * self.size, step) for step in range(3)])
        assert_same_training(alone, [found])
        dist.destroy_process_group()


class GradientsOf2(Gradients):
    size = 2


class GradientsOf3(Gradients):
    size = 3


class GradientsOf4(Gradients):
    size = 4
