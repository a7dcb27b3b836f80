"""The network of ranks: nobody else is on it where the kernel allows that, and elsewhere all is as it was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from harness import Pool, Rank, RanksFailed, World, WorldSpec
from harness.worlds import network
from harness.worlds.launch import LaunchError
from harness.worlds.local import LocalLauncher

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

needs_a_network = pytest.mark.skipif(bool(network.refusal()), reason=f"no namespaces here: {network.refusal().why}")

INTRUDER = """
import json, os, socket, sys
if os.getuid() == 0:  # then as somebody else
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
reached = []
for port in json.loads(sys.argv[1]):
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family) as found:
                found.connect((address, port))
            reached.append(port)
        except OSError:
            pass
print(json.dumps(reached))
"""


def as_another_user() -> None:
    """In a child before it executes something: become somebody else, if we may."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def listening_on(pid: int) -> set[int]:
    """The TCP ports on which a process listens, on whatever network it is."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def attacked(world: World, folder: Path) -> tuple[set[int], set[int]]:
    """Attack a world from outside while it makes a new group: returns its ports, and those that were reached."""
    found: list[set[int]] = []

    def body(rank: Rank) -> None:
        dist.barrier()
        if rank.index == 1:
            (folder / "rank 0 is in new_group").touch()
            while not (folder / "attacked").exists():  # the run's timeout ends a wait for nothing
                time.sleep(0.01)
        dist.barrier(dist.new_group([0, 1]))

    def attack() -> None:
        while not (folder / "rank 0 is in new_group").exists():
            time.sleep(0.01)
        listening = {port for pid in world.pids for port in listening_on(pid)}
        command = [sys.executable, "-S", "-c", INTRUDER, json.dumps(sorted(listening))]
        answer = subprocess.check_output(command, text=True)
        (folder / "attacked").touch()
        found.extend([listening, set(json.loads(answer))])

    world.run_beside(attack, body)
    return found[0], found[1]


@pytest.fixture(scope="module")
def own() -> Iterator[Pool]:
    """A pool of its own: the session's would keep a server for each network."""
    found = Pool(launcher=lambda **how: LocalLauncher(["torch"], **how))
    yield found
    found.close()


@needs_a_network
def test_nobody_outside_reaches_ranks(own: Pool, tmp_path: Path) -> None:
    """No port on which ranks listen can be reached by a process of another user, or of the same."""
    world = own.acquire(WorldSpec(2, network="private"))
    listening, reached = attacked(world, tmp_path)
    own.release(world)
    assert listening
    assert reached == set()


@needs_a_network
def test_no_name_server_is_missed(own: Pool) -> None:
    """Ranks print nothing of their own, although nobody tells them the name of an address there."""

    def body(rank: Rank) -> None:
        raise ValueError("the reason")

    with pytest.raises(RanksFailed) as caught:
        own.acquire(WorldSpec(2, network="private")).run(body)
    assert [end.output for end in caught.value.ends] == ["", ""]


def test_on_the_network_of_the_host_everybody_does(own: Pool, tmp_path: Path) -> None:
    """On the host's network each of those ports is reached, as the docs say."""
    world = own.acquire(WorldSpec(2, network="host"))
    listening, reached = attacked(world, tmp_path)
    own.release(world)
    assert listening
    assert reached == listening


@needs_a_network
def test_worlds_that_need_the_network_of_the_host_have_it(own: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that chooses an interface puts ranks on the host's network, in one world or in all."""

    def network_of(spec: WorldSpec) -> bool:
        world = own.acquire(spec)
        (found,) = world.run(lambda rank: os.readlink("/proc/self/ns/net"))
        own.release(world)
        return bool(found == os.readlink("/proc/self/ns/net"))

    chosen = (("GLOO_SOCKET_IFNAME", "eth0"),)  # one rank connects to nobody
    assert [network_of(WorldSpec(1)), network_of(WorldSpec(1, env=chosen))] == [False, True]
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert [network_of(WorldSpec(1)), network_of(WorldSpec(1, network="private"))] == [True, False]


PROGRAM = """
import json, os, pathlib, sys, time
import torch, torch.distributed as dist
from harness import Pool, RanksFailed, WorldSpec
from harness.worlds.local import LocalLauncher

if sys.argv[1:]:
    from tests.worlds.refused_unshare import refuse_unshare
    refuse_unshare()

def look(rank):
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return tensor.item(), os.getuid(), os.getgid(), int(status["CapPrm"], 16)

def hang(rank):
    if rank.index == 0:
        dist.barrier()
    else:
        dist.recv(torch.ones(1), 0)

pool = Pool(launcher=lambda **how: LocalLauncher(["torch"], **how))
world = pool.acquire(WorldSpec(2))
found = {"network": pool.networks, "ranks": world.run(look)}
try:
    world.run(hang, timeout=50)
except RanksFailed as e:
    found["hang"] = e.headline
pool.close()
print(json.dumps(found))
"""


def run_program(*arguments: str, **how: object) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, **how
    )  # type: ignore[call-overload]
    return dict(json.loads(done.stdout))


def may_execute_python_as_another_user() -> bool:
    try:
        subprocess.run([sys.executable, "-S", "-c", ""], preexec_fn=as_another_user, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


@needs_a_network
def test_without_privileges() -> None:
    """Without privileges there is a network, too: ranks are the same user, have no capability, can be watched."""
    if not may_execute_python_as_another_user():
        pytest.skip("only root can execute this Python")
    found = run_program(preexec_fn=as_another_user)
    user = NOBODY if os.getuid() == 0 else os.getuid()
    group = NOBODY if os.getuid() == 0 else os.getgid()
    assert found["network"] == ["private"]
    assert found["ranks"] == [[2.0, user, group, 0]] * 2
    assert "rank 1" in str(found["hang"])
    assert "not finished" not in str(found["hang"]), "a deadlock is proven there as elsewhere"


def test_where_namespaces_are_refused() -> None:
    """Where the kernel refuses, ranks are on the host's network, with the reason; all else is the same."""
    found = run_program("refused")
    (said,) = found["network"]  # type: ignore[misc]
    assert str(said).startswith("host: ")
    assert re.search("seccomp|allows|AppArmor|root without", str(said))
    assert [rank[0] for rank in found["ranks"]] == [2.0, 2.0]  # type: ignore[attr-defined]
    assert "not finished" not in str(found["hang"])


def test_private_is_not_made_up() -> None:
    """A private network that was asked for and can't be had is an error with its reason and a remedy."""

    class Refusing:
        refusal = network.Refusal("the kernel refuses", "another kernel")
        alive = True

        def close(self) -> None:
            pass

    pool = Pool(launcher=lambda **how: Refusing())  # type: ignore[arg-type,return-value]
    with pytest.raises(
        LaunchError, match="ranks can't have a network of their own: the kernel refuses; another kernel"
    ):
        pool.acquire(WorldSpec(1, network="private"))
