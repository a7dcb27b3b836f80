"""What a generated training run costs: programs a second, and the share of the time that is not PyTorch's own.

Run with ``pytest tests/bench/test_programs.py --benchmark-enable``; nothing here fails for being slow.

PyTorch's own is what anybody would have to spend who trains on one device and on ranks and compares: the same program
trained once alone in float64, watched by nothing, and the time that the slowest rank spends in ``build``,
``distribute`` and ``train``.  The rest is ours: drawing, writing source, the proof and the sampled bounds, transport,
waiting, cleaning up, comparing, and programs that are given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.nn.parallel import DistributedDataParallel

from harness import Pool, Rank, World, WorldSpec
from harness.programs import assertion, execute
from harness.programs.execute import Outcome
from harness.programs.patience import Patience
from harness.programs.spec import Program, walk
from harness.programs.strategies import programs
from tests.programs.damaged import unreduced
from tests.programs.test_patience import computes_for_ever
from tests.programs.test_shrinking import hangs_in_second_step, killed_where_biases_are, shrunk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLES = {"replicate": 25, "replicate_fsdp": 25, "tp_extension": 25, "dynamo": 6}


@dataclass
class Clock:
    """What each part of checking programs took, in seconds, one entry for each time."""

    truth: list[float] = field(default_factory=list)
    ranks: list[float] = field(default_factory=list)
    """From sending a program to ranks until all have answered."""
    inside: list[float] = field(default_factory=list)
    """Of that, what the slowest rank spent in the program."""
    compared: list[float] = field(default_factory=list)
    done: list[Program] = field(default_factory=list)

    def timing(self, kept: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time kept."""

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                kept.append(time.perf_counter() - began)

        return timed

    def world(self, world: World) -> World:
        """The same world, its runs' times kept."""
        run = self.timing(self.ranks, world.run)

        def timed(*args: Any, **options: Any) -> list[Outcome]:
            outcomes: list[Outcome] = run(*args, **options)
            self.inside.append(max(o.seconds for o in outcomes))
            return outcomes

        world.run = timed  # type: ignore[method-assign]
        return world


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool()
    found.launcher().wait_ready()  # type: ignore[attr-defined]
    yield found
    found.close()


def alone(program: Program) -> float:
    """Seconds that training takes on one device, with nothing of ours around it."""
    execute.functions(program)
    began = time.perf_counter()
    execute.alone(program)()
    return time.perf_counter() - began


@pytest.mark.parametrize("kind", ["exact", "rounded"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stack", list(EXAMPLES))
def test_share(
    stack: str, size: int, kind: str, pool: Pool, benchmark: Any, shares: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Programs a second, and whose time it is."""
    if not benchmark.enabled:
        pytest.skip("a benchmark: runs with --benchmark-enable")
    clock = Clock()
    plain = pool.acquire(WorldSpec(size, timeout=120))
    world = clock.world(plain)
    monkeypatch.setattr(assertion, "truth_of", clock.timing(clock.truth, assertion.truth_of))
    monkeypatch.setattr(assertion, "problems", clock.timing(clock.compared, assertion.problems))

    def run(count: int, number: int) -> None:
        @seed(number)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(programs(stack, (size,), smooth=kind == "rounded", most_steps=2 if stack == "dynamo" else 3))
        def check(program: Program) -> None:
            assertion.assert_same_as_alone(lambda _: world, program)
            clock.done.append(program)

        check()

    run(4, 1)  # imports, first compilations
    for kept in (clock.truth, clock.ranks, clock.inside, clock.compared, clock.done):
        kept.clear()  # type: ignore[attr-defined]
    began = time.perf_counter()
    benchmark.pedantic(lambda: run(EXAMPLES[stack], 2), rounds=1)
    total = time.perf_counter() - began
    count = len(clock.done)
    own = mean(map(alone, clock.done))
    row = {
        "what": f"{stack}, {size} ranks, {kind}",
        "a second": count / total,
        "total": total / count,
        "alone": own,
        "on ranks": sum(clock.inside) / count,
        "truth": sum(clock.truth) / count - own,
        "around ranks": (sum(clock.ranks) - sum(clock.inside)) / count,
        "comparing": sum(clock.compared) / count,
    }
    row["drawing"] = row["total"] - sum(row[k] for k in ("alone", "on ranks", "truth", "around ranks", "comparing"))
    row["not PyTorch's"] = 1 - (row["alone"] + row["on ranks"]) / row["total"]
    benchmark.extra_info.update(row)
    shares.append(row)
    pool.release(plain)


def wrong_on_one_rank(rank: Rank) -> None:
    step = torch.optim.SGD.__dict__.get("_undamaged", torch.optim.SGD.step)

    def damaged(self: Any, closure: Any = None) -> Any:
        result = step(self, closure)
        with torch.no_grad():
            for group in self.param_groups if rank.index == 1 else ():
                group["params"][0].view(-1)[0] += 1
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
def test_time_to_reproducer(
    defect: str,
    benchmark: Any,
    reproducers: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first failure to the shrunk reproducer, in the default setting."""
    if not benchmark.enabled:
        pytest.skip("a benchmark: runs with --benchmark-enable")
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
