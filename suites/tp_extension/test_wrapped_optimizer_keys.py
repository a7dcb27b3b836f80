"""Keys of optimizer states under FSDP1 that name no parameter: states of the user's own."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullOptimStateDictConfig, FullyShardedDataParallel, StateDictType

from fixtures.wrapped import STRATEGIES, Two, whole_tensors, wrapped
from harness import Rank, World, assert_same, assert_same_all, requirement

FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


@requirement(
    "TP-STATE-4300",
    "An optimizer's state that belongs to no parameter is saved and loaded as it is, beside those of all parameters.",
    source=f"{FSDP}: optim_state_dict, optim_state_dict_to_load; torch/distributed/fsdp/_optim_utils.py: "
    "'FSDP will directly copy everything to the returned state_dict'",
)
@pytest.mark.world(2)
def test_own_states(world: World) -> None:
    """Put a number and a tensor of one's own after a parameter's state; rank 0 alone may have what is loaded."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        fsdp = FullyShardedDataParallel
        count, values = {"count": 3, "words": "some"}, torch.arange(3.0, device=rank.device)
        ways = [(FULL, False), (FULL, True), (SHARDED, False)]
        for (kind, only), original, strategy in itertools.product(ways, (True, False), STRATEGIES[::2]):
            what = f"{kind}, {only=}, {original=}, {strategy}"
            options = {"use_orig_params": original, "sharding_strategy": strategy, "device_mesh": rank.mesh()}
            config = FullOptimStateDictConfig(rank0_only=only, offload_to_cpu=False) if kind == FULL else None
            # with rank0_only, other ranks do not get tensors of one's own, a known defect
            own: dict[Any, Any] = {"own": count} if only else {"own": count, "values": values}

            def made(options: dict[str, Any] = options, kind: Any = kind, config: Any = config) -> Any:
                model = wrapped(rank, Two(), **options)
                fsdp.set_state_dict_type(model, kind, None, config)
                return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

            (model, sgd), (other, fresh) = made(), made()
            model(torch.ones(1, device=rank.device)).sum().backward()
            sgd.step()
            sgd.state.update(copy.deepcopy(own))
            saved = fsdp.optim_state_dict(model, sgd)
            if only and rank.index:
                assert saved == {}, what
            else:
                assert set(saved["state"]) == {"a", "b", *own}, f"{what}: {sorted(saved['state'])}"
            fresh.load_state_dict(fsdp.optim_state_dict_to_load(other, fresh, saved))
            for where, found in ("saved", saved.get("state", own)), ("loaded", fresh.state):
                assert found["own"] == count, f"{what}, {where}"
                if "values" in own:
                    assert_same(values, found["values"], f"{what}, {where}")
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                assert_same_all(whole_tensors(sgd.state[p]), whole_tensors(fresh.state[q]), f"{what}: parameters")

    world.run(body)
