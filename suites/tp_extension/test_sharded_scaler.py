"""ShardedGradScaler, the scaler of gradients that FSDP shards."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from harness import Rank, World, requirement


@requirement(
    "TP-SCALE-3705",
    "A ShardedGradScaler unscales sparse gradients as dense ones, and skips a step if their values, or sums of them in "
    "float16, are not finite.",
    source="torch/distributed/fsdp/sharded_grad_scaler.py: ShardedGradScaler.unscale_; torch.amp.GradScaler",
)
@pytest.mark.world(2)
def test_sparse(world: World) -> None:
    """A gradient names a row twice; in float16 only the sum of both is infinite; one rank or none has such a one."""

    def body(rank: Rank) -> None:
        rows = torch.tensor([[0, 2, 0]], device=rank.device)
        for dtype, spoilt, sparse in itertools.product((torch.float32, torch.float16), (None, 0, 1), (True, False)):
            what = f"{dtype}, {spoilt=}, {sparse=}"
            weight = nn.Parameter(torch.ones(4, 2, dtype=dtype, device=rank.device))
            sgd = torch.optim.SGD([weight], lr=0.5)
            scaler = ShardedGradScaler(rank.device.type, init_scale=4.0, backoff_factor=0.25, growth_interval=1)
            scaler.scale(torch.ones((), device=rank.device))
            infinite = torch.finfo(dtype).max if dtype == torch.float16 else torch.inf
            large = infinite if rank.index == spoilt else 16.0
            values = torch.tensor([[4.0, large], [8.0, 2.0], [12.0, large]], dtype=dtype, device=rank.device)
            gradient = torch.sparse_coo_tensor(rows, values, (4, 2), check_invariants=True)
            weight.grad = gradient if sparse else gradient.to_dense()
            scaler.unscale_(sgd)
            assert weight.grad.is_sparse == sparse, what
            if rank.index != spoilt:
                expected = torch.tensor([[4.0, 8.0], [0.0, 0.0], [2.0, 0.5], [0.0, 0.0]], dtype=dtype)
                assert weight.grad.to_dense().tolist() == expected.tolist(), what
            scaler.step(sgd)
            scaler.update()
            skipped = spoilt is not None
            assert scaler.get_scale() == (1.0 if skipped else 8.0), f"{what}: {scaler.get_scale()}"
            after = [[1.0, 1.0]] * 4 if skipped else [[-1.0, -3.0], [1.0, 1.0], [0.0, 0.75], [1.0, 1.0]]
            assert weight.tolist() == after, f"{what}: {weight.tolist()}"

    world.run(body)
