"""What DistributedDataParallel writes down about itself: its options, its hook, its steps and its buckets."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, requirement
from harness.stacks import replicate

SOURCE = "torch.nn.parallel.DistributedDataParallel: _get_ddp_logging_data"
MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("with_buckets")


class Layers(nn.Module):
    """Three layers of 1 KiB, of which the last may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.order = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3)), (0, 1, 2)

    def forward(self, x: torch.Tensor, count: int = 3) -> torch.Tensor:
        for index in self.order[:count]:
            x = self.layers[index](x)
        return x


def step(rank: Rank, model: nn.Module, count: int = 3) -> None:
    model(torch.ones(1, 16, device=rank.device), count).sum().backward()


@requirement(
    "DDP-LOG-01",
    "The logging data of a DDP module tell its options, its parameters, its rank and its world's size.",
    source=SOURCE,
)
@requirement(
    "DDP-LOG-02",
    "The logging data of a DDP module tell a hook, a static graph or a join from when it is there.",
    source=SOURCE,
)
@requirement(
    "DDP-LOG-03",
    "The logging data of a DDP module tell the latest step, and what its buckets are since they were rebuilt.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_logged(world: World) -> None:
    """Ask for the data as soon as the module is made, after its hook, after each of four steps, and after a join."""
    cases: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({}, {"bucket_cap_bytes": 25 * MIB, "broadcast_buffers": 1}),
        ({"bucket_cap_mb": 1, "broadcast_buffers": False}, {"bucket_cap_bytes": MIB, "broadcast_buffers": 0}),
        ({"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": 1}),
        ({"find_unused_parameters": True}, {"find_unused_parameters": 1}),
        ({"static_graph": True}, {"static_graph": 1}),
    ]
    hooks: list[Any] = [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, powerSGD_hook.powerSGD_hook]

    def body(rank: Rank) -> None:
        for number, (options, says) in enumerate(cases):
            model: Any = DistributedDataParallel(Layers().to(rank.device), **options)
            always: dict[str, Any] = {
                "module_name": "Layers",
                "rank": rank.index,
                "world_size": 2,
                "num_parameter_tensors": 3,
                "total_parameter_size_bytes": 3 * 1024,
                "dtypes": "float",
                "bucket_sizes": "3072",
                "has_sync_bn": 0,
                "find_unused_parameters": 0,
                "gradient_as_bucket_view": 0,
                "static_graph": None,
                "join_uneven_inputs": None,
                "comm_hook": None,
                **says,
            }

            def check(model: Any = model, always: dict[str, Any] = always, where: Any = options, **more: Any) -> None:
                found = replicate.logged(model)
                for key, value in {**always, **more}.items():
                    assert found.get(key) == value, (where, key)

            check(iteration=0, rebuilt_bucket_sizes=None)
            if number < len(hooks):
                hook = hooks[number]
                state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=100) if number == 2 else None
                model.register_comm_hook(state, hook)
                always["comm_hook"] = hook.__qualname__
                check(iteration=0)
            finds = "find_unused_parameters" in options
            for done in range(4):
                step(rank, model, 2 if finds and done > 1 else 3)
                check(iteration=done)
            check(
                has_rebuilt_buckets=int(not finds),
                rebuilt_bucket_sizes=None if finds else "3072",
                unused_parameter_size=1024 if finds else 0,
            )
            with model.join():
                step(rank, model)
            check(iteration=4, join_uneven_inputs=1)

    world.run(body)


@requirement(
    "DDP-LOG-04",
    "Changing the logging data that a DDP module returned changes neither the module nor data that it returns later.",
    source=SOURCE,
)
@requirement(
    "DDP-LOG-05",
    "From its tenth step on, a DDP module logs those steps alone that the sample rate divides.",
    source="torch.nn.parallel.DistributedDataParallel: _set_ddp_runtime_logging_sample_rate",
)
@pytest.mark.world(1)
def test_sampled(world: World) -> None:
    """Steps with the default rate of 100, then with rates of two and three."""

    def body(rank: Rank) -> None:
        model: Any = DistributedDataParallel(Layers().to(rank.device))
        first = replicate.logged(model)
        first["rank"] = first["iteration"] = 77
        found = []
        for _ in range(12):
            step(rank, model)
            found.append(replicate.logged(model)["iteration"])
        assert found == [*range(11), 10]
        assert replicate.logged(model)["rank"] == 0
        assert first["iteration"] == 77
        for rate, right in ((2, [12, 12, 14, 14]), (3, [14, 14, 18, 18])):
            replicate.log_every(model, rate)
            found = []
            for _ in range(4):
                step(rank, model)
                found.append(replicate.logged(model)["iteration"])
            assert found == right, rate
        for wrong in (0, -1):
            with pytest.raises(ValueError, match="sample rate"):
                replicate.log_every(model, wrong)

    world.run(body)


@requirement(
    "DDP-LOG-66",
    "The logging data of a DDP module tell an error that it has raised, and no error before.",
    source=SOURCE,
)
@pytest.mark.world(2)
def test_errors(world: World) -> None:
    """Register what is no hook, leave out a parameter, or change what a static graph uses."""

    def wrong_hook(rank: Rank, model: Any) -> None:
        model.register_comm_hook({}, {})

    def left_out(rank: Rank, model: Any) -> None:
        for _ in range(2):
            step(rank, model, 2)

    def changed(rank: Rank, model: Any) -> None:
        for count in (3, 2, 2):
            step(rank, model, count)

    def body(rank: Rank) -> None:
        cases: list[tuple[Any, dict[str, Any]]] = [(wrong_hook, {}), (left_out, {}), (changed, {"static_graph": True})]
        for fails, options in cases:
            model: Any = DistributedDataParallel(Layers().to(rank.device), **options)
            before = replicate.logged(model)
            assert (before.get("has_error", 0), before.get("error", "")) == (0, ""), fails
            with pytest.raises((RuntimeError, TypeError)) as e:
                fails(rank, model)
            found = replicate.logged(model)
            assert found.get("has_error") == 1, fails
            assert str(e.value).splitlines()[0][:60] in found["error"], fails

    world.run(body)


@requirement(
    "DDP-LOG-3660",
    "The logging data of a DDP module tell in which order the gradients of the latest step were ready.",
    source=f"{SOURCE}; torch/csrc/distributed/c10d/logger.cpp: prev_iteration_grad_ready_order_indices",
)
@requirement(
    "DDP-LOG-3661",
    "The times in the logging data of a DDP module fit together: each is from its start to its end.",
    source=f"{SOURCE}; torch/csrc/distributed/c10d/logger.cpp: backward_comm_time",
)
@requirement(
    "DDP-LOG-3662",
    "The logging data of a DDP module have the environment variables that were set when it was made.",
    source=f"{SOURCE}; torch/csrc/distributed/c10d/logger.cpp: set_env_variables",
)
@pytest.mark.world(2)
def test_of_a_step(world: World) -> None:
    """Call three layers in another order in each of five steps, with addresses of another job in the environment."""
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (2, 0, 1)]

    def body(rank: Rank) -> None:
        for number, finds in enumerate((False, True)):
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = f"host-{number}", f"9{number}"
            model: Any = DistributedDataParallel(Layers().to(rank.device), find_unused_parameters=finds)
            os.environ["MASTER_ADDR"] = "later"
            for done, order in enumerate(orders):
                x = torch.ones(1, 16, device=rank.device)
                for index in order:
                    model.module.layers[index].weight.grad = None
                model.module.order = order
                model(x).sum().backward()
                found = replicate.logged(model)
                what = f"{finds=}, step {done}"
                assert (found["master_addr"], found["master_port"]) == (f"host-{number}", f"9{number}"), what
                if done == 0:
                    continue  # what is logged is the step before
                ready = [int(index) for index in found["prev_iteration_grad_ready_order_indices"].split(",")]
                assert ready == list(orders[done - 1])[::-1], what
                for name in "backward_comm_time", "backward_compute_time":
                    assert found[name] == found[f"{name}_end"] - found[f"{name}_start"] > 0, f"{what}: {name}"
                assert found["forward_compute_time_start"] < found["backward_compute_time_start"], what
                assert found["backward_compute_comm_overlap_time"] <= found["backward_comm_time"], what

    world.run(body)
