"""Training, joining and sharded optimizers while new tensors have another default device or dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_same, requirement


@contextlib.contextmanager
def default(setter: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    """Set a default of the process."""
    setter(value)
    try:
        yield
    finally:
        setter(back)


DEFAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "as it is": contextlib.nullcontext,
    "device as a context": lambda: torch.device("meta"),
    "default device": lambda: default(torch.set_default_device, "meta", None),
    "default dtype": lambda: default(torch.set_default_dtype, torch.float64, torch.float32),
}


class Counting(nn.Module):
    """A layer that is used, one that is not, and a buffer that counts the calls."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        kind: Any = {"device": device, "dtype": torch.float32}
        self.used, self.left = (nn.Parameter(torch.ones(3, **kind)) for _ in range(2))
        self.register_buffer("calls", torch.zeros(1, **kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the products."""
        self.calls += 1
        return (self.used * x).sum()


def joined(rank: Rank, model: Any, optimizer: Any, throw: bool = False) -> None:
    """Take one step on rank 0, and two on the others, whose gradients are the number of the rank plus one."""
    with Join([model, optimizer], throw_on_early_termination=throw):
        for _ in range(1 + min(rank.index, 1)):
            model(torch.full((3,), rank.index + 1.0, dtype=torch.float32, device=rank.device)).backward()
            optimizer.step()
            optimizer.zero_grad()


def trained(rank: Rank, **options: Any) -> list[torch.Tensor]:
    """Return the parameters, the buffer and the momenta after uneven inputs, and notice those of others."""
    model: Any = DistributedDataParallel(Counting(rank.device), find_unused_parameters=True, **options)
    optimizer: Any = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=1.0, momentum=0.5, parameters_as_bucket_view=bool(options)
    )
    joined(rank, model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    momenta = [] if rank.index else [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()]
    with pytest.raises(RuntimeError, match="exhausted"):
        joined(rank, model, optimizer, throw=True)
    return [t.detach().cpu() for t in (*model.parameters(), *model.buffers(), *momenta)]


@requirement(
    "REPL-DEFAULT-4000",
    "Training, joining and sharded optimizers give the same values whatever the default device or dtype is.",
    source="torch.device, torch.set_default_device, torch.set_default_dtype; torch.nn.parallel."
    "DistributedDataParallel; torch.distributed.algorithms.Join; torch.distributed.optim.ZeroRedundancyOptimizer",
)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.world(2)
def test_other_defaults(world: World, views: bool) -> None:
    """Rank 1 has an input more than rank 0, while new tensors have no memory, or double precision."""

    def body(rank: Rank) -> None:
        found: dict[str, list[torch.Tensor]] = {}
        for name, set_default in DEFAULTS.items():
            with set_default():
                found[name] = trained(rank, **({"gradient_as_bucket_view": True} if views else {}))
        used, left, calls, *_ = found["as it is"]
        assert (len(used), len(left), len(calls)) == (3, 3, 1)
        for name, tensors in found.items():
            assert len(tensors) == len(found["as it is"]), name
            for one, other in zip(found["as it is"], tensors, strict=True):
                assert_same(one, other, name)

    world.run(body)
