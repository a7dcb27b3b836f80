"""What a generated training run costs: programs a second, and the share of the time that is not PyTorch's own.

Run with ``pytest tests/bench/test_programs.py --benchmark-enable``; nothing here fails for being slow.

A program is drawn, sent to ranks, trained there and, at the same time, alone for the truth, cleaned up and compared.
Two shares are shown, of the same runs:

- ``by the clock``: how much of the time even the slowest rank was not in PyTorch, which is in ``build``,
  ``distribute``, ``train`` and destroying what they made, but for what is gathered, copied and counted there to be
  compared;
- ``strictly``: as if cores were never shared.  PyTorch's own is then the same program run on other ranks with nothing
  beside it, and trained once alone in float64, watched by nothing; what the search for the truth slows ranks
  down by where there is no core to spare counts as ours.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.nn.parallel import DistributedDataParallel

from harness import Pool, Rank, World, WorldSpec
from harness.programs import assertion, execute, prelude
from harness.programs.check import Truth
from harness.programs.execute import Outcome
from harness.programs.patience import Patience
from harness.programs.strategies import programs
from harness.specs.program import Program
from harness.specs.shapes import walk
from tests.programs.damaged import unreduced
from tests.programs.test_patience import computes_for_ever
from tests.programs.test_shrinking import hangs_in_second_step, killed_where_biases_are, shrunk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLES = {"replicate": 30, "replicate_fsdp": 30, "tp_extension": 30, "dynamo": 6}


@dataclass
class Cost:
    """What checking one program took, in seconds."""

    program: Program
    smooth: bool = False
    """Whether layers and optimizers that round were drawn."""
    exact: bool = False
    """Whether it was proven exact."""
    total: float = 0.0
    """Since the program before: drawing, and what was given up in between, are in it."""
    truth: float = 0.0
    ranks: float = 0.0
    """From sending a program to ranks until all have answered; meanwhile, the truth was found."""
    inside: float = 0.0
    """Of that, what the slowest rank spent in the program, PyTorch's part."""
    undisturbed: float = 0.0
    """The same when nothing runs beside the ranks."""
    observing: float = 0.0
    """Of that, what it took to gather, copy and count what is compared."""
    comparing: float = 0.0


class Clock:
    """Takes the time of every part of :func:`assertion.assert_same_as_alone`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.costs: list[Cost] = []
        self.smooth = False
        self._cost: Any = None
        self._since = 0.0
        monkeypatch.setattr(assertion, "truth_of", self._timed("truth", assertion.truth_of, self._exact))
        monkeypatch.setattr(assertion, "problems", self._timed("comparing", assertion.problems))

    def _exact(self, truth: Truth) -> None:
        self._cost.exact = truth.exact

    def _inside(self, outcomes: list[Outcome]) -> None:
        self._cost.inside = max(o.seconds for o in outcomes)

    def _timed(
        self, part: str, function: Callable[..., Any], look: Callable[[Any], None] | None = None
    ) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **options)
            setattr(self._cost, part, getattr(self._cost, part) + time.perf_counter() - began)
            if look is not None:
                look(result)
            return result

        return timed

    def world(self, world: World) -> World:
        """The same world, its runs' times kept."""
        timed = self._timed("ranks", world.run_beside, self._inside)
        world.run_beside = timed  # type: ignore[method-assign]
        return world

    def start(self) -> None:
        """Forget everything."""
        self.costs.clear()
        self._since = time.perf_counter()

    def check(self, world: World, program: Program) -> None:
        """Check a program, and keep what it took."""
        self._cost = Cost(program, self.smooth)
        assertion.assert_same_as_alone(lambda _: world, program)
        now = time.perf_counter()
        self._cost.total, self._since = now - self._since, now
        self.costs.append(self._cost)


@pytest.fixture
def pool(asked_for: None) -> Iterator[Pool]:
    found = Pool()
    found.launcher().wait_ready()  # type: ignore[attr-defined]
    yield found
    found.close()


def observed(rank: Rank, program: Program) -> tuple[float, float]:
    """Seconds that a program takes on this rank, and how many of them go into what is compared."""
    spent = 0.0
    within = False

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def observing(*args: Any, **options: Any) -> Any:
            nonlocal spent, within
            if within:
                return function(*args, **options)
            within, began = True, time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                within = False
                spent += time.perf_counter() - began

        return observing

    with pytest.MonkeyPatch.context() as patch:
        for name in ("note", "look", "count"):
            patch.setattr(prelude.Run, name, timed(getattr(prelude.Run, name)))
        patch.setattr(prelude, "gradients", timed(prelude.gradients))
        return execute.on_rank(rank, program).seconds, spent


@execute.for_small_tensors()
def alone(program: Program) -> float:
    """Seconds that training takes on one device, with nothing of ours around it."""
    execute.functions(program)
    began = time.perf_counter()
    execute.alone(program)()
    return time.perf_counter() - began


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stack", list(EXAMPLES))
def test_share(
    stack: str,
    size: int,
    pool: Pool,
    benchmark: Any,
    shares: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs a second, and whose time it is; those compared bit for bit, and those within bounds, apart."""
    clock = Clock(monkeypatch)
    plain = pool.acquire(WorldSpec(size, timeout=120))
    world = clock.world(plain)

    def run(count: int, number: int) -> None:
        for smooth in (False, True):
            clock.smooth = smooth

            @seed(number)
            @settings(
                max_examples=count,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(programs(stack, (size,), smooth=smooth, most_steps=2 if stack == "dynamo" else 3))
            def check(program: Program) -> None:
                clock.check(world, program)

            check()

    run(3, 1)  # imports, first compilations
    first = [cost.program for cost in clock.costs]
    clock.start()
    benchmark.pedantic(lambda: run(EXAMPLES[stack], 2), rounds=1)
    other = pool.acquire(WorldSpec(size, timeout=120))  # that has seen as little of the programs as the first had
    for program in first:
        other.run(observed, program)
    for cost in clock.costs:
        cost.undisturbed, cost.observing = max(other.run(observed, cost.program))
    _OF_A_SUITE.setdefault(size, {})[stack] = whole = of_a_suite(stack, clock.costs)
    shares.append(shown(f"{stack}, {size} ranks, as its suite draws", whole))
    for kind in ("exact", "rounded"):
        costs = [c for c in clock.costs if c.exact == (kind == "exact")]
        if costs:
            shares.append(shown(f"{stack}, {size} ranks, {kind}", row_of(costs)))
            benchmark.extra_info[kind] = shares[-1]
    pool.release(plain)
    pool.release(other)


_OF_A_SUITE: dict[int, dict[str, dict[str, float]]] = {}
"""Of each stack, what its suite's programs take in the default setting, by number of ranks."""


def of_a_suite(stack: str, costs: Sequence[Cost]) -> dict[str, float]:
    """Means over programs in the proportion in which the stack's suite draws them, and how many those are."""
    suite = importlib.import_module(f"suites.{stack}.test_programs")
    drawn = {False: suite.test_representable, True: suite.test_rounded}
    counts = {smooth: test._hypothesis_internal_use_settings.max_examples for smooth, test in drawn.items()}
    rows = {smooth: row_of([c for c in costs if c.smooth == smooth]) for smooth in drawn}
    count = sum(counts.values())
    row = {key: sum(rows[kind][key] * counts[kind] for kind in counts) / count for key in rows[False]}
    return row | {"programs": float(count)}


@pytest.mark.usefixtures("asked_for")
def test_share_of_the_suites(benchmark: Any, shares: list[dict[str, Any]]) -> None:
    """All four suites together, in the default setting: of what CI waits for, how much is not PyTorch's."""
    benchmark.pedantic(lambda: None, rounds=1)  # it was measured above
    for size, stacks in _OF_A_SUITE.items():
        if len(stacks) == len(EXAMPLES):
            count = sum(row["programs"] for row in stacks.values())
            keys = next(iter(stacks.values()))
            row = {key: sum(r[key] * r["programs"] for r in stacks.values()) / count for key in keys}
            shares.append(shown(f"all suites, {size} ranks", row))


def shown(what: str, row: Mapping[str, float]) -> dict[str, Any]:
    """A row of the table: ``seconds`` of each part, and which ``shares`` of the total are not PyTorch's."""
    total, of_ranks = row["total"], row["undisturbed"] - row["observing"]
    return {
        "what": what,
        "a second": 1 / total,
        "seconds": {part: seconds for part, seconds in row.items() if part != "programs"},
        "shares": {
            "by the clock": 1 - row["on ranks"] * of_ranks / row["undisturbed"] / total,
            "strictly": 1 - (row["alone"] + of_ranks) / total,
        },
    }


def row_of(costs: Sequence[Cost]) -> dict[str, float]:
    """Means, in seconds."""
    row = {
        "programs": float(len(costs)),
        "total": mean(c.total for c in costs),
        "alone": mean(alone(c.program) for c in costs),
        "on ranks": mean(c.inside for c in costs),
        "undisturbed": mean(c.undisturbed for c in costs),
        "observing": mean(c.observing for c in costs),
        "oracles": mean(c.truth for c in costs),
        "around ranks": mean(c.ranks - max(c.inside, c.truth) for c in costs),
        "at once": mean(min(c.inside, c.truth) for c in costs),
        "comparing": mean(c.comparing for c in costs),
    }
    row["oracles"] -= row["alone"]  # the truth is a training run, too
    others = sum(row[k] for k in ("alone", "on ranks", "oracles", "around ranks", "comparing"))
    row["drawing"] = row["total"] + row["at once"] - others
    return row


def wrong_on_one_rank(rank: Rank) -> None:
    step = torch.optim.SGD.__dict__.get("_undamaged", torch.optim.SGD.step)

    def damaged(self: Any, closure: Any = None) -> Any:
        result = step(self, closure)
        with torch.no_grad():
            for group in self.param_groups if rank.index == 1 else ():
                group["params"][0].view(-1)[:1] += 1  # of none, where it is empty
        return result

    torch.optim.SGD.step, torch.optim.SGD._undamaged = damaged, step  # type: ignore[method-assign,attr-defined]


def raises(rank: Rank) -> None:
    plain = DistributedDataParallel.__init__

    def init(self: Any, parameters: Any, **options: Any) -> None:
        if rank.index == 1 and any(p.dim() == 1 for p in parameters):
            raise RuntimeError("injected")
        plain(self, parameters, **options)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


DEFECTS: dict[str, Callable[[Rank], None]] = {
    "values wrong on one rank": wrong_on_one_rank,
    "gradients not averaged": unreduced,
    "a rank raises": raises,
    "a rank aborts": killed_where_biases_are,
    "a deadlock": hangs_in_second_step,
    "a rank computes for ever": computes_for_ever,
}


@pytest.mark.parametrize("defect", list(DEFECTS))
@pytest.mark.usefixtures("asked_for")
def test_time_to_reproducer(
    defect: str,
    benchmark: Any,
    reproducers: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first failure to the shrunk reproducer, in the default setting."""
    monkeypatch.setenv("CONCORD_REPRODUCERS", str(tmp_path))
    failures: list[float] = []
    noted = Patience.failed

    def failed(self: Patience, what: object) -> None:
        failures.append(time.perf_counter())
        noted(self, what)

    monkeypatch.setattr(Patience, "failed", failed)
    _, program = benchmark.pedantic(lambda: shrunk(DEFECTS[defect], tmp_path), rounds=1)
    seconds = time.perf_counter() - failures[0]
    benchmark.extra_info.update(seconds=seconds)
    layers = len(list(walk(program.model)))
    reproducers.append(
        {
            "what": defect,
            "seconds": seconds,
            "failing runs": len(failures),
            "left": f"{program.layout.world} ranks, {layers} layers, {len(program.steps)} steps",
        }
    )
