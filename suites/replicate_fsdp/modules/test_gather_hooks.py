"""Tensor subclasses that say themselves what is gathered of their shards, and how the whole is made of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fixtures.managed import ways
from fixtures.tensors import chunk, numbers
from harness import Rank, World, requirement
from harness.stacks import replicate_fsdp
from harness.stacks.replicate_fsdp import Wrapping, rewrite

SOURCE = "torch/distributed/fsdp/_fully_shard/_fsdp_param.py: fsdp_pre_all_gather, fsdp_post_all_gather"


class Coded(Wrapping):
    """A tensor that is sent as its magnitudes and, in another dtype, its signs."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return the parts, with as many rows on each rank, and what the other method needs to know."""
        self.shared.append(
            (dist.get_process_group_ranks(mesh.get_group()), outer_size, outer_stride, module, mp_policy)
        )
        rows = -(-outer_size[0] // mesh.size())
        padded = self.plain.new_zeros(rows, *outer_size[1:])
        padded[: self.plain.size(0)] = self.plain
        return (padded.abs(), padded.sign().to(torch.int8)), (outer_size[0], len(self.shared))

    def fsdp_post_all_gather(
        self, parts: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        """Make the whole of all ranks' parts, in new memory at first and in the same memory then."""
        rows, number = metadata
        assert number == len(self.shared), "metadata of another gather"
        assert (out is None) == (number == 1), "the first result is kept"
        whole = (parts[0] * parts[1]).to(param_dtype)[:rows]
        if out is None:
            return whole, (whole,)
        assert out.dtype == param_dtype
        rewrite(out, whole)
        return None


class OfOneArgument(Coded):
    """The same with the older method, which gets the mesh alone."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:  # type: ignore[override]
        """Return the parts of an even shard."""
        size = torch.Size((self.plain.size(0) * mesh.size(), *self.plain.shape[1:]))
        return Coded.fsdp_pre_all_gather(self, mesh, size, None, None, None)


def patched(parameter: Any) -> list[Any]:
    """Give the tensor of a plain parameter's shard the hooks, and return the list of what they are asked."""
    local: Any = replicate_fsdp.held(parameter)
    local.plain, local.shared = local, []
    for hook in Coded.fsdp_pre_all_gather, Coded.fsdp_post_all_gather:
        setattr(local, hook.__name__, hook.__get__(local))
    shared: list[Any] = local.shared
    return shared


class Product(nn.Module):
    """A coded weight and a plain one, whose gradients are the input and twice the input."""

    def __init__(self, kind: type[Coded] | None, rows: int, device: torch.device) -> None:
        super().__init__()
        coded = (numbers(rows, 2) - 3).to(device)
        self.coded = nn.Parameter(kind(coded) if kind else coded)
        self.plain = nn.Parameter((numbers(3) - 2).to(device))
        self.seen: tuple[Any, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.coded.dtype, self.coded.detach().tolist(), self.plain.detach().tolist()
        return (self.coded * x).sum() + (2 * self.plain * x).sum()


@requirement(
    "RFSDP-EXT-01",
    "Parameters of a tensor subclass with gather hooks are gathered as these say before each forward or backward, and "
    "train as on one device.",
    source=SOURCE,
)
@requirement(
    "RFSDP-EXT-02",
    "Gather hooks get the mesh of the shards, the whole size, the stride, the module, its policy, and the metadata of "
    "the same gather.",
    source=SOURCE,
)
@pytest.mark.world(4, keeps="tensors that refer to their modules")
def test_coded(world: World) -> None:
    """Take three steps with both signatures, hooks of one tensor, uneven shards, replicas, and kept or cast weights."""
    narrow = torch.bfloat16

    def body(rank: Rank) -> None:
        cases = itertools.product(
            ("sharded", "hybrid"), ((Coded, 8), (Coded, 5), (OfOneArgument, 4), (None, 8)), (True, False)
        )
        dtypes = itertools.cycle((None, narrow, narrow))
        for (way, (kind, rows), kept), param in zip(cases, dtypes, strict=False):
            if rows == 5 and not kept:
                continue  # pytorch/pytorch#154836
            what = f"{way}, {kind} of {rows} rows, {param}, {kept=}"
            policy = MixedPrecisionPolicy(param, torch.float32)
            model: Any = nn.Sequential(Product(kind, rows, rank.device))
            asked = model[0].coded.shared if kind else []
            managed = ways(rank)[way]
            managed(model[0], mp_policy=policy, reshard_after_forward=not kept)
            managed(model, mp_policy=policy)
            if not kind:
                asked = patched(model[0].coded)
            sgd = torch.optim.SGD(model.parameters(), lr=2.0, foreach=False)
            for step in range(3):
                output = model(torch.tensor(1.0 + rank.index, device=rank.device))
                coded, plain = numbers(rows, 2) - 3 - 5 * step, numbers(3) - 2 - 10 * step
                assert model[0].seen == (param or torch.float32, coded.tolist(), plain.tolist()), f"{what}, step {step}"
                output.backward()
                gradients = [g.unique().tolist() for g in replicate_fsdp.gradients(model).values()]
                assert gradients == [[2.5], [5.0]], f"{what}, step {step}"
                sgd.step()
                sgd.zero_grad()
            shards = list(range(4)) if way == "sharded" else [rank.index // 2 * 2, rank.index // 2 * 2 + 1]
            told = torch.Size((rows, 2)), (2, 1), model[0], policy
            for ranks, size, stride, module, given in asked:
                assert ranks == shards, what
                assert kind is OfOneArgument or (size, stride, module, given) == told, what
            assert len(asked) == (3 if kept else 6), what

    world.run(body)


@requirement(
    "RFSDP-EXT-3674",
    "Parameters of a tensor subclass with gather hooks, managed on the meta device, keep their class with its hooks "
    "when they get memory.",
    source=f"{SOURCE}; torch.nn.Module.to_empty",
)
@pytest.mark.world(2, keeps="tensors that refer to their modules")
def test_on_meta(world: World) -> None:
    """Manage a model on the meta device, give it memory and values, and take three steps, kept gathered or not."""

    def body(rank: Rank) -> None:
        rows = 8
        for kept in (False, True):
            what = f"{kept=}"
            with torch.device("meta"):
                model: Any = nn.Sequential(Product(Coded, rows, torch.device("meta")))
            managed = ways(rank)["sharded"]
            managed(model[0], reshard_after_forward=not kept)
            managed(model)
            model.to_empty(device=rank.device)
            for parameter, values in zip(model.parameters(), (numbers(rows, 2) - 3, numbers(3) - 2), strict=True):
                local = parameter.to_local().detach()
                local.copy_(chunk(values.to(rank.device), 2, rank.index))
            assert isinstance(replicate_fsdp.held(model[0].coded), Coded), what
            sgd = torch.optim.SGD(model.parameters(), lr=2.0, foreach=False)
            for step in range(3):
                model(torch.tensor(1.0 + rank.index, device=rank.device)).backward()
                coded, plain = numbers(rows, 2) - 3 - 3 * step, numbers(3) - 2 - 6 * step
                assert model[0].seen == (torch.float32, coded.tolist(), plain.tolist()), f"{what}, step {step}"
                gradients = [g.unique().tolist() for g in replicate_fsdp.gradients(model).values()]
                assert gradients == [[1.5], [3.0]], f"{what}, step {step}"
                sgd.step()
                sgd.zero_grad()

    world.run(body)
