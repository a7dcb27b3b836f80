"""The communication hooks that PyTorch ships: over all ranks, in subgroups, and what they send."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages

# Groups are not destroyed here: a thread of gloo that still holds one, in a hook's callback, aborts if it ends it.
FOLDER = "torch/distributed/algorithms/ddp_comm_hooks"
FACTORS = [5, 2, 1]
"""The factor of each rank's gradients, which are three times a value."""
STEPS = 3


class Two(nn.Module):
    """Two parameters whose gradients are given values times the input; each is a bucket of its own after a step."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros_like(values)) for _ in range(2))
        self.register_buffer("values", values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ((self.first + 2 * self.second) * self.values * x).sum()
        return result


@dataclass(frozen=True)
class Shipped:
    """A hook, the values of which its result is exact, and what it sends of float types."""

    hook: Callable[[Any, Any], Any]
    values: torch.Tensor
    sends: set[str]
    state: Callable[[Any], Any] = lambda group: group


def exact() -> torch.Tensor:
    """Return values of 7 bits: three times a value needs more than bfloat16 has, and no sum needs more than float16."""
    return torch.tensor([77.0, -101.0, 127 / 8, 0.0, 93 / 64, -65.0, 1.0])


def wide() -> torch.Tensor:
    """Return values of 4 bits, of which float16 has no multiples."""
    return torch.tensor([13.0 * 2**13, -(2.0**40), 3.0, 0.0, 11 * 2.0**-40])


def bytes_like(size: int) -> torch.Tensor:
    """Return whole numbers that 8 bits have, the smallest and the largest of which are in every 512 of them."""
    values = torch.arange(size) * 37 % 256 - 128.0
    values[::512], values[1::512] = -128, 127
    return values * torch.where(torch.arange(size) < 512, 1.0, 4.0)


def unnamed(hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a hook that DistributedDataParallel does not know: by name, it accepts some only with some backends."""
    return lambda state, bucket: hook(state, bucket)


def power(**options: Any) -> Callable[[Any], Any]:
    return lambda group: powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=STEPS, **options)


def elsewhere(group: Any, bucket: Any) -> Any:
    """Average over the group, and leave the bucket as it is: the result is a tensor of the hook's own."""
    group = dist.group.WORLD if group is None else group
    averaged = bucket.buffer() / group.size()
    future: Any = dist.all_reduce(averaged, group=group, async_op=True).get_future()  # type: ignore[union-attr]
    return future.then(lambda done: done.value()[0])


def hooks() -> dict[str, Shipped]:
    allreduce, of = default_hooks.allreduce_hook, Shipped
    return {
        "allreduce_hook": of(allreduce, wide(), {"Float"}),
        "fp16_compress_hook": of(default_hooks.fp16_compress_hook, exact(), {"Half"}),
        "bf16_compress_hook": of(unnamed(default_hooks.bf16_compress_hook), wide(), {"BFloat16"}),
        "fp16_compress_wrapper": of(default_hooks.fp16_compress_wrapper(allreduce), exact(), {"Half"}),
        "bf16_compress_wrapper": of(unnamed(default_hooks.bf16_compress_wrapper(allreduce)), wide(), {"BFloat16"}),
        "both wrappers": of(
            unnamed(default_hooks.bf16_compress_wrapper(default_hooks.fp16_compress_wrapper(allreduce))),
            torch.tensor([9.0, -13.0, 0.5]),
            {"Half"},
        ),
        "fp16_compress_wrapper of noop_hook": of(
            default_hooks.fp16_compress_wrapper(debugging_hooks.noop_hook), exact(), set()
        ),
        "fp16_compress_wrapper of a hook with another tensor": of(
            default_hooks.fp16_compress_wrapper(elsewhere), exact(), {"Half"}
        ),
        "bf16_compress_wrapper of a hook with another tensor": of(
            unnamed(default_hooks.bf16_compress_wrapper(elsewhere)), wide(), {"BFloat16"}
        ),
        "noop_hook": of(debugging_hooks.noop_hook, wide(), set()),
        "powerSGD_hook": of(powerSGD_hook.powerSGD_hook, wide(), {"Float"}, power()),
        "batched_powerSGD_hook": of(powerSGD_hook.batched_powerSGD_hook, wide(), {"Float"}, power()),
        "fp16_compress_wrapper of powerSGD_hook": of(
            default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), exact(), {"Half"}, power()
        ),
        "post_localSGD_hook": of(
            post_localSGD_hook.post_localSGD_hook,
            wide(),
            {"Float"},
            lambda group: post_localSGD_hook.PostLocalSGDState(group, None, STEPS),
        ),
    }


@requirement(
    "REPL-HOOK-11",
    "Every communication hook that PyTorch ships averages over the ranks of the group that it is given.",
    source=f"{FOLDER}: process_group",
)
@requirement(
    "REPL-HOOK-12",
    "A communication hook of a narrower dtype sends nothing else, and gives gradients in the dtype of parameters.",
    source=f"{FOLDER}/default_hooks.py, quantization_hooks.py",
)
@requirement(
    "REPL-HOOK-13",
    "The no-op communication hook sends nothing, so that each rank keeps its own gradients.",
    source=f"{FOLDER}/debugging_hooks.py: noop_hook",
)
@pytest.mark.parametrize("where", ["world", "group"])
@pytest.mark.world(3)
def test_groups(world: World, where: str) -> None:
    """All ranks, or rank 0 alone and the other two, run three steps with each hook; all values stay exact."""

    def body(rank: Rank) -> None:
        group = None
        if where == "group":
            alone, others = rank.subgroup([0]), rank.subgroup([1, 2])
            group = alone or others
        members = [0, 1, 2] if group is None else [0] if rank.index == 0 else [1, 2]
        for name, shipped in hooks().items():
            module = Two(shipped.values).to(rank.device)
            model: Any = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-6)
            model.register_comm_hook(shipped.state(group), shipped.hook)
            factors = [FACTORS[rank.index]] if "noop" in name else [FACTORS[member] for member in members]
            right = 3 * sum(factors) / len(factors) * shipped.values
            for number in range(STEPS):
                output = model(torch.tensor(3.0 * FACTORS[rank.index], device=rank.device))
                before = messages.mark()
                output.backward()
                sent = [m for m in messages.since(before) if m.dtype not in ("Int", "Long")]
                assert not sent or {m.dtype for m in sent} == shipped.sends, (name, number)
                assert all(m.members == tuple(members) for m in sent), (name, number)
                for p, times in ((module.first, 1), (module.second, 2)):
                    assert p.grad.dtype == torch.float32, (name, number)
                    assert torch.equal(p.grad.cpu(), times * right), (name, number, p.grad, times * right)
                model.zero_grad()

    world.run(body)


@requirement(
    "REPL-HOOK-14",
    "A quantization hook averages values that 8 bits have exactly.",
    source=f"{FOLDER}/quantization_hooks.py: 'returns the mean'",
)
@pytest.mark.parametrize(("name", "size"), [("pertensor", 100), ("perchannel", 512), ("perchannel", 1030)])
@pytest.mark.world(2)
def test_quantization(world: World, name: str, size: int) -> None:
    """Values from 512 on have another scale.

    All scales are powers of two, which are exact even if a device divides by 255 by way of the rounded reciprocal.
    """

    def body(rank: Rank) -> None:
        model: Any = DistributedDataParallel(Matrices([bytes_like(size)]).to(rank.device))
        model.register_comm_hook(None, getattr(quantization_hooks, f"quantization_{name}_hook"))
        for _ in range(STEPS):
            output = model(torch.tensor([2.0, 8.0][rank.index], device=rank.device))
            before = messages.mark()
            output.backward()
            assert {m.dtype for m in messages.since(before)} <= {"Float", "Byte"}
            assert torch.equal(model.module.weights[0].grad.cpu(), 5 * bytes_like(size))
            model.zero_grad()

    world.run(body)


@requirement(
    "REPL-HOOK-15",
    "The post-local SGD hook averages over its group for the given number of steps, and over its subgroup afterwards.",
    source=f"{FOLDER}/post_localSGD_hook.py: PostLocalSGDState",
)
@requirement(
    "REPL-HOOK-16",
    "Without post_local_gradient_allreduce, the post-local SGD hook sends nothing after the given number of steps.",
    source=f"{FOLDER}/post_localSGD_hook.py: post_local_gradient_allreduce",
)
@pytest.mark.world(3)
def test_post_local_sgd(world: World) -> None:
    """Two steps of two buckets are global, and three local: over rank 0 alone and the other two, or over no group."""

    def body(rank: Rank) -> None:
        alone, others = rank.subgroup([0]), rank.subgroup([1, 2])
        subgroup, members = (alone, [0]) if rank.index == 0 else (others, [1, 2])
        for process_group in (None, rank.group):
            for local in (True, False):
                state = post_localSGD_hook.PostLocalSGDState(process_group, subgroup, 2, local)
                model: Any = DistributedDataParallel(Two(exact()).to(rank.device), bucket_cap_mb=1e-6)
                model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
                for number in range(5):
                    output = model(torch.tensor(6.0 * FACTORS[rank.index], device=rank.device))
                    before = messages.mark()
                    output.backward()
                    ranks = [0, 1, 2] if number < 2 else members if local else [rank.index]
                    sent = [m.members for m in messages.since(before) if m.dtype == "Float"]
                    assert set(sent) <= {tuple(ranks)}, (local, number)
                    assert number < 2 or local or not sent, number
                    mean = sum(FACTORS[r] for r in ranks) / len(ranks)
                    assert torch.equal(model.module.second.grad.cpu(), 12 * mean * exact()), (local, number)
                    model.zero_grad()

    world.run(body)


POWERS: dict[str, dict[str, Any]] = {
    "default": {},
    "rank 2": {"matrix_approximation_rank": 2},
    "no feedback": {"use_error_feedback": False},
    "cold": {"warm_start": False},
    "epsilon": {"orthogonalization_epsilon": 1e-8},
    "rank 3 with epsilon": {
        "matrix_approximation_rank": 3,
        "orthogonalization_epsilon": 1e-8,
        "min_compression_rate": 1,
    },
    "batched": {"batch_tensors_with_same_shape": True},
    "batched rank 2": {"batch_tensors_with_same_shape": True, "matrix_approximation_rank": 2},
    "seed": {"random_seed": 7},
}


class Matrices(nn.Module):
    """Two matrices of one shape, one of another, and a vector; their gradients are given values times the input."""

    SHAPES = ((8, 16), (8, 16), (32, 8), (5,))

    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros_like(value) for value in values)
        self.values = values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        products = [(p * v.to(p.device) * x).sum() for p, v in zip(self.weights, self.values, strict=True)]
        return torch.stack(products).sum()


def of_rank(rank: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return tensors of the shapes, no two of which are equal, and of which matrices have a rank of 1 to 3."""

    def value(shape: tuple[int, ...]) -> torch.Tensor:
        first, *others = (torch.arange(1.0, n + 1) for n in shape)
        if not others:
            return first
        terms = [
            torch.outer(first, *others),
            50 * torch.outer((-1.0) ** first, (-1.0) ** others[0]),
            9 * torch.outer(first % 3, others[0] % 5),
        ]
        return torch.stack(terms[:rank]).sum(0)

    return [(number + 1) * value(shape) for number, shape in enumerate(shapes)]


@requirement(
    "REPL-HOOK-17",
    "Under every option, the compressing PowerSGD hook gives the average over its group if that has the given rank.",
    source=f"{FOLDER}/powerSGD_hook.py: PowerSGDState",
)
@requirement(
    "REPL-HOOK-18",
    "The compressing PowerSGD hook sends two factors of the given rank for each matrix, and what is not compressed.",
    source=f"{FOLDER}/powerSGD_hook.py: matrix_approximation_rank, min_compression_rate",
)
@requirement(
    "REPL-HOOK-19",
    "The PowerSGD hook leaves the random number generator's state unchanged.",
    source=f"{FOLDER}/powerSGD_hook.py: random_seed",
)
@pytest.mark.world(3)
def test_power_sgd_options(world: World) -> None:
    """Run two steps that average and three that compress, in the group of the last two ranks."""

    def body(rank: Rank) -> None:
        group = rank.subgroup([1, 2])
        if group is None:
            return
        for name, options in POWERS.items():
            approximation = options.get("matrix_approximation_rank", 1)
            values = of_rank(approximation, Matrices.SHAPES)
            size = 5 + sum(approximation * sum(shape) for shape in Matrices.SHAPES if len(shape) == 2)
            state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, **options)
            model: Any = DistributedDataParallel(Matrices(values).to(rank.device), process_group=group)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            torch.manual_seed(rank.index)
            random = torch.get_rng_state()
            for number in range(5):
                output = model(torch.tensor(float(rank.index), device=rank.device))
                before = messages.mark()
                output.backward()
                sent = [m for m in messages.since(before) if m.dtype == "Float"]
                if sent and number >= 2:
                    assert sum(m.shape[0] for m in sent) == size, (name, number)
                assert all(m.members == (1, 2) for m in sent), (name, number)
                for p, value in zip(model.module.weights, values, strict=True):
                    torch.testing.assert_close(p.grad.cpu(), 1.5 * value, rtol=1e-4, atol=1e-3, msg=f"{name} {number}")
                model.zero_grad()
                assert state.iter == number + 1, name
            assert torch.equal(torch.get_rng_state(), random), name
            before_compression = sum(value.numel() for value in values)
            stats = before_compression / size, 3 * before_compression, 3 * size
            assert state.compression_stats() == stats, name

    world.run(body)


ZEROS = {"one of two of a shape": (1,), "the only one of its shape": (2,), "all": (0, 1, 2, 3)}
"""Which of the matrices have gradients of zero."""


@requirement(
    "REPL-HOOK-8455",
    "With an orthogonalization_epsilon, PowerSGD averages gradients of zero to zero in every step, under every option.",
    source=f"{FOLDER}/powerSGD_hook.py: PowerSGDState: orthogonalization_epsilon",
)
@pytest.mark.parametrize("zeros", ZEROS.values(), ids=ZEROS)
@pytest.mark.world(2)
def test_power_sgd_zeros(world: World, zeros: tuple[int, ...]) -> None:
    """Some gradients are zero in all steps, and those of one rank in some; the last five of seven are compressed."""
    factors = [(1.0, 2.0), (0.0, 2.0), (1.0, 0.0)]

    def body(rank: Rank) -> None:
        for name, options in POWERS.items():
            given = {"orthogonalization_epsilon": 1e-8, "start_powerSGD_iter": 2, **options}
            values = of_rank(options.get("matrix_approximation_rank", 1), Matrices.SHAPES)
            for number in zeros:
                values[number].zero_()
            model: Any = DistributedDataParallel(Matrices(values).to(rank.device))
            model.register_comm_hook(powerSGD_hook.PowerSGDState(None, **given), powerSGD_hook.powerSGD_hook)
            for step in range(7):
                own = factors[step % 3]
                model(torch.tensor(own[rank.index], device=rank.device)).backward()
                for number, (p, value) in enumerate(zip(model.module.weights, values, strict=True)):
                    what = f"{name}, step {step}, {number}"
                    right = sum(own) / 2 * value
                    torch.testing.assert_close(p.grad.cpu(), right, rtol=1e-4, atol=1e-3, msg=what)
                    assert number not in zeros or not p.grad.any(), what
                model.zero_grad()

    world.run(body)


@requirement(
    "REPL-HOOK-464",
    "The PowerSGD hook gives the average of gradients in one bucket or several.",
    source=f"{FOLDER}/powerSGD_hook.py: powerSGD_hook; pytorch/pytorch#48478",
)
@pytest.mark.parametrize("cap", [25, 1e-4], ids=["one", "several"])
@pytest.mark.world(2, timeout=3)
def test_power_sgd_buckets(world: World, cap: float) -> None:
    """Six matrices of rank one are in one bucket or each in its own; two steps average, and six compress."""
    values = of_rank(1, [(16, 16)] * 6)

    def body(rank: Rank) -> str:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model: Any = DistributedDataParallel(Matrices(values).to(rank.device), bucket_cap_mb=cap)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for number in range(8):
            model(torch.tensor(1.0 + rank.index, device=rank.device)).backward()
            for p, value in zip(model.module.weights, values, strict=True):
                torch.testing.assert_close(p.grad.cpu(), 1.5 * value, rtol=1e-4, atol=1e-3, msg=f"step {number}")
            model.zero_grad()
        return "averaged"

    assert_on_ranks(["averaged"] * world.size, world.run(body))


@requirement(
    "REPL-HOOK-20",
    "With error feedback, what PowerSGD leaves out of a step is added to the next, so that no gradient is lost.",
    source=f"{FOLDER}/powerSGD_hook.py: use_error_feedback",
)
@requirement(
    "REPL-HOOK-21",
    "A PowerSGD state that was pickled and loaded continues as the state would have, in the default group.",
    source=f"{FOLDER}/powerSGD_hook.py: PowerSGDState.__getstate__, __setstate__",
)
@requirement(
    "REPL-HOOK-22",
    "PowerSGD with a min_compression_rate that no matrix reaches averages exactly.",
    source=f"{FOLDER}/powerSGD_hook.py: min_compression_rate",
)
@pytest.mark.world(2)
def test_power_sgd_errors(world: World) -> None:
    """Run eight steps, six compressed to rank one, with gradients of full rank; a copy has its state pickled midway."""

    def run(rank: Rank, feedback: bool, reload: bool = False, rate: float = 2.0) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(rank.index)
        values = [torch.randn(16, 16)]
        state = powerSGD_hook.PowerSGDState(
            None, start_powerSGD_iter=2, use_error_feedback=feedback, min_compression_rate=rate
        )
        model: Any = DistributedDataParallel(Matrices(values).to(rank.device))
        states = [state]  # what the hook uses
        model.register_comm_hook(None, lambda _, bucket: powerSGD_hook.powerSGD_hook(states[-1], bucket))
        steps = []
        for number in range(8):
            if reload and number == 5:
                states.append(pickle.loads(pickle.dumps(state)))
            model(torch.ones((), device=rank.device)).backward()
            steps.append(model.module.weights[0].grad.cpu().clone())
            model.zero_grad()
        return steps, states[-1]

    def body(rank: Rank) -> list[Any]:
        steps, state = run(rank, True)
        again, loaded = run(rank, True, reload=True)
        assert loaded.process_group is rank.group
        assert all(map(torch.equal, steps, again))
        without, no_errors = run(rank, False)
        assert not no_errors.error_dict
        exactly, _ = run(rank, False, rate=1e9)
        left = state.error_dict[0].cpu().reshape(16, 16)
        return [steps, left, without, exactly]

    first, second = world.run(body)
    (steps, left, without, exactly), (others, other, _, _) = first, second
    mean, lost = steps[0], (left + other) / 2
    assert all(map(torch.equal, steps, others))
    torch.testing.assert_close(sum(steps[2:]) + lost, 6 * mean)
    assert not torch.allclose(steps[2], mean, rtol=0.1)
    assert not torch.allclose(sum(without[2:]), 6 * mean, rtol=0.1)
    assert all(torch.equal(step, mean) for step in exactly)


@requirement(
    "REPL-HOOK-281",
    "Without a warm start, PowerSGD approximates each step's gradients with new random numbers, of its random_seed.",
    source=f"{FOLDER}/powerSGD_hook.py: PowerSGDState: warm_start, random_seed; pytorch/pytorch#48507",
)
@requirement(
    "REPL-HOOK-282",
    "The average that PowerSGD approximates is the same on all ranks, under every option.",
    source=f"{FOLDER}/powerSGD_hook.py: powerSGD_hook",
)
@pytest.mark.world(2)
def test_power_sgd_randomness(world: World) -> None:
    """Give the same gradients of full rank in five steps, of which three are compressed, with several seeds."""

    def run(rank: Rank, **options: Any) -> list[torch.Tensor]:
        values = [torch.arange(64.0).reshape(8, 8).sin() + rank.index * torch.arange(64.0).reshape(8, 8).cos()] * 2
        state = powerSGD_hook.PowerSGDState(
            None, start_powerSGD_iter=2, use_error_feedback=False, min_compression_rate=1, **options
        )
        model: Any = DistributedDataParallel(Matrices(values).to(rank.device))
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        steps = []
        for _ in range(5):
            model(torch.ones((), device=rank.device)).backward()
            steps.append(torch.stack([p.grad.cpu() for p in model.module.weights]))
            model.zero_grad()
        return steps

    def body(rank: Rank) -> dict[str, list[torch.Tensor]]:
        found = {}
        for batched in (False, True):
            for warm in (False, True):
                for name, seed in (("first", 1), ("again", 1), ("other", 2)):
                    found[f"{batched} {warm} {name}"] = run(
                        rank, batch_tensors_with_same_shape=batched, warm_start=warm, random_seed=seed
                    )
        return found

    found, others = world.run(body)
    for name, steps in found.items():
        assert all(map(torch.equal, steps, others[name])), f"{name}: ranks differ"
    for batched in (False, True):
        for warm in (False, True):
            first, again, other = (found[f"{batched} {warm} {name}"] for name in ("first", "again", "other"))
            what = f"batched {batched}, warm {warm}"
            assert all(map(torch.equal, first, again)), what
            assert not any(map(torch.equal, first[2:], other[2:])), what
            if not warm:
                assert not any(torch.equal(*pair) for pair in itertools.combinations(first[2:], 2)), what


@requirement(
    "REPL-HOOK-8802",
    "The PowerSGD hook averages a matrix's gradients also after steps in which they were zero.",
    source=f"{FOLDER}/powerSGD_hook.py: PowerSGDState: orthogonalization_epsilon, warm_start; powerSGD_hook",
)
@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no feedback"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.world(2)
def test_power_sgd_after_zeros(world: World, warm: bool, feedback: bool) -> None:
    """Gradients of rank one are zero in two steps that average and in one that compresses, and then are not."""
    values = of_rank(1, [(16, 16)])

    def body(rank: Rank) -> list[float]:
        state = powerSGD_hook.PowerSGDState(
            None,
            start_powerSGD_iter=2,
            orthogonalization_epsilon=1e-8,
            warm_start=warm,
            use_error_feedback=feedback,
        )
        model: Any = DistributedDataParallel(Matrices(values).to(rank.device))
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        averages = []
        for factor in (0, 0, 0, 1, 1, 1):
            model(torch.tensor((1.0 + rank.index) * factor, device=rank.device)).backward()
            averages.append(round((model.module.weights[0].grad.cpu() / values[0]).mean().item(), 2))
            model.zero_grad()
        return averages

    assert_on_ranks([[0.0] * 3 + [1.5] * 3] * 2, world.run(body))


@requirement(
    "REPL-HOOK-463",
    "The PowerSGD hook averages parameters that it does not compress, whatever their number of dimensions or elements.",
    source=f"{FOLDER}/powerSGD_hook.py: 'Rest of the tensors will be directly allreduced without compression'",
)
@pytest.mark.parametrize("shape", [(3,), (2, 2), (), (0, 2)], ids=["vector", "matrix", "scalar", "empty"])
@pytest.mark.world(2)
def test_power_sgd_shapes(world: World, shape: tuple[int, ...]) -> None:
    """A parameter of each shape is beside a matrix of rank one, which is compressed."""
    values = [*of_rank(1, [(16, 16)]), torch.full(shape, 3.0)]

    def body(rank: Rank) -> str:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model: Any = DistributedDataParallel(Matrices(values).to(rank.device))
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for number in range(4):
            try:
                model(torch.tensor(1.0 + rank.index, device=rank.device)).backward()
            except (IndexError, RuntimeError) as e:
                return f"{type(e).__name__} in step {number}"
            for p, value in zip(model.module.weights, values, strict=True):
                torch.testing.assert_close(p.grad.cpu(), 1.5 * value, rtol=1e-4, atol=1e-3, msg=f"step {number}")
            model.zero_grad()
        return "averaged"

    assert_on_ranks(["averaged"] * world.size, world.run(body))


@requirement(
    "REPL-HOOK-25",
    "The compressing batched PowerSGD hook gives the average if it has rank one as a square, or raises an error.",
    source=f"{FOLDER}/powerSGD_hook.py: batched_powerSGD_hook",
)
@pytest.mark.world(2)
def test_batched_power_sgd(world: World) -> None:
    """One matrix is the whole bucket. PyTorch 2.11 to 2.15 raise an error without a message in the third step."""
    values = of_rank(1, [(16, 16)])

    def body(rank: Rank) -> str:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model: Any = DistributedDataParallel(Matrices(values).to(rank.device))
        model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
        for number in range(5):
            try:
                model(torch.tensor(1.0 + rank.index, device=rank.device)).backward()
            except (AssertionError, RuntimeError):
                return "an error" if number == 2 else f"an error in step {number}"
            found = model.module.weights[0].grad.cpu()
            torch.testing.assert_close(found, 1.5 * values[0], rtol=1e-4, atol=1e-3, msg=f"step {number}")
            model.zero_grad()
        return "averaged"

    assert_on_ranks(["averaged"] * 2, world.run(body), or_all=["an error"] * 2)


@requirement(
    "REPL-HOOK-462",
    "The batched PowerSGD hook compresses gradients of a rank that it approximates exactly to their average.",
    source=f"{FOLDER}/powerSGD_hook.py: batched_powerSGD_hook",
)
@pytest.mark.parametrize("compress", [False, True], ids=["averages", "compresses"])
@pytest.mark.world(2)
def test_batched_power_sgd_compresses(world: World, compress: bool) -> None:
    """One matrix of rank one is the whole bucket; take the steps before it is compressed, and those after."""
    values = of_rank(1, [(16, 16)])

    def body(rank: Rank) -> str:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model: Any = DistributedDataParallel(Matrices(values).to(rank.device))
        model.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
        for number in range(5 if compress else 2):
            try:
                model(torch.tensor(1.0 + rank.index, device=rank.device)).backward()
            except AssertionError:
                return f"an AssertionError in step {number}"
            found = model.module.weights[0].grad.cpu()
            torch.testing.assert_close(found, 1.5 * values[0], rtol=1e-4, atol=1e-3, msg=f"step {number}")
            model.zero_grad()
        return "averaged"

    assert_on_ranks(["averaged"] * world.size, world.run(body))


@requirement(
    "REPL-HOOK-23",
    "A PowerSGD state with error feedback or a warm start raises an error if it is to compress the first two steps.",
    source=f"{FOLDER}/powerSGD_hook.py: start_powerSGD_iter",
)
@requirement(
    "REPL-HOOK-24",
    "register_ddp_comm_hook registers the hook of each type with the state that it is given.",
    source=f"{FOLDER}/__init__.py: DDPCommHookType, register_ddp_comm_hook",
)
@pytest.mark.world(1)
def test_registration(world: World) -> None:
    """A stand-in for a model takes the hooks; PowerSGD is given a state that the registration makes."""
    plain = {
        "ALLREDUCE": "allreduce_hook",
        "FP16_COMPRESS": "fp16_compress_hook",
        "BF16_COMPRESS": "bf16_compress_hook",
        "QUANTIZE_PER_TENSOR": "quantization_pertensor_hook",
        "QUANTIZE_PER_CHANNEL": "quantization_perchannel_hook",
        "NOOP": "noop_hook",
    }
    powers = {
        "POWER_SGD": ("powerSGD_hook", 1),
        "POWER_SGD_RANK2": ("powerSGD_hook", 2),
        "BATCHED_POWER_SGD": ("batched_powerSGD_hook", 1),
        "BATCHED_POWER_SGD_RANK2": ("batched_powerSGD_hook", 2),
    }

    class Takes:
        def register_comm_hook(self, state: Any, hook: Any) -> None:
            self.given = state, hook

    def body(rank: Rank) -> None:
        for group in (None, rank.group):
            for kind in (*plain, *powers):
                model: Any = Takes()
                ddp_comm_hooks.register_ddp_comm_hook(ddp_comm_hooks.DDPCommHookType[kind], model, group)
                state, hook = model.given
                if kind in plain:
                    assert (hook.__name__, state) == (plain[kind], group), kind
                else:
                    assert (hook.__name__, state.matrix_approximation_rank) == powers[kind], kind
                    assert (state.process_group, state.start_powerSGD_iter) == (group, 1000), kind
        for first in (0, 1, 2):
            for options in ({}, {"use_error_feedback": False}, {"warm_start": False}):
                make = functools.partial(powerSGD_hook.PowerSGDState, None, start_powerSGD_iter=first, **options)
                if first < 2:
                    with pytest.raises(ValueError, match="start_powerSGD_iter"):
                        make()
                else:
                    assert make().start_powerSGD_iter == 2
        neither = powerSGD_hook.PowerSGDState(None, 1, 0, use_error_feedback=False, warm_start=False)
        assert neither.start_powerSGD_iter == 0

    world.run(body)
