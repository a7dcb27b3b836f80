"""Unsupported uses of replicate(), which raise an error at once or in the first forward."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import layer
from harness import Rank, World, requirement
from harness.stacks import dynamo, replicate


def frozen() -> nn.Module:
    return layer().requires_grad_(False)


def hooked_twice(model: nn.Module) -> None:
    for _ in range(2):
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())  # type: ignore[operator]


def untouched(model: nn.Module) -> None:
    pass


WRONG: dict[str, tuple[Callable[[], nn.Module], Callable[[Rank], dict[str, Any]], Callable[[nn.Module], None], str]] = {
    "group-and-mesh": (
        layer,
        lambda rank: {"process_group": rank.group, "device_mesh": rank.mesh()},
        untouched,
        "(?i)both.*group.*mesh",
    ),
    "mesh-of-two-dimensions": (layer, lambda rank: {"device_mesh": rank.mesh(1, 2)}, untouched, "(?i)1D"),
    "unknown-option": (layer, lambda rank: {"bucket_size": 1}, untouched, "bucket_size"),
    "nothing-to-train": (frozen, lambda rank: {}, untouched, "(?i)requires? a gradient"),
    "two-hooks": (layer, lambda rank: {}, hooked_twice, "(?i)comm_hook.*once"),
}
"""The model, the options of replicate(), what is done before the first forward, and a pattern of the error."""


@requirement(
    "REPL-REFUSE-01",
    "Unsupported uses of replicate() raise an error that names the problem on every rank, in the first forward at "
    "the latest.",
    source="torch/distributed/_composable/replicate.py: replicate; torch.nn.parallel.DistributedDataParallel",
)
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.world(2)
def test_refused(world: World, what: str) -> None:
    """The error comes before any communication, so that no rank is left waiting."""
    make, options, prepare, says = WRONG[what]

    def body(rank: Rank) -> str:
        try:
            model = replicate.apply(make(), rank, **options(rank))
            prepare(model)
            model(torch.ones(1, 2, device=rank.device))
        except (RuntimeError, TypeError, ValueError) as e:
            return str(e)
        return "no error"

    for message in world.run(body):
        assert re.search(says, message), message


NOT_WRAPPED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "uninitialized": (lambda: nn.LazyLinear(2), {}, "uninitialized parameters"),
    "partly-uninitialized": (lambda: nn.Sequential(layer(), nn.LazyLinear(2)), {}, "uninitialized parameters"),
    "nothing-to-train": (frozen, {}, "requires a gradient"),
    "nothing-at-all": (nn.Module, {}, "requires a gradient"),
    "two-devices": (layer, {"device_ids": [0, 1]}, "single element"),
    "two-device-types": (lambda: nn.Sequential(layer(), nn.Linear(2, 2, device="meta")), {}, "same type of devices"),
    "device-of-the-host": (layer, {"device_ids": [torch.device("cpu")]}, "device_ids"),
    "device-as-text": (layer, {"device_ids": ["cpu"]}, "device_ids"),
    "index-of-the-host": (layer, {"device_ids": [0]}, "device_ids"),
    "output-on-another-device": (layer, {"output_device": 1}, "output_device"),
    "output-on-the-host": (layer, {"output_device": torch.device("cpu")}, "output_device"),
    "synchronized-norm": (lambda: nn.Sequential(layer(), nn.SyncBatchNorm(2)), {}, "SyncBatchNorm"),
}
"""Modules on the host, options, and a pattern of the error."""


@requirement(
    "DDP-REFUSE-01",
    "DistributedDataParallel refuses a module that it cannot replicate, or devices that the module is not on.",
    source="torch.nn.parallel.DistributedDataParallel: module, device_ids, output_device",
)
@pytest.mark.world(1)
def test_refused_by_ddp(world: World) -> None:
    """Wrap modules with uninitialized parameters, none to train, on several devices, or on the host."""

    def body(rank: Rank) -> None:
        from_host = "cpu" in {pair.split(":")[0] for pair in dist.get_backend_config().split(",")}
        for name, (make, options, says) in NOT_WRAPPED.items():
            if name == "synchronized-norm" and not from_host:
                says = "device type cpu"  # ranks compare parameters before the layer is refused
            with pytest.raises((RuntimeError, ValueError), match=says) as e:
                DistributedDataParallel(make(), **options)
            assert type(e.value) is (
                RuntimeError if says.split()[0] in ("uninitialized", "requires", "device") else ValueError
            ), name
        for ids in (None, [], ()):
            DistributedDataParallel(layer().to(rank.device), device_ids=ids)

    world.run(body)


@requirement(
    "DDP-REFUSE-02",
    "A communication hook that returns None is an error of the backward at the latest.",
    source="torch.nn.parallel.DistributedDataParallel.register_comm_hook: 'it still must return a completed Future'",
)
@pytest.mark.world(2)
def test_hook_without_future(world: World) -> None:
    """The hook says nothing of what it returns, so that it is accepted at first."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
        return None

    def body(rank: Rank) -> str:
        model = DistributedDataParallel(layer().to(rank.device))
        try:
            model.register_comm_hook(None, hook)
            model(torch.ones(1, 2, device=rank.device)).sum().backward()
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return "an error"
        return "no error"

    assert world.run(body) == ["an error"] * 2


@requirement(
    "DDP-REFUSE-62",
    "bucket_cap_mb_list is refused with DDP's reducer in Python, which takes bucket_cap_mb alone.",
    source="torch.nn.parallel.DistributedDataParallel: bucket_cap_mb_list; torch/_dynamo/config.py: optimize_ddp",
)
@pytest.mark.needs(torch="torch.nn.parallel.DistributedDataParallel(bucket_cap_mb_list)")
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.world(1, keeps="hooks of the reducer in Python, which refer to their parameters")
def test_list_of_sizes(world: World) -> None:
    """Give a list with the reducer in Python, with and without another size, and then without that reducer."""

    def body(rank: Rank) -> None:
        for options in ({"bucket_cap_mb_list": [1, 2]}, {"bucket_cap_mb_list": [3], "bucket_cap_mb": 1}):
            module = layer().to(rank.device)
            with dynamo.python_reducer():
                with pytest.raises((AssertionError, ValueError), match="bucket_cap_mb_list"):
                    DistributedDataParallel(module, **options)  # type: ignore[arg-type]
                DistributedDataParallel(module, bucket_cap_mb=1)
            DistributedDataParallel(module, **options)  # type: ignore[arg-type]

    world.run(body)
