"""Ways to break collectives in a rank: what replaces a function, made from the function that it replaces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from harness import Rank, World
from harness.stacks import collectives as stack

Function = Callable[..., Any]
Defect = Callable[[Function, Rank], Function]


def broken(rank: Rank, patches: dict[str, Defect], fn: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on a rank whose collectives are broken."""
    with _patched(rank, patches):
        return fn(rank, *args, **kwargs)


@contextlib.contextmanager
def _patched(rank: Rank, patches: dict[str, Defect]) -> Iterator[None]:
    undo = []
    for name, defect in patches.items():
        owner: Any = stack.functional if name.startswith("functional.") else dist
        owner, name = (dist.Work, "is_completed") if name == "Work.is_completed" else (owner, name.rpartition(".")[2])
        original = getattr(owner, name)
        undo.append((owner, name, original))
        setattr(owner, name, defect(original, rank))
    try:
        yield
    finally:
        for owner, name, original in undo:
            setattr(owner, name, original)


class BrokenWorld:
    """A world as a suite's test sees it, in which some collectives are broken."""

    def __init__(self, world: World, patches: dict[str, Defect]) -> None:
        self.world, self.patches = world, patches
        self.size = world.size

    def run(
        self, fn: Function, *args: Any, timeout: float | None = None, watch: bool = True, **kwargs: Any
    ) -> list[Any]:
        return self.world.run(broken, self.patches, fn, args, kwargs, timeout=timeout or 20, watch=watch)


def tensors(value: Any) -> list[torch.Tensor]:
    """Tensors in an argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, list | tuple) else []


def spoil(tensor: torch.Tensor) -> None:
    """Change the last element."""
    if tensor.numel():
        with torch.no_grad():
            at = tuple(extent - 1 for extent in tensor.shape)
            old = tensor[at].clone()
            one = torch.ones((), dtype=tensor.dtype)
            tensor[at] = ~old if tensor.dtype == torch.bool else torch.where(old == 0, one, old * 0)


def wrong(when: Callable[..., bool] = lambda *_: True, output: int = 0) -> Defect:
    """The last element of the output is wrong, where ``when(rank, call, arguments, options)`` says so."""

    def defect(original: Function, rank: Rank) -> Function:
        calls = 0

        def replacement(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            result = original(*args, **options)
            if hasattr(result, "wait") and not isinstance(result, torch.Tensor):
                result.wait()
            if when(rank, calls, args, options):
                for tensor in tensors(args[output] if len(args) > output else [])[-1:]:
                    spoil(tensor)
            return result

        return replacement

    return defect


def returns_wrong(original: Function, rank: Rank) -> Function:
    """A functional collective whose result is wrong."""

    def replacement(*args: Any, **options: Any) -> Any:
        result = stack.functional.wait_tensor(original(*args, **options)) * 1
        spoil(result)
        return result

    return replacement


def touches_input(position: int) -> Defect:
    """An input is changed."""
    return wrong(output=position)


class Done:
    """Work that was never done."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def nothing(original: Function, rank: Rank) -> Function:
    """Nothing is done at all."""
    return lambda *args, **options: Done() if options.get("async_op") else None


def never_raises(original: Function, rank: Rank) -> Function:
    """Errors are swallowed."""

    def replacement(*args: Any, **options: Any) -> Any:
        try:
            return original(*args, **options)
        except Exception:
            return None

    return replacement


def always_raises(original: Function, rank: Rank) -> Function:
    """Refused on this rank alone if it is the last."""

    def replacement(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        if rank.index == rank.size - 1:
            raise RuntimeError("not supported")
        return result

    return replacement


def instead(value: Any) -> Defect:
    """The function gives something else."""
    return lambda original, rank: lambda *args, **options: value


def without(*names: str) -> Defect:
    """Some options are dropped on the way."""
    return lambda original, rank: (
        lambda *args, **options: original(*args, **{key: value for key, value in options.items() if key not in names})
    )


def reversed_list(position: int) -> Defect:
    """What comes back in a list is in the wrong order."""

    def defect(original: Function, rank: Rank) -> Function:
        def replacement(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if len(args) > position and args[position] is not None:
                args[position].reverse()
            return result

        return replacement

    return defect


def odd_world(rank: Rank, call: int, args: Any, options: Any) -> bool:
    return rank.size % 2 == 1 and rank.size > 1


def strided(rank: Rank, call: int, args: Any, options: Any) -> bool:
    return any(not t.is_contiguous() for arg in args for t in tensors(arg))


def without_rank_0(rank: Rank, call: int, args: Any, options: Any) -> bool:
    group = options.get("group")
    return group is not None and 0 not in dist.get_process_group_ranks(group)


def second_call(rank: Rank, call: int, args: Any, options: Any) -> bool:
    return call == 2


def large(rank: Rank, call: int, args: Any, options: Any) -> bool:
    return tensors(args[0])[0].numel() > 1 << 20


def complex_only(rank: Rank, call: int, args: Any, options: Any) -> bool:
    return any(t.is_complex() for arg in args for t in tensors(arg))
