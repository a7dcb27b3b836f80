"""Ranks with different numbers of batches: DistributedDataParallel.join."""

from __future__ import annotations

import warnings
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from suites.replicate.hooks.test_shipped_hooks import Matrices, of_rank
from suites.replicate.reducer.test_buckets import sent

SOURCE = "torch.nn.parallel.DistributedDataParallel.join"
BATCHES = [1, 2, 4]
"""The number of batches of each rank. Gradients in units of 12 are divided by 2, 3 and 4 without rounding."""
pytestmark = pytest.mark.usefixtures("with_buckets")


class Model(nn.Module):
    """Two parameters and a branch with a third; a buffer counts forwards."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.branch = (nn.Parameter(torch.zeros(3)) for _ in range(3))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        self.count += 1
        result: torch.Tensor = (self.first + 2 * self.second) * x
        return result + 3 * self.branch * x if branch else result


def given(rank: int, step: int) -> float:
    return 12.0 * (rank + 1) * (step + 1)


def expected(members: list[int], batches: list[int], step: int, divided: bool) -> float:
    """Return the gradient of the first parameter in a step. ``divided``: by the number of ranks at the beginning."""
    active = [rank for rank, number in zip(members, batches, strict=True) if step < number]
    return sum(given(rank, step) for rank in active) / (len(members) if divided else len(active))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "divided": ({}, {"divide_by_initial_world_size": True}),
    "not divided": ({}, {"divide_by_initial_world_size": False}),
    "small buckets": ({"bucket_cap_mb": 1e-6}, {"divide_by_initial_world_size": False}),
    "views": ({"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-6}, {"divide_by_initial_world_size": False}),
    "find unused": ({"find_unused_parameters": True}, {"divide_by_initial_world_size": False}),
    "no buffers": ({"broadcast_buffers": False}, {"divide_by_initial_world_size": False}),
    "early": ({}, {"throw_on_early_termination": False, "enable": True}),
}


@requirement(
    "DDP-JOIN-01",
    "With join, gradients are the sum over ranks that have a batch, divided by the initial number of ranks by default.",
    source=f"{SOURCE}: divide_by_initial_world_size=True",
)
@requirement(
    "DDP-JOIN-02",
    "With divide_by_initial_world_size=False, gradients are the mean over the ranks that still have a batch.",
    source=f"{SOURCE}: divide_by_initial_world_size=False",
)
@requirement(
    "DDP-JOIN-03",
    "After join, all ranks have the parameters and synchronized buffers of the rank that had the most batches.",
    source=SOURCE,
)
@pytest.mark.parametrize("where", ["world", "group", "idle"])
@pytest.mark.parametrize("last", [0, 2], ids=["first-rank-last", "last-rank-last"])
@pytest.mark.world(3)
def test_uneven(world: World, last: int, where: str) -> None:
    """Train on one, two and four batches, with two ranks alone, or with ranks that have no batch at all."""
    batches = BATCHES if where != "idle" else [0, 0, 2] if last == 2 else [0, 3, 2]
    batches = batches if last == 2 else batches[::-1]
    members = [last, 1] if where == "group" else [0, 1, 2]

    def body(rank: Rank) -> None:
        group = rank.subgroup(sorted(members)) if where == "group" else None
        if rank.index not in members:
            return
        for name, (options, how) in CASES.items():
            model: Any = DistributedDataParallel(Model().to(rank.device), process_group=group, **options)
            module = model.module
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            counts = [batches[member] for member in members]
            gradients = []
            divided = how.get("divide_by_initial_world_size", True)
            with model.join(**how):
                for number in range(batches[rank.index]):
                    optimizer.zero_grad()
                    x = torch.tensor(given(rank.index, number), device=rank.device)
                    model(x, options.get("find_unused_parameters") is None or number == 0).sum().backward()
                    gradients.append(
                        [p.grad.tolist() if p.grad is not None else [0.0] * 3 for p in module.parameters()]
                    )
                    optimizer.step()
            sums = [0.0, 0.0, 0.0]
            for number in range(max(counts)):
                value = expected(members, counts, number, divided)
                right = [value, 2 * value, 0.0 if "find" in name and number > 0 else 3 * value]
                sums = [total + value for total, value in zip(sums, right, strict=True)]
                if number < len(gradients):
                    assert gradients[number] == [[value] * 3 for value in right], (name, number)
            assert [p.tolist() for p in module.parameters()] == [[-total] * 3 for total in sums], name
            own = batches[rank.index] if name == "no buffers" else max(counts)
            assert module.count.tolist() == [own] * 2, name

    world.run(body)


def gathering(_, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    """Average what all ranks have gathered, instead of an all-reduce."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    work: Any = dist.all_gather(parts, bucket.buffer(), async_op=True)
    return work.get_future().then(lambda _: torch.stack(parts).mean(0))


def in_two_halves(_, bucket):  # type: ignore[no-untyped-def]  # DDP rejects string annotations
    """Average the halves of a bucket one after the other."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    for part in bucket.buffer().chunk(2):
        dist.all_reduce(part)
    done.set_result(bucket.buffer().div_(dist.get_world_size()))
    return done


HOOKS = {
    "plain": [None],
    "hook": [allreduce_hook, fp16_compress_hook],
    "other": [gathering, in_two_halves],
}
"""Hooks that average: those that send a bucket as it is or in 16 bits, and those that send something else."""


@requirement(
    "DDP-JOIN-04",
    "With join, micro-batches without synchronization accumulate, and a later one averages.",
    source=f"{SOURCE}; torch.nn.parallel.DistributedDataParallel.no_sync",
)
@requirement(
    "DDP-JOIN-215",
    "After a join, a forward without buffers does not communicate, so that one rank may run one alone as before.",
    source=SOURCE,
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.world(2)
def test_forward_of_one_rank(world: World, when: str) -> None:
    """Run a forward on one rank, before or after batches in a join, and then sum numbers over the ranks."""

    def body(rank: Rank) -> float:
        model: Any = DistributedDataParallel(nn.Linear(1, 1).to(rank.device))
        x = torch.ones(1, 1, device=rank.device)
        if when == "after":
            with model.join():
                for _ in range(1 + rank.index):
                    model(x).sum().backward()
        if rank.index == 0:
            model(x)
        numbers = torch.tensor([4.0], device=rank.device)
        dist.all_reduce(numbers)
        if rank.index == 1 and numbers.item() != 8.0:  # the other rank waits for answers to what its forward sent
            for _ in range(2):
                dist.all_reduce(torch.zeros(1, device=rank.device))
        return numbers.item()

    assert_on_ranks([8.0, 8.0], world.run(body))


@requirement(
    "DDP-JOIN-9306",
    "A join leaves the program's filters of warnings as they are.",
    source=f"{SOURCE}: 'Context manager for training with uneven inputs across processes'",
)
@pytest.mark.parametrize("end", ["disabled", "error", "join"])
@pytest.mark.world(2)
def test_filters_of_warnings(world: World, end: str) -> None:
    """Filter warnings, take steps in a join that ranks leave at its end or by an error, or in one that is disabled."""

    def body(rank: Rank) -> list[bool]:
        model: Any = DistributedDataParallel(nn.Linear(1, 1).to(rank.device))
        with warnings.catch_warnings():
            warnings.simplefilter("error", BytesWarning)
            before, kept = list(warnings.filters), []
            with suppress(LookupError), model.join(enable=end != "disabled"):
                for _ in range(1 if end == "disabled" else 1 + rank.index):
                    model(torch.ones(1, 1, device=rank.device)).sum().backward()
                    kept.append(warnings.filters == before)
                    if end == "error":
                        raise LookupError
            kept.append(warnings.filters == before)
        return kept[-2:]

    assert_on_ranks([[True, True]] * 2, world.run(body))


@requirement(
    "DDP-JOIN-215",
    "After a join, a forward without buffers does not communicate, so that one rank may run one alone as before.",
    source=SOURCE,
)
@pytest.mark.parametrize("enable", [False, True], ids=["disabled", "joined"])
@pytest.mark.world(2)
def test_messages_after_a_join(world: World, enable: bool) -> None:
    """A step in the block, and a forward without gradients after it."""

    def body(rank: Rank) -> int:
        model: Any = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(rank.device))
        x = torch.ones(1, 1, device=rank.device)
        with model.join(enable=enable):
            model(x).sum().backward()
        before = messages.mark()
        with torch.no_grad():
            model(x)
        return len(sent(before))

    assert_on_ranks([0, 0], world.run(body))


@requirement(
    "DDP-JOIN-05",
    "With join, a communication hook reduces the gradients of the ranks that have a batch, and zeros of the others.",
    source=SOURCE,
)
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.world(3)
def test_micro_batches(world: World, hooks: str) -> None:
    """Every step has two micro-batches, of which the second is synchronized; the hooks average over all ranks."""

    def body(rank: Rank) -> None:
        for hook in HOOKS[hooks]:
            model: Any = DistributedDataParallel(Model().to(rank.device))
            if hook:
                model.register_comm_hook(None, hook)
            gradients = []
            with model.join(divide_by_initial_world_size=False):
                for number in range(BATCHES[rank.index]):
                    x = torch.tensor(given(rank.index, number), device=rank.device)
                    with model.no_sync():
                        model(x).sum().backward()
                    model(x).sum().backward()
                    gradients.append(model.module.second.grad.tolist())
                    model.zero_grad()
            right = [expected([0, 1, 2], BATCHES, n, bool(hook)) for n in range(BATCHES[rank.index])]
            assert gradients == [[4 * value] * 3 for value in right], hook

    world.run(body)


@requirement(
    "DDP-JOIN-09",
    "Each of several models in one Join trains, and ends with the same parameters on all ranks, as with its own join.",
    source="torch.distributed.algorithms.join.Join: joinables",
)
@pytest.mark.parametrize("last", [0, 2], ids=["first-rank-last", "last-rank-last"])
@pytest.mark.world(3)
def test_several(world: World, last: int) -> None:
    """Two and three models with options of their own, in either order, train on one, two and four batches."""
    batches = BATCHES if last == 2 else BATCHES[::-1]
    every: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"broadcast_buffers": False}]

    def body(rank: Rank) -> None:
        for some in ([0, 1], [2, 0], [1, 2, 0]):
            models: list[Any] = [DistributedDataParallel(Model().to(rank.device), **every[kind]) for kind in some]
            optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
            with Join(models):
                for number in range(batches[rank.index]):
                    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                        optimizer.zero_grad()
                        model(torch.tensor(given(rank.index, number) * (i + 1), device=rank.device)).sum().backward()
                        value = expected([0, 1, 2], batches, number, True) * (i + 1)
                        assert model.module.first.grad.tolist() == [value] * 3, (some, i, number)
                        optimizer.step()
            for i, (kind, model) in enumerate(zip(some, models, strict=True)):
                total = sum(expected([0, 1, 2], batches, number, True) for number in range(4)) * (i + 1)
                right = [[-factor * total] * 3 for factor in (1, 2, 3)]
                assert [p.tolist() for p in model.module.parameters()] == right, (some, i)
                own = batches[rank.index] if "broadcast_buffers" in every[kind] else 4
                assert model.module.count.tolist() == [own] * 2, (some, i)

    world.run(body)


class Telling(Model):
    """The model, which tells the other ranks of each forward."""

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        told = torch.ones_like(x)
        dist.all_reduce(told)
        assert told.item() == dist.get_world_size()
        return super().forward(x, branch)


def train_until_thrown(model: Any, rank: Rank, done: list[int], options: dict[str, bool]) -> None:
    with model.join(throw_on_early_termination=True, **options):
        for number in range(1 + 2 * rank.index):
            model(torch.tensor(given(rank.index, number), device=rank.device)).sum().backward()
            done.append(number)


@requirement(
    "DDP-JOIN-06",
    "With throw_on_early_termination, every rank raises an error as soon as one has no more batches.",
    source=f"{SOURCE}: throw_on_early_termination",
)
@requirement(
    "DDP-JOIN-07",
    "With enable=False, join changes nothing for ranks with equal numbers of batches.",
    source=f"{SOURCE}: enable",
)
@requirement(
    "DDP-JOIN-08",
    "An error within join reaches the caller, and the join of no or of differing groups is an error.",
    source="torch.distributed.algorithms.join.Join",
)
@pytest.mark.world(2)
def test_errors(world: World) -> None:
    """Rank 1 has two batches more, also of a model with a collective of its own; then errors and wrong arguments."""

    def body(rank: Rank) -> None:
        def train(model: Any, batches: int) -> list[float]:
            gradients = []
            for number in range(batches):
                model.zero_grad()
                model(torch.tensor(given(rank.index, number), device=rank.device)).sum().backward()
                gradients.append(float(model.module.first.grad[0]))
            return gradients

        for options in ({}, {"divide_by_initial_world_size": False}):
            model: Any = DistributedDataParallel((Telling() if options else Model()).to(rank.device))
            done: list[int] = []
            words = "exhausted all inputs" if rank.index == 0 else "exhausted inputs"
            with pytest.raises(RuntimeError, match=words):
                train_until_thrown(model, rank, done, options)
            assert done == [0]
        model = DistributedDataParallel(Model().to(rank.device))
        with model.join(enable=False):
            assert train(model, 2) == [18.0, 36.0]
        model = DistributedDataParallel(Model().to(rank.device))
        with Join([model], divide_by_initial_world_size=False):
            assert train(model, 2) == [18.0, 36.0]
        assert train(model, 2) == [18.0, 36.0]  # joined before
        with pytest.raises(ZeroDivisionError), model.join():
            raise ZeroDivisionError
        with pytest.raises(ValueError, match="at least one joinable"):
            Join([])
        group = rank.subgroup([0, 1])
        other = DistributedDataParallel(Model().to(rank.device), process_group=group)
        with pytest.raises(ValueError, match="multiple process groups"):
            Join([model, other])

    world.run(body)


HOWS: dict[str, dict[str, bool]] = {
    "default": {},
    "divided": {"divide_by_initial_world_size": True},
    "not divided": {"divide_by_initial_world_size": False},
    "disabled": {"enable": False},
    "throwing": {"divide_by_initial_world_size": False, "throw_on_early_termination": True},
}
"""Arguments of a join."""


@requirement(
    "DDP-JOIN-8451",
    "Each join of a model follows the arguments that it is given, whatever those of earlier joins were.",
    source=f"{SOURCE}: divide_by_initial_world_size, enable, throw_on_early_termination",
)
@pytest.mark.parametrize("form", ["join", "Join"])
@pytest.mark.world(2)
def test_joins_in_turn(world: World, form: str) -> None:
    """Join a model with any arguments after any others, and take a step without a join after each."""
    names = list(HOWS)
    turns = [n for i, one in enumerate(names) for n in (one, *(m for other in names[i + 1 :] for m in (one, other)))]

    def body(rank: Rank) -> None:
        model: Any = DistributedDataParallel(Model().to(rank.device))

        def train(batches: int) -> list[float]:
            gradients = []
            for number in range(batches):
                model.zero_grad()
                model(torch.tensor(given(rank.index, number), device=rank.device)).sum().backward()
                gradients.append(float(model.module.first.grad[0]))
            return gradients

        for number, name in enumerate([*turns, names[0]]):
            how = HOWS[name]
            batches = [2, 2] if name in ("disabled", "throwing") else [1 + number % 2, 2 - number % 2]
            divided = how.get("divide_by_initial_world_size", True)
            right = [expected([0, 1], batches, step, divided) for step in range(batches[rank.index])]
            with model.join(**how) if form == "join" else Join([model], **how):
                assert train(batches[rank.index]) == right, (number, name)
            assert train(1) == [18.0], (number, name)

    world.run(body)


@requirement(
    "DDP-JOIN-10",
    "With enable=False, join sends nothing, so that every rank keeps the model that it has at the end.",
    source="torch.distributed.algorithms.join.Join: enable",
)
@pytest.mark.world(2)
def test_disabled(world: World) -> None:
    """Steps of the rank's own, as many on both ranks or not, and shared ones, in a join of one or two models."""
    options: list[dict[str, bool]] = [
        {},
        {"throw_on_early_termination": True},
        {"divide_by_initial_world_size": False},
        {"divide_by_initial_world_size": True, "throw_on_early_termination": True},
    ]

    def body(rank: Rank) -> None:
        def joined(models: list[Any], how: dict[str, bool]) -> Any:
            return models[0].join(enable=False, **how) if len(models) == 1 else Join(models, enable=False, **how)

        for how in options:
            for count in (1, 2):
                models: list[Any] = [DistributedDataParallel(Model().to(rank.device)) for _ in range(count)]
                for number, steps in enumerate(([0, 0], [2, 2], [1, 3], [3, 0])):
                    for model in models:
                        for tensor in (*model.module.parameters(), *model.module.buffers()):
                            tensor.detach().fill_(10.0 * rank.index + number)
                    before = messages.mark()
                    with joined(models, how):
                        for _ in range(steps[rank.index]):
                            for model in models:
                                model.module(torch.ones((), device=rank.device)).sum().backward()
                    assert sent(before) == [], (how, steps)
                    for model in models:
                        own = 10.0 * rank.index + number
                        assert [p.tolist() for p in model.module.parameters()] == [[own] * 3] * 3, (how, steps)
                        assert model.module.count.tolist() == [own + steps[rank.index]] * 2, (how, steps)
                        model.zero_grad()
                told = []
                for block in (nullcontext(), nullcontext(), nullcontext(), joined(models, how), nullcontext()):
                    before = messages.mark()
                    with block:
                        for model in models:
                            model(torch.tensor(12.0 * rank.index, device=rank.device)).sum().backward()
                            assert model.module.first.grad.tolist() == [6.0] * 3, how
                            model.zero_grad()
                    told.append(sorted(sent(before)))
                assert told[2] == told[3] == told[4], how  # buckets are as they stay from the third step on
                with Join(models):
                    pass
                ends = [p.tolist() for model in models for p in model.module.parameters()]
                gathered: list[Any] = [None, None]
                dist.all_gather_object(gathered, ends)
                assert gathered[0] == gathered[1], how

    world.run(body)


@requirement(
    "DDP-JOIN-05",
    "With join, a communication hook reduces the gradients of the ranks that have a batch, and zeros of the others.",
    source=SOURCE,
)
@pytest.mark.world(3)
def test_power_sgd(world: World) -> None:
    """PowerSGD compresses from the third of six steps on, with and without what it keeps of a step for the next one."""

    def body(rank: Rank) -> None:
        values = of_rank(1, Matrices.SHAPES)
        for batches in ([1, 4, 6], [6, 2, 3]):
            for feedback in (False, True):
                state = PowerSGDState(None, start_powerSGD_iter=2, use_error_feedback=feedback)
                model: Any = DistributedDataParallel(Matrices(values).to(rank.device))
                model.register_comm_hook(state, powerSGD_hook)
                sgd = torch.optim.SGD(model.parameters(), lr=2.0**-6)
                total = 0.0
                with model.join():
                    for step in range(batches[rank.index]):
                        model.zero_grad()
                        model(torch.tensor(float(rank.index + 1), device=rank.device)).backward()
                        mean = sum(r + 1.0 for r in range(3) if step < batches[r]) / 3
                        for p, value in zip(model.module.weights, values, strict=True):
                            close(p.grad.cpu(), mean * value)
                        sgd.step()
                total = sum(sum(r + 1.0 for r in range(3) if step < batches[r]) / 3 for step in range(6))
                for p, value in zip(model.module.weights, values, strict=True):
                    close(p.detach().cpu(), -total * value / 64)
                assert state.iter == max(batches), batches

    def close(found: torch.Tensor, right: torch.Tensor) -> None:
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-3)

    world.run(body)
