"""What a run leaves behind: nothing, where ranks are healthy; and everything that can be left is found, on its rank."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from harness import Pool, Rank, WorldSpec
from harness.programs import execute, residue
from harness.programs.check import problems, truth_of
from harness.programs.residue import Left
from harness.specs.program import Activation, Compile, Layout, Linear, Model, Program, Step
from harness.stacks import training

MODEL = Model((3,), (Linear(4), Activation(), Linear(2)))
STEPS = (Step(rows=(2, 4)),) * 2


def in_training(do: Callable[[torch.nn.Module, dict[str, Any]], None]) -> Callable[[Rank], None]:
    """Something that rank 1 does with its model and what it has seen, after training."""

    def damage(rank: Rank) -> None:
        if rank.index != 1:
            return
        plain = execute.functions

        def functions(program: Program) -> dict[str, Any]:
            names = plain(program)
            train = names["train"]

            def damaged(party: Any, model: Any) -> Any:
                seen = train(party, model)
                do(party.root(model), seen)
                return seen

            return {**names, "train": damaged}

        execute.functions = functions

    return damage


def keep_model(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    residue.gc.kept = [model]  # type: ignore[attr-defined]  # something that outlives the run


def keep_parameter(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    residue.gc.kept = list(model.parameters())[:1]  # type: ignore[attr-defined]


def thread(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    threading.Thread(target=time.sleep, args=(20,), daemon=True).start()


def group(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    new = dist.distributed_c10d.PrefixStore("left", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    made = dist.ProcessGroup(new, 0, 1)
    world = dist.distributed_c10d._world
    world.pg_map[made] = ("gloo", new)
    world.pg_names[made] = "left"
    world.pg_group_ranks[made] = {1: 0}
    training.clean_up = lambda device: None


def global_hook(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    register_module_forward_hook(lambda *args: None)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def mode(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    _Mode().__enter__()


def default_dtype(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)


def grad_mode(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    torch.set_grad_enabled(False)


def anomaly(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    torch.autograd.set_detect_anomaly(True)


def saved_tensors(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    save_on_cpu().__enter__()  # type: ignore[no-untyped-call]


def deterministic(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(True)


def environment(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    os.environ["LEFT"] = "1"


def random_numbers(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    torch.rand(1)


def gradient_with_history(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter).requires_grad_() * 2


def gradient(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def frozen(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    model.requires_grad_(False)


def no_parameter(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    linear: Any = model.get_submodule("linear0")
    weight = linear.weight
    del linear._parameters["weight"]
    linear.weight = weight.detach()


def wider(model: torch.nn.Module, seen: dict[str, Any]) -> None:
    model.double()


DAMAGES: list[tuple[Callable[[torch.nn.Module, dict[str, Any]], None], Left]] = [
    (keep_model, Left("memory", "the model")),
    (keep_parameter, Left("memory", "parameter linear0.weight")),
    (thread, Left("threads", ANY, ANY, ANY)),
    (group, Left("groups", "", ANY, ANY)),
    (global_hook, Left("global_hooks", "_global_forward_hooks", "1", "0")),
    (mode, Left("modes", "", "('_Mode',)", "()")),
    (default_dtype, Left("default_dtype", "", "torch.float64", "torch.float32")),
    (grad_mode, Left("grad", "", "False", "True")),
    (anomaly, Left("anomaly", "", "True", "False")),
    (saved_tensors, Left("saved_tensor_hooks", "", "True", "False")),
    (deterministic, Left("deterministic", "", "(True, False)", "(False, False)")),
    (environment, Left("environment", "LEFT", "1", "None")),
    (random_numbers, Left("random numbers")),
    (gradient_with_history, Left("gradients", "linear0.weight", "requires_grad=True", "requires_grad=False")),
    (gradient, Left("gradients", "linear0.weight", "float32[4, 3]", "None, since all were set to None")),
    (frozen, Left("parameters", "linear0.weight", "requires_grad=False", "requires_grad=True")),
    (
        no_parameter,
        Left(
            "parameters",
            "",
            "['linear0.bias', 'linear2.weight', 'linear2.bias']",
            "['linear0.weight', 'linear0.bias', 'linear2.weight', 'linear2.bias']",
        ),
    ),
    (wider, Left("parameters", "linear0.weight", "float64[4, 3]", "float32[4, 3]")),
]


@pytest.mark.parametrize(
    ("left", "says"),
    [
        (Left("memory", "the model"), "memory: the model is still there"),
        (Left("random numbers"), "random numbers: the state of the generator has changed"),
        (Left("collectives", now="3"), "collectives: nothing has waited for 3 after a backward"),
        (Left("global_hooks", "x", "1", "0"), "global hooks: x: 1, before 0"),
        (Left("grad", "", "False", "True"), "grad: False, before True"),
        (Left("gradients", "w", "float32[2]", "None"), "gradients: w: float32[2], expected None"),
    ],
)
def test_what_is_left_is_said(left: Left, says: str) -> None:
    """A sentence for each kind of thing."""
    assert str(left) == says


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("threads", "ours"),
    [
        (("python", "pt_gloo_runloop"), False),  # PyTorch 2.11: gloo's own threads have no names
        (("python", "pt_gloo_runloop", "gloo_tcp_loop"), True),
        (("python",), True),  # not gloo
    ],
)
def test_threads_of_a_group_that_is_kept(monkeypatch: pytest.MonkeyPatch, threads: tuple[str, ...], ours: bool) -> None:
    """A thread without a name is one of gloo's only if gloo runs and none of its threads has its name."""
    names = {threads[0]: "3"} | dict.fromkeys(threads[1:], "1")
    monkeypatch.setattr(residue, "_own_name", lambda: threads[0])
    monkeypatch.setattr(residue, "_changes", lambda before: [Left("threads", "python", "4", "3")])
    before = dataclasses.replace(residue.take(), threads=names)
    assert bool(residue.left(before, groups_freed=False)) == ours


@pytest.mark.parametrize("on_device", [False, True])
def test_threads_of_groups_on_a_device(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of a backend's groups have longer to end on a device, and need not if their groups live on."""
    monkeypatch.setattr(residue, "_PATIENCE", 0.0)
    before = residue.take()
    stop = threading.Event()
    ready = threading.Event()

    def named() -> None:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as f:
            f.write("pt_nccl_heartbt")
        ready.set()
        stop.wait()

    thread = threading.Thread(target=named, daemon=True)
    thread.start()
    ready.wait()
    kept = [change.kind for change in residue.left(before, groups_freed=False, on_device=on_device)]
    threading.Timer(0.2, stop.set).start()
    ended = [change.kind for change in residue.left(before, on_device=on_device)]
    thread.join()
    assert ("threads" in kept, "threads" in ended) == (not on_device, not on_device)


@pytest.mark.parametrize("more", [0, 1])
def test_threads_that_name_themselves_late(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """A thread that has a name only now is the one that had none before; a further one with this name is new."""
    go, stop = threading.Event(), threading.Event()

    def named() -> None:
        go.wait()
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as f:
            f.write("pt_gloo_runloop")
        ready.release()
        stop.wait()

    ready = threading.Semaphore(0)
    monkeypatch.setattr(residue, "_PATIENCE", 0.01)
    threads = [threading.Thread(target=named, daemon=True) for _ in range(2 + more)]
    for thread in threads[:2]:
        thread.start()
    before = residue.take()
    for thread in threads[2:]:
        thread.start()
    go.set()
    for _ in threads:
        ready.acquire()
    found = [change.name for change in residue.left(before) if change.kind == "threads"]
    stop.set()
    for thread in threads:
        thread.join()
    assert found == ["pt_gloo_runloop"] * more


@pytest.mark.parametrize(("do", "left"), DAMAGES, ids=[do.__name__ for do, _ in DAMAGES])
def test_what_is_left_is_found(pool: Pool, do: Callable[[torch.nn.Module, dict[str, Any]], None], left: Left) -> None:
    """Something that one of two ranks leaves, said of that rank and of no other."""
    program = Program(MODEL, steps=STEPS, dtype="float32")
    damage = in_training(do)

    def body(rank: Rank) -> execute.Outcome:
        damage(rank)
        return execute.on_rank(rank, program)

    world = pool.acquire(WorldSpec(2, timeout=30))
    try:
        outcomes = world.run(body)
    finally:
        world.kill()
    wrong = [p for p in problems(program, truth_of(program), outcomes) if p.kind == "left behind"]
    assert any(p.what == left for p in wrong), wrong
    assert {p.ranks for p in wrong} == {(1,)}


STACKS = [
    Layout(),
    Layout(options=(("hook", "allreduce_hook"),)),
    Layout("replicate_fsdp", wrapped=("linear0",)),
    Layout("tp_extension", 4, 2, ("linear2",), (("linear0", "columns"),), (("use_orig_params", False),)),
    Layout("tp_extension", options=(("use_orig_params", False), ("strategy", "SHARD_GRAD_OP"))),
    Layout("tp_extension", options=(("use_orig_params", True), ("strategy", "NO_SHARD"))),
    Layout("dynamo", options=(("inner", "replicate"),), compiled=Compile()),
]


@pytest.mark.parametrize("layout", STACKS, ids=lambda layout: layout.stack)
def test_nothing_is_left(pool: Pool, layout: Layout) -> None:
    """The third run in a process leaves what the first did: nothing."""
    program = Program(MODEL, layout, STEPS, dtype="float32")
    world = pool.acquire(WorldSpec(layout.world, timeout=60))
    for _ in range(3):
        assert [o.left for o in world.run(execute.on_rank, program)] == [()] * layout.world
    assert pool.release(world) == []


@pytest.mark.parametrize("layout", STACKS, ids=lambda layout: layout.stack)
def test_counts_are_true(pool: Pool, layout: Layout) -> None:
    """What the groups' sequence numbers say is what the Flight Recorder has, group by group."""
    program = Program(MODEL, layout, STEPS, dtype="float32")

    def body(rank: Rank) -> tuple[dict[str, int], dict[str, int], int]:
        names = execute.functions(program)
        party = training.Party(
            torch.float32, rank.device, rank.index, rank.size, program.part(rank.index), program.parts
        )
        model = names["distribute"](party, names["build"](party))
        world = dist.distributed_c10d._world
        seen: Counter[str] = Counter()
        recorded = _recorded()
        before = training.launched()
        names["train"](party, model)
        now = _recorded()
        groups = {world.pg_names[g]: str(tuple(sorted(dist.get_process_group_ranks(g)))) for g in world.pg_map}
        for record, group in now.items():
            if record not in recorded:
                seen[groups[group]] += 1
        counted = {str(group): count for group, count in training.since(before).items()}
        within = sum(sum(groups.values()) for groups in party.launched.values())
        training.clean_up(rank.device)
        return dict(seen), counted, within

    live = pool.acquire(WorldSpec(layout.world, timeout=60))
    ranks = live.run(body)
    live.kill()
    for seen, counted, within in ranks:
        assert seen == counted
        assert 0 < within <= sum(counted.values())


def _recorded() -> dict[int, str]:
    """The name of the group of every collective that the Flight Recorder has, by its number."""
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json()).get("entries", [])
    return {entry["record_id"]: entry["process_group"][0] for entry in entries}


def test_what_another_thread_releases_later() -> None:
    """Another thread that holds the model may have a moment to release it, if it must; one that keeps it is found."""
    held = [torch.nn.Linear(2, 2)]
    remains = residue.Remains(held[0])
    assert Left("memory", "the model") in remains.alive()
    assert Left("memory", "the model") in remains.alive(patient=False)
    threading.Timer(0.1, held.clear).start()
    assert not remains.alive()
