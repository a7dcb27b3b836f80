"""What DTensors, tensor parallelism and FSDP1 leave as it was: settings of the process, random numbers among them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dtensors
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, StateDictType
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel, implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from fixtures.settings import settings
from fixtures.wrapped import STRATEGIES
from harness import Rank, World, requirement


@requirement(
    "TP-LIFE-5546",
    "DTensors, parallel modules, FSDP modules or their states leave random numbers and other settings as they were.",
    source="torch.distributed.tensor; torch.distributed.tensor.parallel; "
    "torch.distributed.fsdp.FullyShardedDataParallel; torch.get_rng_state; warnings.catch_warnings",
)
@pytest.mark.world(2)
def test_settings_stay(world: World) -> None:
    """Compare them around each function that makes, converts, trains, saves and loads, in two turns."""

    def body(rank: Rank) -> None:
        fsdp, mesh, x = FullyShardedDataParallel, rank.mesh(), torch.ones(4, 8, device=rank.device)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(rank.device)
        targets = torch.zeros(4, dtype=torch.long, device=rank.device)
        parallel, made = copy.deepcopy(plain), dict[str, Any]()
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}

        def losses() -> None:
            logits = distribute_tensor(x.clone(), mesh, [Shard(1)]).requires_grad_()
            with loss_parallel():
                nn.functional.cross_entropy(logits, targets).backward()

        def contexts() -> None:
            with context_parallel(mesh, buffers=[x.clone()], buffer_seq_dims=[0]), implicit_replication():
                distribute_tensor(x.clone(), mesh, [Shard(0)]) + x

        def states(kind: StateDictType) -> None:
            model, sgd = made["model"], made["sgd"]
            with fsdp.state_dict_type(model, kind):
                state, momenta = model.state_dict(), fsdp.optim_state_dict(model, sgd)
                model.load_state_dict(state)
                sgd.load_state_dict(fsdp.optim_state_dict_to_load(model, sgd, momenta))

        def wrap(**options: Any) -> None:
            model = fsdp(copy.deepcopy(plain), device_id=rank.device, **options)
            made.update(model=model, sgd=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5))

        def summon() -> None:
            with fsdp.summon_full_params(made["model"]):
                pass

        def accumulate() -> None:
            with made["model"].no_sync():
                made["model"](x).sum().backward()

        layouts = Shard(0), Shard(1), Replicate(), Partial()
        steps: dict[str, Callable[[], Any]] = {
            "distribute_tensor": lambda: [distribute_tensor(x.clone(), mesh, [layout]) for layout in layouts],
            "factories": lambda: dtensors.zeros(4, 8, device_mesh=mesh, placements=[Shard(0)]),
            "full_tensor": lambda: distribute_tensor(x.clone(), mesh, [Shard(1)]).full_tensor(),
            "distribute_module": lambda: distribute_module(copy.deepcopy(plain), mesh),
            "parallelize_module": lambda: parallelize_module(copy.deepcopy(plain), mesh, plan),
            "parallel step": lambda: parallel(x).sum().backward(),
            "loss_parallel": losses,
            "contexts": contexts,
        }
        parallelize_module(parallel, mesh, plan)
        low = MixedPrecision(torch.bfloat16)
        ways = [{"sharding_strategy": each, "use_orig_params": each != STRATEGIES[1]} for each in STRATEGIES]
        for way in *ways, {"mixed_precision": low}:
            steps |= {
                f"FSDP {way}": lambda way=way: wrap(**way),  # type: ignore[misc]
                f"no_sync {way}": accumulate,
                f"step {way}": lambda: made["model"](x).sum().backward(),
                f"clip_grad_norm_ {way}": lambda: made["model"].clip_grad_norm_(1.0),
                f"optimizer {way}": lambda: made["sgd"].step(),
                f"summon_full_params {way}": summon,
                f"full state {way}": lambda: states(StateDictType.FULL_STATE_DICT),
                f"sharded state {way}": lambda: states(StateDictType.SHARDED_STATE_DICT),
            }
        settings()
        for turn in range(2):
            for what, step in steps.items():
                torch.rand(1)  # so that the generator is no more as its seed made it
                before = settings()
                step()
                after = settings()
                changed = {name for name in before if before[name] != after[name]}
                assert not changed, f"{what}, turn {turn}: {changed}"

    world.run(body)
