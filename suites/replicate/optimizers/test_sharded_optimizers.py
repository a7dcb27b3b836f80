"""ZeroRedundancyOptimizer, which divides an optimizer's state among the ranks of a replicated model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, assert_same, requirement

SOURCE = "torch.distributed.optim.ZeroRedundancyOptimizer"
SHAPES = ((3, 4), (2,), (5,), (1, 1), (2, 3), (7,))
OPTIMIZERS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.SGD: {"lr": 0.5, "momentum": 0.5},
    torch.optim.AdamW: {"lr": 0.25, "weight_decay": 0.125},
}


class Pair:
    """Parameters twice: with a sharded optimizer, and with the optimizer that it shards, which has all of them."""

    def __init__(
        self, rank: Rank, kind: type[torch.optim.Optimizer], group: Any, *, backwards: bool = False, **options: Any
    ) -> None:
        shapes = SHAPES[::-1] if backwards else SHAPES
        numbers = [torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape) for shape in shapes]
        self.sharded, self.whole = ([nn.Parameter(n.to(rank.device).clone()) for n in numbers] for _ in range(2))
        given = OPTIMIZERS[kind]
        self.kind, self.options = kind, {"backwards": backwards, **options}
        self.zero: Any = ZeroRedundancyOptimizer(groups_of(self.sharded), kind, process_group=group, **options, **given)
        self.plain: Any = kind(groups_of(self.whole), **given)

    @property
    def both(self) -> tuple[tuple[list[nn.Parameter], Any], tuple[list[nn.Parameter], Any]]:
        return (self.sharded, self.zero), (self.whole, self.plain)

    def step(self, number: int, *, closure: bool = False) -> None:
        """Run a step of both with the same gradients, and compare the parameters."""

        def gradients(parameters: list[nn.Parameter]) -> float:
            for i, p in enumerate(parameters):
                p.grad = torch.full_like(p, 0.5 + i - number)
            return 8.0 + number

        for parameters, optimizer in self.both:
            if closure:
                assert optimizer.step(lambda parameters=parameters: gradients(parameters)) == 8.0 + number
            else:
                gradients(parameters)
                optimizer.step()
        self.compare(f"step {number}")

    def goes_on(self, rank: Rank, group: Any, zero: Any, plain: Any, numbers: range) -> Pair:
        """Load state dicts into new optimizers over a group, run steps, and return them."""
        other = Pair(rank, self.kind, group, **self.options)
        for (parameters, optimizer), (from_, _), state in zip(other.both, self.both, (zero, plain), strict=True):
            for p, value in zip(parameters, from_, strict=True):
                p.data.copy_(value.data)
            optimizer.load_state_dict(copy.deepcopy(state))
        for number in numbers:
            other.step(number)
        return other

    def consolidated(self, target: int, *, here: bool) -> dict[str, Any] | None:
        """Consolidate the states on a rank of the group, compare them there with the plain ones, and return them."""
        self.zero.consolidate_state_dict(to=target)
        if not here:
            with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                self.zero.state_dict()
            return None
        right, found = self.plain.state_dict(), self.zero.state_dict()
        assert found["param_groups"] == right["param_groups"]
        assert sorted(found["state"]) == sorted(right["state"])
        for number, state in right["state"].items():
            assert list(found["state"][number]) == list(state)
            for name, value in state.items():
                assert_same(value.cpu(), found["state"][number][name], f"{number}: {name}")
        return dict(found)

    def compare(self, when: str) -> None:
        for i, (one, other) in enumerate(zip(self.sharded, self.whole, strict=True)):
            assert_same(other.detach().cpu(), one.detach(), f"{when}, parameter {i}")
        assert options_of(self.zero) == options_of(self.plain), when


def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups, of which the second has a learning rate of its own, without the last two parameters."""
    return [{"params": parameters[:2]}, {"params": parameters[2:4], "lr": 0.125}]


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def memory_of(parameters: list[nn.Parameter]) -> dict[int, int]:
    """Return the bytes of each memory that parameters are in, by its address."""
    storages = [p.untyped_storage() for p in parameters]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@requirement(
    "DDP-ZERO-51",
    "A ZeroRedundancyOptimizer steps as the optimizer that it shards, with every option that its groups have then.",
    source=f"{SOURCE}: step, param_groups, parameters_as_bucket_view, process_group; torch.optim.lr_scheduler",
)
@requirement(
    "DDP-ZERO-52",
    "A ZeroRedundancyOptimizer can get more groups, and clears the gradients of all to None or to zero.",
    source=f"{SOURCE}: add_param_group, zero_grad",
)
@requirement(
    "DDP-ZERO-9170",
    "With bucket views, trained parameters of a rank fill one memory and frozen ones have their own, otherwise every "
    "parameter stays where it is.",
    source=f"{SOURCE}: parameters_as_bucket_view: 'packed into buckets', 'each params.data stays intact'",
)
@pytest.mark.world(3)
def test_steps(world: World) -> None:
    """A scheduler and the program change options between steps, also with a closure; in the world and in a group."""

    def body(rank: Rank) -> None:
        two = dist.new_group([1, 2])
        for group in (None, two):
            if group is two and rank.index == 0:
                continue
            for kind in OPTIMIZERS:
                for views in (False, True):
                    pair = Pair(rank, kind, group, parameters_as_bucket_view=views)
                    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for _, o in pair.both]
                    for number in range(7):
                        for parameters, optimizer in pair.both:
                            if number == 3:  # one option of one group
                                optimizer.param_groups[1]["weight_decay"] = 0.25
                            if number == 4:
                                optimizer.param_groups[0]["lr"] *= 2
                            if number == 5:
                                optimizer.add_param_group({"params": parameters[4:], "lr": 2.0})
                        pair.step(number, closure=number % 3 == 1)
                        held = memory_of(pair.sharded)
                        assert sum(held.values()) == sum(p.nbytes for p in pair.sharded), (views, number)
                        for scheduler in schedulers:
                            scheduler.step()
                    assert options_of(pair.zero) == options_of(pair.plain)
                    for none in (False, True):
                        pair.zero.zero_grad(set_to_none=none)
                        for p in pair.sharded:
                            assert p.grad is None if none else not p.grad.any()

    world.run(body)


@requirement(
    "DDP-ZERO-53",
    "A ZeroRedundancyOptimizer keeps each state on one rank, and consolidates them on the rank that it is told alone.",
    source=f"{SOURCE}: consolidate_state_dict, state_dict",
)
@requirement(
    "DDP-ZERO-54",
    "A ZeroRedundancyOptimizer goes on with a loaded state dict as the optimizer that it shards does.",
    source=f"{SOURCE}: load_state_dict",
)
@pytest.mark.world(2)
def test_states(world: World) -> None:
    """Consolidate on each rank in turn, and load this into a new optimizer, of both ranks or one, with another rate.

    Backwards, a rank owns parameters that do not follow one another.
    """

    def body(rank: Rank) -> int:
        alone = rank.subgroup([rank.index], use_local_synchronization=True)

        for kind, backwards in itertools.product(OPTIMIZERS, (False, True)):
            pair = Pair(rank, kind, None, backwards=backwards)
            with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                pair.zero.state_dict()
            for number in range(2):
                pair.step(number)
                for _, optimizer in pair.both:
                    optimizer.param_groups[1]["lr"] *= 0.5
            for target in range(2):
                shared: list[Any] = [pair.consolidated(target, here=rank.index == target)]
                dist.broadcast_object_list(shared, target)
                right = pair.plain.state_dict()
                for saved, group in itertools.product((right, *shared), (None, alone)):
                    other = pair.goes_on(rank, group, saved, right, range(2, 4))
                other.zero.consolidate_state_dict(to=0)  # of the rank alone
                other.goes_on(rank, None, other.zero.state_dict(), other.plain.state_dict(), range(4, 6))
        return len(pair.zero.optim.state)

    assert sum(world.run(body)) == 4  # of four parameters in groups


ORDERED = pytest.mark.needs(torch="torch.distributed.new_group(sort_ranks)")
GROUPS = {
    "the first two": (0, 1),
    "the last two": (1, 2),
    "the outer two": (0, 2),
    "the last alone": (2,),
    "in reverse": pytest.param((2, 0), marks=ORDERED),
    "the first at last": pytest.param((1, 2, 0), marks=ORDERED),
}
"""Ranks of groups, in the order in which they are numbered there."""


@requirement(
    "DDP-ZERO-7800",
    "The ranks of a ZeroRedundancyOptimizer's group consolidate states on each of them without the others, "
    "whichever ranks they are.",
    source=f"{SOURCE}: process_group, consolidate_state_dict: to",
)
@pytest.mark.parametrize("members", GROUPS.values(), ids=GROUPS)
@pytest.mark.world(3)
def test_states_of_groups(world: World, members: tuple[int, ...]) -> None:
    """Consolidate on each rank of a group, before any step or after some, and load this into a new optimizer."""
    ordered = list(members) == sorted(members)

    def body(rank: Rank) -> None:
        group = rank.subgroup(members, **({} if ordered else {"sort_ranks": False}))
        if group is None:
            return
        for kind, views in itertools.product(OPTIMIZERS, (False, True)):
            pair = Pair(rank, kind, group, backwards=views, parameters_as_bucket_view=views)
            for steps in range(3):
                for target, member in enumerate(members):
                    shared: list[Any] = [pair.consolidated(target, here=rank.index == member)]
                    dist.broadcast_object_list(shared, member, group)
                    pair.goes_on(rank, group, *shared, pair.plain.state_dict(), range(steps, steps + 2))
                pair.step(steps)

    world.run(body)


@requirement(
    "DDP-ZERO-118",
    "load_state_dict of a ZeroRedundancyOptimizer leaves what it is given as it is, so that it can be loaded again.",
    source=f"{SOURCE}: load_state_dict; torch.optim.Optimizer.load_state_dict: 'shallow copy'",
)
@pytest.mark.parametrize("group", ["the rank alone", "all ranks"])
@pytest.mark.world(2)
def test_loaded_states_stay(world: World, group: str) -> None:
    """Load what the optimizer that is sharded has saved, and look at what is left of it."""

    def body(rank: Rank) -> list[str]:
        lost = []
        alone = rank.subgroup([rank.index], use_local_synchronization=True)
        for kind in OPTIMIZERS:
            pair = Pair(rank, kind, alone if group == "the rank alone" else None)
            pair.step(0)
            given = copy.deepcopy(pair.plain.state_dict())
            had = {number: sorted(state) for number, state in given["state"].items()}
            pair.zero.load_state_dict(given)
            has = {number: sorted(state or ()) for number, state in given["state"].items()}
            lost += [f"{kind.__name__}: lost what {n} had" for n in had if has[n] != had[n]]
        return lost

    assert_on_ranks([[]] * world.size, world.run(body))


ORDERS: dict[str, Callable[[list[int]], list[int]]] = {
    "ascending": sorted,
    "descending": lambda numbers: sorted(numbers, reverse=True),
    "the first at last": lambda numbers: sorted(numbers)[1:] + sorted(numbers)[:1],
    "the last alone": lambda numbers: sorted(numbers)[-1:],
    "two of them": lambda numbers: [numbers[2], numbers[0]],
}
"""Which states of numbered parameters a state dict has, in order."""


@requirement(
    "DDP-ZERO-7002",
    "A ZeroRedundancyOptimizer gives each parameter the state that is loaded for its number, in whatever order states "
    "are.",
    source=f"{SOURCE}: load_state_dict; torch.optim.Optimizer.load_state_dict",
)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.world(2)
def test_order_of_states(world: World, order: str) -> None:
    """Load what either optimizer saved, with the states of all parameters or of some, into both, and take steps."""

    def body(rank: Rank) -> None:
        for kind, backwards in itertools.product(OPTIMIZERS, (False, True)):
            pair = Pair(rank, kind, None, backwards=backwards)
            for number in range(2):
                pair.step(number)
            pair.zero.consolidate_state_dict(to=0)
            shared: list[Any] = [pair.zero.state_dict() if rank.index == 0 else None]
            dist.broadcast_object_list(shared, 0)
            for state in (pair.plain.state_dict(), *shared):
                chosen = {number: state["state"][number] for number in ORDERS[order](list(state["state"]))}
                other = Pair(rank, kind, None, backwards=backwards)
                for _, optimizer in other.both:
                    optimizer.load_state_dict(copy.deepcopy({**state, "state": chosen}))
                for number in range(2, 4):
                    other.step(number)

    world.run(body)


@requirement(
    "DDP-ZERO-7302",
    "States that a ZeroRedundancyOptimizer has consolidated or loaded do not change in a step after it.",
    source=f"{SOURCE}: consolidate_state_dict, load_state_dict, state_dict: 'the last global optimizer state known'",
)
@pytest.mark.parametrize("whose", ["loaded", "consolidated", "consolidated of others"])
@pytest.mark.world(2)
def test_states_kept(world: World, whose: str) -> None:
    """Look at the states of the rank's own parameters, or of the others, before and after a step."""

    def body(rank: Rank) -> list[str]:
        changed = []
        for kind in OPTIMIZERS:
            pair = Pair(rank, kind, None)
            pair.step(0)
            kept = copy.deepcopy(pair.plain.state_dict())
            if whose == "loaded":
                pair.zero.load_state_dict(kept)
            for target in range(rank.size if whose != "loaded" else 0):
                pair.zero.consolidate_state_dict(to=target)
                kept = pair.zero.state_dict() if target == rank.index else kept
            own = [p in pair.zero.optim.state for p in pair.sharded]
            watched = {n: state for n, state in kept["state"].items() if own[n] != (whose == "consolidated of others")}
            assert watched, kind.__name__
            before = copy.deepcopy(watched)
            pair.step(1)
            for number, state in watched.items():
                names = [name for name, value in before[number].items() if not torch.equal(value, state[name])]
                changed += [f"{kind.__name__}: {name} of {number}" for name in names]
        return changed

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "DDP-ZERO-298",
    "A ZeroRedundancyOptimizer trains the parameters of its groups, whatever iterable they are given in.",
    source=f"{SOURCE}: params; torch.optim.Optimizer: params",
)
@pytest.mark.parametrize("given", [list, tuple, iter], ids=["list", "tuple", "iterator"])
@pytest.mark.world(2)
def test_iterables_of_groups(world: World, given: Callable[[list[nn.Parameter]], Any]) -> None:
    """Give two groups with a rate each, and take a step with gradients of one."""

    def body(rank: Rank) -> list[float]:
        parameters = [nn.Parameter(torch.ones(2, device=rank.device)) for _ in range(4)]
        groups = [{"params": given(parameters[:2])}, {"params": given(parameters[2:]), "lr": 0.25}]
        optimizer: Any = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.5)
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        return [p[0].item() for p in parameters]

    assert_on_ranks([[0.5, 0.5, 0.75, 0.75]] * world.size, world.run(body))


@requirement(
    "DDP-ZERO-299",
    "A step of a ZeroRedundancyOptimizer gives ranks equal parameters, also of groups that are unfrozen later.",
    source=f"{SOURCE}: add_param_group: 'frozen layers can be made trainable'; parameters_as_bucket_view",
)
@pytest.mark.parametrize("when", ["made", "added"])
@pytest.mark.parametrize("views", [False, True], ids=["plain", "views"])
@pytest.mark.world(2)
def test_unfrozen(world: World, views: bool, when: str) -> None:
    """A group is frozen when it is given or added; then a step with gradients of one."""

    def body(rank: Rank) -> list[float]:
        parameters = [nn.Parameter(torch.ones(2, device=rank.device), requires_grad=i < 2) for i in range(4)]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        given = groups if when == "made" else groups[:1]
        options: dict[str, Any] = {"parameters_as_bucket_view": views, "lr": 0.5}
        optimizer: Any = ZeroRedundancyOptimizer(given, torch.optim.SGD, **options)
        if when == "added":
            optimizer.add_param_group(groups[1])
        for p in parameters:
            p.requires_grad_(True)
            p.grad = torch.ones_like(p)
        optimizer.step()
        return [p[0].item() for p in parameters]

    assert_on_ranks([[0.5] * 4] * world.size, world.run(body))


def check_memory(parameters: list[nn.Parameter], first: list[nn.Parameter], views: bool, what: Any) -> None:
    """Assert that parameters fill the memory that they are in: with views, one for those that ``first`` have in one."""
    held = memory_of(parameters)
    assert sum(held.values()) == sum(p.nbytes for p in parameters), what
    if not views:
        assert [p.data_ptr() for p in parameters] == [p.data_ptr() for p in first], what
        return
    trained = [i for i, p in enumerate(parameters) if p.requires_grad]
    assert len(held) == len(parameters) - len(trained) + len(memory_of([first[i] for i in trained])), what
    for p in parameters:
        assert p.requires_grad or memory_of([p])[p.data_ptr()] == p.nbytes, what


@requirement(
    "DDP-ZERO-9170",
    "With bucket views, trained parameters of a rank fill one memory and frozen ones have their own, otherwise every "
    "parameter stays where it is.",
    source=f"{SOURCE}: parameters_as_bucket_view: 'packed into buckets', 'each params.data stays intact'",
)
@requirement(
    "DDP-ZERO-8456",
    "A step of a ZeroRedundancyOptimizer changes the parameters that are trained then alone, whichever were before.",
    source=f"{SOURCE}: step, parameters_as_bucket_view, 'frozen layers can be made trainable'",
)
@pytest.mark.parametrize("views", [False, True], ids=["plain", "views"])
@pytest.mark.world(2)
def test_frozen_in_turn(world: World, views: bool) -> None:
    """Of three parameters, train any choice after any other one, with gradients of those that are trained."""
    choices = list(itertools.product((True, False), repeat=3))
    turns = [
        n for i, one in enumerate(choices) for n in (one, *(m for other in choices[i + 1 :] for m in (one, other)))
    ]

    def body(rank: Rank) -> None:
        for kind, given in OPTIMIZERS.items():
            both = [[nn.Parameter(torch.ones(2, i + 1, device=rank.device)) for i in range(3)] for _ in range(2)]
            zero: Any = ZeroRedundancyOptimizer(both[0], kind, parameters_as_bucket_view=views, **given)
            plain = kind(both[1], **given)
            first = [nn.Parameter(p.detach()) for p in both[0]]
            for step, choice in enumerate([*turns, choices[0]]):
                for parameters, optimizer in zip(both, (zero, plain), strict=True):
                    for i, (p, trained) in enumerate(zip(parameters, choice, strict=True)):
                        p.requires_grad_(trained)
                        p.grad = torch.full_like(p, 0.5 + i - step % 4) if trained else None
                    optimizer.step()
                for i, (found, right) in enumerate(zip(*both, strict=True)):
                    assert torch.equal(found, right), (kind.__name__, step, choice, i)
                    assert found.requires_grad == choice[i], (kind.__name__, step, choice, i)
                check_memory(both[0], first, views, (kind.__name__, step, choice))

    world.run(body)


class Scaled(torch.optim.SGD):
    """SGD whose step has an argument of its own beside the closure."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:  # type: ignore[override]
        """Subtract multiples of the gradients."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * factor * p.grad
        return loss


@requirement(
    "DDP-ZERO-55",
    "A ZeroRedundancyOptimizer passes arguments of step on, and has the options that the optimizer adds to groups.",
    source=f"{SOURCE}: step, optimizer_class, defaults; torch.optim.Optimizer: param_groups",
)
@pytest.mark.parametrize("views", [False, True], ids=["plain", "views"])
@pytest.mark.world(2)
def test_arguments_of_step(world: World, views: bool) -> None:
    """Give no closure, one by position or one by name, each with another argument or without."""

    def body(rank: Rank) -> None:
        parameters = [nn.Parameter(torch.full((2,), 1.0 + i, device=rank.device)) for i in range(3)]
        optimizer: Any = ZeroRedundancyOptimizer(parameters, Scaled, lr=0.5, parameters_as_bucket_view=views)
        calls: list[int] = []

        def closure() -> float:
            calls.append(0)
            return 8.0

        for step, (form, options) in enumerate(itertools.product(range(3), ({}, {"factor": 2.0}, {"factor": 0.25}))):
            before = [p.tolist() for p in parameters]
            for i, p in enumerate(parameters):
                p.grad = torch.full_like(p, 4.0 + i)
            found = optimizer.step(*[closure] * (form == 1), **({"closure": closure} if form == 2 else {}), **options)
            assert (found, len(calls)) == ((8.0, 1) if form else (None, 0)), step
            calls.clear()
            factor = options.get("factor", 1.0)
            right = [[value - 0.5 * factor * (4.0 + i) for value in values] for i, values in enumerate(before)]
            assert [p.tolist() for p in parameters] == right, (form, options)

    world.run(body)


class Counting(torch.optim.Optimizer):
    """An optimizer whose step has an argument of its own and no closure; its groups count the steps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, factor: float = 1.0) -> None:  # type: ignore[override]
        """Subtract multiples of the gradients."""
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                p.data -= group["lr"] * factor * p.grad


@requirement(
    "DDP-ZERO-55",
    "A ZeroRedundancyOptimizer passes arguments of step on, and has the options that the optimizer adds to groups.",
    source=f"{SOURCE}: step, optimizer_class, defaults; torch.optim.Optimizer: param_groups",
)
@requirement(
    "DDP-ZERO-56",
    "A ZeroRedundancyOptimizer refuses parameters that are missing, no tensors or of several dtypes.",
    source=f"{SOURCE}: params: 'requires that all of the passed-in parameters are the same dense type'",
)
@pytest.mark.world(2)
def test_own_optimizers(world: World) -> None:
    """An optimizer of the program's own; then what is no list of parameters."""

    def body(rank: Rank) -> None:
        both = [[nn.Parameter(torch.full((2,), 1.0 + i, device=rank.device)) for i in range(3)] for _ in range(2)]
        zero, plain = ZeroRedundancyOptimizer(both[0], Counting, lr=0.5), Counting(both[1], lr=0.5)
        for number, options in enumerate(({}, {"factor": 2.0}, {"factor": 0.25}), start=1):
            for parameters, optimizer in zip(both, (zero, plain), strict=True):
                for p in parameters:
                    p.grad = torch.full_like(p, float(number))
                optimizer.step(**options)
            assert [p.tolist() for p in both[0]] == [p.tolist() for p in both[1]]
            assert zero.param_groups[0]["steps"] == number
        wrong: list[tuple[Any, type[Exception]]] = [
            ([], ValueError),
            (both[0][0], TypeError),
            (None, TypeError),
            ([both[0][0], 1.0], TypeError),
            ([both[0][0], nn.Parameter(both[0][1].double())], ValueError),
        ]
        for parameters, error in wrong:
            with pytest.raises(error):
                ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.5)
        dist.barrier()

    world.run(body)


class Averaging(Joinable):
    """Averages numbers over all ranks as gradients of parameters, those of ranks that have joined being zero."""

    def __init__(self, rank: Rank, parameters: list[nn.Parameter], group: Any) -> None:
        super().__init__()
        self.rank, self.parameters, self.group = rank, parameters, group

    def average(self, number: float) -> None:
        """Set every gradient to the average of the ranks' numbers and its own position."""
        Join.notify_join_context(self)
        self.share(number)

    def share(self, number: float) -> None:
        total = torch.tensor(number, device=self.rank.device)
        dist.all_reduce(total, group=self.group)
        for i, p in enumerate(self.parameters):
            p.grad = torch.full_like(p, total.item() / 2 + i)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a hook that takes part in averages."""
        hook = JoinHook()
        hook.main_hook = lambda: self.share(0.0)  # type: ignore[method-assign]
        return hook

    @property
    def join_device(self) -> torch.device:
        """The device of the numbers."""
        return self.rank.device

    @property
    def join_process_group(self) -> Any:
        """The group of the averages."""
        return self.group or dist.group.WORLD


@requirement(
    "DDP-ZERO-116",
    "In a Join, ranks that have joined go on to step their parts, so that all end as with the plain optimizer.",
    source=f"{SOURCE}: join_hook; torch.distributed.algorithms.join.Join",
)
@pytest.mark.world(3)
def test_join(world: World) -> None:
    """Ranks have one, two and four batches, or none, in the world or in a group; the gradients are averaged."""

    def body(rank: Rank) -> None:
        two = dist.new_group([1, 2])
        for batches in ([1, 2, 4], [4, 2, 1], [2, 2, 2], [0, 3, 0]):
            for group in (None, two):
                if group is two and rank.index == 0:
                    continue
                for kind in OPTIMIZERS:
                    for views in (False, True):
                        pair = Pair(rank, kind, group, parameters_as_bucket_view=views)
                        averaging = Averaging(rank, pair.sharded, group)
                        with Join([averaging, pair.zero]):
                            for number in range(batches[rank.index]):
                                averaging.average(8.0 + rank.index + number)
                                pair.zero.step()
                        members = range(3) if group is None else (1, 2)
                        for number in range(max(batches[r] for r in members)):
                            total = sum(8.0 + r + number for r in members if number < batches[r])
                            for i, p in enumerate(pair.whole):
                                p.grad = torch.full_like(p, total / 2 + i)
                            pair.plain.step()
                        pair.compare(f"{batches}, {kind.__name__}, {views=}, group: {group is two}")

    world.run(body)


@requirement(
    "DDP-ZERO-8800",
    "In a Join, a ZeroRedundancyOptimizer steps also if it is the only joinable or the first one.",
    source=f"{SOURCE}: join_hook; torch.distributed.algorithms.join.Join: joinables",
)
@pytest.mark.parametrize("batches", [(2, 2), (1, 3)], ids=["even", "uneven"])
@pytest.mark.parametrize("place", ["alone", "first", "last"])
@pytest.mark.world(2, timeout=5)
def test_place_in_join(world: World, place: str, batches: tuple[int, int]) -> None:
    """Step with the gradients that were set before, as they are after a last average, at each place among joinables."""

    def body(rank: Rank) -> None:
        pair = Pair(rank, torch.optim.SGD, None)
        other = Averaging(rank, pair.sharded, None)
        joinables = {"alone": [pair.zero], "first": [pair.zero, other], "last": [other, pair.zero]}[place]
        for parameters, _ in pair.both:
            for i, p in enumerate(parameters):
                p.grad = torch.full_like(p, 1.0 + i)
        with Join(joinables):
            for _ in range(batches[rank.index]):
                if place != "alone":
                    other.average(1.0)
                pair.zero.step()
        for number in range(max(batches)):
            if place != "alone":
                total = sum(number < count for count in batches)
                for i, p in enumerate(pair.whole):
                    p.grad = torch.full_like(p, total / 2 + i)
            pair.plain.step()
        pair.compare(f"{place}, {batches}")

    world.run(body)


@requirement(
    "DDP-ZERO-117",
    "The parts of a ZeroRedundancyOptimizer differ in their elements by no more than the largest parameter of a group "
    "has.",
    source=f"{SOURCE}: 'sorted-greedy algorithm to pack a number of parameters at each rank'",
)
@requirement(
    "DDP-ZERO-51",
    "A ZeroRedundancyOptimizer steps as the optimizer that it shards, with every option that its groups have then.",
    source=f"{SOURCE}: step, param_groups, parameters_as_bucket_view, process_group; torch.optim.lr_scheduler",
)
@pytest.mark.world(3)
def test_parts(world: World) -> None:
    """Divide parameters in ascending and in descending order of size, more of them, and groups of one; train some."""

    def layers(sizes: tuple[int, ...]) -> nn.Sequential:
        modules = nn.Sequential(*(nn.Linear(1, size, bias=False) for size in sizes))
        for i, p in enumerate(modules.parameters()):
            nn.init.constant_(p, 1.0 + i)
        return modules

    def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in model]).sum()  # type: ignore[operator]

    class Summed(nn.Module):
        def __init__(self, sizes: tuple[int, ...]) -> None:
            super().__init__()
            self.layers = layers(sizes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return output(self.layers, x)

    def body(rank: Rank) -> list[list[int]]:
        counts = []
        for sizes in ((1, 2, 3, 4, 5, 6), (9, 7, 5, 5, 3, 3, 1), (4, 4, 4)):
            models = [DistributedDataParallel(Summed(sizes).to(rank.device)) for _ in range(2)]
            parts = [list(model.parameters()) for model in models]
            zero = ZeroRedundancyOptimizer(parts[0], torch.optim.SGD, lr=0.5, momentum=0.5)
            plain = torch.optim.SGD(parts[1], lr=0.5, momentum=0.5)
            found = [sum(p.numel() for group in zero.optim.param_groups for p in group["params"])]
            zero.add_param_group({"params": [nn.Parameter(torch.zeros(n, device=rank.device)) for n in (6, 5, 1)]})
            found.append(sum(p.numel() for group in zero.optim.param_groups for p in group["params"]))
            alone = [{"params": [nn.Parameter(torch.zeros(n, device=rank.device))]} for n in sizes]
            grouped = ZeroRedundancyOptimizer(alone, torch.optim.SGD, lr=0.5)
            found.append(sum(p.numel() for group in grouped.optim.param_groups for p in group["params"]))
            counts.append(found)
            for step in range(3):
                for model, optimizer in zip(models, (zero, plain), strict=True):
                    optimizer.zero_grad()
                    model(torch.full((1, 1), 3.0 * (rank.index + step), device=rank.device)).backward()
                    optimizer.step()
                assert [p.tolist() for p in parts[0]] == [p.tolist() for p in parts[1]], (sizes, step)
        return counts

    ranks = world.run(body)
    for number, (before, after) in enumerate([(6, 6), (9, 9), (4, 6)]):
        for when, largest in enumerate((before, after, before)):
            found = [rank[number][when] for rank in ranks]
            assert sum(found) == [21, 33, 12][number] + 12 * (when == 1)
            assert max(found) - min(found) <= largest, (number, when, found)
