"""Distributed checkpoints of sharded modules: what is no tensor, threads that write, and states that are staged."""

from __future__ import annotations

import copy
import itertools
import threading
import urllib.error
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
)
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fixtures.states import WAYS_TO_SAVE, assert_equal, copied, whole
from fixtures.tensors import numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.checkpoint"


def model(rank: Rank, factor: float = 1.0) -> Any:
    """Shard a linear layer unevenly, and one evenly."""
    made = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(numbers(*parameter.shape) * factor)
    return fully_shard(made.to(rank.device))


def progress(step: int) -> dict[str, Any]:
    """Return numbers, texts, and containers of them, at several depths; none of a step is that of another."""
    return {
        "epoch": step,
        "trainer": {
            "step": 10 * step,
            "name": f"run {step}",
            "best": step / 4,
            "nothing": None if step % 2 else 0,
            "on": bool(step % 2),
            "deeper": {"tokens": 2**40 + step, "deepest": {"names": [f"{step}", step], "pair": (step, -step)}},
            "listed": [{"seed": step}, {"seed": step + 1}],
        },
        "phases": [step, [step + 1]],
        "": {"a.b": step, "3": {"c": step}},
    }


@requirement(
    "RFSDP-CHECKPOINT-51",
    "Loading a checkpoint sets numbers, texts and other values that are no tensors, at every depth of a state.",
    source=f"{SOURCE}: save, load; DefaultLoadPlanner",
)
@pytest.mark.world(2)
def test_values(world: World, tmp_path: Path) -> None:
    """Load all of a state or a part of it, and one that has more, which is refused unless it may be partial."""

    def body(rank: Rank) -> None:
        state = {"model": model(rank).state_dict(), **progress(1)}
        right = whole(state)
        checkpoint.save(state, checkpoint_id=tmp_path / "all")
        loaded: dict[str, Any] = {"model": model(rank, -2.0).state_dict(), **progress(2)}
        checkpoint.load(loaded, checkpoint_id=tmp_path / "all")
        assert_equal(right, whole(loaded), "all")
        for part in ("epoch",), ("trainer", "step"), ("trainer", "deeper", "tokens"), ("trainer", "listed"):
            loaded = {}
            inner, value = loaded, progress(2)
            for key in part:
                value = value[key]
                inner = inner.setdefault(key, {}) if key != part[-1] else inner
            inner[part[-1]] = value
            checkpoint.load(loaded, checkpoint_id=tmp_path / "all")
            found, value = loaded, right
            for key in part:
                assert list(found) == [key], part
                found, value = found[key], value[key]
            assert_equal(value, found, str(part))
        more = {"epoch": 0, "trainer": {"step": 0, "unknown": 5}, "unknown": "kept"}
        with pytest.raises(checkpoint.CheckpointException, match="unknown"):
            checkpoint.load(copied(more), checkpoint_id=tmp_path / "all")
        planner = checkpoint.DefaultLoadPlanner(allow_partial_load=True)
        checkpoint.load(more, checkpoint_id=tmp_path / "all", planner=planner)
        assert more == {"epoch": 1, "trainer": {"step": 10, "unknown": 5}, "unknown": "kept"}
        flat: dict[str, Any] = {**model(rank).state_dict(), "step": 7, "name": "flat", "listed": [1, {"a": 2}]}
        planners = checkpoint.DefaultSavePlanner(False), checkpoint.DefaultLoadPlanner(False, False)
        checkpoint.save(flat, checkpoint_id=tmp_path / "flat", planner=planners[0])
        loaded = {**model(rank, -2.0).state_dict(), "step": 0, "name": "", "listed": []}
        checkpoint.load(loaded, checkpoint_id=tmp_path / "flat", planner=planners[1])
        assert_equal(whole(flat), whole(loaded), "flat")

    world.run(body)


WAYS_TO_FLATTEN = {
    "both": {},
    "dicts": {"flatten_sharded_tensors": False},
    "shards": {"flatten_state_dict": False},
    "neither": {"flatten_sharded_tensors": False, "flatten_state_dict": False},
}


@requirement(
    "RFSDP-CHECKPOINT-51",
    "Loading a checkpoint sets numbers, texts and other values that are no tensors, at every depth of a state.",
    source=f"{SOURCE}: save, load; DefaultLoadPlanner",
)
@pytest.mark.parametrize("flattened", WAYS_TO_FLATTEN)
@pytest.mark.world(2)
def test_values_of_a_planner(world: World, tmp_path: Path, flattened: str) -> None:
    """Save and load with planners that flatten dicts, shards of sharded tensors, both, or neither."""

    def body(rank: Rank) -> list[Any]:
        options = WAYS_TO_FLATTEN[flattened]
        saved = {"weight": torch.ones(2, device=rank.device), "step": 5, "deep": {"rate": 0.5, "text": ["a", None]}}
        checkpoint.save(saved, checkpoint_id=tmp_path / "saved", planner=checkpoint.DefaultSavePlanner(**options))
        state = {"weight": torch.zeros(2, device=rank.device), "step": 0, "deep": {"rate": 0.0, "text": ["", ""]}}
        checkpoint.load(state, checkpoint_id=tmp_path / "saved", planner=checkpoint.DefaultLoadPlanner(**options))
        return [state["weight"].tolist(), state["step"], state["deep"]]

    assert_on_ranks([[[1.0, 1.0], 5, {"rate": 0.5, "text": ["a", None]}]] * world.size, world.run(body))


@requirement(
    "RFSDP-CHECKPOINT-51",
    "Loading a checkpoint sets numbers, texts and other values that are no tensors, at every depth of a state.",
    source=f"{SOURCE}: save, load; DefaultLoadPlanner",
)
@pytest.mark.world(2)
def test_integer_keys(world: World, tmp_path: Path) -> None:
    """Number the entries of a state, as those of optimizers are, at two depths and beside tensors."""

    def numbered(step: int) -> dict[str, Any]:
        return {"state": {i: {"step": step + i, "sum": torch.full((2,), step + i)} for i in range(2)}, "lr": {7: step}}

    def body(_: Rank) -> None:
        checkpoint.save(numbered(1), checkpoint_id=tmp_path)
        loaded = numbered(5)
        checkpoint.load(loaded, checkpoint_id=tmp_path)
        assert_equal(numbered(1), loaded, "numbered")

    world.run(body)


LACKING: dict[str, dict[str, Any]] = {
    "plain": {"number": 2.5, "text": "a", "pair": (1, "b"), "listed": [1, [2]], "deeper": {"on": True}},
    "other": {"complex": 1j, "dtype": torch.float16, "set": {1, 2}, "deeper": {"dtype": torch.int8}},
}
"""What a checkpoint lacks: values that are numbers, texts and containers, and others."""


@requirement(
    "RFSDP-CHECKPOINT-481",
    "Loading a part of a state leaves what the checkpoint lacks as it is, whatever its type is.",
    source=f"{SOURCE}: load; DefaultLoadPlanner: allow_partial_load",
)
@pytest.mark.parametrize("kind", LACKING)
@pytest.mark.world(2)
def test_partial(world: World, tmp_path: Path, kind: str) -> None:
    """The checkpoint has a tensor alone; load that beside values of each kind."""

    def body(_: Rank) -> list[str]:
        checkpoint.save({"tensor": torch.ones(2)}, checkpoint_id=tmp_path)
        loaded = {"tensor": torch.zeros(2), **copy.deepcopy(LACKING[kind])}
        planner = checkpoint.DefaultLoadPlanner(allow_partial_load=True)
        checkpoint.load(loaded, checkpoint_id=tmp_path, planner=planner)
        assert loaded["tensor"].tolist() == [1, 1]
        return [f"{name} has become {loaded[name]}" for name, was in LACKING[kind].items() if loaded[name] != was]

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "RFSDP-CHECKPOINT-483",
    "A checkpoint that is converted to a file of torch.save has every key of an optimizer's state.",
    source=f"{SOURCE}.format_utils: dcp_to_torch_save",
)
@pytest.mark.parametrize("momentum", [0.5, 0.0], ids=["momentum", "stateless"])
@pytest.mark.world(2)
def test_converted(world: World, tmp_path: Path, momentum: float) -> None:
    """Convert the state of an optimizer that has momenta or none, on each rank for itself."""

    def body(rank: Rank) -> list[str]:
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        sgd = torch.optim.SGD([parameter], lr=0.5, momentum=momentum)
        sgd.step()
        checkpoint.save({"sgd": sgd.state_dict()}, checkpoint_id=tmp_path / "saved")
        file = tmp_path / f"{rank.index}.pt"
        dcp_to_torch_save(tmp_path / "saved", file)
        return sorted(torch.load(file, weights_only=False)["sgd"])

    assert_on_ranks([["param_groups", "state"]] * world.size, world.run(body))


WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "flattened": ({}, {}),
    "unflattened": ({"flatten_state_dict": False}, {}),
    "unflattened files": ({"flatten_state_dict": False}, {"single_file_per_rank": False}),
    "unflattened threads": ({"flatten_state_dict": False}, {"thread_count": 2}),
    "unflattened and kept": ({"flatten_state_dict": False, "enable_plan_caching": True}, {}),
    "kept": ({"enable_plan_caching": True}, {}),
    "of the lowest rank": ({"dedup_save_to_lowest_rank": True}, {}),
    "files": ({}, {"single_file_per_rank": False}),
    "threads": ({}, {"thread_count": 2}),
}
"""Options of planners and of writers."""
DTYPES = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64)


@requirement(
    "RFSDP-CHECKPOINT-1710",
    "A checkpoint that is converted to a file of torch.save has the whole state that was saved, however it was saved.",
    source=f"{SOURCE}.format_utils: dcp_to_torch_save; DefaultSavePlanner: flatten_state_dict; FileSystemWriter",
)
@pytest.mark.world(2)
def test_converted_ways(world: World, tmp_path: Path) -> None:
    """Save sharded tensors, plain ones of every dtype and other values with every option; convert that on each rank."""

    def body(rank: Rank) -> None:
        for name, (planning, writing) in WRITTEN.items():
            deeper = {"tensor": torch.ones(3), "empty": torch.zeros(0, 2), "listed": [1, {"a": 2}], "text": "a"}
            state: dict[str, Any] = {
                **model(rank).state_dict(),
                "plain": torch.arange(4.0),
                "step": 7,
                "deeper": deeper,
                "dtypes": {str(dtype): torch.tensor([1, 2]).to(dtype) for dtype in DTYPES},
            }
            checkpoint.save(
                state,
                storage_writer=checkpoint.FileSystemWriter(tmp_path / name, sync_files=False, **writing),
                planner=checkpoint.DefaultSavePlanner(**planning),
            )
            file = tmp_path / f"{name} {rank.index}.pt"
            dcp_to_torch_save(tmp_path / name, file)
            assert_equal(whole(state), torch.load(file, weights_only=False), name)

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-485",
    "BroadcastingTorchSaveReader gives each rank its part of what rank 0 reads from a file of torch.save.",
    source=f"{SOURCE}.format_utils: BroadcastingTorchSaveReader: 'broadcast and shard each tensor to all ranks'",
)
@pytest.mark.parametrize("stack", ["plain", "transposed", "other-dtype", "sharded"])
@pytest.mark.world(2, timeout=5)
def test_file_of_torch_save(world: World, tmp_path: Path, stack: str) -> None:
    """Load a weight into a module on each rank, or into one that is sharded, and one that is transposed in the file."""
    file = tmp_path / "saved.pt"
    saved = {"transposed": numbers(4, 2).t().contiguous().t(), "other-dtype": numbers(4, 2).bfloat16()}
    torch.save({"weight": saved.get(stack, numbers(4, 2))}, file)

    def body(rank: Rank) -> bool:
        net: Any = nn.Linear(2, 4, bias=False).to(rank.device)
        if stack == "other-dtype":
            net.half()
        if stack == "sharded":
            fully_shard(net, mesh=rank.mesh())
        state = net.state_dict()
        planner = DynamicMetaLoadPlanner()
        checkpoint.load(state, storage_reader=BroadcastingTorchSaveReader(), planner=planner, checkpoint_id=file)
        return torch.equal(whole(state)["weight"].float().cpu(), numbers(4, 2))

    assert_on_ranks([True] * world.size, world.run(body))


@requirement(
    "RFSDP-CHECKPOINT-3600",
    "A load takes part only in its process group: other ranks need not load.",
    source=f"{SOURCE}: load: process_group",
)
@pytest.mark.parametrize("storage", ["checkpoint", "torch-save"])
@pytest.mark.world(2, timeout=5)
def test_load_by_a_group(world: World, tmp_path: Path, storage: str) -> None:
    """One of the ranks loads a checkpoint or a file of torch.save, in a group of its own."""
    file = tmp_path / "saved"
    if storage == "torch-save":
        torch.save({"weight": numbers(4, 2)}, file)
    else:
        planner = checkpoint.DefaultSavePlanner()
        checkpoint.save({"weight": numbers(4, 2)}, checkpoint_id=file, planner=planner, no_dist=True)

    def body(rank: Rank) -> bool:
        group = dist.new_group([0])
        if rank.index == 1:
            return True
        options: dict[str, Any] = {}
        if storage == "torch-save":
            options = {"storage_reader": BroadcastingTorchSaveReader(), "planner": DynamicMetaLoadPlanner()}
        state = {"weight": torch.zeros(4, 2, device=rank.device)}
        checkpoint.load(state, checkpoint_id=file, process_group=group, **options)
        return torch.equal(state["weight"].cpu(), numbers(4, 2))

    assert_on_ranks([True] * world.size, world.run(body))


@requirement(
    "RFSDP-CHECKPOINT-486",
    "A checkpoint has the whole of a sharded tensor, in whichever container of a state it is.",
    source=f"{SOURCE}: save, load; DefaultSavePlanner: flatten_state_dict",
)
@pytest.mark.parametrize("container", [list, tuple], ids=["list", "tuple"])
@pytest.mark.world(2)
def test_containers(world: World, tmp_path: Path, container: type) -> None:
    """Save a sharded tensor in a container, and load it into one of zeros."""

    def body(rank: Rank) -> list[float]:
        def made(values: torch.Tensor) -> dict[str, Any]:
            return {"kept": container([distribute_tensor(values.to(rank.device), rank.mesh(), [Shard(0)])])}

        checkpoint.save(made(torch.arange(4.0)), checkpoint_id=tmp_path)
        loaded = made(torch.zeros(4))
        checkpoint.load(loaded, checkpoint_id=tmp_path)
        found: list[float] = loaded["kept"][0].full_tensor().tolist()
        return found

    assert_on_ranks([[0.0, 1.0, 2.0, 3.0]] * world.size, world.run(body))


CACHED = {
    "values": ({"a": torch.zeros(2)}, {"a": torch.ones(2)}),
    "sizes": ({"a": torch.zeros(2)}, {"a": torch.ones(3)}),
    "names": ({"a": torch.zeros(2)}, {"b": torch.ones(2)}),
    "dtypes": ({"a": torch.zeros(1)}, {"a": torch.tensor([2**40 + 1])}),
    "nesting": ({"a.b": torch.zeros(2)}, {"a": {"b": torch.ones(2)}}),
}
"""Two states each, which differ in one respect."""


@requirement(
    "RFSDP-CHECKPOINT-487",
    "A checkpoint whose planner uses cached plans has the dtypes, sizes, names and nesting of its own state.",
    source=f"{SOURCE}.default_planner: DefaultSavePlanner: enable_plan_caching",
)
@pytest.mark.parametrize("differ", CACHED)
@pytest.mark.world(2)
def test_cached_plans(world: World, tmp_path: Path, differ: str) -> None:
    """Save two states with a planner each, and convert the second checkpoint."""

    def body(rank: Rank) -> Any:
        for number, state in enumerate(CACHED[differ]):
            planner = checkpoint.DefaultSavePlanner(enable_plan_caching=True)
            checkpoint.save(dict(state), checkpoint_id=tmp_path / f"{number}", planner=planner)
        file = tmp_path / f"of {rank.index}.pt"
        dcp_to_torch_save(tmp_path / "1", file)
        return listed(torch.load(file))

    assert_on_ranks([listed(CACHED[differ][1])] * world.size, world.run(body))


def listed(state: Any) -> Any:
    """Return a state with lists of numbers in place of its tensors."""
    return {k: listed(v) for k, v in state.items()} if isinstance(state, Mapping) else state.tolist()


class App:
    """A model and its optimizer, saved together."""

    def __init__(self, rank: Rank, factor: float) -> None:
        self.model = model(rank, factor)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=factor / 8, momentum=0.5, foreach=False)
        self.seen: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        self.seen.append("saved")
        of_model, of_sgd = get_state_dict(self.model, self.sgd)
        return {"model": of_model, "sgd": of_sgd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load both."""
        self.seen.append("loaded")
        set_state_dict(self.model, self.sgd, model_state_dict=state["model"], optim_state_dict=state["sgd"])

    def step(self) -> None:
        """Train a step."""
        self.model(torch.ones(1, 2, device=self.model[0].weight.device)).sum().backward()
        self.sgd.step()
        self.sgd.zero_grad()


@requirement(
    "RFSDP-CHECKPOINT-301",
    "Loading calls load_state_dict once on each object of a state that has one, which stays in the state to be saved "
    "and loaded again.",
    source=f"{SOURCE}: load, stateful.Stateful",
)
@pytest.mark.world(2)
def test_stateful(world: World, tmp_path: Path) -> None:
    """A class of the user's, a module and a scheduler are beside a tensor and a number; save and load twice."""

    def made(rank: Rank, factor: float) -> dict[str, Any]:
        app, plain = App(rank, factor), nn.Linear(2, 1).to(rank.device)
        nn.init.constant_(plain.weight, factor)
        schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(plain.parameters(), lr=factor), 1)
        tensor = torch.full((2,), factor, device=rank.device)
        return {"app": app, "plain": plain, "schedule": schedule, "tensor": tensor, "number": factor}

    def body(rank: Rank) -> None:
        state, other = made(rank, 1.0), made(rank, 4.0)
        kept = dict(other)
        for round_ in range(2):
            state["app"].step()
            state["schedule"].step()
            state["number"] = state["number"] + 1
            state["tensor"].add_(1)
            checkpoint.save(state, checkpoint_id=tmp_path / f"{round_}")
            kept["app"].seen.clear()
            checkpoint.load(other, checkpoint_id=tmp_path / f"{round_}")
            assert list(other) == list(kept), round_
            for name in ("app", "plain", "schedule"):
                assert other[name] is kept[name], f"{round_}: {name} was replaced by a {type(other[name])}"
            assert other["app"].seen == ["saved", "loaded"], round_
            assert (other["number"], other["tensor"].tolist()) == (state["number"], state["tensor"].tolist()), round_
            for name in ("app", "plain", "schedule"):
                assert_equal(whole(state[name].state_dict()), whole(other[name].state_dict()), f"{round_}: {name}")
            checkpoint.save(other, checkpoint_id=tmp_path / f"{round_} again")
            third = made(rank, 7.0)
            checkpoint.load(third, checkpoint_id=tmp_path / f"{round_} again")
            assert_equal(whole(state["app"].state_dict()), whole(third["app"].state_dict()), f"{round_}: again")

    world.run(body)


class Failing(checkpoint.FileSystemWriter):
    """A writer that fails when it prepares all ranks' plans or when it writes, or not."""

    def __init__(self, path: Path, fails: str) -> None:
        super().__init__(path, sync_files=False)
        self.fails = fails

    def prepare_global_plan(self, plans: Any) -> Any:
        """Prepare the plans."""
        if self.fails == "prepared":
            raise OSError("no space")
        return super().prepare_global_plan(plans)

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write a rank's part."""
        if self.fails == "written":
            raise OSError("no space")
        return super().write_data(plan, planner)


FAILED = {
    "no-save": ["", "more "],
    "write": ["", "more written", "more "],
    "first-write": ["more written", "more "],
    "plan": ["", "more prepared", "more "],
    "first-plan": ["more prepared", "more "],
}
"""Saves in order by what fails: of more than what ranks have at first, and of what fails."""


@requirement(
    "RFSDP-CHECKPOINT-571",
    "With cached plans, a save after one that failed has all of the state.",
    source=f"{SOURCE}.default_planner: DefaultSavePlanner: enable_plan_caching; SavePlanner; pytorch/pytorch#176289",
)
@pytest.mark.parametrize("failed", FAILED)
@pytest.mark.world(2)
def test_after_a_failed_save(world: World, tmp_path: Path, failed: str) -> None:
    """Save until the last save, which has an entry of rank 1 that the first one may lack, and load that."""

    def body(rank: Rank) -> list[float] | str:
        # plans are kept by the name of the class
        planner: Any = type(f"Planner{failed}", (checkpoint.DefaultSavePlanner,), {})
        own = {f"own {rank.index}": torch.ones(3)}
        more = own | ({"added": torch.ones(2)} if rank.index else {})
        for number, save in enumerate(FAILED[failed]):
            size, _, fails = save.rpartition(" ")
            writer = Failing(tmp_path / str(number), fails)
            try:
                checkpoint.save(more if size else own, storage_writer=writer, planner=planner(enable_plan_caching=True))
            except checkpoint.CheckpointException as error:
                if not fails:
                    return f"not saved: {str(error).strip().splitlines()[-1]}"
            else:
                assert not fails
        loaded = {"own 0": torch.zeros(3), "own 1": torch.zeros(3), "added": torch.zeros(2)}
        try:
            checkpoint.load(loaded, checkpoint_id=tmp_path / str(number))
        except checkpoint.CheckpointException as error:
            return f"not loaded: {str(error).strip().splitlines()[-1]}"
        return torch.cat(list(loaded.values())).tolist()

    assert_on_ranks([[1.0] * 8] * world.size, world.run(body))


@requirement(
    "RFSDP-CHECKPOINT-52",
    "A checkpoint that several threads write, in one file or many for each rank, has all tensors and other values, "
    "however many.",
    source=f"{SOURCE}.FileSystemWriter: thread_count, single_file_per_rank",
)
@pytest.mark.world(2)
def test_threads(world: World, tmp_path: Path) -> None:
    """Save no, one or many values that are no tensors beside no, some or many tensors, with one to eight threads."""
    ways = [(threads, single) for threads in (1, 2, 3, 8) for single in (True, False)]

    def body(rank: Rank) -> None:
        for number, (tensors, values) in enumerate(itertools.product(range(3), range(3))):
            if not tensors and not values:
                continue

            def made(step: int, tensors: int = tensors, values: int = values) -> dict[str, Any]:
                state: dict[str, Any] = {"one": step} if values == 1 else progress(step) if values == 2 else {}
                if tensors:
                    state["model"] = model(rank, step).state_dict()
                if tensors == 2:
                    state["more"] = {str(i): torch.full((i,), step + i, device=rank.device) for i in range(5)}
                return state

            # every kind of state with three ways, and every way with several states
            for threads, single in ways[number % 3 :: 3]:
                what = f"{tensors=}, {values=}, {threads=}, {single=}"
                folder, options = tmp_path / str(number) / f"{threads}{single}", {"sync_files": False}
                writer = checkpoint.FileSystemWriter(
                    folder,
                    thread_count=threads,
                    single_file_per_rank=single,
                    per_thread_copy_ahead=number * 8,
                    **options,
                )
                checkpoint.save(made(1), storage_writer=writer)
                loaded = made(2)
                checkpoint.load(loaded, storage_reader=checkpoint.FileSystemReader(folder))
                assert_equal(whole(made(1)), whole(loaded), what)

    world.run(body)


class FailingPlanner(checkpoint.DefaultSavePlanner):
    """A planner that fails in the thread that saves, or in another one, for which that thread waits."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart, self.failed = apart, threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        """Return the data of an item, or fail."""
        if (threading.current_thread() is not threading.main_thread()) == self.apart:
            self.failed.set()
            raise OSError("no space")
        self.failed.wait(5)
        return super().resolve_data(write_item)


@requirement(
    "RFSDP-CHECKPOINT-482",
    "Saving a checkpoint raises an error on every rank if one of its threads can't write.",
    source=f"{SOURCE}: save, FileSystemWriter: thread_count",
)
@pytest.mark.parametrize("threads", [1, 2], ids=["one", "two"])
@pytest.mark.world(2)
def test_failing_threads(world: World, tmp_path: Path, threads: int) -> None:
    """The thread that saves fails, or the one that it starts."""

    def body(_: Rank) -> str:
        threading.excepthook = lambda _: None
        state = {str(i): torch.ones(2) for i in range(8)}
        writer = checkpoint.FileSystemWriter(tmp_path, thread_count=threads, sync_files=False)
        try:
            checkpoint.save(state, storage_writer=writer, planner=FailingPlanner(threads == 2))
        except checkpoint.CheckpointException:
            return "an error"
        return "the checkpoint was saved"

    assert_on_ranks(["an error"] * world.size, world.run(body))


def holding() -> OSError:
    """Return an error that can't be pickled."""
    error: Any = OSError("no space")
    error.lock = threading.Lock()
    return error


FAILURES: dict[str, Callable[[], Exception]] = {
    "plain": lambda: OSError("no space"),
    "not-loaded": lambda: urllib.error.HTTPError("https://storage", 503, "busy", Message(), None),
    "not-pickled": holding,
}


@requirement(
    "RFSDP-CHECKPOINT-488",
    "If saving a checkpoint fails on one rank, every rank raises an error, whichever exception it is.",
    source=f"{SOURCE}: save; torch/distributed/checkpoint/utils.py: 'all ranks will observe those'",
)
@requirement(
    "RFSDP-CHECKPOINT-5701",
    "If an asynchronous save fails on one rank, its future has an exception on every rank.",
    source=f"{SOURCE}: async_save: 'Future: A future holding the resultant Metadata object from save'",
)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.world(2, timeout=5)
def test_failing_rank(world: World, tmp_path: Path, failure: str) -> None:
    """Rank 1 fails when it writes, at once or in a thread."""

    class Planner(checkpoint.DefaultSavePlanner):
        """A planner of which the data can't be had."""

        def resolve_data(self, write_item: Any) -> Any:
            raise FAILURES[failure]()

    def body(rank: Rank) -> list[str]:
        planner = Planner() if rank.index == 1 else checkpoint.DefaultSavePlanner()
        found = []
        for way, save in WAYS_TO_SAVE.items():
            try:
                save({str(i): torch.ones(2) for i in range(4)}, checkpoint_id=tmp_path / way, planner=planner)
            except checkpoint.CheckpointException:
                found.append(f"{way}: an error")
        return found

    assert_on_ranks([[f"{way}: an error" for way in WAYS_TO_SAVE]] * world.size, world.run(body))


def stagers(rank: Rank) -> dict[str, Any]:
    """Create every stager that needs no accelerator."""
    made: dict[str, Any] = {"blocking": BlockingAsyncStager()}
    if runs_with("<2.13"):  # a DefaultStager of earlier versions stages only once
        return made
    for shared, apart in ((False, False), (True, False), (False, True)):
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=shared, use_async_staging=apart, use_non_blocking_copy=False
        )
        made[f"{shared=}, {apart=}"] = DefaultStager(options)
    return made


@requirement(
    "RFSDP-CHECKPOINT-53",
    "A staged state has the values of the call that staged it, on the host, whatever happens to the model afterwards.",
    source=f"{SOURCE}.staging: AsyncStager.stage, DefaultStager, BlockingAsyncStager",
)
@pytest.mark.world(2)
def test_staged(world: World) -> None:
    """Stage a model and its optimizer three times with each stager, train between, and stage other states besides."""

    def body(rank: Rank) -> None:
        for name, stager in stagers(rank).items():
            net = model(rank)
            sgd = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5, foreach=False)
            for step in range(3):
                what = f"{name}, step {step}"
                state: dict[str, Any] = {"model": net.state_dict(), **progress(step)}
                state["sgd"] = sgd.state_dict()["state"]
                tensor = torch.arange(6.0, device=rank.device) + step
                state["views"] = {"whole": tensor, "part": tensor[1::2], "turned": tensor.view(2, 3).T}
                state["new"] = {str(i): torch.full((step + 1,), i, device=rank.device) for i in range(step)}
                right, local = whole(copied(state)), {n: p.to_local().clone() for n, p in net.state_dict().items()}
                staged = stager.stage(state)
                staged = staged.result() if hasattr(staged, "result") else staged
                net(torch.ones(1, 2, device=rank.device)).sum().backward()
                sgd.step()
                sgd.zero_grad()
                tensor.zero_()
                for n, tensor in staged["model"].items():
                    assert tensor.to_local().device.type == "cpu", what
                    assert torch.equal(tensor.to_local(), local[n].cpu()), f"{what}: {n}"
                    assert tensor.placements == state["model"][n].placements, f"{what}: {n}"
                if rank.device.type == "cpu":
                    assert_equal(right["sgd"], whole(staged["sgd"]), what)
                assert_equal({k: right[k] for k in ("views", "new", *progress(0))}, rest(staged), what)
            stager.close()

    world.run(body)


def leaves(value: Any) -> list[Any]:
    """Return what is in dicts and lists of any depth, in order."""
    if isinstance(value, (dict, list)):
        return [leaf for each in (value.values() if isinstance(value, dict) else value) for leaf in leaves(each)]
    return [value]


@requirement(
    "RFSDP-CHECKPOINT-1500",
    "A staged copy of a plain tensor that requires gradients requires none, so that it can be copied or written to.",
    source=f"{SOURCE}.staging: AsyncStager.stage, BlockingAsyncStager, DefaultStager",
)
@pytest.mark.world(2)
def test_staged_without_gradients(world: World) -> None:
    """Stage parameters alone and in containers, a result and a view of one, twice with each stager."""

    def body(rank: Rank) -> None:
        for name, stager in stagers(rank).items():
            plain = nn.Linear(2, 2, device=rank.device)
            for turn in range(2):
                product = plain.weight * (turn + 2)
                state: dict[str, Any] = {
                    "plain": dict(plain.named_parameters()),
                    "containers": [plain.bias, {"inner": plain.weight}],
                    "result": product,
                    "view": product[0],
                }
                staged = stager.stage(state)
                staged = staged.result() if hasattr(staged, "result") else staged
                for tensor, original in zip(leaves(staged), leaves(state), strict=True):
                    what = f"{name}, turn {turn}"
                    assert original.requires_grad, what
                    assert not tensor.requires_grad, what
                    assert_same(original.detach().cpu(), tensor, what)
                    assert_same(copy.deepcopy(tensor), tensor, what)
                for tensor in leaves(staged):
                    tensor.add_(1)
            stager.close()

    world.run(body)


class Unable(AsyncStager):
    """A stager that fails when it is told to."""

    def stage(self, state_dict: Any) -> Future[Any]:
        """Return a future, which does not get the state."""
        self.future: Future[Any] = Future()
        return self.future


@requirement(
    "RFSDP-CHECKPOINT-484",
    "If a stager fails, staging_completion of an asynchronous save raises its error.",
    source=f"{SOURCE}.state_dict_saver: AsyncSaveResponse.staging_completion",
)
@pytest.mark.parametrize("when", ["later", "at-once"])
@pytest.mark.world(2)
def test_staging_fails(world: World, tmp_path: Path, when: str) -> None:
    """The stager has failed when async_save returns, or fails afterwards."""

    def body(rank: Rank) -> str:
        stager, failure = Unable(), MemoryError("no memory")
        if when == "at-once":
            given = stager.stage({})
            given.set_exception(failure)
            stager.stage = lambda _: given  # type: ignore[method-assign]
        try:
            saved: Any = checkpoint.async_save({"a": torch.ones(2)}, checkpoint_id=tmp_path, async_stager=stager)
        except AssertionError:  # the group has collectives for an accelerator only
            assert rank.device.type != "cpu"
            return "an error"
        if when == "later":
            stager.future.set_exception(failure)
        try:
            saved.staging_completion.result(10)
        except MemoryError:
            return "an error"
        return "said to be staged"

    assert_on_ranks(["an error"] * world.size, world.run(body))


def stager_called(name: str) -> Any:
    """Create a stager that stages once, in the thread that asks it to."""
    return BlockingAsyncStager() if name == "blocking" else DefaultStager(StagingOptions(*[False] * 4))


@requirement(
    "RFSDP-CHECKPOINT-53",
    "A staged state has the values of the call that staged it, on the host, whatever happens to the model afterwards.",
    source=f"{SOURCE}.staging: AsyncStager.stage, DefaultStager, BlockingAsyncStager",
)
@pytest.mark.parametrize("stager", ["default", "blocking"])
@pytest.mark.world(2)
def test_staged_lazy_views(world: World, stager: str) -> None:
    """Stage a tensor that is lazily conjugated, and one that is lazily negated."""

    def body(rank: Rank) -> dict[str, list[Any]]:
        conjugate = torch.tensor([1 + 2j], device=rank.device).conj()
        staged = stager_called(stager).stage({"conjugate": conjugate, "negative": conjugate.imag})
        return {name: tensor.tolist() for name, tensor in staged.items()}

    assert_on_ranks([{"conjugate": [1 - 2j], "negative": [-2.0]}] * world.size, world.run(body))


@requirement(
    "RFSDP-CHECKPOINT-53",
    "A staged state has the values of the call that staged it, on the host, whatever happens to the model afterwards.",
    source=f"{SOURCE}.staging: AsyncStager.stage, DefaultStager, BlockingAsyncStager",
)
@pytest.mark.parametrize("stager", ["default", "blocking"])
@pytest.mark.world(2)
def test_staged_scalars(world: World, stager: str) -> None:
    """Stage DTensors with and without a dimension, and change them."""

    def body(rank: Rank) -> list[float]:
        values = torch.tensor(1.0, device=rank.device), torch.ones(1, device=rank.device)
        state = {str(value.ndim): distribute_tensor(value, rank.mesh(), [Replicate()]) for value in values}
        staged = stager_called(stager).stage(state)
        for tensor in state.values():
            tensor.add_(4)
        return [tensor.to_local().sum().item() for tensor in staged.values()]

    assert_on_ranks([[1.0, 1.0]] * world.size, world.run(body))


class Trainer:
    """An object of a user's class, which is equal to others with the same number."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def advance(self) -> None:
        """Change what it holds."""
        self.epoch += 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trainer) and self.epoch == other.epoch

    __hash__ = None  # type: ignore[assignment]  # it changes


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "object": (lambda: Trainer(1), lambda value: value.advance()),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "bytes": (lambda: bytearray(b"ab"), lambda value: value.extend(b"c")),
    "queue": (lambda: deque([1], maxlen=3), lambda value: value.append(2)),
    "counter": (lambda: Counter("aab"), lambda value: value.update("b")),
    "default": (lambda: defaultdict(int, {"a": 1}), lambda value: value.update(a=2)),
    "listed": (lambda: [[1], Trainer(1)], lambda value: (value[0].append(2), value[1].advance())),
    "pair": (lambda: ({"a": Trainer(1)}, {1}), lambda value: (value[0]["a"].advance(), value[1].clear())),
}
"""Values that are no tensors: how to make one, and how to change it in place."""


@requirement(
    "RFSDP-CHECKPOINT-53",
    "A staged state has the values of the call that staged it, on the host, whatever happens to the model afterwards.",
    source=f"{SOURCE}.staging: AsyncStager.stage, DefaultStager, BlockingAsyncStager",
)
@pytest.mark.world(2)
def test_staged_objects(world: World) -> None:
    """Stage objects that are no tensors, at two depths, and change each of them."""

    def body(rank: Rank) -> None:
        for name, stager in stagers(rank).items():
            state: dict[str, Any] = {kind: make() for kind, (make, _) in CHANGED.items()}
            state["deeper"] = {kind: make() for kind, (make, _) in CHANGED.items()}
            right = copy.deepcopy(state)
            staged = stager.stage({**state, "tensor": torch.ones(2, device=rank.device)})
            staged = staged.result() if hasattr(staged, "result") else staged
            for kind, (_, change) in CHANGED.items():
                change(state[kind])
                change(state["deeper"][kind])
            changed = [k for k in CHANGED if staged[k] != right[k] or staged["deeper"][k] != right["deeper"][k]]
            assert not changed, f"{name}: changes of {changed} are in the staged state"
            stager.close()

    world.run(body)


@requirement(
    "RFSDP-CHECKPOINT-2200",
    "A staged copy of a DTensor that requires gradients, a parameter or a result, requires none.",
    source=f"{SOURCE}.staging: AsyncStager.stage, BlockingAsyncStager, DefaultStager",
)
@pytest.mark.parametrize("stager", ["default", "blocking"])
@pytest.mark.parametrize("kind", ["parameter", "result", "detached"])
@pytest.mark.world(2)
def test_staged_dtensors_without_gradients(world: World, kind: str, stager: str) -> None:
    """Stage a sharded parameter, twice its values, or the parameter without gradients."""

    def body(rank: Rank) -> tuple[list[float], bool]:
        weight = nn.Parameter(distribute_tensor(torch.full((4,), 3.0, device=rank.device), rank.mesh(), [Shard(0)]))
        given = {"parameter": weight, "result": weight * 2, "detached": weight.detach()}[kind]
        staged = stager_called(stager).stage({"tensor": given})["tensor"]
        return staged.to_local().tolist(), staged.requires_grad

    value = 6.0 if kind == "result" else 3.0
    assert_on_ranks([([value] * (4 // world.size), False)] * world.size, world.run(body))


def rest(staged: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is in a staged state besides a model and its optimizer."""
    return {key: value for key, value in staged.items() if key not in ("model", "sgd")}


@requirement(
    "RFSDP-CHECKPOINT-54",
    "Each of several asynchronous saves with one stager saves the values that the model had when it was called.",
    source=f"{SOURCE}.async_save: async_stager",
)
@pytest.mark.world(2)
def test_saved_asynchronously(world: World, tmp_path: Path) -> None:
    """Save twice with each stager, or without one, and change the model after each call."""

    def body(rank: Rank) -> None:
        for name, stager in {"none": None, **stagers(rank)}.items():
            net = model(rank)
            for step in range(2):
                what, folder = f"{name}, step {step}", tmp_path / f"{name}{step}"
                state = {"model": net.state_dict(), **progress(step)}
                right = whole(copied(state))
                try:
                    saved: Any = checkpoint.async_save(state, checkpoint_id=folder, async_stager=stager)
                except AssertionError:  # the group has collectives for an accelerator only
                    assert rank.device.type != "cpu", what
                    return
                if hasattr(saved, "staging_completion"):
                    saved.staging_completion.result()
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.mul_(2.0)
                getattr(saved, "upload_completion", saved).result()
                loaded = {"model": model(rank, -2.0).state_dict(), **progress(5)}
                checkpoint.load(loaded, checkpoint_id=folder)
                assert_equal(right, whole(loaded), what)

    world.run(body)


class Waiting(checkpoint.DefaultSavePlanner):
    """A planner that waits before it plans."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def create_local_plan(self) -> Any:
        """Plan what this rank saves, after it was told to."""
        self.waits.set()
        assert self.goes_on.wait(10)
        return super().create_local_plan()


@requirement(
    "RFSDP-CHECKPOINT-1711",
    "While an asynchronous save stages its state, an earlier one with the same writer goes on to its own folder.",
    source=f"{SOURCE}.async_save: 'first de-stages the state_dict ... and then calls the save in a separate thread'",
)
@pytest.mark.parametrize("when", ["at-once", "later"])
@pytest.mark.world(2)
def test_writer_of_two_saves(world: World, tmp_path: Path, when: str) -> None:
    """The first save ends while the second one stages, in the call or in a future that is awaited."""

    def body(rank: Rank) -> None:
        planner, writer = Waiting(), checkpoint.FileSystemWriter(tmp_path / "none", sync_files=False)
        mine, options = tmp_path / f"{rank.index}", {"storage_writer": writer, "no_dist": True}

        class During(AsyncStager):
            """A stager that stages nothing before the first save has ended."""

            def stage(self, state_dict: Any) -> Any:
                """Let the first save end, or return a future."""
                if when == "later":
                    self.future: Future[Any] = Future()
                    return self.future
                planner.goes_on.set()
                first.result()
                return state_dict

        first: Any = checkpoint.async_save(
            {"a": torch.ones(3)}, checkpoint_id=mine / "first", planner=planner, **options
        )
        assert planner.waits.wait(10)
        stager = During()
        second: Any = checkpoint.async_save(
            {"a": torch.full((3,), 2.0)}, checkpoint_id=mine / "second", async_stager=stager, **options
        )
        if when == "later":
            planner.goes_on.set()
            first.result()
            stager.future.set_result({"a": torch.full((3,), 2.0)})
        getattr(second, "upload_completion", second).result()
        for name, value in {"first": 1.0, "second": 2.0}.items():
            loaded = {"a": torch.zeros(3)}
            checkpoint.load(loaded, checkpoint_id=mine / name, no_dist=True)
            assert loaded["a"].tolist() == [value] * 3, name

    world.run(body)
