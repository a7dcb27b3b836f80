"""Functions that PyTorch 2.13 deprecates: what they say, and that they do what takes their place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from harness import Rank, World, assert_same, requirement
from harness.stacks.collectives import functional
from harness.stacks.limit import runs_with

Calls = dict[str, tuple[Callable[[], Any], Callable[[], Any], str]]


def calls(x: torch.Tensor) -> Calls:
    """Return a call of each old function of a world of one, of the new one, and the new one's name."""
    group: Any = dist.group.WORLD

    def into(call: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[], torch.Tensor]:
        def called() -> torch.Tensor:
            result = torch.zeros_like(x)
            call(result, x.clone())
            return result

        return called

    made: Calls = {}
    for old, new, given in (
        ("all_gather_tensor", "all_gather_single", (0,)),
        ("all_gather_tensor_autograd", "all_gather_single_autograd", (0,)),
        ("reduce_scatter_tensor", "reduce_scatter_single", ("sum", 0)),
        ("reduce_scatter_tensor_autograd", "reduce_scatter_single_autograd", ("sum", 0)),
    ):
        made[f"functional.{old}"] = (
            lambda old=old, given=given: getattr(functional, old)(x, *given, group),  # type: ignore[misc]
            lambda new=new, given=given: getattr(functional, new)(x, *given, group),  # type: ignore[misc]
            new,
        )
    for old, new, given in (
        ("all_gather_into_tensor_coalesced", "all_gather_single_coalesced", ()),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", ("sum", [0])),
    ):
        made[f"functional.{old}"] = (
            lambda old=old, given=given: getattr(functional, old)([x], *given, group)[0],  # type: ignore[misc]
            lambda new=new, given=given: getattr(functional, new)([x], *given, group)[0],  # type: ignore[misc]
            new,
        )
    ended = runs_with(">=2.15")  # which takes the deprecation of these two back
    for name in () if ended else ("all_gather_into_tensor", "reduce_scatter_tensor"):
        new = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}[name]
        made[name] = (into(getattr(dist, name)), into(getattr(dist, new)), new)
    gather = functional.all_gather_single_autograd
    made |= {
        "nn.broadcast": (lambda: differentiable.broadcast(x, 0), lambda: x, "broadcast"),
        "nn.all_reduce": (lambda: differentiable.all_reduce(x), lambda: x, "all_reduce"),
        "nn.all_gather": (lambda: differentiable.all_gather(x)[0], lambda: gather(x, 0, group), "all_gather_single"),
        "nn.reduce_scatter": (
            lambda: differentiable.reduce_scatter(torch.zeros_like(x), [x]),
            lambda: x,
            "reduce_scatter_single",
        ),
        "nn.all_to_all_single": (
            lambda: differentiable.all_to_all_single(torch.zeros_like(x), x),
            lambda: x,
            "all_to_all_single",
        ),
    }
    return made


@requirement(
    "COLL-CALL-4000",
    "A deprecated function says with each call what takes its place, which has the same result without a warning.",
    source="torch.distributed: all_gather_into_tensor, reduce_scatter_tensor; torch.distributed.nn.functional; "
    "torch.distributed._functional_collectives: 'is deprecated. Please use'",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="PyTorch 2.13 deprecates them")
@pytest.mark.world(1, keeps="results that nothing uses")
def test_deprecated(world: World) -> None:
    """Call each twice, and what takes its place."""

    def body(rank: Rank) -> None:
        x = torch.arange(4.0, device=rank.device)
        for name, (old, new, named) in calls(x).items():
            for _ in range(2):
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    found = old()
                texts = [str(w.message) for w in said if issubclass(w.category, FutureWarning)]
                assert len(texts) == 1, f"{name}: {texts}"
                assert "deprecated" in texts[0], name
                assert f".{named}" in texts[0].split("deprecated")[1], name
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)
                right = new()
            assert_same((right + 0).cpu(), found + 0, name)

    world.run(body)
