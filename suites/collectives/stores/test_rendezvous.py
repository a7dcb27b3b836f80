"""What a rendezvous gives: a store at the place that is named, with the timeout that is given."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness import Rank, World, requirement

LOCAL = "127.0.0.1"
GIVEN = timedelta(seconds=7)


def free_port() -> int:
    with socket.create_server((LOCAL, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def environment(**variables: object) -> Iterator[None]:
    """Set what env:// reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        for name, value in variables.items():
            patch.setenv(name, str(value))
        yield


@requirement(
    "COLL-LIFE-4000",
    "The store of a tcp:// or env:// rendezvous has the timeout that the rendezvous is given.",
    source="torch.distributed.rendezvous; torch.distributed.init_process_group: init_method, timeout",
)
@requirement(
    "COLL-LIFE-4001",
    "Under torchrun, env:// connects every rank to the store of the agent, and counts it among its workers.",
    source="torch.distributed.rendezvous; torch.distributed.TCPStore: world_size, wait_for_workers; torchrun",
)
@pytest.mark.world(1)
def test_stores_of_rendezvous(world: World) -> None:
    """Begin a server, or connect as rank 0 or 1 to a server that is there and waits for another worker."""

    def body(rank: Rank) -> None:
        url = f"tcp://{LOCAL}:{free_port()}?rank=0&world_size=1"
        with environment(RANK=0, WORLD_SIZE=1, MASTER_ADDR=LOCAL, MASTER_PORT=free_port()):
            for address in (url, "env://"):
                store, *_ = next(dist.rendezvous(address, timeout=GIVEN))
                assert store.timeout == GIVEN, address
        for me in range(2):
            port, made = free_port(), list[Any]()

            def serve(port: int = port, made: list[Any] = made) -> None:
                made.append(dist.TCPStore(LOCAL, port, 2, is_master=True, timeout=timedelta(seconds=20)))

            agent = threading.Thread(target=serve, daemon=True)
            agent.start()
            names = {"MASTER_ADDR": LOCAL, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
            with environment(RANK=me, WORLD_SIZE=2, **names):
                client, *place = next(dist.rendezvous("env://", timeout=GIVEN))
            assert place == [me, 2]
            assert client.timeout == GIVEN
            agent.join(5)
            assert made, "the agent's store still waits for this worker"
            made[0].set("key", "of the agent")
            assert client.get("key") == b"of the agent"

    world.run(body)


@requirement(
    "COLL-LIFE-4002",
    "A file:// rendezvous uses the file at the path that its address names, whatever characters the path has.",
    source="torch.distributed.init_process_group: init_method; torch.distributed.FileStore",
)
@pytest.mark.world(1)
def test_files_of_rendezvous(world: World, tmp_path: Path) -> None:
    """Name a file with a letter, a percent sign, a plus sign, a space or another alphabet in its name."""

    def body(rank: Rank) -> None:
        for name in ("plain", "a%20b", "100%", "a+b", "a b", "été"):
            path = tmp_path / name
            store, *place = next(dist.rendezvous(f"file://{path}?rank=0&world_size=1"))
            store.set("key", name)
            assert place == [0, 1]
            assert path.exists(), f"{name}: {[p.name for p in tmp_path.iterdir()]}"
            assert dist.FileStore(str(path), 1).get("key") == store.get("key"), name

    world.run(body)
