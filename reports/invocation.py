"""The check of a run's first and last records against its command line and its variables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from harness.results import DEFAULT_SEED, FREE_SEED, OnlySome, OptionGiven, Run
from harness.results.challenge import SLACK
from harness.thorough.effort import EXAMPLES, EffortError, effort
from reports.arguments import Asked
from reports.coherence import listed

_RANDOM, _NONE = "random", "none"
_LARGEST_SEED = 2**32 - 1
_VARIABLE = "variable "
_OF_PYTEST = ("PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_THEME", "PYTEST_THEME_MODE", "PYTEST_VERSION")
_OF_PYTEST_ITSELF = ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_")
_ELSEWHERE = ("PYTHONPATH", "PYTHONWARNINGS", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONUSERBASE", "LD_PRELOAD", "LD_AUDIT")


def header_problems(run: Run, asked: Asked) -> Iterator[str]:
    """Find where the first or last record of a run contradicts its arguments and variables."""
    header = run.header
    yield from _seed(run, asked)
    yield from _effort(run)
    if sorted(header.faults) != sorted(asked.faults):
        says, given = (", ".join(each) or "none" for each in (header.faults, asked.faults))
        yield f"its faults are {says}, but --fault in its arguments says {given}"
    if header.subject != asked.subject:
        yield f"its subject is {header.subject}, but its arguments say {asked.subject}"
    if asked.profile is not None and not _is_profile(asked.profile, run):
        yield f"it went by the profile {header.profile or 'none'!r}, but its arguments say --profile {asked.profile}"
    if not header.environment.get("torch"):
        yield "its environment has no torch"
    if run.end is None:
        return
    if run.end.whole and asked.narrowed:
        yield f"its last line says that it ran all of {', '.join(run.end.whole)}, and {asked.narrowed[0]} was given"
    silent = [flag for flag in asked.narrowed if OptionGiven(flag) not in run.end.left_out]
    if silent:
        yield f"{silent[0]} is among its arguments, but its last line does not say that tests were left out"
    whole = ", ".join(run.end.whole)
    if whole and (why := [each for each in run.end.left_out if not isinstance(each, OnlySome)]):
        yield f"its last line says that it ran all of {whole}, and that tests were left out: {why[0]}"
    some = {stack for each in run.end.left_out if isinstance(each, OnlySome) for stack in each.stacks}
    if both := [stack for stack in run.end.whole if stack in some]:
        yield f"its last line says that it ran all of {', '.join(both)}, and that it ran only some of its tests"
    never = [stack for stack in run.end.whole if not asked.may_cover(stack)]
    if never:
        given = ", ".join(asked.paths[:3])
        yield f"its last line says that it ran all of {', '.join(never)}, but its arguments ask for {given}"


def _seed(run: Run, asked: Asked) -> Iterator[str]:
    header = run.header
    if header.challenge is not None or asked.challenge:
        yield from _answered(run, asked)
        return
    thorough = header.environment.get(f"{_VARIABLE}{EXAMPLES}") == "thorough"
    if asked.hypothesis_seed is not None:
        seed, drawn = asked.hypothesis_seed, False
    elif thorough:
        seed, drawn = FREE_SEED, asked.seed == _RANDOM
    elif asked.seed == _RANDOM:
        seed, drawn = "", True
    else:
        seed, drawn = asked.seed, False
    if header.seed_drawn != drawn:
        given = "" if asked.seed == DEFAULT_SEED else f", but its arguments say --concord-seed {asked.seed}"
        given = given or (f", but its arguments say --hypothesis-seed {seed}" if asked.hypothesis_seed else "")
        was = "was drawn at random" if header.seed_drawn else "was not drawn"
        yield f"its seed {header.seed} {was}{given or ', but its arguments do not ask for that'}"
    elif seed and header.seed != seed:
        yield f"its seed is {header.seed or 'none'}, but its arguments say {seed}"
    elif not seed and not (header.seed.isascii() and header.seed.isdigit() and int(header.seed[:11]) <= _LARGEST_SEED):
        yield f"its seed {header.seed[:40]!r} can't have been drawn: a whole number from 0 to {_LARGEST_SEED}"


def _answered(run: Run, asked: Asked) -> Iterator[str]:
    """Find where the seed of a run does not follow from its challenge."""
    header, challenge = run.header, run.header.challenge
    if challenge is None:
        yield "--concord-challenge is among its arguments, but it has no challenge"
    elif not asked.challenge:
        yield "it has a challenge, but its arguments do not ask for one"
    elif header.seed != challenge.seed or not header.seed_drawn:
        yield f"its seed is {header.seed[:40] or 'none'}, but from its challenge follows {challenge.seed}"
    elif header.started < challenge.made - SLACK:
        yield "it began before its challenge was made"
    other = "--concord-seed" if asked.seed != DEFAULT_SEED else "--hypothesis-seed" if asked.hypothesis_seed else ""
    if other:
        yield f"{other} is among its arguments beside --concord-challenge, which pytest refuses"


def _effort(run: Run) -> Iterator[str]:
    said = run.header.environment.get(f"{_VARIABLE}{EXAMPLES}", "")
    share = run.header.effort
    try:
        real = effort({EXAMPLES: said}).share
    except EffortError as e:
        yield f"it ran with {e}"
        return
    if not math.isclose(share, real, rel_tol=1e-9):
        yield f"its effort is {share:g}, and {EXAMPLES} is {said or 'not set'}, which is {real:g}"


def _is_profile(given: str, run: Run) -> bool:
    if given == _NONE:
        return not run.header.profile
    if "/" in given or given.endswith(".toml"):
        return run.profile is not None and PurePosixPath(run.profile.file).name == PurePosixPath(given).name
    return run.profile is not None and PurePosixPath(run.profile.file).stem == given


def unjudged(run: Run, asked: Asked) -> Iterator[str]:
    """Find arguments, variables and flags that may change verdicts in an unknown way."""
    if asked.malformed:
        yield f"its arguments cannot be parsed: {asked.malformed}"
    if asked.unjudged:
        yield listed("made with arguments that may change its verdicts", asked.unjudged)
    yield from _variables(run.header.environment)
    flags = run.header.environment.get("python flags", "")
    if "optimize" in flags or run.header.environment.get(f"{_VARIABLE}PYTHONOPTIMIZE"):
        yield f"made by a Python that leaves out assertions ({flags or 'PYTHONOPTIMIZE'})"


def _variables(environment: Mapping[str, str]) -> Iterator[str]:
    names = [key.removeprefix(_VARIABLE) for key in environment if key.startswith(_VARIABLE)]
    odd = [n for n in names if n.startswith("PYTEST_") and n not in _OF_PYTEST and not n.startswith(_OF_PYTEST_ITSELF)]
    if odd:
        yield listed("made with variables that may change its verdicts", odd)


def code_from_elsewhere(run: Run) -> Iterator[str]:
    """Find variables with which Python may have loaded code other than the installed one."""
    names = [name for name in _ELSEWHERE if run.header.environment.get(f"{_VARIABLE}{name}")]
    if names:
        yield f"{', '.join(names)} was set, so that code may have come from elsewhere"
