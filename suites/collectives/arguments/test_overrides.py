"""Collectives under what overrides PyTorch's functions: function modes, and tensors of a class that has a say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

SINCE = pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, only all_reduce and all_gather were overridable")
RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""Functions that have another name since PyTorch 2.13."""


class Seen(TorchFunctionMode):
    """Notes the functions of torch.distributed that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        if getattr(func, "__module__", "").startswith("torch.distributed"):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Refusing(torch.Tensor):
    """A tensor that answers for every function of torch.distributed instead of letting it run."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the function's name."""
        if getattr(func, "__module__", "").startswith("torch.distributed"):
            return func.__name__
        return super().__torch_function__(func, types, args, kwargs or {})


class Telling(torch.Tensor):
    """A tensor that answers for every function of torch.distributed with the function and what it is given."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the arguments by name, those that are left out included."""
        if getattr(func, "__module__", "").startswith("torch.distributed"):
            given = inspect.signature(func).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            return dict(given.arguments)
        return super().__torch_function__(func, types, args, kwargs or {})


def calls(rank: Rank, made: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Return a call of each collective, and of each way to send a message, of tensors that ``made`` makes."""
    root, other = rank.index == 0, 1 - rank.index

    def two() -> list[torch.Tensor]:
        return [made(2), made(2)]

    return {
        "all_reduce": lambda: dist.all_reduce(made(2)),
        "broadcast": lambda: dist.broadcast(made(2), 0),
        "reduce": lambda: dist.reduce(made(2), 0),
        "all_gather": lambda: dist.all_gather(two(), made(2)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(made(4), made(2)),
        "gather": lambda: dist.gather(made(2), two() if root else None, 0),
        "scatter": lambda: dist.scatter(made(2), two() if root else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(made(2), two()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(made(2), made(4)),
        "all_to_all": lambda: dist.all_to_all(two(), two()),
        "all_to_all_single": lambda: dist.all_to_all_single(made(4), made(4)),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced(two()),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([[made(2)], [made(2)]], [made(2)]),
        "send" if root else "recv": lambda: (dist.send if root else dist.recv)(made(2), other),
        "isend" if root else "irecv": lambda: (dist.isend if root else dist.irecv)(made(2), other),
    }


@requirement(
    "COLL-MODE-01",
    "A function mode, or a tensor that overrides functions, is asked about each collective or message under its name.",
    source="torch.overrides: TorchFunctionMode, has_torch_function; torch/distributed/distributed_c10d.py",
)
@SINCE
@pytest.mark.needs(collective="gather")
@pytest.mark.needs(collective="scatter")
@pytest.mark.needs(collective="all_to_all")
@pytest.mark.needs(features=["coalescing", "messages"])
@pytest.mark.world(2)
def test_asked(world: World) -> None:
    """The mode lets each call run; the tensor answers in its place, so that nothing is communicated."""

    def body(rank: Rank) -> list[str]:
        def plain(count: int) -> torch.Tensor:
            return torch.ones(count, device=rank.device)

        wrong = []
        for name, call in calls(rank, plain).items():
            expected = {name, RENAMED.get(name, name)}
            with Seen() as seen:
                found = call()
            if hasattr(found, "wait"):
                found.wait()
            if len(seen.names) != 1 or seen.names[0] not in expected:
                wrong.append(f"{name}: the mode saw {seen.names}")
        for name, call in calls(rank, lambda count: plain(count).as_subclass(Refusing)).items():
            found = call()
            if found not in (name, RENAMED.get(name, name)):
                wrong.append(f"{name}: the tensor's answer is {found}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "COLL-MODE-4000",
    "A tensor that overrides functions is told each argument that a collective or a message was called with.",
    source="torch.overrides: handle_torch_function, __torch_function__; torch/distributed/distributed_c10d.py",
)
@SINCE
@pytest.mark.world(2)
def test_told(world: World) -> None:
    """Give every parameter a value that is not its default, by name; the tensor answers, so nothing is communicated."""

    def body(rank: Rank) -> None:
        def made(count: int = 2) -> torch.Tensor:
            return torch.ones(count, device=rank.device).as_subclass(Telling)

        group, pair = dist.new_group([0, 1]), lambda: [made(), made()]
        values: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(("tensor", "output", "input", "output_tensor", "input_tensor"), made),
            **dict.fromkeys(("tensor_list", "gather_list", "scatter_list", "input_list", "tensors"), pair),
            **dict.fromkeys(("input_tensor_list", "output_tensor_list"), pair),
            "output_tensor_lists": lambda: [pair(), pair()],
            "op": lambda: dist.ReduceOp.MAX,
            "group": lambda: group,
            "async_op": lambda: True,
            **dict.fromkeys(("output_split_sizes", "input_split_sizes"), lambda: [1, 1]),
            **dict.fromkeys(("src", "dst", "group_src", "group_dst", "tag"), lambda: 1),
        }
        for name in calls(rank, made):
            function = getattr(dist, name)
            given = {parameter: values[parameter]() for parameter in inspect.signature(function).parameters}
            told = function(**given)
            assert told.keys() == given.keys(), name
            for parameter, value in given.items():
                assert told[parameter] is value, f"{name}: {parameter}"

    world.run(body)
