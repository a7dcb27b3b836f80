"""When FSDP-replicate unshards, reshards and fills parameters, and how training continues after an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fixtures.layers import alone, layers, train
from fixtures.models import TwoLayers, batch
from harness import Rank, World, assert_on_ranks, requirement
from harness.oracles import baseline
from harness.stacks import replicate_fsdp

SOURCE = "torch.distributed.fsdp.FSDPModule"
STEPS, ROWS_PER_RANK = 3, 2


def everywhere(set_it: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that applies a setting to every replicated module of a model."""
    return lambda model: [set_it(m) for m in model.modules() if isinstance(m, FSDPModule)] and None


SETTINGS: dict[str, Callable[[Any], None]] = {
    "forward-prefetch": lambda model: model.first.set_modules_to_forward_prefetch([model.second]),
    "forward-prefetch-from-the-root": lambda model: model.set_modules_to_forward_prefetch([model.first, model.second]),
    "backward-prefetch": lambda model: model.second.set_modules_to_backward_prefetch([model.first]),
    "backward-prefetch-against-the-order": lambda model: model.first.set_modules_to_backward_prefetch([model.second]),
    "kept-after-backward": everywhere(lambda m: m.set_reshard_after_backward(False)),
    "one-layer-kept-after-backward": lambda model: model.second.set_reshard_after_backward(False, recurse=False),
    "kept-after-backward-and-not-again": everywhere(
        lambda m: m.set_reshard_after_backward(False) or m.set_reshard_after_backward(True, recurse=False)
    ),
    "last-backward-again": lambda model: model.set_is_last_backward(False) or model.set_is_last_backward(True),
    "not-unsharded-in-backward": everywhere(lambda m: m.set_unshard_in_backward(False)),
    "unsharded-in-backward-again": everywhere(
        lambda m: m.set_unshard_in_backward(False) or m.set_unshard_in_backward(True)
    ),
    "nothing-prefetched": everywhere(
        lambda m: m.set_modules_to_forward_prefetch([]) or m.set_modules_to_backward_prefetch([])
    ),
    "never-the-last-backward": lambda model: model.set_is_last_backward(False),
    "unsharded-ahead": everywhere(
        lambda m: m.register_forward_pre_hook(lambda module, args: module.unshard(async_op=True) and None, prepend=True)
    ),
    "given-back-by-hand": everywhere(lambda m: m.register_forward_hook(lambda module, args, output: module.reshard())),
}


@requirement(
    "RFSDP-SCHEDULE-01",
    "Training gives the numbers of one device at every step, whenever parameters are unsharded or resharded.",
    source=f"{SOURCE}: set_modules_to_forward_prefetch, set_reshard_after_backward, set_is_last_backward, unshard",
)
@pytest.mark.world(2, 3)
def test_settings(world: World) -> None:
    """Train two groups and a root for three steps with each scheduling setting."""
    assert_same_with(world, SETTINGS)


def assert_same_with(world: World, settings: Mapping[str, Callable[[Any], None]]) -> None:
    """Assert that training with each setting equals training on a single device.

    Parameters that a setting keeps unsharded are resharded after each backward.
    """

    def trained(rank: Rank, name: str) -> list[baseline.Step]:
        model = replicate_fsdp.apply(TwoLayers(), rank)
        settings[name](model)

        def gradients(model: nn.Module) -> Any:
            if name == "never-the-last-backward" and rank.device.type != "cpu":  # only a last backward waits for them
                torch.accelerator.synchronize()
            everywhere(lambda module: module.reshard())(model)
            return replicate_fsdp.gradients(model)

        return baseline.train(
            model,
            [batch(ROWS_PER_RANK * rank.size, step).part(rank.index, rank.size) for step in range(STEPS)],
            scale=rank.size,
            gradients=gradients,
            parameters=replicate_fsdp.parameters,
        )

    right = baseline.train(TwoLayers(), [batch(ROWS_PER_RANK * world.size, step) for step in range(STEPS)])
    found = world.run(lambda rank: {name: trained(rank, name) for name in settings})
    for name in settings:
        baseline.assert_same_training(right, [steps[name] for steps in found], what=name)


@requirement(
    "RFSDP-SCHEDULE-03",
    "set_reshard_after_forward has no effect on the numbers of a replicated module, or raises an error that names it.",
    source=f"{SOURCE}: set_reshard_after_forward",
)
@pytest.mark.parametrize("given_back", [True, False], ids=["given-back", "kept"])
@pytest.mark.parametrize("recurse", [True, False], ids=["recurse", "root-alone"])
@pytest.mark.world(2)
def test_reshard_after_forward(world: World, given_back: bool, recurse: bool) -> None:
    """Replicated parameters are not resharded after the forward; the root has no parameters of its own."""

    def set_it(model: Any) -> None:
        try:
            model.set_reshard_after_forward(given_back, recurse=recurse)
        except (RuntimeError, ValueError, NotImplementedError) as e:
            if "reshard" not in str(e):
                raise

    assert_same_with(world, {"set": set_it})


@requirement(
    "RFSDP-SCHEDULE-02",
    "A prefetch setting raises an error for a module that is not replicated, and keeps its previous value.",
    source=f"{SOURCE}: set_modules_to_forward_prefetch, set_modules_to_backward_prefetch",
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.world(1)
def test_prefetch_of_a_plain_module(world: World, direction: str) -> None:
    """Pass a plain layer among the modules to prefetch, then train a step."""

    def body(rank: Rank) -> list[list[float]]:
        model: Any = layers(rank.device)
        replicate_fsdp.apply(model, rank)
        with pytest.raises(ValueError, match="Linear"):
            getattr(model[0], f"set_modules_to_{direction}_prefetch")([model[1], nn.Linear(1, 1)])
        return train(model, rank.index)

    assert_on_ranks([alone(1)], world.run(body))


@requirement(
    "RFSDP-META-01",
    "A model created on the meta device, replicated, then filled in place trains like one that had values from "
    "the start.",
    source="torch/distributed/fsdp/_fully_shard: FSDPParamGroup.lazy_init, reset_sharded_param",
)
@pytest.mark.parametrize("filled", ["in-place", "assigned"])
@pytest.mark.world(2)
def test_meta_device(world: World, filled: str) -> None:
    """Parameters stay on the meta device until after wrapping; then to_empty and a copy, or an assigned state dict."""

    def body(rank: Rank) -> list[list[float]]:
        plain = layers().state_dict()
        with torch.device("meta"):
            model: Any = layers()
        for module in (*model, model):
            replicate_fsdp.replicate(module, **{replicate_fsdp.MESH: rank.mesh()})
        if filled == "in-place":
            model.to_empty(device=rank.device)
            for name, parameter in model.named_parameters():
                parameter.to_local().data.copy_(plain[name])
        else:
            given = {
                name: DTensor.from_local(plain[name].to(rank.device), p.device_mesh, p.placements)
                for name, p in model.named_parameters()
            }
            model.load_state_dict(given, assign=True)
        return train(model, rank.index)

    assert_on_ranks([alone(2)] * 2, world.run(body))


@requirement(
    "RFSDP-META-02",
    "A model with parameters still on the meta device raises an error in the first forward that names them.",
    source="torch/distributed/fsdp/_fully_shard: FSDPParamGroup._validate_no_meta_params",
)
@pytest.mark.world(1)
def test_left_on_meta(world: World) -> None:
    """The second layer's weight is never filled."""

    def body(rank: Rank) -> str:
        model: Any = layers(rank.device)
        model[1].to("meta")
        for module in (*model, model):
            replicate_fsdp.replicate(module, **{replicate_fsdp.MESH: rank.mesh()})
        with pytest.raises(RuntimeError, match="meta") as e:
            train(model, rank.index)
        return str(e.value)

    assert "1.weight" in world.run(body)[0]


@requirement(
    "RFSDP-ABORT-01",
    "After a step that an error interrupted, reset_iter_state makes the next step correct.",
    source=f"{SOURCE}: reset_iter_state",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.reset_iter_state")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.world(2)
def test_aborted(world: World, where: str) -> None:
    """The second layer raises once on every rank, in its forward or before its backward."""

    class Interrupted(Exception):
        pass

    def interrupted(*args: Any) -> None:
        raise Interrupted

    def body(rank: Rank) -> list[list[float]]:
        model: Any = layers(rank.device)
        replicate_fsdp.apply(model, rank)
        if where == "forward":
            hook = model[1].register_forward_hook(interrupted)
        else:
            hook = model[0].register_forward_hook(
                lambda module, args, output: output.register_hook(interrupted) and None
            )
        with pytest.raises(Interrupted):
            train(model, rank.index)
        hook.remove()
        model.reset_iter_state()
        model.zero_grad()
        return train(model, rank.index)

    assert_on_ranks([alone(2)] * 2, world.run(body))
