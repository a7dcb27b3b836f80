"""Hooks of modules that are replicated: on the module itself, on DistributedDataParallel, and on layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks import replicate

SOURCE = "torch.nn.Module: register_forward_pre_hook, register_forward_hook"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-6},
]


class Outer(nn.Module):
    """Two layers of one weight, which is one; a keyword multiplies the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = self.layers(x) * times
        return result


def watched(module: nn.Module, name: str, calls: list[str]) -> list[Any]:
    """Hook a module: one hook doubles the input, one makes the output three times as large; others only look."""

    def doubled(_: Any, args: Any, kwargs: Any) -> Any:
        calls.append(f"{name} before {sorted(kwargs)}")
        return tuple(2 * x for x in args), kwargs

    def tripled(_: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(f"{name} after")
        return 3 * output

    def looked(_: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        calls.append(f"{name} always")

    return [
        module.register_forward_pre_hook(doubled, with_kwargs=True),
        module.register_forward_hook(tripled),
        module.register_forward_hook(looked, with_kwargs=True, always_call=True),
    ]


@requirement(
    "DDP-MODHOOK-01",
    "Forward hooks of the replicated module, of its layers and of DDP run once in each forward, outer ones around.",
    source=SOURCE,
)
@requirement(
    "DDP-MODHOOK-02",
    "Forward hooks of a replicated module may change inputs or outputs, which counts in the averaged gradients.",
    source=SOURCE,
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_forward_hooks(world: World, how: str) -> None:
    """Hook layers and modules before or after replication; run three steps, an evaluation, and one without hooks."""

    def body(rank: Rank) -> None:
        for options in OPTIONS:
            for late in (False, True):
                module, calls = Outer().to(rank.device), list[str]()
                handles = watched(module.layers[1], "layer", calls)
                if not late:
                    handles += watched(module, "module", calls)
                model: Any = replicate.replicate(module, **options) if how == "replicate" else None
                model = model or DistributedDataParallel(module, **options)
                if late:
                    handles += watched(module, "module", calls)
                if how == "DDP":
                    handles += watched(model, "outer", calls)
                names = (["outer"] if how == "DDP" else []) + ["module", "layer"]
                right = [f"{name} before {['times'] if name != 'layer' else []}" for name in names]
                right += [f"{name} {when}" for name in names[::-1] for when in ("after", "always")]
                factor = 6.0 ** len(names)
                for step in range(5):
                    if step == 4:
                        for handle in handles:
                            handle.remove()
                        factor, right = 1.0, []
                    where = (options, late, step)
                    x = torch.full((1, 1), 1.0 + rank.index, device=rank.device)
                    with torch.set_grad_enabled(step != 3):
                        output = model(x, times=0.5)
                    assert calls == right, where
                    calls.clear()
                    assert output.tolist() == [[0.5 * factor * (1.0 + rank.index)]], where
                    if step != 3:
                        output.sum().backward()
                        assert [p.grad.item() for p in module.parameters()] == [0.75 * factor] * 2, where  # type: ignore[union-attr]
                        model.zero_grad()
                    assert calls == [], where

    world.run(body)


@requirement(
    "DDP-MODHOOK-03",
    "Backward hooks of a replicated module, or of its layers, see the rank's own gradients and may change them.",
    source="torch.nn.Module: register_full_backward_pre_hook, register_full_backward_hook",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_backward_hooks(world: World, how: str) -> None:
    """A hook of each kind on the module and on its second layer; the layer's multiplies the gradient of its input."""

    def body(rank: Rank) -> None:
        for options in OPTIONS:
            module, seen = Outer().to(rank.device), list[tuple[str, float]]()

            def before(where: str, seen: list[tuple[str, float]] = seen) -> Any:
                return lambda _, outputs: seen.append((f"{where} before", outputs[0].item()))

            def after(where: str, seen: list[tuple[str, float]] = seen) -> Any:
                return lambda _, inputs, outputs: seen.append((f"{where} after", inputs[0].item()))

            for part, name in ((module, "module"), (module.layers[1], "layer")):
                part.register_full_backward_pre_hook(before(name))
                part.register_full_backward_hook(after(name))
            module.layers[1].register_full_backward_hook(lambda _, inputs, outputs: (4 * inputs[0],))
            model: Any = replicate.replicate(module, **options) if how == "replicate" else None
            model = model or DistributedDataParallel(module, **options)
            for step in range(3):
                x = torch.full((1, 1), 1.0 + rank.index, device=rank.device, requires_grad=True)
                (model(x) * (1.0 + rank.index)).sum().backward()
                own = 1.0 + rank.index
                right = [("module before", own), ("layer before", own), ("layer after", own), ("module after", 4 * own)]
                assert seen == right, (options, step)
                assert x.grad is not None
                assert x.grad.item() == 4 * own, (options, step)
                mean = (1.0 + 4.0) / 2
                gradients = [p.grad.item() for p in module.parameters()]  # type: ignore[union-attr]
                assert gradients == [4 * mean, mean], (options, step)
                seen.clear()
                model.zero_grad()

    world.run(body)


@requirement(
    "DDP-MODHOOK-3655",
    "Backward hooks of the older form, on a replicated module, on DDP or on a layer, see the rank's own gradients and "
    "may change them.",
    source="torch.nn.Module.register_backward_hook",
)
@pytest.mark.parametrize("how", ["DDP", "replicate"])
@pytest.mark.world(2)
def test_older_backward_hooks(world: World, how: str) -> None:
    """Hook the module, its second layer and DDP for three steps; the module's multiplies the gradient of its input."""

    def body(rank: Rank) -> None:
        for options in OPTIONS:
            module, seen = Outer().to(rank.device), list[tuple[str, float]]()

            def watched(name: str, factor: float = 1.0, seen: list[tuple[str, float]] = seen) -> Any:
                def hook(_: Any, inputs: Any, outputs: Any) -> Any:
                    seen.append((name, outputs[0].item()))
                    return None if factor == 1 else tuple(x if x is None else factor * x for x in inputs)

                return hook

            module.register_backward_hook(watched("module", 4.0))
            module.layers[1].register_backward_hook(watched("layer"))
            model: Any = replicate.replicate(module, **options) if how == "replicate" else None
            model = model or DistributedDataParallel(module, **options)
            if how == "DDP":
                model.register_backward_hook(watched("DDP"))
            for step in range(3):
                own = 1.0 + rank.index
                x = torch.full((1, 1), own, device=rank.device, requires_grad=True)
                (model(x) * own).sum().backward()
                right = {"module": own, "layer": 4 * own} | ({} if how == "replicate" else {"DDP": own})
                assert len(seen) == len(right), (options, step)
                found = dict(seen)
                assert found.get("DDP") in (right.get("DDP"), 4 * own), (
                    options,
                    step,
                )  # it may come after the module's
                assert {**found, "DDP": None} == {**right, "DDP": None}, (options, step)
                assert x.grad is not None
                assert x.grad.item() == 4 * own, (options, step)
                gradients = [p.grad.item() for p in module.parameters()]  # type: ignore[union-attr]
                assert gradients == [4 * (1.0 + 4.0) / 2] * 2, (options, step)
                seen.clear()
                model.zero_grad()

    world.run(body)
