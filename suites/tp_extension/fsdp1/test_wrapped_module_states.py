"""State dicts of FSDP1 modules that got further modules, whose flat parameters were changed, or local ones in files."""

from __future__ import annotations

import io
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from fixtures.tensors import numbers
from fixtures.wrapped import STRATEGIES, Two, Weight, whole_tensors, wrapped
from harness import Rank, World, assert_same_all, requirement
from harness.stacks import tp_extension

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"
FULL, SHARDED, LOCAL = (StateDictType[f"{kind}_STATE_DICT"] for kind in ("FULL", "SHARDED", "LOCAL"))


@requirement(
    "TP-DICT-3706",
    "Modules that are attached to a model after FSDP are in its state dicts, as they are, and load from them.",
    source=f"{SOURCE}.state_dict; torch.nn.Module.state_dict",
)
@pytest.mark.parametrize("to", ["module", "wrapper"])
@pytest.mark.world(2)
def test_attached(world: World, to: str) -> None:
    """Attach a weight, with a buffer, to the root and to an FSDP module inside: to what is wrapped, or as assigned."""

    def parts_of(model: Any) -> dict[str, Any]:
        return {"": model, "0.": model.module[0]}

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        for kind, original, strategy in itertools.product((FULL, SHARDED), (True, False), STRATEGIES[::2]):
            options = {"use_orig_params": original, "sharding_strategy": strategy, "device_mesh": rank.mesh()}
            what = f"{kind}, {original=}, {strategy}"

            def made(factor: float, options: dict[str, Any] = options) -> Any:
                model = wrapped(rank, nn.Sequential(wrapped(rank, Two(), **options), Two()), **options)
                for place in parts_of(model).values():
                    more = nn.BatchNorm1d(3, device=rank.device)
                    with torch.no_grad():
                        more.weight.copy_(numbers(3) * factor)
                    (place if to == "wrapper" else place.module).more = more
                return model

            def held(model: Any) -> dict[str, torch.Tensor]:
                return whole_tensors(
                    {
                        f"{name}more.{key}": v
                        for name, place in parts_of(model).items()
                        for key, v in place.more.state_dict().items()
                    }
                )

            model, other = made(2.0), made(3.0)
            expected = held(model)
            for each in model, other:
                FullyShardedDataParallel.set_state_dict_type(each, kind)
            state = model.state_dict()
            whole = whole_tensors(state)
            assert set(whole) == {*expected, "0.a", "0.b", "1.a", "1.b"}, f"{what}: {sorted(whole)}"
            assert_same_all(expected, {key: whole[key] for key in expected}, what)
            result = other.load_state_dict(state)
            assert (result.missing_keys, result.unexpected_keys) == ([], []), what
            assert_same_all(expected, held(other), f"{what}: loaded")

    world.run(body)


@requirement(
    "TP-DICT-3707",
    "A local state dict that torch.save has written loads after torch.load, also for ranks whose part is empty.",
    source=f"{SOURCE}.state_dict; torch.distributed.fsdp.StateDictType: LOCAL_STATE_DICT",
)
@pytest.mark.world(2, 3)
def test_local_states_in_files(world: World) -> None:
    """Parameters have one to seven elements, which ranks do not divide; one of the modules is inside another."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        for size in (1, 2, 3, 7):

            def made(size: int = size) -> Any:
                inner = wrapped(rank, Weight(size, 1.0))
                model = wrapped(rank, nn.Sequential(inner, Weight(size + 1, 1.0)))
                FullyShardedDataParallel.set_state_dict_type(model, LOCAL)
                return model

            model, other = made(), made()
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters(), 1):
                    parameter.copy_(torch.arange(parameter.numel()) + 10.0 * number + 100.0 * rank.index)
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            with tp_extension.load_with_process_group(dist.group.WORLD):  # type: ignore[arg-type]
                state = torch.load(file, weights_only=False)
            other.load_state_dict(state)
            with FullyShardedDataParallel.summon_full_params(model), FullyShardedDataParallel.summon_full_params(other):
                expected, found = ({n: p.clone() for n, p in each.named_parameters()} for each in (model, other))
            assert_same_all(expected, found, f"{size=}")

    world.run(body)


@requirement(
    "TP-DICT-3708",
    "A change of flat parameters in place is in the next forward and in the next state dict.",
    source=f"{SOURCE}: use_orig_params",
)
@pytest.mark.world(2)
def test_changed_in_place(world: World) -> None:
    """Multiply them by two before the first forward, and again after a backward, in each strategy."""

    def body(rank: Rank) -> None:
        warnings.simplefilter("ignore")
        for strategy, original in itertools.product(STRATEGIES, (False, True)):
            options = {"use_orig_params": original, "sharding_strategy": strategy, "device_mesh": rank.mesh()}
            model = wrapped(rank, nn.Sequential(wrapped(rank, Weight(5, 1.0), **options), Weight(3, 1.0)), **options)
            x = torch.ones(1, device=rank.device)
            for step in range(1, 4):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(2.0)
                what = f"{strategy}, {original=}, step {step}"
                y = model(x)
                assert y.item() == 15.0 * 4.0**step, what
                y.backward()  # else the root keeps its whole parameters
                model.zero_grad()
                for kind in FULL, SHARDED:
                    with FullyShardedDataParallel.state_dict_type(model, kind):
                        state = model.state_dict()
                    whole = whole_tensors(state)
                    expected = {"0.weight": torch.full((5,), 2.0**step), "1.weight": torch.full((3,), 2.0**step)}
                    assert_same_all(expected, whole, f"{what}, {kind}")

    world.run(body)
