"""Collectives that are wrong in one narrow way, or repaired, put into the ranks while a suite's test runs there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import DeviceMesh

from harness import Rank, World

INPUT = {
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "gather": "tensor",
    "scatter": "scatter_list",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
}
OUTPUT = {
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_single": "output_tensor",
    "gather": "gather_list",
    "scatter": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "reduce_scatter_single": "output",
    "all_to_all": "output_tensor_list",
    "all_to_all_single": "output",
    "recv": "tensor",
}
"""Names of the arguments that a collective reads, and that it writes."""
SAME = ("all_gather_single", "reduce_scatter_single")
"""Other names for what is there already."""

OWNERS = {"functional": functional, "differentiable": differentiable, "DeviceMesh": DeviceMesh, "": dist}
"""What is before the dot in the name of a function that can be damaged."""

FUNCTIONAL = ("all_reduce", "broadcast", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single")


@dataclass(frozen=True)
class Call:
    """One call of a collective on one rank."""

    collective: str
    right: Callable[..., Any]
    """The collective as it was."""
    arguments: dict[str, Any]
    memory: dict[Any, Any]
    """What the damage remembers from call to call."""

    @property
    def group(self) -> Any:
        return self.arguments.get("group")

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the group."""
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def member(self) -> int:
        """This rank in the group."""
        return self.ranks.index(dist.get_rank())

    @property
    def op(self) -> Any:
        return self.arguments["op"]

    @property
    def inputs(self) -> list[torch.Tensor]:
        if self.collective.startswith("functional."):
            return [self.arguments["self"]]
        return _listed(self.arguments[INPUT[self.collective]])

    @property
    def outputs(self) -> list[torch.Tensor]:
        return _listed(self.arguments[OUTPUT[self.collective]])

    @property
    def first(self) -> torch.Tensor:
        """A tensor of the call: of scatter, only the source has inputs."""
        return self.inputs[0] if self.inputs else self.outputs[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    def count(self) -> int:
        """How often there was a call on this group."""
        key = ("count", tuple(self.ranks))
        self.memory[key] = self.memory.get(key, 0) + 1
        return int(self.memory[key])

    def proceed(self, **changes: Any) -> Any:
        """Do what the collective does, with some arguments changed; the data is there afterwards."""
        work = self.right(**{**self.arguments, **changes})
        if self.arguments.get("async_op") and work is not None:
            work.wait()
        return work

    def from_everyone(self) -> list[torch.Tensor]:
        """The first input of each member."""
        mine = self.inputs[0].detach().contiguous().clone()
        found = [torch.empty_like(mine) for _ in range(self.size)]
        dist_all_gather(found, mine, group=self.group)
        return found


dist_all_gather = dist.all_gather


def _listed(found: Any) -> list[torch.Tensor]:
    return [] if found is None else [found] if isinstance(found, torch.Tensor) else list(found)


@dataclass(frozen=True)
class Damage:
    """One narrow way in which a process group is wrong."""

    name: str
    collectives: tuple[str, ...]
    """Names in torch.distributed, or with one of OWNERS before them (``functional.all_reduce``)."""
    wrong: Callable[[Call], Any]
    """Done in place of the collective."""
    when: Callable[[Call], bool] = lambda call: True
    """On which calls; on the others the collective is as it was."""

    def __str__(self) -> str:
        return self.name


Repair = Damage
"""The same for the better: what the backend does wrong is done right."""


@dataclass(frozen=True)
class BrokenWorld:
    """A world whose collectives are changed, for a test that wants a world."""

    world: World
    changes: tuple[Damage, ...]
    """From the inside out: repairs before damages."""
    timeout: float | None = None
    """Seconds that a test may take at most, for one that is expected to hang."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.world.size)

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, watch: bool = True, **keywords: Any
    ) -> list[Any]:
        """As World.run."""
        return self.world.run(
            run_changed, self.changes, fn, args, keywords, timeout=self.timeout or timeout, watch=watch
        )


def run_changed(rank: Rank, changes: tuple[Damage, ...], fn: Callable[..., Any], args: Any, keywords: Any) -> Any:
    """Call a function on this rank while collectives are changed."""
    with ExitStack() as undone:
        for change in changes:
            undone.enter_context(changed(change))
        return fn(rank, *args, **keywords)


@contextmanager
def changed(change: Damage) -> Iterator[None]:
    """Put a damage or a repair into this process."""
    before = []
    memory: dict[Any, Any] = {}
    for name in change.collectives:
        owner, _, attribute = name.rpartition(".")
        right = getattr(OWNERS[owner], attribute)
        before.append((OWNERS[owner], attribute, right))
        setattr(OWNERS[owner], attribute, _replacement(change, name, right, memory))
    try:
        yield
    finally:
        for where, attribute, right in before:
            setattr(where, attribute, right)
        for timer in memory.get("timers", []):
            timer.join()


def _replacement(change: Damage, name: str, right: Callable[..., Any], memory: dict[Any, Any]) -> Callable[..., Any]:
    signature = inspect.signature(right)

    @functools.wraps(right)
    def collective(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = Call(name, right, dict(bound.arguments), memory)
        with torch.no_grad():
            if change.when(call):
                return change.wrong(call)
        return right(*args, **kwargs)

    return collective


class Finished:
    """A Work that says that it is done."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass(frozen=True)
class NeverCompleted:
    """A Work that says that it is not done, whenever it is asked."""

    work: Any

    def wait(self, *args: Any) -> Any:
        return self.work.wait(*args)

    def is_completed(self) -> bool:
        return False


@dataclass(frozen=True)
class DifferentWhenAgain:
    """A Work whose wait, once it has been waited for, does something more."""

    work: Any
    more: Callable[[], Any]
    waited: list[bool] = field(default_factory=list)

    def wait(self, *args: Any) -> Any:
        if self.waited:
            self.more()
        self.waited.append(True)
        return len(self.waited) > 1 or self.work.wait(*args)

    def is_completed(self) -> bool:
        return bool(self.waited)
