"""Backwards that the caller finalizes, and unsharded storage that stays. PyTorch has both since 2.15."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.layers import alone, layers, row
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp

SOURCE = "torch.distributed.fsdp.FSDPModule: set_manual_backward_finalization, finalize_backward"
STEPS = 3
HOW = ["waited-for", "handle"]
FINALIZES = pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.finalize_backward")


def _model(rank: Rank) -> Any:
    """Replicate two layers, each in a group of its own under the root."""
    model: Any = replicate_fsdp.apply(layers(rank.device), rank)
    model.set_manual_backward_finalization(True)
    return model


def _backward(model: Any, rank: Rank) -> None:
    model(row(rank.index).to(rank.device)).sum().backward()


def _finalize(model: Any, how: str) -> None:
    if how == "handle":
        model.finalize_backward(async_op=True).wait()
    else:
        model.finalize_backward()


def _read(model: Any) -> list[list[float]]:
    gradients = replicate_fsdp.gradients(model)
    return [gradients[name].flatten().tolist() for name in sorted(gradients)]


@requirement(
    "RFSDP-FINAL-01",
    "With manual finalization, gradients equal those of one device once finalize_backward has returned or was waited "
    "for.",
    source=SOURCE,
)
@FINALIZES
@pytest.mark.parametrize("how", HOW)
@pytest.mark.world(1, 2, 4)
def test_same_as_one_device(world: World, how: str) -> None:
    """Train the same step three times, clearing gradients between."""

    def body(rank: Rank) -> list[Any]:
        model, seen = _model(rank), []
        for _ in range(STEPS):
            _backward(model, rank)
            _finalize(model, how)
            seen.append(_read(model))
            model.zero_grad()
        return seen

    assert_on_ranks([[alone(world.size)] * STEPS] * world.size, world.run(body))


@requirement(
    "RFSDP-FINAL-02",
    "Several backwards without synchronization add up, and one finalization with synchronization averages their sum.",
    source=SOURCE,
)
@FINALIZES
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("backwards", [2, 3])
@pytest.mark.world(2, 4)
def test_several_backwards(world: World, backwards: int, how: str) -> None:
    """Run two steps, each of several backwards and one finalization."""

    def body(rank: Rank) -> list[Any]:
        model, seen = _model(rank), []
        for _ in range(2):
            model.set_requires_gradient_sync(False)
            for _ in range(backwards):
                _backward(model, rank)
            model.set_requires_gradient_sync(True)
            _finalize(model, how)
            seen.append(_read(model))
            model.zero_grad()
        return seen

    right = [[backwards * element for element in gradient] for gradient in alone(world.size)]
    assert_on_ranks([[right] * 2] * world.size, world.run(body))


@requirement(
    "RFSDP-FINAL-03",
    "finalize_backward before the first forward is a no-op.",
    source=SOURCE,
)
@FINALIZES
@pytest.mark.parametrize("how", HOW)
@pytest.mark.world(2)
def test_before_the_first_forward(world: World, how: str) -> None:
    """The step that follows is right."""

    def body(rank: Rank) -> Any:
        model = _model(rank)
        _finalize(model, how)
        _backward(model, rank)
        _finalize(model, how)
        return _read(model)

    assert_on_ranks([alone(2)] * 2, world.run(body))


@requirement(
    "RFSDP-FINAL-04",
    "set_manual_backward_finalization raises an error for a module below the root.",
    source=SOURCE,
)
@FINALIZES
@pytest.mark.world(2)
def test_below_the_root(world: World) -> None:
    """The root is known from the first forward on."""

    def body(rank: Rank) -> Any:
        model = _model(rank)
        _backward(model, rank)
        _finalize(model, "waited-for")
        with pytest.raises(RuntimeError, match="root"):
            model[0].set_manual_backward_finalization(False)
        return _read(model)

    assert_on_ranks([alone(2)] * 2, world.run(body))


@requirement(
    "RFSDP-FINAL-05",
    "After manual finalization is switched off, a backward averages gradients by itself.",
    source=SOURCE,
)
@FINALIZES
@pytest.mark.world(2)
def test_switched_off(world: World) -> None:
    """One step with manual finalization, one without."""

    def body(rank: Rank) -> Any:
        model = _model(rank)
        _backward(model, rank)
        _finalize(model, "waited-for")
        model.zero_grad()
        model.set_manual_backward_finalization(False)
        _backward(model, rank)
        return _read(model)

    assert_on_ranks([alone(2)] * 2, world.run(body))


@requirement(
    "RFSDP-FINAL-06",
    "Before a gradient reduction has been waited for, another forward or finalize_backward raises an error.",
    source="torch.distributed.fsdp.GradientReductionHandle",
)
@requirement(
    "RFSDP-FINAL-07",
    "A gradient reduction may be waited for more than once.",
    source="torch.distributed.fsdp.GradientReductionHandle",
)
@FINALIZES
@pytest.mark.world(2)
def test_not_waited_for(world: World) -> None:
    """After the wait, the gradients are right, and the next step is, too."""

    def body(rank: Rank) -> Any:
        model, seen = _model(rank), []
        for _ in range(2):
            _backward(model, rank)
            handle = model.finalize_backward(async_op=True)
            with pytest.raises(RuntimeError, match="must be waited on"):
                model(row(rank.index).to(rank.device))
            with pytest.raises(RuntimeError, match="must be waited on"):
                model.finalize_backward()
            handle.wait()
            handle.wait()
            seen.append(_read(model))
            model.zero_grad()
        return seen

    assert_on_ranks([[alone(2)] * 2] * 2, world.run(body))


@requirement(
    "RFSDP-FINAL-08",
    "After reset_iter_state, waiting for the earlier gradient reduction raises an error.",
    source="torch.distributed.fsdp.FSDPModule: reset_iter_state; torch.distributed.fsdp.GradientReductionHandle",
)
@FINALIZES
@pytest.mark.world(2)
def test_reset(world: World) -> None:
    """The step that was reset leaves no gradients, and the next one is right."""

    def body(rank: Rank) -> Any:
        model = _model(rank)
        _backward(model, rank)
        handle = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        with pytest.raises(RuntimeError, match="invalidated"):
            handle.wait()
        left = _read(model)
        _backward(model, rank)
        _finalize(model, "handle")
        return left, _read(model)

    assert_on_ranks([([], alone(2))] * 2, world.run(body))


@requirement(
    "RFSDP-FINAL-09",
    "Between a backward and its finalization, set_manual_backward_finalization(False) raises an error.",
    source=SOURCE,
)
@requirement(
    "RFSDP-FINAL-10",
    "finalize_backward raises an error while set_requires_all_reduce(False) holds gradients back.",
    source=SOURCE,
)
@FINALIZES
@pytest.mark.world(2)
def test_too_early(world: World) -> None:
    """Once all-reduce is switched on again, finalization gives the right gradients."""

    def body(rank: Rank) -> Any:
        model = _model(rank)
        model.set_requires_gradient_sync(False)
        _backward(model, rank)
        with pytest.raises(RuntimeError, match="cannot change mode"):
            model.set_manual_backward_finalization(False)
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(False)
        with pytest.raises(RuntimeError, match="requires all-reduce"):
            model.finalize_backward()
        model.set_requires_all_reduce(True)
        model.finalize_backward()
        return _read(model)

    assert_on_ranks([alone(2)] * 2, world.run(body))


@requirement(
    "RFSDP-SCHEDULE-05",
    "set_keep_unsharded_storage keeps the addresses of unsharded parameters from step to step, and the numbers.",
    source="torch.distributed.fsdp.FSDPModule: set_keep_unsharded_storage",
)
@pytest.mark.needs(torch="torch.distributed.fsdp.FSDPModule.set_keep_unsharded_storage")
@pytest.mark.world(2, 4)
def test_storage_stays(world: World) -> None:
    """A forward of each of three steps looks at the addresses of the parameters it uses."""

    def body(rank: Rank) -> Any:
        model: Any = replicate_fsdp.apply(layers(rank.device), rank)
        model.set_keep_unsharded_storage(True)
        addresses: list[int] = []
        for layer in model:
            layer.register_forward_pre_hook(lambda module, args: addresses.append(module.weight.data_ptr()))
        seen = []
        for _ in range(STEPS):
            _backward(model, rank)
            seen.append(_read(model))
            model.zero_grad()
        return seen, [addresses[i] == addresses[i + 2] for i in range(2 * STEPS - 2)]

    expected = ([alone(world.size)] * STEPS, [True] * (2 * STEPS - 2))
    assert_on_ranks([expected] * world.size, world.run(body))
