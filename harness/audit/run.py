"""The run of an audit: its processes get one defect after another.

For each defect, tests run until one fails.  Cheap tests, and tests that have detected other defects, run first.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness import faults
from harness.audit import mutants, sites, worker
from harness.audit.records import (
    FAILED,
    KILLED,
    NOT_REACHED,
    SURVIVED,
    TIMED_OUT,
    AuditError,
    Begun,
    Defect,
    Healthy,
    Journal,
    Result,
    Summary,
    digest,
    equivalents,
)
from harness.audit.relevance import Relevance
from harness.audit.workers import Workers
from harness.cluster.elsewhere import Place
from harness.provenance import environment
from harness.redaction import current, redacted_arguments
from harness.requirements import stack_of
from harness.results import BAD, torch_version
from harness.subjects import TORCH
from harness.worlds.rank import NotPrepared

EQUIVALENT = Path("fixtures/faults/equivalent.toml")
FAULT, MUTANT, PAIR = "fault", "mutant", "pair"
_AND = " ++ "
"""Between the names of a pair; no edit in words has it."""


@dataclass(frozen=True)
class Plan:
    """The plan of an audit: which defects to inject."""

    components: tuple[str, ...]
    subject: str = "torch"
    """Whose implementation of the components runs; faults are defects of torch, so other subjects have none."""
    faults: bool = True
    mutants: str = "source"
    """Of which modules there are mutants: one of :data:`harness.audit.mutants.LEVELS`, or ``none``."""
    pairs: int = 0
    """Number of pairs of mutants of each component, always the same ones: two edits at once."""
    sample: int = 0
    """Number of faults, mutants and pairs of each component, always the same ones, from its modules in turn; 0: all."""
    names: tuple[str, ...] = ()
    """Only defects whose name contains one of these; empty: all."""
    only: frozenset[str] = frozenset()
    """Only defects with these names; empty: all."""
    again: Mapping[str, str] = field(default_factory=dict)
    """Only these defects, each with the one test that detected it before; empty: all."""
    limit: float = 240.0
    """Seconds after which no further test of a defect starts."""

    @property
    def traces(self) -> bool:
        """Whether it matters what code each test executes: mutants go to the tests that execute them."""
        return self.mutants != "none" and not self.again


@dataclass
class Target:
    """A defect, and how it is put into a rank."""

    defect: Defect
    first: Callable[[], list[tuple[str, str]]]
    """Returns what a rank calls first, each a function and its argument."""
    mutants: tuple[mutants.Mutant, ...] = ()
    """The mutant, or both of a pair; empty for a fault."""
    about: str = ""
    """For a fault, its name, what is wrong, and what a test needs to see it."""


def targets(plan: Plan) -> list[Target]:
    """Return every defect of a plan.  Errors: ValueError if the catalog has two faults with one name."""
    if plan.pairs and plan.mutants == "none":
        raise ValueError(f"--pairs {plan.pairs} --mutants none: pairs are of mutants")
    chosen: list[Target] = []
    if plan.faults and plan.subject == TORCH:
        for fault in faults.catalog().values():
            if fault.component in plan.components:
                about = " ".join(filter(None, (fault.kind, fault.issue)))
                defect = Defect(
                    name=fault.name, sort=FAULT, component=fault.component, says=fault.sentence, about=about
                )
                about = f"{fault.name} {fault.sentence} {fault.needs}"
                chosen.append(Target(defect, functools.partial(_fault, fault.name), about=about))
    if plan.mutants != "none":
        for component in plan.components:
            modules = mutants.sources(component, plan.subject, plan.mutants)
            found = [m for module in modules for m in mutants.mutants(module)]
            chosen += [_edited(component, MUTANT, (mutant,)) for mutant in found]
            chosen += [_edited(component, PAIR, pair) for pair in _pairs(found, plan.pairs)]
    if plan.only:
        chosen = [t for t in chosen if t.defect.name in plan.only]
    if plan.again:
        chosen = [t for t in chosen if t.defect.name in plan.again]
    if plan.names:
        chosen = [t for t in chosen if any(name in t.defect.name for name in plan.names)]
    return _sample(chosen, plan.sample) if plan.sample else chosen


def _sample(all_targets: Sequence[Target], count: int) -> list[Target]:
    """Return ``count`` targets of each component and sort, always the same ones."""
    groups: dict[tuple[str, str], dict[str, list[Target]]] = {}
    for target in sorted(all_targets, key=lambda t: hashlib.sha256(t.defect.name.encode()).digest()):
        by_module = groups.setdefault((target.defect.component, target.defect.sort), {})
        by_module.setdefault(target.mutants[0].module if target.mutants else "", []).append(target)
    chosen: set[str] = set()
    for by_module in groups.values():
        turns = (t for turn in itertools.zip_longest(*by_module.values()) for t in turn if t is not None)
        chosen |= {t.defect.name for t in itertools.islice(turns, count)}
    return [t for t in all_targets if t.defect.name in chosen]


def _pairs(found: Sequence[mutants.Mutant], count: int) -> Iterator[tuple[mutants.Mutant, mutants.Mutant]]:
    """Yield at most ``count`` pairs of mutants of different functions, always the same ones and no mutant twice.

    Edits of one function can't be pairs, since a function gets the code of one edit.
    """
    shuffled = sorted(found, key=lambda m: hashlib.sha256(f"pair {m.name}".encode()).digest())
    pairs = zip(shuffled[::2], shuffled[1::2], strict=False)
    different = ((a, b) for a, b in pairs if (a.module, a.function) != (b.module, b.function))
    return itertools.islice(different, count)


def _fault(name: str) -> list[tuple[str, str]]:
    return [("harness.faults:put", name)]


def _edited(component: str, sort: str, chosen: tuple[mutants.Mutant, ...]) -> Target:
    defect = Defect(
        name=_AND.join(m.name for m in chosen),
        sort=sort,
        component=component,
        says="; ".join(m.edit for m in chosen),
        about=", ".join(f"{Path(m.file).name}:{m.lines[0]}" for m in chosen),
    )
    return Target(defect, lambda: [("harness.audit.mutants:put", mutants.prepared(m)) for m in chosen], chosen)


class Progress:
    """The progress of an audit.  This class shows nothing; subclasses override its methods."""

    def phase(self, name: str, done: int, of: int) -> None:
        """Report that a phase begins: its name, how many steps are done, and of how many."""

    def step(self, line: str) -> None:
        """Report that a step is done, with its result in a line."""


class Audit:
    """One audit.  Its methods raise AuditError."""

    def __init__(self, root: Path, state: Path, plan: Plan, *, places: Sequence[Place], progress: Progress) -> None:
        self.plan = plan
        self.root = root
        self.progress = progress
        self.digest = digest(root)
        self.places = places
        self.started = time.time()
        self.healthy: dict[str, Healthy] = {}
        self.results: dict[str, Result] = {}
        self.kills: Counter[str] = Counter()
        self.equivalent = equivalents(root / EQUIVALENT)
        self.environment = {**environment({}), "torch": torch_version(), "subject": plan.subject}
        level = "wide" if plan.mutants == "wide" else "all"
        files = [sites.file(m) for c in plan.components for m in mutants.sources(c, plan.subject, level)]
        self.files = list(dict.fromkeys(files))
        about = [plan.subject] if plan.subject != TORCH else []
        about += plan.components
        about += ["again"] if plan.again else ["faults"] if not plan.traces else ["wide"] if level == "wide" else []
        self.journal = Journal(state / f"{self.digest}-{self.environment['torch']}-{'-'.join(about)}.jsonl")
        self._read()

    def _read(self) -> None:
        records = self.journal.read()
        if not records:
            self.journal.write(Begun(started=self.started, digest=self.digest, environment=self.environment))
        for record in records:
            if isinstance(record, Healthy):
                self.healthy[record.test] = record
            elif isinstance(record, Result):
                self.results[record.defect.name] = record
                self.kills[record.test] += bool(record.test)

    def run(self) -> Summary:
        """Run what the journal does not have yet, and return the whole audit."""
        chosen = targets(self.plan)
        again = self.plan.again
        wanted = {again[t.defect.name] for t in chosen} if again else None
        with self._workers() as workers:
            tests = [t for t in workers.tests if wanted is None or t in wanted]
            self._look_at_healthy(workers, [t for t in tests if t not in self.healthy])
            left = [t for t in chosen if t.defect.name not in self.results]
            self._look_at(workers, left, len(chosen))
            names = {t.defect.name for t in chosen}
            killers = sorted({r.test for n, r in self.results.items() if n in names and r.state == KILLED})
            red = self._confirm(workers, killers)
        summary = Summary(
            started=self.started,
            seconds=round(time.time() - self.started, 1),
            arguments=redacted_arguments(sys.argv[1:]),
            environment=self.environment,
            digest=self.digest,
            red=sorted({*red, *(h.test for h in self.healthy.values() if h.verdict in BAD)}),
            healthy={h.test: h.verdict for h in self.healthy.values()},
            results=[self.with_equivalence(self.results[t.defect.name]) for t in chosen],
        )
        return msgspec.convert(current().record(msgspec.to_builtins(summary)), Summary)

    def reach(self) -> dict[str, set[tuple[int, int]]]:
        """Return by file the steps from line to line that the ranks of all tests take in the audited sources.

        The ranks have no defects.
        """
        with self._workers() as workers:
            self._look_at_healthy(workers, [t for t in workers.tests if t not in self.healthy])
        reached: dict[str, set[tuple[int, int]]] = {file: set() for file in self.files}
        for test in self.healthy.values():
            for file, steps in test.steps.items():
                reached.setdefault(file, set()).update(steps)
        return reached

    def _workers(self) -> Workers:
        suites = [f"suites/{c}" for c in self.plan.components if (self.root / "suites" / c).is_dir()]
        return Workers(self.root, self.digest, suites, self.plan.subject, self.places)

    def with_equivalence(self, result: Result) -> Result:
        """Return a result with the reason why its mutant is equivalent; a pair is if both of its mutants are."""
        reasons = [self.equivalent.get(name, "") for name in result.defect.name.split(_AND)]
        result.equivalent = "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""
        return result

    def _look_at_healthy(self, workers: Workers, tests: Sequence[str]) -> None:
        self.progress.phase("healthy", len(self.healthy), len(self.healthy) + len(tests))
        trace = (self.files or ["-"]) if self.plan.traces else []
        pending = [worker.Job(tests=[test], trace=trace) for test in tests]
        for job, outcomes, _ in workers.do(iter(pending), limit=600):
            record = _healthy(job, outcomes)
            self.healthy[record.test] = record
            self.journal.write(record)
            self.progress.step(f"{record.verdict} {record.test}")

    def _look_at(self, workers: Workers, left: Sequence[Target], total: int) -> None:
        self.progress.phase("defects", total - len(left), total)
        by_job: dict[int, Target] = {}

        def jobs() -> Iterator[worker.Job]:
            for target in left:
                tests = self.tests_of(target)
                if not tests:
                    self._done(Result(defect=target.defect, state=NOT_REACHED, seconds=0))
                    continue
                job = worker.Job(tests=tests, first=target.first(), seconds=self.plan.limit)
                by_job[id(job)] = target
                yield job

        for job, outcomes, complete in workers.do(jobs(), limit=self.plan.limit + 120):
            self._done(_result(by_job[id(job)].defect, outcomes, complete))

    def _done(self, result: Result) -> None:
        if digest(self.root) != self.digest:
            raise AuditError("harness, suites or fixtures have changed under the audit; start it again")
        self.results[result.defect.name] = result
        self.kills[result.test] += bool(result.test)
        self.journal.write(result)
        by = f" by {result.test.split('/')[-1]}" if result.test else ""
        self.progress.step(f"{result.state} {result.defect.name}{by}, {result.seconds:.1f} s")

    def tests_of(self, target: Target) -> list[str]:
        """Return the tests that could detect a defect, the most promising and cheapest first."""
        good = [h for h in self.healthy.values() if h.verdict == "passed"]
        if self.plan.again:
            return [h.test for h in good if h.test == self.plan.again[target.defect.name]]
        alike: Mapping[str, float] = {}
        if not target.mutants:
            candidates = [h for h in good if stack_of(h.test) == target.defect.component]
            alike = self._relevance.of(target.about)
        else:
            candidates = [h for h in good if any(_executes(h, m) for m in target.mutants)]

        def cost(healthy: Healthy) -> float:
            """Return the seconds of a test, divided by a measure of how likely it is to detect the defect.

            Of a fault, words say more than seconds do, and more than what else the test has detected. With this order,
            90 of the 100 faults of the third blind trial meet the test that detects them within 25 s of tests; with
            the seconds themselves and words squared, it took 47 s (docs/audit.md).
            """
            if not target.mutants:
                return math.sqrt(healthy.seconds) / (0.1 + alike[healthy.test]) ** 4
            return healthy.seconds / (1 + 4 * self.kills[healthy.test])

        return [h.test for h in sorted(candidates, key=cost)]

    @functools.cached_property
    def _relevance(self) -> Relevance:
        return Relevance({h.test: f"{h.test} {h.about}" for h in self.healthy.values()})

    def _confirm(self, workers: Workers, tests: Sequence[str]) -> list[str]:
        """Run tests that detected something once more without a defect, and return those that still fail."""
        self.progress.phase("healthy again", 0, len(tests))
        red = []
        for job, outcomes, _ in workers.do((worker.Job(tests=[test]) for test in tests), limit=600):
            if not outcomes or outcomes[-1].verdict in BAD:
                red.append(job.tests[0])
                self.progress.step(f"red without a defect: {outcomes[-1].headline if outcomes else 'its process died'}")
            self.progress.step(job.tests[0])
        return red


def _executes(test: Healthy, mutant: mutants.Mutant) -> bool:
    first, last = mutant.lines
    return any(first <= line <= last for _, line in test.steps.get(mutant.file, ()))


def _healthy(job: worker.Job, outcomes: Sequence[worker.Outcome]) -> Healthy:
    if not outcomes:
        return Healthy(test=job.tests[0], verdict="crashed", seconds=0, headline="its process died")
    last = outcomes[-1]
    return Healthy(
        test=last.test,
        verdict=last.verdict,
        seconds=last.seconds,
        headline=last.headline,
        about=last.about,
        steps=last.steps,
    )


def _result(defect: Defect, outcomes: Sequence[worker.Outcome], complete: bool) -> Result:
    seconds = round(sum(o.seconds for o in outcomes), 2)
    last = outcomes[-1] if outcomes else None
    result = Result(defect=defect, state=SURVIVED, seconds=seconds, tests=len(outcomes))
    if last is not None and last.verdict in BAD:
        result.state = KILLED
        result.test, result.verdict, result.headline = last.test, last.verdict, last.headline
        result.requirements, result.ranks = last.requirements, last.ranks
        if NotPrepared.__name__ in last.headline:
            result.state = FAILED
    elif not complete:
        result.state = TIMED_OUT
    return result


__all__ = ["Audit", "Place", "Plan", "Progress", "Target", "targets"]
