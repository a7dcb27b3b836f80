"""Whose forward or backward begins: parts called by themselves, several roots, sharded parts, compiled backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from fixtures.layers import alone, layer, layers, train
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import dynamo, replicate_fsdp
from harness.stacks.replicate_fsdp import MESH, replicate

SOURCE = "torch/distributed/_composable/replicate_with_fsdp.py: replicate"
STATE = "torch/distributed/fsdp/_fully_shard/_fsdp_state.py"


class Coder(nn.Module):
    """An encoder and a decoder, of one weight each: 2 and 3."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.encoder.weight, 2.0)
        nn.init.constant_(self.decoder.weight, 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.decoder(self.encoder(x))
        return result


def read(model: nn.Module) -> dict[str, list[float]]:
    return {name: gradient.flatten().tolist() for name, gradient in replicate_fsdp.gradients(model).items()}


def inputs(rank: Rank) -> torch.Tensor:
    """Return the input of a layer, float[1, 2], in which each element is the number of the rank plus 1."""
    return torch.full((1, 2), 1.0 + rank.index, device=rank.device)


@requirement(
    "RFSDP-ROOT-01",
    "A replicated part of a model that is called by itself computes with the parameters of the last optimizer step.",
    source=f"{STATE}: FSDPStateContext.iter_forward_root, 'encoder-only for eval'",
)
@requirement(
    "RFSDP-ROOT-02",
    "Gradients of a replicated part of a model that is trained by itself are averaged.",
    source=f"{STATE}: FSDPStateContext.iter_forward_root",
)
@pytest.mark.parametrize("called", ["evaluated", "trained"])
@pytest.mark.world(1, 2)
def test_part_by_itself(world: World, called: str) -> None:
    """Call the encoder alone after each of two steps of SGD on the whole model."""

    def body(rank: Rank) -> list[Any]:
        model: Any = replicate_fsdp.apply(Coder(), rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x = torch.full((1, 1), 1.0 + rank.index, device=rank.device)
        seen: list[Any] = []
        for _ in range(2):
            model(x).sum().backward()
            seen.append(read(model))
            optimizer.step()
            optimizer.zero_grad()
            with torch.set_grad_enabled(called == "trained"):
                output = model.encoder(x)
            seen.append(output.item())
            if called == "trained":
                output.sum().backward()
                seen.append(read(model))
                model.zero_grad()
        return seen

    def expected(x: float) -> list[Any]:
        mean, encoder, decoder = (world.size + 1) / 2, 2.0, 3.0
        seen: list[Any] = []
        for _ in range(2):
            of_encoder, of_decoder = mean * decoder, mean * encoder
            seen.append({"encoder.weight": [of_encoder], "decoder.weight": [of_decoder]})
            encoder, decoder = encoder - of_encoder, decoder - of_decoder
            seen += [encoder * x, {"encoder.weight": [mean]}] if called == "trained" else [encoder * x]
        return seen

    assert_on_ranks([expected(1.0 + rank) for rank in range(world.size)], world.run(body))


@requirement(
    "RFSDP-ROOT-03",
    "A model whose replicated part was called by itself before the whole model raises an error that says so.",
    source=f"{STATE}: FSDPState._lazy_init, 'requires running forward through the root module first'",
)
@pytest.mark.world(1, 2)
def test_part_before_the_whole(world: World) -> None:
    """Call the encoder, and then the whole model."""

    def body(rank: Rank) -> bool:
        model: Any = replicate_fsdp.apply(Coder(), rank)
        x = torch.ones(1, 1, device=rank.device)
        model.encoder(x)
        with pytest.raises(RuntimeError, match="root module first"):
            model(x)
        return True

    assert_on_ranks([True] * world.size, world.run(body))


@requirement(
    "RFSDP-ROOT-04",
    "Of several replicated models in one backward, each synchronizes gradients as it was told.",
    source=f"{SOURCE}; torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync",
)
@pytest.mark.parametrize("how", ["added", "chained"])
@pytest.mark.world(2)
def test_several_roots(world: World, how: str) -> None:
    """Synchronize only the second of two models, then only the first, then both."""

    def body(rank: Rank) -> list[dict[str, list[float]]]:
        first, second = replicate_fsdp.apply(layer(), rank), replicate_fsdp.apply(layer(), rank)
        both: Any = nn.ModuleList([first, second])
        steps = []
        for synchronized in ((False, True), (True, False), (True, True)):
            for model, on in zip(both, synchronized, strict=True):
                model.set_requires_gradient_sync(on)
            x = inputs(rank)
            (second(first(x)) / 2 if how == "chained" else first(x) + second(x)).sum().backward()
            steps.append(read(both))
        return steps

    kept, averaged = [3.0] * 4, [1.5] * 4
    expected = [
        {"1.weight": averaged},
        {"0.weight": kept, "1.weight": averaged},
        {"0.weight": [4.5] * 4, "1.weight": [4.5] * 4},
    ]
    assert_on_ranks([expected] * 2, world.run(body))


@requirement(
    "RFSDP-SHARDED-01",
    "A module inside a replicated one that fully_shard was applied to stays sharded, and trains with the rest.",
    source=f"{SOURCE}: is_composable_with_replicate",
)
@requirement(
    "RFSDP-SHARDED-02",
    "set_requires_gradient_sync of a replicated module applies to the sharded modules inside it.",
    source="torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync: recurse, 'for all FSDP submodules'",
)
@pytest.mark.parametrize("which", [0, 1], ids=["first", "last"])
@pytest.mark.world(1, 2, 4)
def test_sharded_inside(world: World, which: int) -> None:
    """Shard one of two layers, replicate both, and run backwards with, without and again with synchronization."""

    def body(rank: Rank) -> tuple[list[bool], list[dict[str, list[float]]]]:
        model: Any = nn.Sequential(layer(), layer()).to(rank.device)
        fully_shard(model[which], mesh=rank.mesh())
        replicate(model, **{MESH: rank.mesh()})
        steps = []
        for on in (True, False, True):
            model.set_requires_gradient_sync(on)
            (model(inputs(rank)) / 2).sum().backward()
            steps.append(read(model))
        own = [Replicate(), Replicate()]
        own[which] = Shard(0)  # type: ignore[call-overload]
        return [p.placements == (lies,) for p, lies in zip(model.parameters(), own, strict=True)], steps

    mean = (world.size + 1) / 2
    steps = [{"0.weight": [done * mean] * 4, "1.weight": [done * mean] * 4} for done in (1, 1, 3)]
    assert_on_ranks([([True, True], steps)] * world.size, world.run(body))


@requirement(
    "RFSDP-INIT-02",
    "Without a default group, replicate creates the group of all ranks that the environment variables describe.",
    source="torch/distributed/fsdp/_fully_shard/_fsdp_init.py: _init_default_mesh",
)
@pytest.mark.world(1, 2, 4, env={"TORCHELASTIC_USE_AGENT_STORE": "True"})
def test_default_group(world: World) -> None:
    """Destroy the default group and replicate without a mesh; the store is found as under torchrun."""

    def body(rank: Rank) -> tuple[tuple[int, int], list[list[float]]]:
        dist.barrier()
        dist.destroy_process_group()
        model = replicate(layers(rank.device))
        return (dist.get_rank(), dist.get_world_size()), train(model, rank.index)

    expected = [((rank, world.size), alone(world.size)) for rank in range(world.size)]
    assert_on_ranks(expected, world.run(body))


@requirement(
    "RFSDP-COMPILED-01",
    "If compiled autograd runs the backward, a replicated model trains on averages, or the backward raises an error.",
    source=f"torch._dynamo.compiled_autograd; {STATE}: FSDPState._register_root_post_backward_final_callback",
)
@pytest.mark.parametrize("groups", [True, False], ids=["groups", "one-group"])
@pytest.mark.world(1, 2, timeout=180)
def test_compiled_autograd(world: World, groups: bool) -> None:
    """Run two steps of SGD with compiled backwards, with a group for each layer or one for both."""

    def body(rank: Rank) -> list[float]:
        torch.compiler.reset()
        model = replicate_fsdp.apply(nn.Sequential(layer(), layer()), rank, groups=groups)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        values = []
        for _ in range(2):
            loss = (model(inputs(rank)) / 2).sum()
            try:
                with dynamo.compiled_backward("eager"):
                    loss.backward()
            except (RuntimeError, AssertionError):
                return expected
            optimizer.step()
            optimizer.zero_grad()
            values += [weight.flatten()[0].item() for weight in replicate_fsdp.parameters(model).values()]
        return values

    once = 1 - 0.5 * (world.size + 1) / 2  # each gradient is the other weight times the mean of the inputs
    expected = [once, once, once**2, once**2]
    assert_on_ranks([expected] * world.size, world.run(body))
