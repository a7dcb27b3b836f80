"""All suites by every engine, with worlds spread over hosts and on one: the verdicts are those of this machine alone.

Each run takes minutes, so this is for the night.  ``CONCORD_EXAMPLES`` is ``smoke`` unless the environment says more.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cluster import credentials
from harness.results import Run, TooFewHosts, read
from tests.cluster.conftest import running
from tests.cluster.hosts import Network, missing
from tests.cluster.test_ray import PORT, QUIET, nodes
from tests.cluster.test_slurm import Slurm, slurm

__all__ = ["nodes", "slurm"]

ROOT = Path(__file__).parents[2]
HOUR = 3600
WHOLE = {"CONCORD_PRELOAD": ""}
"""Agents whose servers import all that the suites need."""
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(2 * HOUR),
    pytest.mark.skipif(bool(missing()), reason=missing() or "hosts"),
]


@pytest.fixture(scope="module", params=[2, 3], ids=["2hosts", "3hosts"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Two hosts, or three."""
    with Network(request.param) as found:
        yield found


def ran(folder: Path, *command: str, **env: str) -> Run:
    """Run the suites; returns the results.  ``command``: words before the options of pytest."""
    variables = {"CONCORD_EXAMPLES": "smoke", **os.environ, "CONCORD_LEASES": str(folder), **env}
    variables |= {"PYTEST_ADDOPTS": f"-o concord_results={folder} -p no:cacheprovider"}
    with open(folder / "said.txt", "w") as said:
        done = subprocess.run(command, cwd=ROOT, env=variables, stdout=said, stderr=said, timeout=HOUR, check=False)
    text = (folder / "said.txt").read_text()
    assert done.returncode == 0, text[-5000:]
    (results,) = folder.glob("**/results.jsonl")
    return read(results)


SUITES = (sys.executable, "-m", "pytest", "suites/", "-n", "gpus", "-q")


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What this machine alone says."""
    return ran(tmp_path_factory.mktemp("here"), *SUITES)


def assert_same(found: Run, here: Run, hosts: int) -> None:
    """The verdicts are the same, but for tests of several hosts, which this machine can't run.

    Which examples of a known defect are drawn depends on the seed alone, so waived tests are the same, too, unless the
    defect shows only now and then.
    """
    assert here.profile is not None
    now_and_then = {waiver.place for waiver in here.profile.waivers if waiver.intermittent}
    assert set(found.tests) == set(here.tests)
    pairs = [(name, here.tests[name], found.tests[name]) for name in here.tests]
    alone = [(name, one, other) for name, one, other in pairs if not isinstance(one.cause, TooFewHosts)]
    changed = {
        f"{name}: {one.verdict} here, {other.verdict} there: {other.headline or other.reason}"
        for name, one, other in alone
        if one.verdict != other.verdict and (one.waiver or other.waiver) not in now_and_then
    }
    assert not changed
    apart = [other for _, one, other in pairs if isinstance(one.cause, TooFewHosts)]
    assert apart
    wanting = [result.nodeid for result in apart if isinstance(result.cause, TooFewHosts)]
    assert not [each for each in wanting if hosts > 2]
    assert {result.verdict for result in apart} <= {"passed", "waived", "unsupported"}
    verdicts = Counter(result.verdict for result in found.tests.values())
    print(f"\n{hosts} hosts:", ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))


WAYS = pytest.mark.parametrize("options", [["--spread"], []], ids=["spread", "packed"])


@WAYS
def test_agents(network: Network, options: list[str], here: Run, key_file: Path, tmp_path: Path) -> None:
    """Agents that somebody has started."""
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(running(key_file, "--listen", network.address(i), before=network.command(i), env=WHOLE))
            for i in range(len(network.names))
        ]
        where = "agents=" + ",".join(f"{host}:{port}" for host, port in (agent.address for agent in agents))
        line = network.command(0, *SUITES, "--launcher", where, "--agents-key", str(key_file), *options)
        assert_same(ran(tmp_path, *line), here, len(agents))


@WAYS
def test_ray(nodes: Network, options: list[str], here: Run, tmp_path: Path) -> None:
    """Nodes of a Ray cluster."""
    line = nodes.command(0, *SUITES, "--launcher", f"ray={nodes.address(0)}:{PORT}", *options)
    assert_same(ran(tmp_path, *line, **QUIET), here, len(nodes.names))


@WAYS
def test_slurm(slurm: Slurm, options: list[str], here: Run, tmp_path: Path) -> None:
    """Nodes that srun allocates."""
    count = len(slurm.network.names)
    line = slurm.network.command(0, *SUITES, "--launcher", f"slurm=--nodes={count}", *options)
    assert_same(ran(tmp_path, *line, **slurm.env), here, count)


@WAYS
def test_torchrun(network: Network, options: list[str], here: Run, tmp_path: Path) -> None:
    """The same line on each node."""
    key = tmp_path / "key.pem"
    credentials.write(key, credentials.made())
    count = len(network.names)
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", "--nproc-per-node=1"),
        *(f"--master-addr={network.address(0)}", "--master-port=29500"),
    )
    agent = ("-m", "harness.commands.agent", "--key", str(key), "--", *SUITES, *options)
    others = [
        subprocess.Popen(
            network.command(i, *torchrun, f"--node-rank={i}", *agent),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for i in range(1, count)
    ]
    try:
        found = ran(tmp_path, *network.command(0, *torchrun, "--node-rank=0", *agent))
        assert [other.wait(60) for other in others] == [0] * len(others)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert_same(found, here, count)
