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
from statistics import mean
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from harness import Pool, World, WorldSpec
from harness.programs import assertion, execute
from harness.programs.execute import Outcome
from harness.programs.spec import Program
from harness.programs.strategies import programs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLES = {"replicate": 40, "replicate_fsdp": 40, "tp_extension": 40, "dynamo": 12}


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
