"""What distributed checkpoints keep alive: tensors that were saved or loaded, staged copies, and stagers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.tensor import Shard, distribute_tensor

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.checkpoint"


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from running by itself."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


NESTINGS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda tensor: tensor,
    "mapping": lambda tensor: {"a": {"b": tensor}},
    "list": lambda tensor: [1, [tensor]],
}
"""How a tensor is kept in a state."""


@requirement(
    "RFSDP-CHECKPOINT-1706",
    "A tensor that was saved or loaded is freed as soon as the caller drops it, without a garbage collection.",
    source=f"{SOURCE}: save, load, async_save; torch/distributed/checkpoint/_traverse.py: 'prevent memory leaks'",
)
@pytest.mark.world(2)
def test_dropped_states(world: World, tmp_path: Path) -> None:
    """Save at once, later, and load, each twice, tensors that are sharded or not, at several depths."""

    def saved(state: dict[str, Any], folder: Path) -> None:
        checkpoint.save(state, checkpoint_id=folder)

    def saved_later(state: dict[str, Any], folder: Path) -> None:
        result: Any = checkpoint.async_save(state, checkpoint_id=folder)
        result.result()

    def loaded(state: dict[str, Any], folder: Path) -> None:
        checkpoint.load(state, checkpoint_id=folder)

    def body(rank: Rank) -> list[str]:
        def kept(use: Callable[[dict[str, Any], Path], None], folder: Path) -> list[str]:
            references, state = {}, {}
            for name, nested in NESTINGS.items():
                plain = torch.ones(4, device=rank.device)
                sharded = distribute_tensor(torch.ones(4, device=rank.device), rank.mesh(), [Shard(0)])
                references |= {f"{name}, plain": weakref.ref(plain), f"{name}, sharded": weakref.ref(sharded)}
                state |= {f"{name} plain": nested(plain), f"{name} sharded": nested(sharded)}
                del plain, sharded
            use(state, folder)
            state.clear()
            return [name for name, reference in references.items() if reference() is not None]

        found = []
        with uncollected():
            for step in range(2):
                for use in saved, saved_later, loaded:
                    folder = tmp_path / f"{use.__name__} {step}" if use is not loaded else tmp_path / f"saved {step}"
                    found += [f"{use.__name__}, {step}: {name}" for name in kept(use, folder)]
        return found

    assert_on_ranks([[]] * world.size, world.run(body))


def stagers() -> dict[str, Callable[[], Any]]:
    """Return what creates each stager that needs no accelerator."""
    made: dict[str, Callable[[], Any]] = {"blocking": BlockingAsyncStager}
    for shared, apart in ((False, False), (True, False), (False, True)):
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=shared, use_async_staging=apart, use_non_blocking_copy=False
        )
        made[f"{shared=}, {apart=}"] = lambda options=options: DefaultStager(options)
    return made


@requirement(
    "RFSDP-CHECKPOINT-1707",
    "A stager that is closed holds no copy that it staged.",
    source=f"{SOURCE}.staging: DefaultStager.close: 'Clean up all resources used by the DefaultStager'",
)
@requirement(
    "RFSDP-CHECKPOINT-1708",
    "A stager that is closed leaves nothing to the garbage collector when it is dropped.",
    source=f"{SOURCE}.staging: DefaultStager.close; torch/distributed/checkpoint/_state_dict_stager.py: close: 'to "
    "break the reference cycle'",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a stager that is closed keeps copies, or itself")
@pytest.mark.world(2)
def test_closed_stagers(world: World) -> None:
    """Stage once or twice with each stager, drop the copies, and close it, while the state is still there.

    The copies of one that stages apart are not counted: test_copies_of_a_closed_stager does.
    """

    def body(rank: Rank) -> list[str]:
        tensor = torch.ones(3, device=rank.device)
        sharded = distribute_tensor(torch.ones(4, device=rank.device), rank.mesh(), [Shard(0)])
        state = {"tensor": tensor, "deeper": [{"sharded": sharded}], "text": "text"}

        def staged(stager: Any) -> Any:
            found = stager.stage(state)
            return found.result() if hasattr(found, "result") else found

        def storages(state: Any) -> list[Any]:
            tensors = state["tensor"], state["deeper"][0]["sharded"].to_local()
            return [weakref.ref(tensor.untyped_storage()) for tensor in tensors]

        found = []
        for name, made in stagers().items():
            for times in 1, 2:
                with uncollected():
                    stager = made()
                    copies = [staged(stager) for _ in range(times)]
                    references = [each for copy in copies for each in storages(copy)]
                    del copies
                    stager.close()
                    held = sum(each() is not None for each in references) if "apart=True" not in name else 0
                    found += [f"{name}, {times}: {held} copies"] if held else []
                    reference = weakref.ref(stager)
                    del stager
                    found += [f"{name}, {times}: {what}" for what in garbage()]
                    found += [f"{name}, {times}: the stager"] if reference() is not None else []
        return found

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "RFSDP-CHECKPOINT-1707",
    "A stager that is closed holds no copy that it staged.",
    source=f"{SOURCE}.staging: DefaultStager.close: 'Clean up all resources used by the DefaultStager'",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, a stager that is closed keeps copies, or itself")
@pytest.mark.parametrize("apart", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.world(1)
def test_copies_of_a_closed_stager(world: World, apart: bool) -> None:
    """Stage a tensor twice, in this thread or in another, and drop the copies before or after the stager is closed."""
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=apart, use_non_blocking_copy=False
    )

    def body(rank: Rank) -> list[str]:
        found = []
        for first in "dropped", "closed":
            with uncollected():
                stager = DefaultStager(options)
                state = {"tensor": torch.ones(3, device=rank.device)}
                staged: list[Any] = [stager.stage(state) for _ in range(2)]
                staged = [each.result() for each in staged] if apart else staged
                copies = [weakref.ref(each["tensor"].untyped_storage()) for each in staged]
                if first == "closed":
                    stager.close()
                staged.clear()
                if first == "dropped":
                    stager.close()
                found += [f"{first} first, copy {i}: held" for i, copy in enumerate(copies) if copy() is not None]
        return found

    assert_on_ranks([[]], world.run(body))


def garbage() -> set[str]:
    """Return the types of distributed checkpoints, and of tensors, that only the garbage collector frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        kinds = [type(each) for each in gc.garbage]
        return {k.__qualname__ for k in kinds if issubclass(k, torch.Tensor) or k.__module__.startswith(SOURCE)}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
