"""The state that ranks share once a model is replicated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import layer
from harness import Rank, RanksFailed, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import replicate

SHAPES: dict[str, tuple[int, ...]] = {"scalar": (), "one": (1,), "vector": (5,), "matrix": (3, 2)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
WRAPPED: dict[str, Callable[[nn.Module, Rank], nn.Module]] = {
    "replicate": replicate.apply,
    "DDP": lambda module, rank: DistributedDataParallel(module.to(rank.device)),
}


class Own(nn.Module):
    """A model with parameters of many kinds, some of them frozen, and buffers, whose values differ between ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for dtype in DTYPES:
            for name, shape in SHAPES.items():
                value = dyadic(*shape, key=(name, rank)).to(dtype)
                parameter = nn.Parameter(value, requires_grad=name != "vector")
                self.register_parameter(f"{name}_{str(dtype).removeprefix('torch.')}", parameter)
        self.register_buffer("floats", dyadic(3, key=("floats", rank)))
        self.register_buffer("numbers", torch.arange(3) + rank)
        self.register_buffer("flags", torch.arange(4) % (rank + 1) == 0)
        self.register_buffer("passing", dyadic(2, key=("passing", rank)), persistent=False)
        self.register_buffer("differentiable", dyadic(3, key=("differentiable", rank)).requires_grad_())
        self.child = nn.Module()
        for name, saved in (("kept", True), ("lost", False)):
            self.child.register_buffer(name, torch.tensor(1 + rank), persistent=saved)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = [p.abs().double().sum() for p in self.parameters()]
        return x * torch.stack(used).sum()


@requirement(
    "REPL-INIT-01",
    "After its first call, a replicated model has the parameters of rank 0 on every rank, whatever their shape or "
    "dtype.",
    source="torch.nn.parallel.DistributedDataParallel: parameters are broadcast from rank 0 when it is made",
)
@pytest.mark.parametrize("how", list(WRAPPED))
@pytest.mark.world(2, 3)
def test_parameters_of_rank_0(world: World, how: str) -> None:
    """Parameters of several shapes and dtypes, trained or frozen, start with different values on each rank."""

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        model = Own(rank.index)
        WRAPPED[how](model, rank)(torch.ones(1, device=rank.device))
        return {name: p.detach().cpu() for name, p in model.named_parameters()}

    expected = dict(Own(0).named_parameters())
    for rank, parameters in enumerate(world.run(body)):
        for name, tensor in expected.items():
            assert_same(tensor.detach(), parameters[name], f"rank {rank}: {name}")


@requirement(
    "REPL-INIT-05",
    "Only the first forward broadcasts parameters, so that later forwards use each rank's own values.",
    source="torch.nn.parallel.DistributedDataParallel: parameters are broadcast from rank 0 when it is made",
)
@pytest.mark.parametrize("how", list(WRAPPED))
@pytest.mark.world(2)
def test_equal_once(world: World, how: str) -> None:
    """Between two forwards each rank overwrites a parameter with its own values."""

    def body(rank: Rank) -> list[float]:
        module = layer()
        model = WRAPPED[how](module, rank)
        model(torch.ones(1, 2, device=rank.device)).sum().backward()
        nn.init.constant_(module.weight, 1.0 + rank.index)
        return [float(x) for x in model(torch.ones(1, 2, device=rank.device)).flatten()]

    assert_on_ranks([[2.0] * 2, [4.0] * 2], world.run(body))


@requirement(
    "REPL-INIT-06",
    "replicate() neither communicates nor changes a parameter before the first forward.",
    source="torch/distributed/_composable/replicate.py: _ReplicateState.lazy_init, forward_pre_hook",
)
@pytest.mark.world(2)
def test_prepared_in_the_first_forward(world: World) -> None:
    """Each rank keeps its own parameter until the first forward; one replicates the model later than the other."""

    def body(rank: Rank) -> list[float]:
        told = dist.PrefixStore("late", rank.store)
        if rank.index == 1:  # it replicates only after the other rank has
            told.get("replicated")
        module = layer()
        nn.init.constant_(module.weight, 1.0 + rank.index)
        model = replicate.apply(module, rank)
        told.set("replicated", "")
        before = float(module.weight[0, 0])
        model(torch.ones(1, 2, device=rank.device)).sum().backward()
        return [before, float(module.weight[0, 0])]

    assert_on_ranks([[1.0, 1.0], [2.0, 1.0]], world.run(body))


@requirement(
    "DDP-INIT-02",
    "The constructor of DistributedDataParallel gives every rank rank 0's buffers, of any dtype, persistent or not.",
    source="torch.nn.parallel.DistributedDataParallel: forward_sync_buffers",
)
@pytest.mark.world(2, 3)
def test_buffers_of_rank_0(world: World) -> None:
    """Compare buffers of floats, integers and bools, also of a child and not persistent ones, without a forward."""

    def body(rank: Rank) -> dict[str, torch.Tensor]:
        model = Own(rank.index).to(rank.device)
        DistributedDataParallel(model)
        return {name: b.cpu() for name, b in model.named_buffers()}

    for rank, buffers in enumerate(world.run(body)):
        for name, tensor in Own(0).named_buffers():
            assert_same(tensor, buffers[name], f"rank {rank}: {name}")


@requirement(
    "REPL-INIT-03",
    "Models whose parameters differ in shape, strides or number between ranks raise an error, even if their total "
    "size is the same.",
    source="torch.nn.parallel.DistributedDataParallel: the model is verified across processes",
)
@pytest.mark.parametrize("differing", ["shape", "number", "strides"])
@pytest.mark.world(2, 3)
def test_other_shapes_are_refused(world: World, differing: str) -> None:
    """The last rank has a final layer of the same size in another shape or of other strides, or one more layer."""

    def body(rank: Rank) -> None:
        other = rank.index == rank.size - 1
        layers = [nn.Linear(6, 2)]
        if differing == "shape" and other:
            layers = [nn.Linear(3, 4, bias=False)]
            layers[0].bias = nn.Parameter(torch.ones(2))
        if differing == "number" and other:
            layers.append(nn.Linear(2, 2))
        if differing == "strides" and other:
            layers[0].weight = nn.Parameter(torch.ones(6, 2).t())
        DistributedDataParallel(nn.Sequential(*layers).to(rank.device))

    with pytest.raises(RanksFailed, match=r"verif|shape|strides|number of params"):
        world.run(body)


@requirement(
    "REPL-INIT-04",
    "Replicating a model leaves the random number generator's state unchanged.",
    source="torch/distributed/_composable/replicate.py: replicate",
)
@pytest.mark.world(2)
def test_random_state(world: World) -> None:
    """Random numbers drawn after a first step equal those drawn without a model."""

    def body(rank: Rank) -> list[float]:
        module = nn.Linear(2, 2)
        torch.manual_seed(rank.index)
        model = replicate.apply(module, rank)
        model(torch.ones(1, 2, device=rank.device)).sum().backward()
        drawn: Any = torch.rand(3).tolist()
        return list(drawn)

    for rank, numbers in enumerate(world.run(body)):
        torch.manual_seed(rank)
        assert numbers == torch.rand(3).tolist()


@requirement(
    "REPL-INIT-07",
    "A replicated model has rank 0's parameters with all of their bits, also if its first call is an evaluation.",
    source="torch/distributed/_composable/replicate.py; torch.distributed.utils: _sync_module_states",
)
@pytest.mark.parametrize("first", ["training", "evaluation"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.world(2, 3)
def test_every_bit_of_rank_0(world: World, dtype: torch.dtype, first: str) -> None:
    """Parameters are thirds, whose binary digits never end, and differ between ranks."""

    def body(rank: Rank) -> list[float]:
        model = layer().to(dtype)
        with torch.no_grad():
            model.weight.fill_((rank.index + 1) / 3)
        replicate.apply(model, rank)
        with torch.set_grad_enabled(first == "training"):
            model(torch.ones(1, 2, dtype=dtype, device=rank.device))
        return model.weight.flatten().tolist()

    third = float(torch.tensor(1 / 3, dtype=dtype))
    assert_on_ranks([[third] * 4] * world.size, world.run(body))


def made(on: torch.device | str) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, 1, bias=False, device=on) for _ in range(3)))


def assigned(model: Any) -> None:
    model.load_state_dict({name: p.detach().clone() for name, p in model.state_dict().items()}, assign=True)


def replaced(model: Any) -> None:
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


def tied(model: Any) -> None:
    model[2].weight = model[0].weight


def named(model: Any) -> None:
    model.register_parameter("extra", nn.Parameter(torch.ones_like(model[0].weight)))
    model[0].register_forward_hook(lambda module, args, output: output * model.extra)


CHANGES: dict[str, Callable[[Any, torch.device], object]] = {
    "none": lambda model, device: None,
    "replaced": lambda model, device: replaced(model),
    "another layer": lambda model, device: model.__setitem__(0, nn.Linear(1, 1, bias=False, device=device)),
    "assigned": lambda model, device: assigned(model),
    "added": lambda model, device: model.append(nn.Linear(1, 1, bias=False, device=device)),
    "named": lambda model, device: named(model),
    "removed": lambda model, device: model.__delitem__(1),
    "tied": lambda model, device: tied(model),
    "frozen": lambda model, device: model[1].requires_grad_(False),
    "wider": lambda model, device: model.double(),
    "from meta": lambda model, device: model.to_empty(device=device),
}
"""What may happen to a model between its replication and its first forward."""


@requirement(
    "REPL-INIT-08",
    "replicate() averages the parameters that the module has in its first forward, whatever they were before.",
    source="torch/distributed/_composable/replicate.py: _ReplicateState.lazy_init",
)
@pytest.mark.world(2)
def test_changed_before_the_first_forward(world: World) -> None:
    """Change a model, then compare two steps, of which the first is an evaluation or not, with those of one device."""

    def fill(model: nn.Module, rank: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 2.0 + number + 10 * rank)

    def body(rank: Rank) -> None:
        for name, change in CHANGES.items():
            for evaluates in (False, True):
                device = torch.device("meta") if name == "from meta" else rank.device
                model: Any = replicate.replicate(made(device))
                alone = made(device)
                change(model, rank.device)
                change(alone, rank.device)
                fill(model, rank.index)
                fill(alone, 0)
                right = dict(alone.named_parameters())
                dtype = next(iter(right.values())).dtype
                x = torch.full((1, 1), 1.0 + rank.index, dtype=dtype, device=rank.device)
                mean = torch.full((1, 1), 1.5, dtype=dtype, device=rank.device)
                if evaluates:
                    with torch.no_grad():
                        model(x)
                for number in range(2):
                    model(x).sum().backward()
                    alone(mean).sum().backward()
                    found = dict(model.named_parameters())
                    assert list(found) == list(right)
                    for key, p in right.items():
                        assert torch.equal(found[key], p), (name, key)
                        assert (found[key].grad is None) == (p.grad is None), (name, number, key)
                        assert p.grad is None or torch.equal(found[key].grad, p.grad), (name, number, key)
                    model.zero_grad()
                    alone.zero_grad()
                every = dict(model.named_parameters(remove_duplicate=False))
                averaged = {every[key] for key in replicate.names(model) if every[key].requires_grad}
                assert averaged == {p for p in found.values() if p.requires_grad}, name

    world.run(body)
