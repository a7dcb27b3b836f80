"""Averages of parameters in place of gradients: model averagers, and post-local SGD."""

from __future__ import annotations

import copy
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging import utils
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.limit import runs_with

FOLDER = "torch/distributed/algorithms/model_averaging"
SCHEDULES = [(1, 0), (1, 2), (2, 0), (2, 1), (2, 3), (3, 1), (3, 2), (3, 5), (4, 2), (2, 4)]
"""Periods, and the steps of warm-up."""


def ready(
    value: float, device: torch.device, shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    """Return a parameter of one value that has a gradient, without which it is not averaged."""
    parameter = nn.Parameter(torch.full(shape, value, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    return parameter


def refused(averager: type[Any], *given: Any) -> set[str]:
    """Return which arguments the error of an averager names that refuses what it is given."""
    with pytest.raises(ValueError, match="``") as caught:
        averager(*given)
    return set(re.findall(r"arg ``(\w+)``", str(caught.value), re.IGNORECASE))


@requirement(
    "DDP-AVG-01",
    "A PeriodicModelAverager averages in the first step after its warm-up, then in every period-th, and in no other.",
    source=f"{FOLDER}/averagers.py: PeriodicModelAverager, period, warmup_steps",
)
@requirement(
    "DDP-AVG-02",
    "Model averagers average over their group, which is the default one if none is given, and leave other ranks alone.",
    source=f"{FOLDER}/averagers.py: process_group",
)
@requirement(
    "DDP-AVG-269",
    "The error for a model averager's wrong argument names it as the averager's signature does.",
    source=f"{FOLDER}: PeriodicModelAverager, HierarchicalModelAverager",
)
@pytest.mark.filterwarnings("ignore:When period is 1")
@pytest.mark.world(3)
def test_schedules(world: World) -> None:
    """Every step begins with a value of the rank's own, with periods and warm-ups that divide each other or do not."""

    def body(rank: Rank) -> None:
        pair = dist.new_group([1, 2])
        for group, members in ((None, [0, 1, 2]), (rank.group, [0, 1, 2]), (pair, [1, 2])):
            for period, warmup in SCHEDULES:
                averager = PeriodicModelAverager(period, warmup, group)
                parameter = ready(0.0, rank.device)
                averaged = []
                for step in range(warmup + 2 * period + 1):
                    own = [6.0 * (r + 1) + step for r in range(3)]
                    parameter.data.fill_(own[rank.index])
                    averager.average_parameters([parameter])
                    mean = sum(own[member] for member in members) / len(members)
                    found = parameter.tolist()
                    assert found in ([mean] * 2, [own[rank.index]] * 2), (period, warmup, step)
                    if found == [mean] * 2 != [own[rank.index]] * 2:
                        averaged.append(step)
                    assert averager.step == step + 1
                moves = rank.index in members and mean != own[rank.index]  # the middle rank has the mean itself
                right = [warmup, warmup + period, warmup + 2 * period] if moves else []
                assert averaged == right, (period, warmup, members)
        for period, warmup in ((0, 0), (-1, 0), (2, -1)):
            assert refused(PeriodicModelAverager, period, warmup) == {"period" if period < 1 else "warmup_steps"}
        with pytest.warns(UserWarning, match="period is 1"):
            PeriodicModelAverager(1)

    world.run(body)


FORMS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "parameters": lambda every: every,
    "a generator": lambda every: (p for p in every),
    "a module's": lambda every: nn.ParameterList(every).parameters(),
    "one group": lambda every: [{"params": every, "lr": 0.5}],
    "two groups": lambda every: [{"params": every[:2]}, {"params": every[2:], "lr": 0.5}],
    "a group each": lambda every: [{"params": [p]} for p in every],
    "an optimizer's": lambda every: torch.optim.SGD([{"params": every[:-1]}, {"params": every[-1:]}]).param_groups,
}
KINDS: dict[str, list[torch.dtype]] = {
    "one": [torch.float32] * 4,
    "wide and narrow": [torch.float32, torch.float64, torch.float32, torch.bfloat16],
    "narrow": [torch.bfloat16, torch.float16, torch.float16, torch.bfloat16],
    "complex": [torch.complex64, torch.complex64, torch.complex64],
}
SHAPES = [(2, 3), (), (4,), (1, 2, 2)]


@requirement(
    "DDP-AVG-3604",
    "Model averagers average the parameters that have gradients, and leave others as they are, even if these are all.",
    source=f"{FOLDER}/utils.py: get_params_to_average: 'filters out the parameters that do not contain any gradients'",
)
@pytest.mark.filterwarnings("ignore:When period is 1")
@pytest.mark.parametrize("count", [2, 1, 0])
@pytest.mark.world(2)
def test_without_gradients(world: World, count: int) -> None:
    """Give parameters and groups of them to each averager; of two parameters, both have a gradient, one or none."""

    def body(rank: Rank) -> None:
        for averager in PeriodicModelAverager(1), HierarchicalModelAverager(OrderedDict([(1, 2)])):
            for grouped in False, True:
                parameters = [ready(float(rank.index), rank.device) for _ in range(2)]
                for parameter in parameters[count:]:
                    parameter.grad = None
                averager.average_parameters([{"params": parameters}] if grouped else parameters)
                found = [parameter.tolist() for parameter in parameters]
                assert found == [[0.5] * 2] * count + [[float(rank.index)] * 2] * (2 - count), type(averager).__name__
            assert averager.step == 2

    world.run(body)


@requirement(
    "DDP-AVG-6902",
    "A model averager averages a parameter with the same parameter of other ranks, whichever have a gradient of it.",
    source=f"{FOLDER}/averagers.py: PeriodicModelAverager: 'averages parameters periodically'",
)
@pytest.mark.filterwarnings("ignore:When period is 1")
@pytest.mark.parametrize("used", ["by all", "by different ranks"], ids=["all", "different"])
@pytest.mark.world(2)
def test_of_different_parameters(world: World, used: str) -> None:
    """Ranks have used the same two of three parameters, or one that is theirs beside the first."""

    def body(rank: Rank) -> None:
        parameters = [ready(value + rank.index, rank.device) for value in (1.0, 10.0, 100.0)]
        parameters[2 - (rank.index if used == "by different ranks" else 0)].grad = None
        PeriodicModelAverager(1).average_parameters(parameters)
        found = [p[0].item() for p in parameters]
        assert found[0] == 1.5, f"used {used}: {found}"
        right = {10.0 + rank.index, 10.5}, {100.0 + rank.index, 100.5}
        assert all(value in allowed for value, allowed in zip(found[1:], right, strict=True)), f"used {used}: {found}"
        assert used == "by different ranks" or found[1:] == [10.5, 100.0 + rank.index]

    world.run(body)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.ones(1, 2, 2, 2),
    "channels last": lambda: torch.ones(1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.ones(1, 2, 2, 2).mT.contiguous().mT,
}
"""How the elements of a convolution's weight lie in memory."""


@requirement(
    "DDP-AVG-9300",
    "Averaging leaves the strides of every parameter as they are.",
    source=f"{FOLDER}/utils.py: average_parameters: 'Averages all the given parameters'",
)
@requirement(
    "DDP-AVG-9301",
    "DDP's gradients are averages by element also after a model averager has averaged the parameters.",
    source=f"{FOLDER}/averagers.py: PeriodicModelAverager: 'averages parameters periodically'",
)
@pytest.mark.filterwarnings("ignore:When period is 1")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.world(2)
def test_layouts(world: World, layout: str) -> None:
    """Take steps with DDP on a convolution with a weight of each layout, and average after each with each averager."""
    image = torch.arange(8.0).view(1, 2, 2, 2)  # the gradient of an output's sum by the weight

    def body(rank: Rank) -> tuple[list[Any], list[Any]]:
        strides, gradients = [], []
        for averager in PeriodicModelAverager(1), HierarchicalModelAverager(OrderedDict([(1, 2)])):
            for unused in False, True:
                module = nn.Conv2d(2, 1, 2, bias=False, device=rank.device)
                module.weight = nn.Parameter(LAYOUTS[layout]().to(rank.device))
                model = DistributedDataParallel(module, find_unused_parameters=unused)
                for _ in range(2):
                    model.zero_grad()
                    model(image.to(rank.device) * (1 + 2 * rank.index)).sum().backward()
                    gradients.append(module.weight.grad.flatten().tolist())  # type: ignore[union-attr]
                    module.weight.data.fill_(rank.index)
                    averager.average_parameters(model.parameters())
                    assert module.weight.tolist() == torch.full((1, 2, 2, 2), 0.5).tolist()
                    strides.append(module.weight.stride())
        return strides, gradients

    right = [LAYOUTS[layout]().stride()] * 8, [(2 * image).flatten().tolist()] * 8
    assert_on_ranks([right] * 2, world.run(body))


@requirement(
    "DDP-AVG-03",
    "Averaging leaves every parameter the object that it was, with its shape, dtype, device and gradient.",
    source=f"{FOLDER}/utils.py: average_parameters",
)
@requirement(
    "DDP-AVG-04",
    "Model averagers average every parameter that has a gradient, given as parameters or as groups, but no other.",
    source=f"{FOLDER}/utils.py: get_params_to_average, average_parameters_or_parameter_groups",
)
@pytest.mark.world(2)
def test_parameters(world: World) -> None:
    """Give parameters of one or several dtypes in every form, all of them with gradients or one without."""

    def body(rank: Rank) -> None:
        averagers: list[Callable[[Any], None]] = [
            lambda given: PeriodicModelAverager(2).average_parameters(given),
            lambda given: HierarchicalModelAverager(OrderedDict({2: 2})).average_parameters(given),
            lambda given: utils.average_parameters_or_parameter_groups(given, rank.group),
        ]
        for kind, dtypes in KINDS.items():
            for form, give in FORMS.items():
                for without in (None, 0, len(dtypes) - 1):
                    average = averagers[(without or 0) % 3]
                    every = [
                        ready(4.0 * rank.index + i, rank.device, shape, dtype)
                        for i, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=False))
                    ]
                    gradients = [p.grad for p in every]
                    if without is not None:
                        every[without].grad = gradients[without] = None
                    average(give(every))
                    for i, (p, dtype) in enumerate(zip(every, dtypes, strict=True)):
                        value = 4.0 * rank.index + i if i == without else 2.0 + i
                        where = (kind, form, without, i)
                        assert (p.dtype, p.shape, p.device) == (dtype, SHAPES[i], rank.device), where
                        assert torch.equal(p.detach(), torch.full_like(p, value)), where
                        assert p.grad is gradients[i], where
                        assert p.requires_grad, where
                        assert p.is_leaf, where
        with pytest.raises(NotImplementedError):
            PeriodicModelAverager(2).average_parameters([torch.ones(1)])  # type: ignore[list-item]
        assert utils.get_params_to_average([{"params": every}, {"params": every[:2]}]) == [*every[:-1], *every[:2]]  # type: ignore[list-item]

    world.run(body)


@requirement(
    "DDP-AVG-05",
    "A HierarchicalModelAverager averages after its warm-up, in the group of the largest period that divides the step.",
    source=f"{FOLDER}/hierarchical_model_averager.py: period_group_size_dict, warmup_steps",
)
@requirement(
    "DDP-AVG-269",
    "The error for a model averager's wrong argument names it as the averager's signature does.",
    source=f"{FOLDER}: PeriodicModelAverager, HierarchicalModelAverager",
)
@pytest.mark.world(4)
def test_hierarchies(world: World) -> None:
    """Pairs and all four ranks have periods of which one divides the other or not, after several warm-ups.

    Besides, there are empty hierarchies, periods that are not positive, and sizes that the group does not have.
    """

    def body(rank: Rank) -> None:
        for periods in ([2, 4], [2, 3], [1, 2], [3]):
            sizes = OrderedDict(zip(periods, [2, 4] if len(periods) > 1 else [4], strict=True))
            for warmup in (0, 3):
                averager = HierarchicalModelAverager(sizes, warmup)
                parameter = ready(0.0, rank.device)
                for step in range(10):
                    own = [8.0 * 3**r + step for r in range(4)]
                    parameter.data.fill_(own[rank.index])
                    averager.average_parameters([parameter])
                    size = max([sizes[p] for p in periods if step >= warmup and step % p == 0], default=1)
                    first = rank.index - rank.index % size
                    assert parameter.tolist() == [sum(own[first : first + size]) / size] * 2, (periods, warmup, step)
        assert refused(HierarchicalModelAverager, OrderedDict({2: 4}), -1) == {"warmup_steps"}
        pair = [dist.new_group(members) for members in ([0, 1], [2, 3])][rank.index // 2]
        names = set(inspect.signature(HierarchicalModelAverager).parameters)
        every: list[Any] = [None, {}, {0: 4}, {-1: 2, 2: 4}, {2: 2}, {2: 1}, {2: 8}, {2: 4, 4: 2}]
        of_pairs: list[Any] = [{2: 4}, {2: 2, 4: 4}, {2: 2, 4: 1}]
        for group, wrong in (None, every), (rank.group, every), (pair, of_pairs):
            for sizes in wrong:
                named = refused(HierarchicalModelAverager, OrderedDict(sizes) if sizes else sizes, 0, group)
                if runs_with(">=2.13"):  # before, the error for a wrong size names an argument that does not exist
                    assert "period_group_size_dict" in named <= names, (sizes, named)
        parameter = ready(float(rank.index), rank.device)
        HierarchicalModelAverager(OrderedDict({2: 2}), 0, pair).average_parameters([parameter])
        assert parameter.tolist() == [rank.index // 2 * 2 + 0.5] * 2

    world.run(body)


@requirement(
    "DDP-AVG-3656",
    "In a hierarchy of three levels, each averages over its own groups in the steps of its period that no larger one "
    "has, also if levels have the same ranks.",
    source=f"{FOLDER}/hierarchical_model_averager.py: period_group_size_dict",
)
@pytest.mark.world(8)
def test_levels(world: World) -> None:
    """Groups of two, four and eight ranks have periods that divide one another or do not, or two have as many ranks."""

    def body(rank: Rank) -> None:
        for levels in ({2: 2, 4: 4, 8: 8}, {1: 2, 3: 4, 4: 8}, {2: 2, 4: 2, 6: 8}, {1: 4, 2: 8, 4: 8}):
            averager = HierarchicalModelAverager(OrderedDict(levels), 1)
            parameter = ready(0.0, rank.device)
            for step in range(13):
                own = [8.0 * 3**r + step for r in range(8)]
                parameter.data.fill_(own[rank.index])
                averager.average_parameters([parameter])
                size = (
                    levels[max(p for p in levels if step % p == 0)]
                    if step and any(step % p == 0 for p in levels)
                    else 1
                )
                first = rank.index - rank.index % size
                assert parameter.tolist() == [sum(own[first : first + size]) / size] * 2, (levels, step)

    world.run(body)


CLEARED: list[tuple[dict[str, bool], bool]] = [
    ({}, True),
    ({"set_to_none": True}, True),
    ({"set_to_none": False}, False),
]
"""Options of zero_grad, and whether gradients are None after it."""


class Local:
    """Two parameters in groups of their own, an optimizer with momentum, and post-local SGD from a third step on."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.both = [nn.Parameter(torch.zeros(2, device=rank.device)) for _ in range(2)]
        groups = [{"params": [p], "lr": 2.0**-i} for i, p in enumerate(self.both)]
        self.inner = torch.optim.SGD(groups, momentum=0.5)
        self.averager = PeriodicModelAverager(3, 2)
        self.optimizer = PostLocalSGDOptimizer(self.inner, self.averager)

    def step(self, number: int) -> list[list[float]]:
        """Run a step and return the parameters, which are equal on all ranks after an average alone."""
        for i, p in enumerate(self.both):
            p.grad = torch.full_like(p, 2.0 * self.rank.index + number + i)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert all(p.grad is None for p in self.both)
        return [p.tolist() for p in self.both]


@requirement(
    "DDP-AVG-06",
    "Every step of a PostLocalSGDOptimizer is one of the local optimizer, and an average of all groups if it is due.",
    source="torch.distributed.optim.PostLocalSGDOptimizer: step",
)
@requirement(
    "DDP-AVG-07",
    "A PostLocalSGDOptimizer with a loaded state dict goes on as the one that was saved, at whichever step that was.",
    source="torch.distributed.optim.PostLocalSGDOptimizer: state_dict, load_state_dict",
)
@requirement(
    "DDP-AVG-08",
    "A state dict without a step sets a PostLocalSGDOptimizer to its first step, with a warning.",
    source="torch.distributed.optim.PostLocalSGDOptimizer: load_state_dict",
)
@requirement(
    "DDP-AVG-59",
    "zero_grad of a PostLocalSGDOptimizer clears gradients of all groups, to None or to zero as it is told.",
    source="torch.distributed.optim.PostLocalSGDOptimizer: zero_grad, set_to_none",
)
@pytest.mark.world(2)
def test_post_local_sgd(world: World) -> None:
    """Save before each of nine steps, and load into an optimizer that has not run or that is two steps ahead."""
    steps = 9

    def body(rank: Rank) -> list[list[list[float]]]:
        local, states, seen = Local(rank), [], []
        for number in range(steps):
            state = copy.deepcopy(local.optimizer.state_dict())
            assert state["step"] == number
            states.append((state, [p.detach().clone() for p in local.both]))
            seen.append(local.step(number))
        assert local.optimizer.state is local.inner.state
        assert local.optimizer.param_groups is local.inner.param_groups
        for number, (state, values) in enumerate(states):
            for ahead in (0, 2):
                other = Local(rank)
                for _ in range(ahead):
                    other.step(0)
                for p, value in zip(other.both, values, strict=True):
                    p.data.copy_(value)
                other.optimizer.load_state_dict(copy.deepcopy(state))
                assert other.averager.step == number
                assert [other.step(n) for n in range(number, steps)] == seen[number:], (number, ahead)
        local.optimizer.load_state_dict(states[4][0])
        without = {key: value for key, value in states[4][0].items() if key != "step"}
        with pytest.warns(UserWarning, match="step counter"):
            local.optimizer.load_state_dict(without)
        assert local.averager.step == 0
        added = nn.Parameter(torch.zeros(1, device=rank.device))
        local.optimizer.add_param_group({"params": [added]})
        assert local.inner.param_groups[-1]["params"] == [added]
        for options, none in CLEARED:
            for p in (*local.both, added):
                p.grad = torch.ones_like(p)
            kept = [p.grad for p in (*local.both, added)]
            local.optimizer.zero_grad(**options)
            for p, before in zip((*local.both, added), kept, strict=True):
                assert (p.grad is None) == none, options
                assert none or (p.grad is before and not p.grad.any()), options
                assert not none or before.all(), options
        return seen

    first, second = world.run(body)
    speeds = torch.zeros(2, 2)  # of ranks and parameters
    values = torch.zeros(2, 2)
    for number in range(steps):
        for rank in range(2):
            for i in range(2):
                speeds[rank, i] = 0.5 * speeds[rank, i] + 2.0 * rank + number + i
                values[rank, i] -= speeds[rank, i] * 2.0**-i
        if number >= 2 and (number - 2) % 3 == 0:
            values[:] = values.mean(0)
        found = torch.tensor([first[number], second[number]])
        assert torch.equal(found, values[:, :, None].expand(2, 2, 2)), number


@requirement(
    "DDP-AVG-8457",
    "load_state_dict of a PostLocalSGDOptimizer leaves what it is given as it is, so that it can be loaded again.",
    source="torch.distributed.optim.PostLocalSGDOptimizer: load_state_dict; torch.optim.Optimizer.load_state_dict: "
    "'shallow copy'",
)
@pytest.mark.parametrize("has_step", [True, False], ids=["with a step", "without one"])
@pytest.mark.world(2)
def test_loaded_again(world: World, has_step: bool) -> None:
    """Load a state dict before each of six steps twice into one optimizer and once into another, which goes on."""

    def plain(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {n: each["momentum_buffer"].tolist() for n, each in state["state"].items()}}

    def body(rank: Rank) -> None:
        local = Local(rank)
        for number in range(6):
            given, values = copy.deepcopy(local.optimizer.state_dict()), [p.tolist() for p in local.both]
            if not has_step:
                del given["step"]
            kept, once, other = copy.deepcopy(plain(given)), Local(rank), Local(rank)
            for each in (once, once, other):
                with nullcontext() if has_step else pytest.warns(UserWarning, match="step counter"):
                    each.optimizer.load_state_dict(given)
                assert each.averager.step == (number if has_step else 0), number
                assert plain(given) == kept, number
            for p, value in zip(other.both, values, strict=True):
                p.data.copy_(torch.tensor(value))
            found, right = other.step(number), local.step(number)
            assert found == right or not has_step, number

    world.run(body)


@requirement(
    "DDP-AVG-239",
    "The param_groups of a PostLocalSGDOptimizer are those that it steps and averages, after load_state_dict as well.",
    source="torch.distributed.optim.PostLocalSGDOptimizer: load_state_dict, add_param_group; torch.optim.lr_scheduler",
)
@pytest.mark.parametrize("loaded", [False, True], ids=["made", "loaded"])
@pytest.mark.world(2)
def test_groups_of_post_local_sgd(world: World, loaded: bool) -> None:
    """A scheduler halves the rate of a group, another group is added, and a step is averaged."""

    def body(rank: Rank) -> list[float]:
        first, added = (nn.Parameter(torch.full((1,), float(rank.index), device=rank.device)) for _ in range(2))
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD([first], lr=1.0), PeriodicModelAverager(2))
        if loaded:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=9)
        optimizer.add_param_group({"params": [added]})
        for p in (first, added):
            p.grad = torch.ones_like(p)
        optimizer.step()
        return [first.item(), added.item()]

    assert_on_ranks([[0.0, -0.5]] * world.size, world.run(body))


@requirement(
    "DDP-AVG-06",
    "Every step of a PostLocalSGDOptimizer is one of the local optimizer, and an average of all groups if it is due.",
    source="torch.distributed.optim.PostLocalSGDOptimizer: step",
)
@pytest.mark.world(4)
def test_hierarchical_post_local_sgd(world: World) -> None:
    """Average over pairs every second step and over all ranks every fourth, gradients being views of buckets or not."""

    def body(rank: Rank) -> None:
        alone = [dist.new_group([r]) for r in range(4)][rank.index]
        for views in (False, True):
            model = DistributedDataParallel(
                nn.Linear(1, 1, bias=False).to(rank.device), process_group=alone, gradient_as_bucket_view=views
            )
            model.module.weight.data.zero_()
            averager = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), 1)
            optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), averager)
            right = [0.0] * 4
            for number in range(9):
                optimizer.zero_grad()
                model(torch.full((1, 1), 8.0 * (rank.index + number), device=rank.device)).sum().backward()
                optimizer.step()
                right = [value - 4.0 * (r + number) for r, value in enumerate(right)]
                if number > 0 and number % 2 == 0:
                    size = 4 if number % 4 == 0 else 2
                    right = [sum(right[r - r % size : r - r % size + size]) / size for r in range(4)]
                assert model.module.weight.item() == right[rank.index], (views, number)

    world.run(body)
