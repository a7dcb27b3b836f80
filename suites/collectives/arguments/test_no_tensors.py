"""What is no tensor, in the place of each tensor that a collective or a message takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, requirement

ERRORS = (TypeError, ValueError, RuntimeError)
COLLECTIVES: dict[str, tuple[str, ...]] = {
    "all_reduce": ("tensor",),
    "broadcast": ("tensor",),
    "reduce": ("tensor",),
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "gather": ("tensor", "gather_list"),
    "scatter": ("tensor", "scatter_list"),
    "reduce_scatter": ("output", "input_list"),
    "reduce_scatter_tensor": ("output", "input"),
    "all_to_all": ("output_tensor_list", "input_tensor_list"),
    "all_to_all_single": ("output", "input"),
    "all_reduce_coalesced": ("tensors",),
    "all_gather_coalesced": ("output_tensor_lists", "input_tensor_list"),
    "send": ("tensor",),
    "recv": ("tensor",),
    "isend": ("tensor",),
    "irecv": ("tensor",),
}
"""The parameters of each function that take tensors."""


def tensors_for(parameter: str, device: torch.device) -> Any:
    """Return what a function of two ranks takes there: a tensor, a list of two, or two lists of one each."""
    if parameter == "output_tensor_lists":
        return [[torch.ones(2, device=device)] for _ in range(2)]
    if parameter.endswith("list") or parameter == "tensors":
        return [torch.ones(2, device=device) for _ in range(2)]
    return torch.ones(2, device=device)


def wrong_for(parameter: str, device: torch.device) -> dict[str, Any]:
    """Return values without a tensor where there should be one."""
    one = torch.ones(2, device=device)
    single: dict[str, Any] = {"nothing": None, "a number": 1.0, "a text": "tensor", "a list": [1.0, 1.0]}
    if parameter == "output_tensor_lists":
        return {**single, "lists of numbers": [[1.0], [1.0]], "a number among": [[one], [1.0]]}
    if parameter.endswith("list") or parameter == "tensors":
        missing = {name: value for name, value in single.items() if name not in ("nothing", "a list")}
        return {**missing, "numbers": [1.0, 1.0], "a number among": [one, 1.0], "nothing among": [None, one]}
    return {**single, "a list of one": [one], "an array": one.cpu().numpy()}


@requirement(
    "COLL-MISUSE-4000",
    "A collective or a message raises an error for anything but tensors in the place of each tensor that it takes.",
    source="torch.distributed: Tensor, list[Tensor]; torch/distributed/distributed_c10d.py: _check_single_tensor, "
    "_check_tensor_list",
)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.world(2)
def test_no_tensors(world: World, name: str) -> None:
    """Give nothing, a number, a text, a list or an array, alone or among tensors; then all ranks sum a tensor."""

    def body(rank: Rank) -> None:
        function: Callable[..., Any] = getattr(dist, name)
        taken = inspect.signature(function).parameters
        options = {root: rank.index for root in ("src", "dst") if root in taken}
        if name in ("send", "recv", "isend", "irecv"):
            options = {"src" if "recv" in name else "dst": 1 - rank.index}
        right = {parameter: tensors_for(parameter, rank.device) for parameter in COLLECTIVES[name]}
        for parameter in right:
            for what, wrong in wrong_for(parameter, rank.device).items():
                try:
                    function(**{**right, parameter: wrong}, **options)
                except ERRORS:
                    continue
                raise AssertionError(f"{what} for {parameter} is not refused")
        total = torch.ones(1, device=rank.device)
        dist.all_reduce(total)
        assert total.item() == 2

    world.run(body)
