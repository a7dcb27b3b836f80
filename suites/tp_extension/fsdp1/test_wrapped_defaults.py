"""Options of FSDP1 that are left out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    FlatParameter,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

from fixtures.wrapped import Outer, Two, Weight, inputs, nested, wrapped
from harness import Rank, World, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"


@requirement(
    "TP-WRAP-4304",
    "FSDP with options left out flattens each rank's own parameters, which it shards in full precision, and limits "
    "gathers.",
    source=f"{SOURCE}: sharding_strategy, use_orig_params, mixed_precision, sync_module_states, limit_all_gathers",
)
@requirement(
    "TP-WRAP-4305",
    "summon_full_params with options left out gives every rank whole parameters of all modules without gradients, and "
    "keeps changes.",
    source=f"{SOURCE}.summon_full_params: recurse, writeback, rank0_only, with_grads",
)
@requirement(
    "TP-STATE-4306",
    "State dict configs with options left out are of all ranks, and clip_grad_norm_ takes the norm of order two.",
    source="torch.distributed.fsdp: FullStateDictConfig, FullOptimStateDictConfig; "
    f"{SOURCE}: optim_state_dict, full_optim_state_dict, clip_grad_norm_",
)
@pytest.mark.world(2)
def test_left_out(world: World) -> None:
    """Compare what FSDP does without an option with what it documents as the default."""

    def body(rank: Rank) -> None:
        fsdp = FullyShardedDataParallel
        two = Two()
        torch.nn.init.constant_(two.a, 1.0 + rank.index)
        model: Any = wrapped(rank, two)
        (flat,) = model.parameters()
        assert isinstance(flat, FlatParameter)
        assert flat.tolist() == [[1.0] * 4, [1.0] * 4][rank.index]  # of the second rank's b
        assert model.sharding_strategy == ShardingStrategy.FULL_SHARD
        y = model(inputs(rank))
        assert y.dtype == torch.float32
        assert flat.dtype == torch.float32
        for name, value in ("use_orig_params", False), ("limit_all_gathers", True):
            # all modules of a model need one value
            wrapped(rank, Outer(2, 1.0, wrapped(rank, Weight(2, 1.0), **{name: value})))(inputs(rank))
        model = nested(rank, use_orig_params=True)
        model(torch.ones(1, device=rank.device)).sum().backward()
        with fsdp.summon_full_params(model), torch.no_grad():
            whole = dict(model.named_parameters())
            assert sorted(p.numel() for p in whole.values()) == [4, 8]
            for parameter in whole.values():
                assert parameter.grad is None or parameter.grad.shape != parameter.shape
                parameter.copy_(torch.arange(parameter.numel()))
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        right = [[0.0, 1.0, 2.0, 3.0, 0.0, 1.0], [4.0, 5.0, 6.0, 7.0, 2.0, 3.0]][rank.index]
        assert found.tolist() == right
        norm = model.clip_grad_norm_(1000.0)
        assert norm.item() == pytest.approx((8 * 25 + 4 * 9) ** 0.5, rel=1e-6)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        sgd.step()
        for configs in (), (FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=False)):
            with fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
                assert len(model.state_dict()) == 2
                if configs:
                    assert len(fsdp.optim_state_dict(model, sgd)["state"]) == 2
        assert bool(fsdp.full_optim_state_dict(model, sgd)) == (rank.index == 0)
        fresh = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        with fsdp.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(offload_to_cpu=False)
        ):
            fsdp.optim_state_dict_to_load(model, fresh, fsdp.optim_state_dict(model, sgd))
        assert not fresh.state

    world.run(body)


@requirement(
    "TP-MIXED-4307",
    "MixedPrecision with options left out casts inputs of the root alone, and gives gradients in full precision.",
    source="torch.distributed.fsdp.MixedPrecision: cast_root_forward_inputs, cast_forward_inputs, "
    "keep_low_precision_grads",
)
@pytest.mark.world(2)
def test_precision_left_out(world: World) -> None:
    """Note the dtypes of inputs at the root, and inside, where the outer module casts back."""

    class Noting(Weight):
        seen: torch.dtype

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x.dtype
            return super().forward(x.to(self.weight.dtype)).float()

    def body(rank: Rank) -> None:
        for original, name in itertools.product((True, False), (None, "param", "reduce", "buffer")):
            low = {} if name is None else {f"{name}_dtype": torch.bfloat16}
            options = {"use_orig_params": original, "mixed_precision": MixedPrecision(**low)}
            parts = [Noting(2, 1.0), Noting(2, 1.0)]
            model = wrapped(rank, torch.nn.Sequential(parts[0], wrapped(rank, parts[1], **options)), **options)
            x = torch.ones(1, device=rank.device)
            model(x).sum().backward()
            right = [torch.bfloat16 if name == "param" else torch.float32, torch.float32]
            assert [part.seen for part in parts] == right, f"{original=}, {name}"
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            assert {gradient.dtype for gradient in gradients} == {torch.float32}, f"{original=}, {name}"

    world.run(body)
