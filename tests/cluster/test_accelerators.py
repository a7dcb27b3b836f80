"""Accelerators of agents' hosts: which there are, and which ranks get them.

The accelerators are stand-ins: a module tells torch that its type of device ``meta`` is one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import WorldSpec
from harness.cluster.host import HostRefused
from harness.cluster.launcher import Cluster, Wanted, check
from harness.cluster.messages import Devices, Survey
from harness.cluster.survey import Surveyor
from harness.results import read
from tests.cluster.conftest import Agent, pool_of, running

HOLOGRAM = """
import os, types
import torch

torch.meta = types.ModuleType("torch.meta")
torch.meta.get_device_name = lambda index: "Hologram 3000"
told = torch.accelerator
told.is_available = lambda: bool(told.device_count())
told.current_accelerator = lambda check_available=False: torch.device("meta")
told.device_count = lambda: len([each for each in os.environ.get("META_VISIBLE_DEVICES", "").split(",") if each])
told.set_device_index = told.set_stream = told.synchronize = lambda *_: None
told.current_stream = lambda: "stream"
told.current_device_index = told.memory_allocated = lambda: 0
told.empty_cache = lambda: None
"""
PROFILE = """
name = "hologram"
backend = "gloo"
device = "meta"
imports = ["hologram"]
world_sizes = [1, 2, 3, 4, 8]
"""
TESTS = """
import os
import pytest, torch, torch.distributed as dist

def body(rank):
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [rank.size] * 2
    return rank.host, str(rank.device), os.environ["LOCAL_RANK"]

@pytest.mark.world(1, 2, 3, 4, 8)
def test_one(world):
    print("\\nRANKS", world.size, *(":".join(told) for told in (map(str, each) for each in world.run(body))))

@pytest.mark.world(2, 4)
def test_several(worlds):
    for size in worlds.sizes:
        print("\\nSEVERAL", size, *(told[0] for told in worlds(size).run(body)))
"""

Session = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module, a profile and tests."""
    folder = tmp_path_factory.mktemp("accelerators")
    (folder / "hologram.py").write_text(HOLOGRAM)
    (folder / "hologram.toml").write_text(PROFILE)
    (folder / "test_it.py").write_text(TESTS)
    return folder


def environment(folder: Path, devices: str) -> dict[str, str]:
    """The variables of an agent that sees these devices."""
    here = f"{Path(__file__).parents[2]}:{folder}"
    return {"PYTHONPATH": here, **({"META_VISIBLE_DEVICES": devices} if devices else {})}


@pytest.fixture(scope="module")
def two(folder: Path, key_file: Path) -> Iterator[list[Agent]]:
    """Agents with two devices each."""
    with (
        running(key_file, env=environment(folder, "0,1")) as one,
        running(key_file, env=environment(folder, "2,3")) as other,
    ):
        yield [one, other]


@pytest.fixture
def session(folder: Path, key_file: Path, tmp_path: Path) -> Session:
    """``session(agents, *arguments)`` runs pytest on them; returns its exit code and what it printed."""

    def run(agents: list[Agent], *arguments: str) -> tuple[int, str]:
        where = "agents=" + ",".join(f"{host}:{port}" for host, port in (agent.address for agent in agents))
        plugins = ("-p", "harness.plugin", "-p", "no:cacheprovider")
        options = ("--profile", str(folder / "hologram.toml"), "--launcher", where, "--agents-key", str(key_file))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *plugins, "-rA", *options, *arguments],
            cwd=folder,
            env={
                **os.environ,
                "CONCORD_PRELOAD": "torch",
                "CONCORD_LEASES": str(tmp_path),
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.timeout(300)
def test_packed(two: list[Agent], session: Session, tmp_path: Path) -> None:
    """A world is on one host if its devices are enough, and on as few as possible if not.  Results name the devices."""
    code, said = session(two, "--concord-results", str(tmp_path / "results"))
    assert code == 0, said
    assert "RANKS 4 0:meta:0:0 0:meta:1:1 1:meta:0:0 1:meta:1:1" in said
    assert "RANKS 3 0:meta:0:0 0:meta:1:1 1:meta:0:0" in said
    assert "RANKS 2 0:meta:0:0 0:meta:1:1" in said
    assert "SEVERAL 4 0 0 1 1" in said
    assert "SEVERAL 2 0 0" in said
    assert "a world of 8 ranks needs 8 meta devices, and hosts have 2 and 2" in said
    assert "4 meta devices: meta-0, meta-1, meta-2, meta-3" in said
    (written,) = tmp_path.glob("results/**/results.jsonl")
    header = read(written).header.environment
    assert header["rank interfaces"] == "host 1: lo; host 2: lo"
    assert (header["device"], header["accelerator"]) == ("Hologram 3000", "4 of Hologram 3000 on 2 hosts")


@pytest.mark.timeout(300)
def test_spread(two: list[Agent], session: Session) -> None:
    """With --spread, a world is on as many hosts as have devices for it, on workers as well."""
    code, said = session(two, "--spread", "-n", "2")
    assert code == 0, said
    assert re.search(r"RANKS 2 0:meta:\d:\d 1:meta:\d:\d\n", said), said
    assert "SEVERAL 2 0 1" in said
    assert "RANKS 4 0:meta:0:0 0:meta:1:1 1:meta:0:0 1:meta:1:1" in said


@pytest.mark.timeout(300)
def test_host_without_devices(folder: Path, two: list[Agent], key_file: Path, session: Session) -> None:
    """A host that lacks what the others have is refused before any test, by name."""
    with running(key_file, env=environment(folder, "")) as bare:
        code, said = session([two[0], bare])
    assert code == 4, said
    assert f"127.0.0.1:{bare.address[1]}): no meta device: torch" in said
    assert "Traceback" not in said


def test_devices_are_counted_once(
    folder: Path, two: list[Agent], key_file: Path, cluster_of: Callable[..., Cluster]
) -> None:
    """Two agents that see one device of a machine have it once between them."""
    with running(key_file, env=environment(folder, "1,2")) as third:
        found = check(cluster_of(*two, third), Wanted("meta", ("hologram",), "META_VISIBLE_DEVICES"))
    assert found.accelerators is not None
    assert found.accelerators.keys == ("meta-0", "meta-1", "meta-2", "meta-3")
    assert found.accelerators.devices == ("meta:0@0", "meta:1@0", "meta:0@1", "meta:1@1")
    assert found.device_name == "Hologram 3000"


def test_hosts_that_differ(folder: Path, two: list[Agent], key_file: Path, cluster_of: Callable[..., Cluster]) -> None:
    """Hosts with another type of device are refused together."""
    with running(key_file) as bare:
        with pytest.raises(HostRefused, match="importing hologram: ModuleNotFoundError"):
            check(cluster_of(two[0], bare), Wanted("meta", ("hologram",)))
        assert check(cluster_of(bare), Wanted()).accelerators is None


def test_ranks_are_where_their_devices_are(two: list[Agent], cluster_of: Callable[..., Cluster]) -> None:
    """A world on a device of the second host starts there, whichever host is next in turn."""
    with pool_of(cluster_of(*two)) as pool:
        for _ in range(3):
            world = pool.acquire(WorldSpec(1, "gloo", imports=("hologram",)), ("meta:1@1",))
            assert world.run(lambda rank: (os.environ["META_VISIBLE_DEVICES"], str(rank.device))) == [("2,3", "meta:1")]
            pool.release(world)


def surveyed(imports: list[str], kind: str = "meta", **env: str) -> Devices:
    """What a survey answers."""
    survey = Surveyor(Survey(7, kind, imports, "", env))
    until = time.monotonic() + 60
    while (answer := survey.answer()) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return answer


class TestSurvey:
    """The process that looks for devices may do anything."""

    @pytest.mark.parametrize(
        ("code", "why"),
        [
            ("print('no json')", "no meta device: torch"),
            ("import os; print('driver: out of light', flush=True); os._exit(3)", "status 3: driver: out of light"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "looking for them ended with status -11"),
            ("raise RuntimeError('out of light')", "no meta device: importing brings: RuntimeError: out of light"),
            ("import os; print('x' * 1_000_000, flush=True); os._exit(0)", "xxx"),
        ],
        ids=["prints", "exits", "crashes", "raises", "floods"],
    )
    def test_trouble(self, code: str, why: str, tmp_path: Path) -> None:
        """It is said why, in a line."""
        (tmp_path / "brings.py").write_text(code)
        answer = surveyed(["brings"], PYTHONPATH=f"{Path(__file__).parents[2]}:{tmp_path}")
        assert (answer.number, answer.devices) == (7, [])
        assert why in answer.why
        assert len(answer.why) < 500

    def test_forged_number(self, tmp_path: Path) -> None:
        """An answer is to the question that was asked, whatever a module prints last."""
        forged = '["Devices", 99, "meta", ["meta:0"], ["meta-0"], "", ""]'
        (tmp_path / "brings.py").write_text(f"import os\nprint({forged!r}, flush=True)\nos._exit(0)")
        assert surveyed(["brings"], PYTHONPATH=f"{Path(__file__).parents[2]}:{tmp_path}").number == 7

    def test_host(self) -> None:
        """Where there is no accelerator, and none is asked for, the answer is the host."""
        answer = surveyed([], kind="")
        assert (answer.kind, answer.why) == ("cpu", "")
