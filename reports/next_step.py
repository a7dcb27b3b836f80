"""The next command to run so that levels that are not shown are, worked out from the runs that there are."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from harness.requirements import LEVELS
from harness.results import DEFAULT_SEED, NoFittingSize, NotClaimed, Run, SizeNotClaimed, TooFewDevices
from harness.thorough.effort import EXAMPLES
from reports.arguments import asked
from reports.levels import has_default_seed, has_drawn_seed, unusable, whole_runs
from reports.minimums import Minimums
from reports.model import NOT_CONFORMANT, NOT_SHOWN, LevelReport, Step
from reports.text import listed

_KEPT = (
    *("-n", "--profile", "--subject", "--suite", "--ranks-per-device", "--rank-start", "--rank-network", "--launcher"),
    *("--agents-key", "--world-timeout", "--timeout", "--timeout-method", "--concord-results"),
)
"""Options of a run that its next run needs as well."""
_LONGEST = 1000
"""Characters of a command; a longer one has no options of the run."""
_MOST_CLAIMS = 3
_PLAIN = re.compile(r"[\w./:=,@%+~-]*", re.ASCII)
"""Values that are kept.  Others are not ones that anybody types, and may come from someone who wants them to be run."""
_ADDED = "variable PYTEST_ADDOPTS"


def steps(runs: Sequence[Run], levels: Sequence[LevelReport], minimums: Minimums) -> list[Step]:
    """Return what is missing, in the order in which to do it.

    Levels on which something is wrong, and those above, are left out: no further run helps them.
    """
    levels = _that_a_run_helps(levels)
    if not levels:
        return []
    todo = _runs_missing(runs, [level.stack for level in levels], minimums)
    return todo or _less(runs, levels, minimums)


def _that_a_run_helps(levels: Sequence[LevelReport]) -> list[LevelReport]:
    """Return the levels that are not shown, up to the highest of L1 to L5 that has tests, and P if it has some."""
    of_stacks = [level for level in levels if level.id != "P"]
    highest = max((i for i, level in enumerate(of_stacks) if level.tests), default=-1)
    wrong = next((i for i, level in enumerate(of_stacks) if level.answer == NOT_CONFORMANT), len(of_stacks))
    chosen = of_stacks[: min(highest + 1, wrong)]
    if wrong == len(of_stacks):
        chosen += [level for level in levels if level.id == "P" and level.tests]
    return [level for level in chosen if level.answer == NOT_SHOWN]


def _runs_missing(runs: Sequence[Run], stacks: Sequence[str], minimums: Minimums) -> list[Step]:
    """Return the runs that are missing: of all tests with the default seed, and of properties with another one."""
    good = [run for run in runs if not unusable("It", run)]
    if not good and not any(run.header.profile for run in runs):
        return [_profile(runs)]
    unlike = len({(run.header.suite_hash, run.header.profile_hash, run.header.subject) for run in good}) > 1
    unplain: list[str] = []
    undrawn: list[str] = []
    for level, stack in LEVELS.items():
        if stack not in stacks:
            continue
        counting = [] if unlike else [r for r in good if r.header.effort >= minimums.levels[level].examples]
        whole = whole_runs(counting, stack)
        unplain += [] if has_default_seed(whole) else [stack]
        if not has_drawn_seed(counting, whole or runs, stack):
            undrawn.append(stack)
    todo = []
    if unplain:
        first = "All runs have to be of one suite, profile and subject. Run" if unlike else "Run"
        todo.append(_step(f"{first} all tests{_of(unplain)} with the default seed:", runs, unplain, []))
    if undrawn:
        drawn = ["--concord-seed", "random", "-m", "property_based"]
        again = f"Run the property-based tests{_of(undrawn)} with a seed that is drawn at random:"
        todo.append(_step(again, runs, undrawn, drawn))
    return todo


def _of(stacks: Sequence[str]) -> str:
    return "" if _are_all(stacks) else f" of {listed(stacks)}"


def _are_all(stacks: Sequence[str]) -> bool:
    return {stack for level, stack in LEVELS.items() if level != "P"} <= {*stacks}


def _step(do: str, runs: Sequence[Run], stacks: Sequence[str], options: Sequence[str]) -> Step:
    return Step(do=do, command=command(runs, stacks, options))


def command(runs: Sequence[Run], stacks: Sequence[str], options: Sequence[str]) -> str:
    """Return a command that runs some stacks as the last of the runs did, quoted for a shell.

    ``options``: further options of pytest.  Of the run's own, only those are kept that say on what it ran.
    """
    run = runs[-1]
    paths = ["suites/"] if _are_all(stacks) else [f"suites/{stack}" for stack in stacks]
    added = _added(run.header.environment)
    unset = ["PYTEST_ADDOPTS"] if added else []
    unset += [EXAMPLES] if run.header.environment.get(f"variable {EXAMPLES}") else []
    start = ["env", *(part for name in unset for part in ("-u", name))] if unset else []
    kept = _kept([*added, *run.header.arguments])
    whole = shlex.join([*start, "pytest", *paths, *kept, *options])
    return whole if len(whole) <= _LONGEST else shlex.join([*start, "pytest", *paths, *options])


def _added(environment: Mapping[str, str]) -> list[str]:
    """Return the arguments in ``PYTEST_ADDOPTS`` if they leave out tests or set a seed, which the next run must not."""
    of_variable = asked([], environment)
    narrows = of_variable.narrowed or of_variable.seed != DEFAULT_SEED or of_variable.hypothesis_seed is not None
    return shlex.split(environment.get(_ADDED, "")) if narrows else []


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _kept(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a run that its next run needs as well."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add: Any = parser.add_argument
    for name in _KEPT:
        add(name, *(["--numprocesses"] if name == "-n" else []), action="append", default=[], dest=name)
    add("--spread", action="store_true", dest="--spread")
    try:
        found: Mapping[str, Any] = vars(parser.parse_known_args(list(arguments))[0])
    except ValueError:
        return []
    kept = [part for name in _KEPT for value in found[name] if _PLAIN.fullmatch(value) for part in (name, value)]
    return [*kept, *(["--spread"] if found["--spread"] else [])]


def _profile(runs: Sequence[Run]) -> Step:
    worlds = [test.world for run in runs for test in run.tests.values() if test.world is not None]
    about = [part for world in worlds[:1] for part in ("--backend", world.backend, "--device", world.device)]
    about = about if all(map(_PLAIN.fullmatch, about)) else []
    do = "No run went by a profile, so that nothing is claimed. Draft one, review it, and run with it:"
    return Step(do=do, command=shlex.join(["concord", "probe", *about, "-o", "mine.toml"]))


def _less(runs: Sequence[Run], levels: Sequence[LevelReport], minimums: Minimums) -> list[Step]:
    """Return what to do where all was run and less is shown than the levels take."""
    stacks = [level.stack for level in levels]
    first = next((level for level in levels if level.partial), None)
    if first is None:
        return []
    sizes = minimums.levels[first.id].world_sizes
    causes = [test.cause for run in runs for test in run.tests.values() if test.stack == first.stack]
    few = [each for each in causes if isinstance(each, TooFewDevices) and each.size in sizes]
    if few:
        most = max(few, key=lambda each: each.need)
        do = f"Run it on a machine with at least {most.need} {most.kind} devices; this one has {most.have}:"
        return [_step(do, runs, stacks, [])]
    if any(isinstance(each, SizeNotClaimed | NoFittingSize) for each in causes):
        what = [f"worlds of {listed(map(str, sizes))} ranks (world_sizes)"]
    else:
        what = list(dict.fromkeys(each.what for each in causes if isinstance(each, NotClaimed)))
    if what:
        claim = listed(what[:_MOST_CLAIMS], more=len(what) - _MOST_CLAIMS)
        return [_step(f"Claim {claim} in the profile, if the backend has that, and run it again:", runs, stacks, [])]
    return [_step(f"{first.missing[0]} Mend that, and run it again:", runs, stacks, [])]
