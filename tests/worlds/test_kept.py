"""What a test's functions leave in fresh ranks is told, by rank; what is no test's doing is not."""

from __future__ import annotations

import gc
import importlib
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from harness import Pool, Rank, RanksFailed, World, WorldSpec

kept: list[Any] = []


@pytest.fixture
def world(pool: Pool) -> World:
    return pool.acquire(WorldSpec(2, leaves_nothing=True))


def referred(rank: Rank) -> None:
    """Keep a matrix in a variable of a module of PyTorch."""
    torch.kept = {"the matrix": torch.ones(2, 3)}  # type: ignore[attr-defined]


def in_a_cycle(rank: Rank) -> None:
    """Make a cycle through C++, which no collector sees: a parameter whose hook refers to it."""
    parameter = torch.ones(4, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(lambda _: parameter)  # type: ignore[arg-type, return-value]
    parameter.sum().backward()
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: parameter)


def in_a_new_module(rank: Rank) -> None:
    """Keep a tensor in a variable of a module of PyTorch that is new."""
    sys.modules["torch.new"] = ModuleType("torch.new")
    sys.modules["torch.new"].kept = torch.ones(6)  # type: ignore[attr-defined]


def pending(rank: Rank) -> None:
    """Issue a functional collective, and do not wait for it."""
    all_reduce(torch.ones(5), "sum", dist.group.WORLD)


def hooked(rank: Rank) -> None:
    """Register a hook of all modules."""
    nn.modules.module.register_module_forward_hook(lambda *_: None)


class Mode(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_a_mode(rank: Rank) -> None:
    """Enter a mode, and do not leave it."""
    Mode().__enter__()


def hooks_of_saved_tensors(rank: Rank) -> None:
    """Enter the context of hooks of saved tensors, and do not leave it."""
    torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__()


def autocast(rank: Rank) -> None:
    """Enter autocast, and do not leave it."""
    torch.autocast("cpu").__enter__()


def without_gradients(rank: Rank) -> None:
    """Turn gradients off."""
    torch.set_grad_enabled(False)


def in_another_dtype(rank: Rank) -> None:
    """Set a default dtype."""
    torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (referred, "1 tensor: Tensor float32[2, 3], held by the entry 'the matrix' of a dict"),
        (in_a_new_module, "1 tensor: Tensor float32[6], held by the entry 'kept' of a dict"),
        (in_a_cycle, "tensor: Tensor float32[4]"),
        (pending, "1 functional collective that nothing has waited for"),
        (hooked, "_global_forward_hooks: 1 hooks, 0 before"),
        (in_a_mode, "modes: ('Mode',), () before"),
        (hooks_of_saved_tensors, "saved tensor hooks: True, False before"),
        (autocast, "autocast: True, False before"),
        (without_gradients, "grad mode: False, True before"),
        (in_another_dtype, "default dtype: torch.float64, torch.float32 before"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_left(world: World, body: Callable[[Rank], None], told: str) -> None:
    """Something is left, and the error says what."""
    world.run(body)
    with pytest.raises(RanksFailed, match="something of it was still there") as failure:
        world.require_nothing_left()
    assert told in str(failure.value)


def test_of_one_rank(world: World) -> None:
    """The rank is named that has something, and no other."""
    world.run(lambda rank: referred(rank) if rank.index == 1 else None)
    with pytest.raises(RanksFailed, match="rank 1 of 2 failed first") as failure:
        world.require_nothing_left()
    assert failure.value.culprits == (1,)


def test_of_an_earlier_run(world: World) -> None:
    """What the first of two functions left is told as well."""
    world.run(referred)
    world.run(lambda rank: None)
    with pytest.raises(RanksFailed, match="1 tensor"):
        world.require_nothing_left()


def plain(rank: Rank) -> torch.Tensor:
    """Train a model, and return a gradient."""
    model = nn.Linear(3, 3)
    model(torch.ones(2, 3)).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad


def under_ddp(rank: Rank) -> None:
    """Train a model under DDP."""
    model = DistributedDataParallel(nn.Linear(3, 3))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()


def sharded(rank: Rank) -> None:
    """Train a model that is sharded over a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (1, rank.size), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    torch.optim.Adam(model.parameters()).zero_grad()
    model(torch.ones(2, 4)).sum().backward()  # type: ignore[operator]


def flat(rank: Rank) -> None:
    """Train a model of FSDP1, whose flat parameters PyTorch never frees."""
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    model(torch.ones(2, 4)).sum().backward()


def held_by_a_thread(rank: Rank) -> None:
    """Let a thread hold a tensor a moment longer."""
    tensor, ended = torch.ones(8), threading.Event()

    def hold(held: list[torch.Tensor]) -> None:
        ended.wait(0.2)
        held.clear()

    threading.Thread(target=hold, args=([tensor],)).start()


def compiled(rank: Rank) -> None:
    """Compile a function: what it holds as long as it is there is nobody's leak."""
    constant = torch.ones(7)
    torch.compile(lambda x: x + constant, backend="eager")(torch.ones(7))


def in_python(rank: Rank) -> None:
    """Leave a cycle of Python's objects, which its collector finds."""
    gc.disable()
    cycle: list[Any] = [torch.ones(9)]
    cycle.append(cycle)


def importing(rank: Rank) -> None:
    """Import a module, of a file that the rank writes first, with tensors in its variables."""
    with tempfile.TemporaryDirectory() as folder:
        lines = "import torch", "VIEW = torch.arange(6.0).view(2, 3)", "TABLE = {'a': torch.ones(4)}"
        Path(folder, "of_a_user.py").write_text("\n".join(lines))
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)
            importlib.import_module("of_a_user")


@pytest.mark.parametrize("body", [plain, under_ddp, sharded, flat, held_by_a_thread, compiled, in_python, importing])
def test_nothing_left(world: World, body: Callable[[Rank], Any]) -> None:
    """Training leaves nothing, and a rank goes on after it was asked."""
    for _ in range(2):
        world.run(body)
        world.require_nothing_left()


def test_not_asked(pool: Pool) -> None:
    """A world whose ranks did not record how they began is not asked."""
    world = pool.acquire(WorldSpec(2))
    world.run(referred)
    world.require_nothing_left()
    world.run(referred)


def test_of_ranks_that_have_ended(world: World) -> None:
    """Ranks that a test has ended are not asked, and none is started for it."""
    world.run(referred)
    world.kill()
    world.require_nothing_left()
    assert world.started == 1
