"""Buffers under FSDP1 of modules that it ignores, beside others, with a wrapping policy and without."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fixtures.wrapped import inputs, wrapped
from harness import Rank, World, assert_on_ranks, requirement

SOURCE = "torch.distributed.fsdp.FullyShardedDataParallel"


class Part(nn.Module):
    """A weight, a buffer, and perhaps parts inside."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.tensor([1.0, 257.0]))
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple of the sum of ``x`` and what the parts return."""
        return self.weight.sum() * sum((part(x) for part in self.children()), start=x)


class Root(Part):
    """The outermost part."""


class Layer(Part):
    """A part in the middle."""


@requirement(
    "TP-IGNORE-4308",
    "A buffer_dtype casts all buffers but those of ignored modules, which are in state dicts as they are, also if an "
    "FSDP module inside ignores them.",
    source=f"{SOURCE}: ignored_modules, ignored_states; torch.distributed.fsdp.MixedPrecision: buffer_dtype",
)
@pytest.mark.world(2)
def test_ignored_buffers(world: World) -> None:
    """Buffers are in the root, a layer, and parts of both; a part is ignored by the root, or by the layer."""

    def body(rank: Rank) -> None:
        ways = itertools.product((True, False), ("modules", "states"), ("together", "policy", "inner"))
        for (original, how, where), ignored in itertools.product(ways, ("part", "layer.piece")):
            if (where, ignored) in {("inner", "part"), ("policy", "layer.piece")}:
                continue  # it is not in the layer; a policy's modules cast what the root ignores, a known defect
            what = f"{original=}, {how}, {where}, {ignored}"
            low = MixedPrecision(buffer_dtype=torch.bfloat16)
            options: dict[str, Any] = {"use_orig_params": original, "mixed_precision": low}
            model: Any = Root(part=Part(), layer=Layer(piece=Part())).to(rank.device)
            buffers = [f"{name}.kept".strip(".") for name, module in model.named_modules() if isinstance(module, Part)]
            part = model.get_submodule(ignored)
            given: dict[str, Any] = {f"ignored_{how}": [part]}
            if where == "inner":
                model.layer = wrapped(rank, model.layer, **given, **options)
                model = wrapped(rank, model, **options)
            else:
                policy = ModuleWrapPolicy({Layer}) if where == "policy" else None
                model = wrapped(rank, model, auto_wrap_policy=policy, **given, **options)
            for step in range(2):
                model(inputs(rank)).sum().backward()
                found = {name.replace("_fsdp_wrapped_module.", ""): b.dtype for name, b in model.named_buffers()}
                right = {name: torch.float32 if name == f"{ignored}.kept" else torch.bfloat16 for name in buffers}
                assert found == right, f"{what}, step {step}: {found}"
                with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                    state = model.state_dict()
                assert {state[name].dtype for name in buffers} == {torch.float32}, f"{what}, step {step}"
                own = dict(part.named_buffers())["kept"]
                assert state[f"{ignored}.kept"].data_ptr() == own.data_ptr(), f"{what}, step {step}: it is a copy"

    world.run(body)


class Scaled(nn.Module):
    """Multiply by a weight and a buffer, and by those of an inner module."""

    scale: torch.Tensor

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.tensor([257.0]))  # bfloat16 has 256 and 258
        self.inner = inner or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(self.weight.sum() * self.scale * x)
        return result


class Around(Scaled):
    """The module with the ignored one inside."""


class Beside(Scaled):
    """A module that has nothing to do with it."""


POLICIES: dict[str, ModuleWrapPolicy | None] = {
    "none": None,
    "beside": ModuleWrapPolicy({Beside}),
    "around": ModuleWrapPolicy({Around}),
}
"""What the policy wraps in an FSDP module of its own."""


@requirement(
    "TP-IGNORE-4600",
    "A buffer of a module that FSDP ignores keeps its dtype, whatever modules around it the policy wraps.",
    source="torch.distributed.fsdp.FullyShardedDataParallel: ignored_modules: 'child modules' parameters and buffers "
    "are ignored', auto_wrap_policy; pytorch/pytorch#77439",
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.world(2)
def test_buffers_of_ignored_modules(world: World, policy: str) -> None:
    """Ignore a module inside another one, beside which there is a third, as a module or as a state."""

    def body(rank: Rank) -> list[Any]:
        found = []
        for original, how in itertools.product((False, True), ("ignored_modules", "ignored_states")):
            ignored, beside = Scaled(), Beside()
            model = wrapped(
                rank,
                nn.Sequential(Around(ignored), beside),
                auto_wrap_policy=POLICIES[policy],
                use_orig_params=original,
                mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16),
                **{how: [ignored]},
            )
            model(torch.ones(1, device=rank.device)).sum().backward()
            found.append([(buffer.dtype, buffer.item()) for buffer in (ignored.scale, beside.scale)])
        return found

    assert_on_ranks([[[(torch.float32, 257.0), (torch.bfloat16, 256.0)]] * 4] * world.size, world.run(body))
