"""Command-line options and ini settings."""

from __future__ import annotations

import pytest

from harness.plugin import launching, perf
from harness.plugin.arguments import path_of
from harness.profiles.vocabulary import STARTS
from harness.results import DEFAULT_SEED
from harness.safe_io.writing import nearest
from harness.subjects import Subject, SubjectError, find
from harness.worlds.network import AUTO, NETWORKS


def add(parser: pytest.Parser) -> None:
    """Register the options and ini settings with pytest."""
    group = parser.getgroup("concord", "worlds of ranks (Concord)")
    group.addoption(
        "--world-backend",
        metavar="NAME",
        help="Backend of the process groups. Default: the profile's, or torch's own for the device.",
    )
    group.addoption(
        "--world-device",
        metavar="TYPE",
        help="Type of device that ranks run on, as torch names it. "
        "Default: the profile's, or else the accelerator, or cpu if there is none.",
    )
    group.addoption(
        "--world-timeout",
        type=float,
        metavar="S",
        help="Seconds for one run on ranks, if the test's mark sets no timeout. Default: the profile's, or 60.",
    )
    group.addoption(
        "--ranks-per-device",
        type=int,
        metavar="N",
        help="How many ranks share an accelerator. Default: the profile's number, or 1.",
    )
    group.addoption(
        "--worlds-per-device",
        type=int,
        metavar="N",
        help="How many worlds, of as many pytest processes, share an accelerator. With -n gpus, there are as many "
        "workers for each. Worlds that need all devices for themselves still get them. Default: 1.",
    )
    group.addoption(
        "--rank-network",
        choices=NETWORKS,
        default=AUTO,
        help="Network of ranks. private: one of their own, which no other process can reach; host: the machine's; "
        "auto: private if the kernel allows it, unless ranks are on accelerators or a variable such as "
        "GLOO_SOCKET_IFNAME selects an interface of the machine. Default: auto.",
    )
    group.addoption(
        "--rank-start",
        choices=STARTS,
        help="How the processes of ranks begin. fork: they are forked from a process that has imported torch; spawn: "
        "each is a new Python, which takes seconds, for runtimes that do not survive a fork. Default: the profile's, "
        "or fork.",
    )
    launching.add_options(group)
    group.addoption(
        "--profile",
        metavar="NAME",
        help="Profile of the backend: a name in fixtures/profiles or of a package's profile, a path to a .toml file, "
        "or none. Default: the one for the run's backend and device, if there is one.",
    )
    group.addoption(
        "--fault",
        action="append",
        default=[],
        metavar="NAME",
        help="Inject a fault of the catalog (fixtures/faults) into every rank, to see whether the suites detect it. "
        "Repeatable. `concord faults` lists them.",
    )
    group.addoption(
        "--subject",
        default="torch",
        metavar="NAME",
        help="Whose implementation of the stacks the suites run on: torch (PyTorch's own), reference (Concord's own, "
        "written to be read), or one that an installed package registers. Default: torch.",
    )
    group.addoption(
        "--suite",
        action="append",
        default=[],
        metavar="NAME",
        help="Collect the suite of an installed package (entry points concord.suites); all: every one. Repeatable.",
    )
    group.addoption(
        "--rank-pdb",
        type=int,
        metavar="R",
        help="Open a debugger in rank R when it fails, and at breakpoint().",
    )
    group.addoption(
        "--concord-results",
        metavar="DIR",
        help="Folder for the results of the run. Default: the ini setting concord_results. If both are empty, no "
        "results are written.",
    )
    group.addoption(
        "--thorough",
        action="store_true",
        help="Sweep what suites only sample by default: every count, size, dtype, layout and group, with many repeats, "
        "and every combination of parameters.",
    )
    group.addoption(
        "--within",
        metavar="TIME",
        help="Run the tests that ask the most in this time, as 5m or 90s: of requirements, and of faults that they are "
        "known to notice.",
    )
    group.addoption(
        "--start-over",
        action="store_true",
        help="Begin a new thorough run (CONCORD_EXAMPLES=thorough) instead of continuing an interrupted one.",
    )
    perf.add_options(group)
    perf.add_ini(parser)
    group.addoption(
        "--concord-seed",
        default=DEFAULT_SEED,
        metavar="SEED",
        help="Seed of the suites' properties. default: the same examples in every run; random: a seed drawn for this "
        "run; a number: that seed; free: as Hypothesis chooses, including earlier failures. Default: default.",
    )
    group.addoption(
        "--concord-challenge",
        metavar="FILE",
        help="Take the seed of the suites' properties from a verifier's challenge (`concord challenge`): a file, or "
        "its text. Levels count it as a random seed.",
    )
    parser.addini("concord_results", "Folder for the results of runs, relative to the root directory.", default="")


def check(config: pytest.Config) -> None:
    """Reject options that cannot work. Errors: UsageError."""
    rank = config.getoption("rank_pdb")
    if rank is not None and (rank < 0 or config.getoption("numprocesses", None) or hasattr(config, "workerinput")):
        why = "a rank's number is 0 or more" if rank < 0 else "a worker of pytest-xdist has no terminal; add -n 0"
        raise pytest.UsageError(f"--rank-pdb {rank}: {why}")
    for option in ("ranks_per_device", "worlds_per_device"):
        per_device = config.getoption(option)
        if per_device is not None and per_device < 1:
            raise pytest.UsageError(f"--{option.replace('_', '-')} {per_device}: at least 1")
    for name in config.getoption("fault"):
        _check_fault(name)
    subject(config)
    _check_paths(config)
    _check_results(config)
    timeout = config.getoption("world_timeout")
    if timeout is not None and not timeout > 0:
        raise pytest.UsageError(f"--world-timeout {timeout:g}: a number of seconds above 0")


def subject(config: pytest.Config) -> Subject:
    """Return the subject of the run. Errors: UsageError if none has that name."""
    name = config.getoption("subject")
    try:
        return find(name)
    except SubjectError as e:
        raise pytest.UsageError(f"--subject {name}: {e}") from None


def _check_results(config: pytest.Config) -> None:
    """Reject a folder for results that can't be one. A full disk may be mended, and a run goes on without results."""
    given = config.getoption("concord_results")
    if not given:
        return
    place = nearest(config.rootpath / given)
    if not place.is_dir():
        raise pytest.UsageError(f"--concord-results {given}: {place} is not a folder")


def _check_paths(config: pytest.Config) -> None:
    """Reject a file or folder that does not exist. With workers, pytest would run no test and not say why."""
    if not config.getoption("numprocesses", None) or config.option.pyargs:
        return
    for argument in config.args:
        if not path_of(config, argument).exists():
            raise pytest.UsageError(f"file or directory not found: {argument}")


def _check_fault(name: str) -> None:
    from difflib import get_close_matches

    from harness.faults import catalog

    try:
        names = list(catalog())
    except ImportError as e:
        raise pytest.UsageError(f"--fault {name}: no catalog of faults here: {e}") from e
    if name not in names:
        near = get_close_matches(name, names)
        hint = f"did you mean {near[0]}?" if near else "`concord faults` lists them"
        raise pytest.UsageError(f"--fault {name}: no such fault in the catalog; {hint}")
