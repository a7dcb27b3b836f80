"""Where the default group begins: addresses, files, timeouts of stores, and what a process keeps of itself."""

from __future__ import annotations

import functools
import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fixtures.beginnings import started
from fixtures.settings import settings
from harness import Rank, World, requirement
from harness.stacks.collectives import default_store
from suites.collectives.groups.test_naming import total

SECONDS = 0.25
SHORT = timedelta(seconds=SECONDS)
HOST = "127.0.0.1"


def a_free_port() -> int:
    """Return a port that nobody serves."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def without_agent(patch: pytest.MonkeyPatch) -> None:
    """Let rank 0 serve the store itself."""
    patch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


@requirement(
    "COLL-LIFE-20",
    "An address without a port, path, rank or world size, or that has rank and size twice, is refused at once.",
    source="torch.distributed.rendezvous, init_process_group: init_method; test_store.py: RendezvousTCPTest, "
    "RendezvousFileTest, RendezvousTest",
)
@pytest.mark.world(1)
def test_malformed_addresses(world: World, tmp_path: Path) -> None:
    """Give each to rendezvous and to init_process_group; what the environment must say is missing, then empty."""

    def body(rank: Rank) -> None:
        dist.destroy_process_group()
        file = f"file://{tmp_path}/store"
        place = {"rank": 0, "world_size": 1}
        wrong: list[tuple[str, dict[str, Any]]] = [
            *((f"tcp://{HOST}:0?{query}", {}) for query in ("", "rank=0", "world_size=1")),
            (f"tcp://{HOST}:0", {"rank": 0}),
            (f"tcp://{HOST}:0", {"world_size": 1}),
            (f"tcp://{HOST}?rank=0&world_size=1", {}),
            (f"tcp://{HOST}", place),
            (f"tcp://{HOST}:port", place),
            (f"tcp://{HOST}:70000", place),
            *((f"{file}?{query}", {}) for query in ("", "rank=0", "world_size=1")),
            ("file://", place),
            *((f"{file}?{query}", place) for query in ("rank=0&world_size=1", "rank=0", "world_size=1")),
            (f"tcp://{HOST}:0?rank=0&world_size=1", place),
            ("nothing://", place),
            (f"{HOST}:0", place),
            ("", place),
        ]
        errors = (ValueError, RuntimeError, AssertionError)

        def refused(url: str, call: Callable[[], Any]) -> None:
            with pytest.raises(errors) as told:
                call()
            assert not isinstance(told.value, dist.DistError), url  # which comes when somebody has been waited for

        with pytest.MonkeyPatch.context() as patch:
            without_agent(patch)
            for url, beside in wrong:
                refused(url, lambda url=url, o=beside: next(dist.rendezvous(url, timeout=SHORT, **o)))
                if url:  # which init_process_group takes for none
                    begin = functools.partial(dist.init_process_group, rank.backend, timeout=SHORT)
                    refused(url, lambda begin=begin, url=url, o=beside: begin(init_method=url, **o))
                assert not dist.is_initialized(), f"{url}, {beside}"
        assert not (tmp_path / "store").exists()
        for url in (None, 7):
            with pytest.raises(RuntimeError, match="string"):
                dist.rendezvous(url)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="integer"):
            dist.rendezvous("env://", "0", 1)  # type: ignore[arg-type]
        values = {"MASTER_ADDR": HOST, "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        with pytest.MonkeyPatch.context() as patch:
            without_agent(patch)
            for missing in values:
                for name, value in values.items():
                    patch.setenv(name, value)
                for change in (lambda name: patch.delenv(name), lambda name: patch.setenv(name, "")):
                    change(missing)
                    with pytest.raises(ValueError, match=missing):
                        next(dist.rendezvous("env://", timeout=SHORT))
        started(rank, "back", 0, 1)

    world.run(body)


@requirement(
    "COLL-LIFE-21",
    "With file://, ranks meet in the file, whether rank and world size are given beside it or in the address.",
    source="torch.distributed.init_process_group: init_method, Shared file-system initialization",
)
@requirement(
    "COLL-TIMEOUT-06",
    "The store of the default group has the timeout of init_process_group, whichever init_method makes it.",
    source="torch.distributed.init_process_group: timeout, init_method; test_c10d_common.py: AbstractTimeoutTest",
)
@pytest.mark.world(2)
def test_timeout_of_the_store(world: World, tmp_path: Path) -> None:
    """Begin at an address, in the environment and in a file, with a short timeout and a long one, and ask the store."""

    def body(rank: Rank) -> None:
        dist.barrier()
        dist.destroy_process_group()
        beside = {"rank": rank.index, "world_size": 2}
        inside = f"rank={rank.index}&world_size=2"
        ways: list[tuple[str, dict[str, Any]]] = [
            ("tcp://{host}:{port}", beside),
            (f"tcp://{{host}}:{{port}}?{inside}", {}),
            ("env://", {}),
            (f"file://{tmp_path}/first", beside),
            (f"file://{tmp_path}/second?{inside}", {}),
        ]
        with pytest.MonkeyPatch.context() as patch:
            without_agent(patch)
            for number, (url, place) in enumerate(ways):
                if rank.index == 0:
                    rank.store.set(f"port {number}", str(a_free_port()))
                port = rank.store.get(f"port {number}").decode()
                for name, value in (("MASTER_ADDR", HOST), ("MASTER_PORT", port), ("RANK", rank.index)):
                    patch.setenv(name, str(value))
                patch.setenv("WORLD_SIZE", "2")
                limit = timedelta(seconds=11 + number)
                method = url.format(host=HOST, port=port)
                dist.init_process_group(rank.backend, init_method=method, timeout=limit, **place)
                assert (dist.get_rank(), dist.get_world_size()) == (rank.index, 2), url
                assert total(rank, None) == 11, url
                store: Any = default_store()
                assert store.timeout == limit, url
                store.set(f"of {rank.index}", f"way {number}")
                assert store.get(f"of {1 - rank.index}").decode() == f"way {number}", url
                dist.barrier()
                dist.destroy_process_group()
            for url in (f"tcp://{HOST}:0?rank=0&world_size=1", "env://?rank=0&world_size=1"):
                patch.setenv("MASTER_PORT", "0")
                store, *_ = next(dist.rendezvous(url, timeout=SHORT))
                began = time.monotonic()
                with pytest.raises(dist.DistError):
                    store.get("never")
                assert 0.9 * SECONDS <= time.monotonic() - began < SECONDS + 5, url
        started(rank, "back", rank.index, 2)

    world.run(body)


@requirement(
    "COLL-TIMEOUT-07",
    "A rank whose peers do not come to init_process_group gets an error after the timeout, and no group.",
    source="torch.distributed.init_process_group: timeout; test_store.py: test_dns_timeout; test_c10d_common.py: "
    "test_store_based_barrier",
)
@pytest.mark.world(2)
def test_nobody_comes(world: World) -> None:
    """Rank 0 is alone in a store, with a barrier at the end and without; rank 1 at an address and in a store.

    Without the barrier, only a backend that connects at once, as gloo does, has anybody to wait for. The barrier, which
    other backends get to, looks at its limit only once in 10 s, so as not to give up too early (torch's comment in it).
    """

    def body(rank: Rank) -> None:
        dist.barrier()
        dist.destroy_process_group()
        at_once = rank.backend == "gloo"

        def alone(what: str, late: float = 0, **options: Any) -> None:
            began = time.monotonic()
            with pytest.raises((RuntimeError, TimeoutError)):
                dist.init_process_group(rank.backend, timeout=SHORT, world_size=2, **options)
            assert 0.9 * SECONDS <= time.monotonic() - began < SECONDS + late + 5, what
            assert not dist.is_initialized(), what
            assert dist.group.WORLD is None, what

        with pytest.MonkeyPatch.context() as patch:
            without_agent(patch)
            for barrier in ("0", "1"):  # both ranks twice, because each attempt counts in the name of the next group
                patch.setenv("TORCH_DIST_INIT_BARRIER", barrier)
                if rank.index == 1 and barrier == "0":
                    alone("at an address", init_method=f"tcp://{HOST}:{a_free_port()}", rank=1)
                    continue
                if barrier == "0" and not at_once:
                    continue
                store = dist.PrefixStore(f"alone {barrier} {rank.index}", rank.store.clone())
                store.set_timeout(timedelta(seconds=20))
                late = 0 if at_once else 10
                alone(f"in a store, TORCH_DIST_INIT_BARRIER={barrier}", late, store=store, rank=rank.index)
        started(rank, "back", rank.index, 2)
        assert total(rank, None) == 11

    world.run(body, watch=False, timeout=30)


@requirement(
    "COLL-LIFE-22",
    "A group that begins or ends leaves logging, random numbers, the environment or other settings of the process as "
    "they are.",
    source="torch.distributed.init_process_group, new_group, destroy_process_group; test_c10d_gloo.py: "
    "test_logging_init",
)
@pytest.mark.world(2)
def test_settings_stay(world: World) -> None:
    """Compare them around the end of the world, a new one, groups in it, and collectives; with handlers and without."""

    def body(rank: Rank) -> None:
        steps: dict[str, Callable[[], Any]] = {
            "destroy_process_group": dist.destroy_process_group,
            "init_process_group": lambda: dist.init_process_group(
                rank.backend, store=dist.PrefixStore(f"turn {turn}", rank.store), rank=rank.index, world_size=2
            ),
            "new_group": lambda: groups.append(dist.new_group([0, 1])),
            "new_subgroups": lambda: groups.append(dist.new_subgroups(2)[0]),
            "all_reduce": lambda: total(rank, groups[0]),
            "all_gather_object": lambda: dist.all_gather_object([None, None], rank.index),
            "destroy_process_group of a group": lambda: dist.destroy_process_group(groups.pop()),
            "barrier": dist.barrier,
        }
        handler = logging.NullHandler()
        for turn in range(2):
            groups: list[Any] = []
            dist.barrier()
            for what, step in steps.items():
                before = settings()
                step()
                after = settings()
                assert {name for name in before if before[name] != after[name]} == set(), f"{what}, turn {turn}"
            logging.root.addHandler(handler)
        logging.root.removeHandler(handler)

    world.run(body)


@requirement(
    "COLL-CALL-07",
    "A backend is named in any case, for one device or several, and a malformed name is refused before a group begins.",
    source="torch.distributed.Backend, BackendConfig, new_group: backend; test_c10d_common.py: test_backend_config; "
    "distributed_test.py: test_Backend_enum_class",
)
@pytest.mark.world(2, warm=False)
def test_names_of_backends(world: World) -> None:
    """Name the own backend for one device, two or all, and for a device twice; name nothing, or what is no name."""

    def body(rank: Rank) -> None:
        own, kind = str(dist.get_backend()), rank.device.type
        another = "fpga"
        mixed = own[:1].upper() + own[1:]
        assert {str(dist.Backend(name)) for name in (own, own.upper(), mixed)} == {own}
        for wrong in (None, 3, [own], b"x"):
            with pytest.raises(ValueError, match="string"):
                dist.Backend(wrong)  # type: ignore[arg-type]
        named: dict[str, dict[str, str]] = {
            f"{kind}:{own}": {kind: own},
            f"{kind}:{own}".upper(): {kind: own},
            f"{kind}:{own},{another}:{own}": {kind: own, another: own},
            f"{another}:{own},{kind}:{own}": {another: own, kind: own},
            f"{another}:other,{kind}:{own}": {another: "other", kind: own},
        }
        for name, devices in named.items():
            config = dist.BackendConfig(dist.Backend(name))
            assert {device: str(each) for device, each in config.get_device_backend_map().items()} == devices, name
            assert str(config) == ",".join(f"{device}:{each}" for device, each in devices.items()), name
            if "other" not in name:
                group = dist.new_group(backend=name)
                assert dist.get_backend_config(group) == str(config), name
                assert total(rank, group) == 11, name
        alone = dist.BackendConfig(dist.Backend(own.upper()))
        assert alone.get_device_backend_map()[kind] == own
        assert set(alone.get_device_backend_map()) == set(dist.Backend.backend_capability[own])
        for name in (
            f"{kind}:{own},",
            f"{kind}:{own},{kind}:{own}",
            f"{kind}:{own},{another}:{own},{kind}:other",
            f"{kind}:{own}:more",
            f"{kind}:{own},{own}",
            f"{own},{kind}:{own}",
            f",{kind}:{own}",
        ):
            with pytest.raises(ValueError):  # noqa: PT011 - the words differ
                dist.BackendConfig(dist.Backend(name))
            with pytest.raises(ValueError):  # noqa: PT011 - the words differ
                dist.new_group(backend=name)
        dist.Backend.register_backend("another_name", lambda *arguments: None, devices=[another])
        assert dist.Backend.ANOTHER_NAME == "another_name"  # type: ignore[attr-defined]
        assert dist.is_backend_available("ANOTHER_NAME")
        assert str(dist.BackendConfig(dist.Backend("Another_Name"))) == f"{another}:another_name"
        assert total(rank, None) == 11

    world.run(body)
