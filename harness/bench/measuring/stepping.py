"""Benchmarks of training steps: the whole step, its compute alone, its communication alone, and the exposed part.

The model is a stack of equal pairs of linear layers.  *Compute* is the same step on every rank at the same time without
communication (for tensor parallel: with the rank's own shards).  *Communication* is the collectives that the step
launched, as the Flight Recorder lists them, run again back to back.  *Exposed* is the time of the step minus its
compute: communication that no compute hides, and the stack's own work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from harness.bench.measuring.collectives import merged
from harness.bench.measuring.steps import Step
from harness.bench.measuring.timing import Effort, Timing, measure, visits
from harness.bench.records import COUNTS, Measurement, Series
from harness.stacks import messages, replicate, replicate_fsdp, tp_extension
from harness.stacks.messages import Message
from harness.stacks.registry import stack
from harness.worlds.rank import Rank
from harness.worlds.world import World

_SETTLING = 3
"""Steps before anything is measured: buckets are rebuilt after the first, graphs are compiled in the second."""
ADAPTERS = {"replicate": replicate, "replicate_fsdp": replicate_fsdp, "tp_extension": tp_extension}


class Pair(nn.Module):
    """A linear layer, ReLU, and a linear layer back to the width."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.second = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float32[rows, width] to float32[rows, width]."""
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


def model(step: Step, hidden: int) -> nn.Sequential:
    """Create the plain model, equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Pair(step.width, hidden) for _ in range(step.pairs)))


def on_stack(rank: Rank, step: Step) -> nn.Module:
    """Create the model and apply the stack to it."""
    whole = model(step, step.width)
    options = dict(step.options)
    if step.stack == "tp_extension":
        plan = {f"{i}.{name}": how for i in range(step.pairs) for name, how in tp_extension.PLAN.items()}
        return tp_extension.apply(whole, rank, plan=plan, **options)
    return ADAPTERS[step.stack].apply(whole, rank, **options)  # type: ignore[no-any-return]


def alone(rank: Rank, step: Step) -> nn.Module:
    """Create a rank's part of the model, which runs without communication."""
    hidden = step.width // tp_extension.mesh_shape(rank.size)[1] if step.stack == "tp_extension" else step.width
    return model(step, hidden).to(rank.device)


def rows(rank: Rank, step: Step, part: int = 0) -> torch.Tensor:
    """Create the input of a micro-batch: float32[rows, width]. ``part``: which part of the whole batch."""
    return torch.linspace(-1 - part, 1, step.rows * step.width, device=rank.device).view(step.rows, step.width)


def stepping(rank: Rank, step: Step, module: nn.Module, *, distributed: bool) -> Callable[[], None]:
    """Return a function that runs one training step.  ``distributed``: whether ``module`` has the stack applied."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    called: Any = torch.compile(module, backend=step.compiler) if step.compiler else module
    inputs, handle = rows(rank, step), stack(step.stack).handle()
    last = step.micro_batches - 1

    def once() -> None:
        for number in range(step.micro_batches):
            if distributed and step.micro_batches > 1:
                handle.set_sync(module, step.synced or number == last)
            called(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return once


class Prepared:
    """A training step on this rank, ready to be called.  Gradients are checked now, and by :meth:`check`."""

    in_flight = 1
    takes_part = True

    def __init__(self, rank: Rank, step: Step) -> None:
        self._rank, self._step = rank, step
        self.members = list(range(rank.size))
        self.module = on_stack(rank, step)
        self.call = stepping(rank, step, self.module, distributed=True)
        self.problem = ""
        """What is wrong with the gradients; empty: nothing."""
        self.check("the first step")
        for _ in range(_SETTLING):
            self.call()

    def check(self, when: str) -> None:
        """Run a forward and a backward besides the steps, and add to ``problem`` how the gradients differ."""
        problem = _checked(self._rank, self._step, self.module)
        self.problem = "; ".join(filter(None, (self.problem, problem and f"{when}: {problem}")))

    def copy(self) -> float:
        """Return 0: nothing is known of the least time of a step."""
        return 0.0

    def close(self) -> None:
        """Nothing was made besides the module."""


@dataclass
class Found:
    """The result of a timed step on one rank."""

    timings: dict[str, Timing]
    messages: list[Message]
    launched: int
    """Number of collectives in one step, from the sequence numbers of the process groups."""
    problem: str


def on_rank(rank: Rank, step: Step, effort: Effort) -> Found:
    """Time a step on this rank."""
    prepared = Prepared(rank, step)
    full = prepared.call
    before, mark = messages.launched(), messages.mark()
    full()
    if rank.device.type != "cpu":
        torch.accelerator.synchronize()
    launched = messages.launched() - before
    seen = messages.since(mark)
    calls = {"time": full, "compute": stepping(rank, step, alone(rank, step), distributed=False)}
    if seen and messages.replayable(seen):
        calls["communication"] = messages.replay(seen, rank.device)
    timings = measure(rank, calls, list(range(rank.size)), effort)
    prepared.check("a step after the last that was timed")
    return Found(timings, seen, launched, prepared.problem)


def _checked(rank: Rank, step: Step, module: nn.Module) -> str:
    """Return what is wrong with the gradients of one step; empty if nothing is.

    Ranks have different parts of the batch, so gradients must be the mean of those that a single device has for each.
    """
    adapter: Any = ADAPTERS[step.stack]
    plain = model(step, step.width).to(rank.device)
    plain.load_state_dict(adapter.parameters(module))
    parts = adapter.parts(rank.size)
    for part in parts:
        (plain(rows(rank, step, part)).square().mean() / len(parts)).backward()
    module(rows(rank, step, parts[rank.index])).square().mean().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    gradients = adapter.gradients(module)
    for parameter in module.parameters():
        parameter.grad = None
    if gradients is None:
        return ""
    for name, gradient in expected.items():
        other = gradients.get(name)
        if other is None:
            return f"{name} has no gradient"
        # The sums may be in another order, so the bound is relative to the largest element, in roundings of float32.
        error = (gradient - other.to(gradient.device)).abs().max() / gradient.abs().max()
        if not error <= 64 * torch.finfo(torch.float32).eps * step.width**0.5:
            return f"the gradient of {name} is off by {error:.2g} of its largest element"
    return ""


def timed_on(world: World, step: Step, effort: Effort) -> list[Measurement]:
    """Time a step on the ranks of a world.  Returns ``time`` first, then its parts.

    Errors: AssertionError if gradients are wrong or ranks launch different numbers of collectives;
    :class:`~harness.RanksFailed` if ranks fail.
    """
    __tracebackhide__ = True
    if step.compiler:  # fresh ranks would compile again, so all rounds run in one set of ranks
        effort = replace(effort, rounds=effort.rounds * effort.visits, visits=1)
    by_series: dict[Series, Measurement] = {}
    for answers in visits(world, effort, lambda: world.run(on_rank, step, effort)):
        for one in _measured(world, step, answers):
            known = by_series.setdefault(one.series, one)
            if known is not one and one.series.metric not in COUNTS:
                known.samples += one.samples
    return list(by_series.values())


def _measured(world: World, step: Step, found: list[Found]) -> list[Measurement]:
    """Convert the results of one set of ranks to measurements."""
    started = time.time()
    wrong = [f"rank {i}: {answer.problem}" for i, answer in enumerate(found) if answer.problem]
    if wrong:
        raise AssertionError("\n".join([f"a step of {step.stack} gives wrong gradients", *wrong]))
    launched = [answer.launched for answer in found]
    if len(set(launched)) > 1:
        raise AssertionError(f"ranks launch different numbers of collectives in a step: {launched}")
    measurements = [
        Measurement(
            series=step.series(world, name),
            samples=merged([answer.timings[name].rounds for answer in found]),
            first=max(answer.timings[name].first for answer in found) if name == "time" else 0.0,
            clock=found[0].timings[name].clock,
            started=started,
        )
        for name in found[0].timings
    ]
    exposed = [[r] for r in _exposed(measurements[0], measurements[1], world.size)]
    counts = {
        "exposed": exposed,
        "collectives": [[[float(count) for count in launched]]],
        "bytes": [[[float(sum(m.bytes for m in answer.messages)) for answer in found]]],
    }
    if not any(answer.messages for answer in found):
        del counts["bytes"]
    return measurements + [
        Measurement(series=step.series(world, metric), samples=samples, started=started)
        for metric, samples in counts.items()
    ]


def _exposed(whole: Measurement, compute: Measurement, ranks: int) -> list[list[float]]:
    """Return ``[round][rank]``: the time of the slowest rank's step minus its compute, for each round.

    The result is 0 for a step that happens to take less time than its compute.
    """
    return [[max(0.0, a - b)] * ranks for a, b in zip(whole.rounds(), compute.rounds(), strict=True)]
