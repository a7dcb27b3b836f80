"""The parameters of a fully sharded module after a forward and a backward, their memory, and parameters made anew."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fixtures.layers import alone, layers, row, train
from fixtures.managed import ways
from fixtures.tensors import chunk
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks import messages, replicate_fsdp
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.fsdp.fully_shard"


def sharded(rank: Rank, model: Any = None, **options: Any) -> Any:
    """Shard each layer of a sequence and the sequence; ``options`` are those of the layers."""
    model = layers(rank.device) if model is None else model
    for layer in model:
        fully_shard(layer, mesh=rank.mesh(), **options)
    return fully_shard(model, mesh=rank.mesh())


@requirement(
    "RFSDP-SHARDPAR-01",
    "With reshard_after_forward=n, a layer is gathered from all ranks for the forward, and from n for the backward.",
    source=f"{SOURCE}: reshard_after_forward",
)
@requirement(
    "RFSDP-SHARDPAR-02",
    "With reshard_after_forward=n, the parameters between forward and backward are sharded over n ranks.",
    source=f"{SOURCE}: reshard_after_forward",
)
@pytest.mark.world(4)
def test_smaller_groups(world: World) -> None:
    """Use 2 of 4 ranks, for two steps and by reshard(); 4 is as True, 1 as False; others raise an error."""

    def body(rank: Rank) -> None:
        pair = tuple(range(rank.index // 2 * 2, rank.index // 2 * 2 + 2))
        plain, everyone = [p.detach() for p in layers().parameters()], tuple(range(4))
        for value, backward in {2: [pair] * 2, 4: [everyone] * 2, 1: []}.items():
            model = sharded(rank, reshard_after_forward=value)
            for by_hand in False, True, False:
                at, what = messages.mark(), f"reshard_after_forward={value}, {by_hand=}"
                output = model(row(rank.index).to(rank.device))
                assert [m.members for m in messages.since(at)] == [everyone] * 2, what
                for layer, expected in zip(model, plain, strict=True):
                    if by_hand:
                        layer.reshard()
                    ranks = 4 if by_hand else value
                    weight = layer.weight
                    assert isinstance(weight, DTensor) == (ranks > 1), what
                    if ranks == 2 and len(expected) % 4:
                        continue  # PyTorch up to 2.15 shows padding instead of rows here, and computes with the rows
                    assert torch.equal(replicate_fsdp.whole(weight).cpu(), expected), what
                    local = weight.to_local() if isinstance(weight, DTensor) else weight
                    part = chunk(expected, ranks, rank.index % ranks)
                    assert torch.equal(local.detach().cpu(), part), what
                at = messages.mark()
                output.sum().backward()
                gathered = [m.members for m in messages.since(at) if "gather" in m.op]
                assert gathered == ([everyone] * 2 if by_hand else backward), what
                assert all(p.placements == (Shard(0),) for p in model.parameters()), what
                gradients = [replicate_fsdp.whole(p.grad).flatten().tolist() for p in model.parameters()]
                assert gradients == alone(4), what
                model.zero_grad()
        for value in 0, 3, 5, 8, -2, "2", 2.0:
            with pytest.raises(ValueError, match="reshard_after_forward"):
                fully_shard(nn.Linear(2, 2, device=rank.device), mesh=rank.mesh(), reshard_after_forward=value)  # type: ignore[arg-type]

    world.run(body)


class Partly(nn.Module):
    """A frozen weight beside another one, and which of them required gradients in the last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.weight = nn.Parameter(torch.full((4,), 2.0), requires_grad=False), nn.Parameter(torch.ones(4))
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = trained(self)
        return x * self.frozen * self.weight


def trained(module: nn.Module) -> list[bool]:
    """Return which parameters require gradients; all of them are leaves."""
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in module.parameters())
    return [p.requires_grad for p in module.parameters()]


@requirement(
    "RFSDP-SHARDPAR-215",
    "A parameter requires gradients exactly if it was told so, wherever it is resharded to, and while it is gathered.",
    source=f"{SOURCE}: reshard_after_forward; torch.nn.Parameter.requires_grad",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, frozen parameters on a smaller mesh require gradients")
@pytest.mark.world(4)
def test_frozen(world: World) -> None:
    """Look at each parameter wherever it may change, freeze others between steps, and use 1, 2, 4 or all ranks."""
    both, first, second = [True] * 2, [True, False], [False, True]

    def body(rank: Rank) -> None:
        for value, layerwise in itertools.product((2, True, False, 1, 4), (True, False)):
            model: Any = nn.Sequential(Partly(), Partly()).to(rank.device)
            if layerwise:
                sharded(rank, model, reshard_after_forward=value)
            else:
                fully_shard(model, mesh=rank.mesh(), reshard_after_forward=value)
            for step, right in enumerate(([second, second], [second, first], [both, second])):
                for layer, told in zip(model, right, strict=True):
                    for parameter, on in zip(layer.parameters(), told, strict=True):
                        parameter.requires_grad_(on)
                what, every = f"{value}, {layerwise=}, step {step}", [*right[0], *right[1]]
                loss = model(torch.full((4,), 1.0 + rank.index, device=rank.device)).sum()
                assert [layer.seen for layer in model] == right, what
                assert trained(model) == every, f"{what}: after the forward"
                if step == 1:
                    model[1].reshard() if layerwise else model.reshard()
                    assert trained(model) == every, f"{what}: resharded"
                    model[1].unshard() if layerwise else model.unshard()
                    assert trained(model) == every, f"{what}: gathered"
                loss.backward()
                assert trained(model) == every, f"{what}: after the backward"
                gradients = [None if p.grad is None else p.grad.full_tensor().tolist() for p in model.parameters()]
                values = [5.0, 10.0] * 2
                assert gradients == [[g] * 4 if on else None for g, on in zip(values, every, strict=True)], what
                model.zero_grad()
                with torch.no_grad():
                    model(torch.ones(4, device=rank.device))
                assert trained(model) == every, f"{what}: after an evaluation"
                for module in [*model, model] if layerwise else [model]:
                    module.reshard()

    world.run(body)


@requirement(
    "RFSDP-SHARDPAR-275",
    "A layer that is frozen or unfrozen after an evaluation is so in later steps, whatever reshard_after_forward is.",
    source=f"{SOURCE}: reshard_after_forward; torch.nn.Module.requires_grad_",
)
@pytest.mark.parametrize("value", [True, 4, False, 2], ids=["resharded", "all", "kept", "smaller-group"])
@pytest.mark.world(4)
def test_frozen_after_evaluation(world: World, value: Any) -> None:
    """Evaluate, freeze one of two layers, unfreeze the other, and train two steps."""

    def body(rank: Rank) -> list[str]:
        model = layers(rank.device)
        model[1].requires_grad_(False)
        sharded(rank, model, reshard_after_forward=value)
        with torch.no_grad():
            model(row(rank.index).to(rank.device))
        model[0].requires_grad_(False)
        model[1].requires_grad_(True)
        seen = []
        for step in range(2):
            model(row(rank.index).to(rank.device)).sum().backward()
            seen += [f"step {step}: trains {n}" for n, p in model.named_parameters() if p.grad is not None]
            model.zero_grad()
        return seen

    assert_on_ranks([["step 0: trains 1.weight", "step 1: trains 1.weight"]] * world.size, world.run(body))


class Keeping(nn.Linear):
    """A layer that keeps the parameter that its last forward used."""

    used: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["used"] = self.weight
        return super().forward(x)


@requirement(
    "RFSDP-SHARDPAR-03",
    "The memory of gathered parameters is freed when they are resharded, and only then.",
    source=f"{SOURCE}: reshard_after_forward; torch.distributed.fsdp.FSDPModule: reshard, set_reshard_after_backward",
)
@requirement(
    "RFSDP-SHARDPAR-04",
    "Parameters are DTensors where they are resharded, and plain tensors where they stay gathered.",
    source=f"{SOURCE}: reshard_after_forward",
)
@pytest.mark.world(2)
def test_memory(world: World) -> None:
    """Look at the memory of each layer's weight after a forward, a backward, an evaluation, unshard() and reshard()."""

    def body(rank: Rank) -> None:
        def held(model: Any) -> list[bool]:
            memory = [layer.used.untyped_storage().size() > 0 for layer in model]
            assert [not isinstance(layer.weight, DTensor) for layer in model] == memory
            return memory

        for after_forward in True, False:
            for after_backward in True, False:
                model: Any = nn.Sequential(*(Keeping(4, 4, device=rank.device) for _ in range(3)))
                sharded(rank, model, reshard_after_forward=after_forward)
                model.set_reshard_after_backward(after_backward)
                what = f"{after_forward=}, {after_backward=}"
                for synced in True, False, True:
                    model.set_requires_gradient_sync(synced)
                    loss = model(torch.ones(1, 4, device=rank.device)).sum()
                    assert held(model) == [not after_forward] * 3, f"{what}, {synced=}: after the forward"
                    loss.backward()
                    assert held(model) == [not after_backward] * 3, f"{what}, {synced=}: after the backward"
                    del loss
                with torch.no_grad():
                    model(torch.ones(1, 4, device=rank.device))
                assert held(model) == [not after_forward] * 3, f"{what}: after an evaluation"
                model[1].unshard()
                for layer in model:
                    layer.__dict__["used"] = layer.used if isinstance(layer.weight, DTensor) else layer.weight
                assert held(model) == [not after_forward, True, not after_forward], f"{what}: after unshard()"
                model[1].reshard()
                assert held(model) == [not after_forward, False, not after_forward], f"{what}: after reshard()"

    world.run(body)


class Some(nn.Module):
    """Layers that are called in an order that can be changed."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(Keeping(4, 4, bias=False) for _ in range(count)), list[int]()
        for layer in self.layers:
            nn.init.eye_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.layers[i](x)
        return x * 1


@requirement(
    "RFSDP-SHARDPAR-05",
    "A forward that ran only some modules of a list leaves the parameters of all of them as one that ran all.",
    source=f"{SOURCE}: module, reshard_after_forward",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a list of which a forward runs a part stays gathered")
@pytest.mark.world(2)
def test_in_part(world: World) -> None:
    """Run some or all of two or three listed modules and of others, once or twice, in several orders, twice each."""
    orders = [[0], [1, 3], [3, 2], [2, 2, 0], [0, 1, 2, 3], [2, 3, 1]]

    def body(rank: Rank) -> None:
        every = ways(rank)
        for way, size, kept in itertools.product(("sharded", "hybrid"), (2, 3), (None, False, True)):
            model: Any = Some(4).to(rank.device)
            options = {} if kept is None else {"reshard_after_forward": not kept}
            every[way](list(model.layers)[:size], **options)
            every[way](model)
            for order, grad in itertools.product(orders, (True, False)):
                what = f"{way}, {size} listed, {kept=}, {order}, {grad=}"
                model.order = order
                x = torch.full((1, 4), 1.0 + rank.index, device=rank.device)
                with torch.set_grad_enabled(grad):
                    output = model(x)
                listed = [layer for i, layer in enumerate(model.layers) if i < size]
                gathered = bool(kept) and any(i < size for i in order)
                assert [not isinstance(layer.weight, DTensor) for layer in listed] == [gathered] * size, what
                memory = [model.layers[i].used.untyped_storage().size() > 0 for i in order if i < size]
                assert memory == [gathered] * len(memory), what
                if grad:
                    output.sum().backward()
                    assert all(isinstance(p, DTensor) for p in model.parameters()), what
                    found = {name: g.unique().tolist() for name, g in replicate_fsdp.gradients(model).items()}
                    right = {f"layers.{i}.weight": [1.5 * order.count(i)] for i in sorted(set(order))}
                    assert found == right, what
                    model.zero_grad()
                elif gathered:
                    for module in (model.layers[0], model):
                        module.reshard()

    world.run(body)


@requirement(
    "RFSDP-EMPTY-01",
    "The next forward and backward use the parameters that to_empty() or an assigned state dict replaced, as does the "
    "first one those that were set.",
    source="torch/distributed/fsdp/_fully_shard: FSDPModule._apply, FSDPParam.reset_sharded_param",
)
@pytest.mark.parametrize("stack", ["replicated", "sharded"])
@pytest.mark.parametrize("how", ["to_empty", "assigned", "loaded", "set"])
@pytest.mark.world(2)
def test_replaced(world: World, stack: str, how: str) -> None:
    """Replace them before the first step and, unless they are set, after a forward, unshard(), or one step or two."""

    def body(rank: Rank) -> None:
        for when in ("first",) if how == "set" else ("first", "forward", "evaluation", "unshard", "step", "twice"):
            model: Any = layers(rank.device)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(7.0)
            model = sharded(rank, model) if stack == "sharded" else replicate_fsdp.apply(model, rank)
            if when in ("forward", "evaluation"):
                with torch.set_grad_enabled(when == "forward"):
                    model(row(rank.index).to(rank.device))
            if when == "unshard":
                for layer in model:
                    layer.unshard()
            if when in ("step", "twice"):
                train(model, rank.index)
                model.zero_grad()
            for _ in range(2 if when == "twice" else 1):
                replace(model)
                assert train(model, rank.index) == alone(2), when
                assert all(p.grad.placements == p.placements for p in model.parameters()), when
                model.zero_grad()
                values = [replicate_fsdp.whole(p).cpu() for p in model.parameters()]
                assert all(map(torch.equal, values, layers().parameters())), when

    def replace(model: Any) -> None:
        given = dict(layers().named_parameters())
        if how == "to_empty":
            for module in model:  # those of a root without parameters are the layers'
                module.to_empty(device=next(module.parameters()).device)
            for name, parameter in model.named_parameters():
                at = parameter.device_mesh.get_local_rank()
                part = chunk(given[name], 2, at) if parameter.placements == (Shard(0),) else given[name]
                with torch.no_grad():
                    parameter.to_local().copy_(part)
            return
        state = {
            name: DTensor.from_local(given[name].detach().to(p.device), p.device_mesh, [Replicate()], run_check=False)
            .redistribute(placements=p.placements)
            .detach()
            for name, p in ((n, t) for n, t in model.state_dict().items())
        }
        if how == "set":
            for name, value in state.items():
                index, _, attribute = name.partition(".")
                setattr(model[int(index)], attribute, nn.Parameter(value))
            return
        model.load_state_dict(state, assign=how == "assigned")

    world.run(body)


KEEPS = "torch.distributed.fsdp.FSDPModule.set_keep_unsharded_storage"


@requirement(
    "RFSDP-KEPT-01",
    "set_keep_unsharded_storage keeps the memory of its module's gathered parameters, until it is set back.",
    source=KEEPS,
)
@requirement(
    "RFSDP-KEPT-02",
    "set_keep_unsharded_storage applies to inner modules if recurse=True, and otherwise to its own module only.",
    source=f"{KEEPS}: recurse",
)
@pytest.mark.needs(torch=KEEPS)
@pytest.mark.world(2)
def test_kept_memory(world: World) -> None:
    """Set each value with and without recursion, and look at the memory and the address of each layer's weight."""
    settings: list[tuple[int | None, bool, bool, list[bool]]] = [
        (None, True, False, [False] * 3),  # the root has no parameters
        (1, True, False, [False, True, False]),
        (0, True, True, [True, True, False]),
        (None, False, False, [True, True, False]),
        (1, False, True, [True, False, False]),
        (None, True, True, [True] * 3),
        (None, False, True, [False] * 3),
    ]

    def body(rank: Rank) -> None:
        model: Any = nn.Sequential(*(Keeping(4, 4, bias=False, device=rank.device) for _ in range(3)))
        for layer in model:
            nn.init.eye_(layer.weight)
        sharded(rank, model)
        for where, keep, recurse, kept in settings:
            what = f"{where}, {keep=}, {recurse=}"
            (model if where is None else model[where]).set_keep_unsharded_storage(keep, recurse=recurse)
            addresses: list[list[int]] = []
            for _ in range(2):
                loss = model(torch.full((1, 4), 1.0 + rank.index, device=rank.device)).sum()
                loss.backward()
                assert [layer.used.untyped_storage().size() > 0 for layer in model] == kept, what
                assert all(isinstance(layer.weight, DTensor) for layer in model), what
                addresses.append([layer.used.untyped_storage().data_ptr() for layer in model])
                gradients = [replicate_fsdp.whole(layer.weight.grad).flatten().tolist() for layer in model]
                assert gradients == [[1.5] * 16] * 3, what
                model.zero_grad()
            first, second = addresses
            assert [a == b for a, b, keeps in zip(first, second, kept, strict=True) if keeps] == [True] * sum(kept), (
                what
            )

    world.run(body)


@requirement(
    "RFSDP-SHARDPAR-7607",
    "A fully sharded embedding with max_norm keeps what it writes into its weight in a forward, or is refused.",
    source=f"{SOURCE}; torch.nn.Embedding: max_norm: 'modify Embedding's weight tensor in-place'",
)
@pytest.mark.parametrize("limit", [None, 2.0], ids=["unlimited", "limited"])
@pytest.mark.parametrize("value", [True, False], ids=["resharded", "kept"])
@pytest.mark.world(2)
def test_limited_norms(world: World, value: bool, limit: float | None) -> None:
    """Look up some rows, the same on each rank, with a gradient and without, and compare the whole table."""

    def body(rank: Rank) -> None:
        plain = nn.Embedding(6, 2, max_norm=limit).to(rank.device)
        with torch.no_grad():
            plain.weight.copy_(torch.arange(12.0).view(6, 2))
        model = fully_shard(copy.deepcopy(plain), mesh=rank.mesh(), reshard_after_forward=value)
        for tokens, gradient in ([0, 4], True), ([1, 5], False):
            expected = plain(torch.tensor(tokens, device=rank.device))
            with torch.set_grad_enabled(gradient):
                try:
                    found = model(torch.tensor(tokens, device=rank.device))
                except RuntimeError:
                    return  # refused
            assert_same(expected.detach(), found.detach(), f"rows {tokens}")
            if gradient:
                found.sum().backward()
            model.reshard()
            assert_same(plain.weight.detach(), model.weight.detach().full_tensor(), f"the table after {tokens}")

    world.run(body)
