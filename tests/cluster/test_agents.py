"""What may become of agents, and who may talk to them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import ssl
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import Rank, RanksFailed, World, WorldSpec
from harness.cluster import credentials, messages
from harness.cluster.channel import Channel
from harness.cluster.credentials import KeyProblem
from harness.cluster.host import HostRefused
from harness.cluster.launcher import Cluster, ClusterLauncher
from harness.safe_io.waiting import readable
from tests.cluster.conftest import Agent, gone, pool_of, running

SPREAD = WorldSpec(2, hosts=2, timeout=60)
SOON = 5.0


def children(pid: int) -> list[int]:
    """A process's children, and theirs."""
    own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [below for child in own for below in children(child)]


def summed(rank: Rank) -> float:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return float(tensor[0])


def fails(world: object, do: Callable[[], object]) -> RanksFailed:
    """The failure of a run during which something happens, half a second after rank 0 waits for rank 1."""

    def body(rank: Rank) -> None:
        if rank.index == 1:
            time.sleep(60)
        dist.barrier()

    def later() -> None:
        time.sleep(0.5)
        do()

    with pytest.raises(RanksFailed) as caught:
        world.run_beside(later, body)  # type: ignore[attr-defined]
    return caught.value


def under_rank_1(world: World, *agents: Agent) -> Agent:
    """The agent that started rank 1.  Worlds begin on any host."""
    address = world._processes[1].host.address  # type: ignore[attr-defined]
    return next(agent for agent in agents if agent.address == address)


# keys


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620])
def test_key_that_others_may_read(mode: int, tmp_path: Path) -> None:
    """A key that somebody else could know is refused."""
    path = tmp_path / "key"
    credentials.write(path, credentials.made())
    path.chmod(mode)
    with pytest.raises(KeyProblem, match=r"others may read or write it .*chmod 600"):
        credentials.read(path)


@pytest.mark.parametrize("text", ["", "no key", "-----BEGIN CERTIFICATE-----\n", "\0" * 70000])
def test_text_that_is_no_key(text: str, tmp_path: Path) -> None:
    """It is said of which file."""
    path = tmp_path / "key"
    credentials.write(path, text)
    with pytest.raises(KeyProblem, match=f"^{path}: it is not a key"):
        credentials.read(path)


def test_key_is_never_written_over(tmp_path: Path) -> None:
    """Neither a file nor what a link refers to."""
    path, link = tmp_path / "key", tmp_path / "link"
    path.write_text("precious")
    link.symlink_to(path)
    for each in (path, link):
        with pytest.raises(FileExistsError):
            credentials.write(each, "another")
    assert path.read_text() == "precious"


def test_key_is_not_shown(key_file: Path) -> None:
    """A cluster that is printed does not show its key."""
    key = credentials.read(key_file)
    assert "KEY" not in repr(Cluster((("127.0.0.1", 1),), key))


# peers


def test_no_agent() -> None:
    """The address is named, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(HostRefused, match=rf"no agent answers at 127\.0\.0\.1:{port}: .*`concord agent` starts one"):
        ClusterLauncher(Cluster((("127.0.0.1", port),), credentials.made()))


def test_another_key(start: Callable[..., Agent]) -> None:
    """Neither side talks to a peer with another key."""
    agent = start()
    with pytest.raises(HostRefused, match="not an agent with our key|has it the same key"):
        ClusterLauncher(Cluster((agent.address,), credentials.made()))
    assert agent.process.poll() is None


def test_peer_without_a_key(start: Callable[..., Agent]) -> None:
    """A client that speaks TLS, but has no key, gets nothing."""
    agent = start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(agent.address, timeout=5) as sock:
        got = b""
        with contextlib.suppress(OSError), context.wrap_socket(sock) as tls:
            got = tls.recv(1)
        assert got == b""
    assert not children(agent.process.pid)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_garbage_and_silence(start: Callable[..., Agent], cluster_of: Callable[..., Cluster], count: int) -> None:
    """Thousands of silent and noisy peers keep nobody out."""
    agent = start()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count > limits[0]:
        if limits[1] != resource.RLIM_INFINITY and limits[1] < count + 500:
            pytest.skip(f"a process may have {limits[1]} open files here, and {count} connections are wanted")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count + 500, limits[1]))
    silent = []
    try:
        for number in range(count):
            with contextlib.suppress(OSError):
                sock = socket.create_connection(agent.address, timeout=5)
                silent.append(sock)
                if number % 5 == 0:
                    sock.sendall(os.urandom(1000))
        began = time.monotonic()
        launcher = ClusterLauncher(cluster_of(agent))
        assert time.monotonic() - began < SOON
        launcher.close()
    finally:
        for sock in silent:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir(f"/proc/{agent.process.pid}/fd")) < 256 + 50


def test_garbage_from_a_peer_with_the_key(
    start: Callable[..., Agent], cluster_of: Callable[..., Cluster], key_file: Path
) -> None:
    """What is no message ends the session, and only that one."""
    agent = start()
    context = credentials.context(credentials.read(key_file), server=False)
    for noise in (b"\xff" * 4096, b"\0\0\0\1\0\0\0\0\0\0\0\0\xc1"):
        with socket.create_connection(agent.address, timeout=5) as sock, context.wrap_socket(sock) as tls:
            tls.sendall(noise)
            with contextlib.suppress(OSError):
                while tls.recv(65536):
                    pass
    ClusterLauncher(cluster_of(agent)).close()


def test_messages_that_are_none() -> None:
    """A channel is lost with a reason, and takes no memory for what never comes."""
    for noise in (b"\xff" * 12 + b"x", b"\0\0\0\1" + b"\0" * 8 + b"\xc1", b"\0\0\0\1" + b"\xff" * 8):
        ours, theirs = socket.socketpair()
        with theirs:
            channel = Channel(_Plain(ours), messages.TO_AGENT)  # type: ignore[arg-type]
            theirs.sendall(noise)
            assert channel.receive() == []
            assert channel.lost.startswith("the peer sent something that is not a message")
            channel.close()


@pytest.mark.parametrize(("reset", "says"), [(True, "the connection broke"), (False, "the peer closed the connection")])
def test_how_a_connection_ended(key_file: Path, reset: bool, says: str) -> None:
    """A channel tells a connection that broke from one that the peer closed."""
    key = credentials.read(key_file)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as threads:
        ours = socket.create_connection(listener.getsockname(), timeout=SOON)
        accepted, _ = listener.accept()
        wrapping = threads.submit(credentials.context(key, server=True).wrap_socket, accepted, server_side=True)
        channel = Channel(
            credentials.context(key, server=False).wrap_socket(ours, suppress_ragged_eofs=False), messages.TO_CONTROLLER
        )
        theirs = wrapping.result()
    if reset:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    until = time.monotonic() + SOON
    while not channel.lost and time.monotonic() < until:
        readable(channel, SOON)
        channel.receive()
    assert channel.lost.startswith(says)
    channel.close()


class _Plain:
    """A socket with what TLS has besides."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def pending(self) -> int:
        return 0


# hosts


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"NCCL_ALGO": "Ring"}, "the variable NCCL_ALGO is set there and not here"),
        ({"TORCH_LOGS": "+dynamo", "GLOO_X": "1"}, "GLOO_X is set there and not here; the variable TORCH_LOGS"),
    ],
    ids=["one", "two"],
)
def test_another_environment(
    start: Callable[..., Agent], cluster_of: Callable[..., Cluster], env: dict[str, str], says: str
) -> None:
    """A host with other settings is refused before any rank starts, and the difference is named."""
    with pytest.raises(HostRefused, match="can't run ranks of this session") as caught:
        ClusterLauncher(cluster_of(start(env=env)))
    assert says in str(caught.value)


def test_other_versions(
    start: Callable[..., Agent], cluster_of: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is one with another torch, Python or Concord."""
    from harness.cluster import facts

    real = facts.facts()
    changed = {**real, "torch": "2.99.0", "python": "3.99.0", "concord": "0"}
    monkeypatch.setattr("harness.cluster.launcher.facts", lambda: changed)
    with pytest.raises(HostRefused) as caught:
        ClusterLauncher(cluster_of(start()))
    for name in ("torch", "python", "concord"):
        assert f"{name} is {real[name]} there and {changed[name]} here" in str(caught.value)


def test_agent_is_killed(start: Callable[..., Agent], cluster_of: Callable[..., Cluster]) -> None:
    """An agent that has gone means that its ranks have: its host is blamed within seconds, and nothing is left."""
    one, two = start(), start()
    with pool_of(cluster_of(one, two)) as pool:
        world = pool.acquire(SPREAD)
        world.run(summed)
        two = under_rank_1(world, one, two)
        below = children(two.process.pid)
        assert len(below) >= 3
        began = time.monotonic()
        failed = fails(world, lambda: two.end(signal.SIGKILL))
        assert time.monotonic() - began < SOON
        assert [end.kind for end in failed.ends if end.kind == "lost"] == ["lost"]
        assert f"127.0.0.1:{two.address[1]}" in failed.headline
        assert all(gone(pid) for pid in below)


def test_agent_is_told_to_end(start: Callable[..., Agent], cluster_of: Callable[..., Cluster]) -> None:
    """At SIGTERM, too."""
    one, two = start(), start()
    with pool_of(cluster_of(one, two)) as pool:
        world = pool.acquire(SPREAD)
        world.run(summed)
        two = under_rank_1(world, one, two)
        below = children(two.process.pid)
        failed = fails(world, two.end)
        assert f"127.0.0.1:{two.address[1]}" in failed.headline
        assert all(gone(pid) for pid in below)


def test_frozen_host(start: Callable[..., Agent], cluster_of: Callable[..., Cluster]) -> None:
    """A host of which every process is stopped is given up after the patience that was asked for."""
    one, two = start(), start()
    with pool_of(cluster_of(one, two, patience=4.0)) as pool:
        world = pool.acquire(SPREAD)
        world.run(summed)
        two = under_rank_1(world, one, two)
        frozen = [two.process.pid, *children(two.process.pid)]
        try:
            failed = fails(world, lambda: [os.kill(pid, signal.SIGSTOP) for pid in frozen])
            assert "did not answer for 4 s" in failed.headline
            assert f"127.0.0.1:{two.address[1]}" in failed.headline
        finally:
            for pid in frozen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        assert all(gone(pid) for pid in frozen[2:])


def test_full_disk_on_one_host(key_file: Path, start: Callable[..., Agent], tmp_path: Path) -> None:
    """An agent on a full disk starts ranks as others do, and a rank that can't write is named with its host."""
    full = tmp_path / "full"
    full.mkdir()
    fill = f'mount -t tmpfs -o size=64k tmpfs {full} && ! head -c 1M /dev/zero 2>&- >{full}/all; exec "$@"'
    before = ("unshare", "--mount", "sh", "-c", fill, "sh")
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a file system for one process needs a mount namespace, which only root can make here")

    def body(rank: Rank) -> None:
        dist.barrier()
        with tempfile.TemporaryFile(dir=os.environ.get("TMPDIR")) as file:
            file.write(bytes(1 << 20))

    with running(key_file, env={"TMPDIR": str(full)}, before=before) as other:
        cluster = Cluster((start().address, other.address), credentials.read(key_file))
        with pool_of(cluster) as pool:
            world = pool.acquire(SPREAD)
            assert world.run(summed) == [2.0, 2.0]
            with pytest.raises(RanksFailed) as caught:
                world.run(body)
    (failed,) = [end for end in caught.value.ends if end.failed]
    assert "No space left on device" in failed.what
    assert f"({other.address[0]}:{other.address[1]})" in caught.value.summary().splitlines()[2]


def test_two_sessions_on_one_cluster(start: Callable[..., Agent], cluster_of: Callable[..., Cluster]) -> None:
    """Sessions do not see each other, and the end of one leaves the other alone."""
    cluster = cluster_of(start(), start())
    with pool_of(cluster) as one:
        first = one.acquire(SPREAD)
        with pool_of(cluster) as two:
            second = two.acquire(SPREAD)
            assert second.run(summed) == first.run(summed) == [2.0, 2.0]
        assert first.run(summed) == [2.0, 2.0]


def test_one_agent_for_two_hosts(start: Callable[..., Agent], cluster_of: Callable[..., Cluster]) -> None:
    """A world on more hosts than there are is refused."""
    from harness.worlds.launch import LaunchError

    with pool_of(cluster_of(start())) as pool, pytest.raises(LaunchError, match="on 2 hosts: this session has 1"):
        pool.acquire(SPREAD)
