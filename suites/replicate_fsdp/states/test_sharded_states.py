"""Managed modules that are cast before their first forward, and state dicts that are taken once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fixtures.managed import ways
from fixtures.tensors import numbers
from harness import Rank, World, requirement
from harness.stacks import messages, replicate_fsdp

GIVEN = 512.0, 2.0
"""The inputs of two ranks, whose average needs nine bits; bfloat16 has eight."""


class Weights(nn.Module):
    """Weights of one, three and four rows, which two ranks do not all divide; each gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        for rows in (1, 3, 4):
            self.register_parameter(f"weight{rows}", nn.Parameter(numbers(rows, 2)))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every weight times the input."""
        self.seen = {p.dtype for p in self.parameters()}
        return torch.stack([(p * x).sum() for p in self.parameters()]).sum()


@requirement(
    "RFSDP-CAST-02",
    "A model that is cast between wrapping and its first forward trains in its new dtype, by which its policy goes, "
    "also in uneven shards.",
    source="torch.nn.Module.to; torch.distributed.fsdp: fully_shard, MixedPrecisionPolicy",
)
@pytest.mark.world(2)
def test_cast(world: World) -> None:
    """Cast to a wider or a narrower dtype or the same, under several policies."""
    narrow, single, wide = torch.bfloat16, torch.float32, torch.float64
    casts = [(single, wide), (single, narrow), (narrow, single), (wide, single), (single, single)]
    policies = [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(narrow),
        MixedPrecisionPolicy(narrow, narrow),
        MixedPrecisionPolicy(narrow, single),
        MixedPrecisionPolicy(single, narrow),
        MixedPrecisionPolicy(reduce_dtype=narrow),
    ]

    def body(rank: Rank) -> None:
        every = itertools.cycle(ways(rank).items())
        for (policy, (before, after)), (way, managed) in zip(itertools.product(policies, casts), every, strict=False):
            what = f"{way}, {before} to {after}, {policy}"
            model: Any = managed(Weights().to(rank.device, before), mp_policy=policy)
            assert model.to(after) is model
            computed = policy.param_dtype or after
            reduced = policy.reduce_dtype or (after if replicate_fsdp.REDUCES_IN_PARAMETER_DTYPE else computed)
            mean = 256.0 if narrow in (reduced, after) else 257.0
            at = messages.mark()
            model(torch.tensor(GIVEN[rank.index], device=rank.device, dtype=after)).backward()
            assert model.seen == {computed}, what
            sent = {m.dtype for m in messages.since(at) if "gather" not in m.op}
            assert sent <= {messages.RECORDED[reduced]}, what
            for name, parameter in model.named_parameters():
                for tensor in (parameter, parameter.to_local(), parameter.grad, parameter.grad.to_local()):
                    assert tensor.dtype == after, f"{what}: {name}"
                rows = int(name[-1])
                assert torch.equal(parameter.full_tensor().cpu(), numbers(rows, 2).to(after)), f"{what}: {name}"
                assert parameter.grad.full_tensor().unique().tolist() == [mean], f"{what}: {name}"

    world.run(body)


@requirement(
    "RFSDP-CAST-800",
    "After a cast of a managed model, each optimizer takes the step that it takes on plain tensors of the new dtype.",
    source="torch.nn.Module.to; torch.distributed.fsdp.fully_shard; torch.optim: foreach",
)
@pytest.mark.world(2)
def test_optimizers_after_a_cast(world: World) -> None:
    """Cast to a wider or a narrower dtype before the first forward; step on tensors one by one or in lists."""

    def body(rank: Rank) -> None:
        settings = itertools.cycle(itertools.product((torch.float64, torch.bfloat16), ways(rank).items()))
        for name, foreach in itertools.product(("Adam", "RMSprop", "Adagrad"), (False, True)):
            dtype, (way, managed) = next(settings)
            what = f"{name}, {foreach=}, {way}, {dtype}"
            model: Any = managed(Weights().to(rank.device)).to(dtype)
            shards = [p.detach().to_local().clone().requires_grad_() for p in model.parameters()]
            model(torch.tensor(1.0 + rank.index, device=rank.device, dtype=dtype)).backward()
            for shard in shards:
                shard.grad = torch.full_like(shard, 1.5)
            for given in (model.parameters(), shards):
                getattr(torch.optim, name)(given, lr=0.125, foreach=foreach).step()
            for parameter, shard in zip(model.parameters(), shards, strict=True):
                found = parameter.detach().to_local()
                assert found.dtype == dtype, what
                assert torch.equal(found, shard.detach()), what

    world.run(body)


@requirement(
    "RFSDP-STATE-04",
    "The state dict of a managed module has the memory of its parameters: one that was taken once shows every later "
    "step and load.",
    source="torch.nn.Module.state_dict; torch/distributed/fsdp/_fully_shard/_fsdp_param.py: reset_sharded_param",
)
@pytest.mark.world(2)
def test_taken_once(world: World) -> None:
    """Take it before the first forward or after a step, kept gathered or not; then train, and load other values."""

    def body(rank: Rank) -> None:
        for (way, managed), early, kept in itertools.product(ways(rank).items(), (True, False), (False, True)):
            if way == "replicated" and kept:
                continue
            what = f"{way}, {early=}, {kept=}"
            model: Any = nn.Sequential(Weights()).to(rank.device)
            for module in (model[0], model):
                managed(module, **({"reshard_after_forward": False} if kept else {}))
            sgd = torch.optim.SGD(model.parameters(), lr=2.0)
            state = model.state_dict() if early else {}
            for done in range(1, 4):
                model(torch.tensor(1.0 + rank.index, device=rank.device)).backward()
                sgd.step()
                sgd.zero_grad()
                with torch.no_grad():
                    model(torch.ones((), device=rank.device))
                state = state or model.state_dict()
                check(model, state, -3.0 * done, f"{what}, after {done} steps")
                model[0].reshard()
            loaded = {name: value.clone().fill_(7.0) for name, value in state.items()}
            model.load_state_dict(loaded)
            check(model, state, None, f"{what}, loaded")
            model(torch.tensor(1.0 + rank.index, device=rank.device)).backward()
            sgd.step()
            assert all(v.full_tensor().unique().tolist() == [4.0] for v in state.values()), f"{what}, trained on"

    def check(model: Any, state: dict[str, Any], more: float | None, what: str) -> None:
        """Assert that the state and the model have the same memory, and these values."""
        fresh = model.state_dict()
        assert list(state) == list(fresh), what
        for name, value in state.items():
            assert isinstance(value, DTensor), f"{what}: {name}"
            rows = int(name[-1])
            right = torch.full((rows, 2), 7.0) if more is None else numbers(rows, 2) + more
            for tensor in (value, fresh[name]):
                assert torch.equal(tensor.full_tensor().cpu(), right), f"{what}: {name}"
            assert value.to_local().data_ptr() == fresh[name].to_local().data_ptr(), f"{what}: {name}"

    world.run(body)
