"""What torch.distributed says of itself: of groups, of ranks that are none, of backends, before and after changes."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import torch
import torch.distributed as dist

from fixtures.beginnings import started
from harness import Rank, World, requirement, spmd
from harness.stacks.collectives import functional
from suites.collectives.groups.test_naming import total


@requirement(
    "COLL-GROUP-24",
    "A rank outside of a group gets -1 for its rank or the group's size, while the group's backend is refused.",
    source="torch.distributed.get_rank, get_world_size: '-1, if not part of the group', get_backend",
)
@requirement(
    "COLL-GROUP-25",
    "A rank that is not in a group is not translated.",
    source="torch.distributed.get_group_rank, get_global_rank: 'must be part of group otherwise this raises'",
)
@requirement(
    "COLL-GROUP-26",
    "Without a group, or with group.WORLD, queries are about the default group.",
    source="torch.distributed.get_rank, get_world_size, get_backend, get_process_group_ranks: group",
)
@spmd(3)
def test_queries(rank: Rank) -> None:
    """Ask about the world, a group of two ranks, and what new_group gives to others."""
    world: Any = dist.group.WORLD
    assert dist.is_initialized()
    for of in ((), (None,), (world,)):
        assert (dist.get_rank(*of), dist.get_world_size(*of)) == (rank.index, 3)
        assert dist.get_backend(*of) == dist.get_backend()
        assert dist.get_backend_config(*of) == dist.get_backend_config(world)
    assert dist.get_process_group_ranks(None) == dist.get_process_group_ranks(world) == [0, 1, 2]
    assert (world.rank(), world.size()) == (rank.index, 3)
    for query in (dist.get_group_rank, dist.get_global_rank):  # of a group that torch.distributed has not made
        with pytest.raises((ValueError, RuntimeError)):
            query(dist.ProcessGroup(0, 1), 0)
    count = dist.get_pg_count()
    group: Any = dist.new_group([2, 0])
    assert dist.get_pg_count() == count + 1
    if rank.index == 1:
        assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
        for query in (dist.get_backend, dist.get_backend_config):
            with pytest.raises(ValueError, match=r"(?i)group"):
                query(group)
        dist.destroy_process_group(group)  # which does nothing
    else:
        assert (dist.get_rank(group), dist.get_world_size(group)) == (rank.index // 2, 2)
        assert (group.rank(), group.size()) == (rank.index // 2, 2)
        assert dist.get_backend(group) == dist.get_backend()
        for query, wrong in ((dist.get_group_rank, 1), (dist.get_group_rank, 3), (dist.get_global_rank, 2)):
            for number in (wrong, -1):
                with pytest.raises((ValueError, RuntimeError)):
                    query(group, number)
    assert total(rank, None) == 111


@requirement(
    "COLL-GROUP-1201",
    "A group says the name of its backend, or that it is custom, whether this was named alone or for its devices.",
    source="torch.distributed.ProcessGroup.name; new_group: backend; pytorch/pytorch#167305",
)
@pytest.mark.parametrize("named", ["alone", "device", "devices"])
@pytest.mark.world(1, warm=False)
def test_name_of_a_groups_backend(world: World, named: str) -> None:
    """Another backend is registered, as torch.distributed.fsdp registers one, and is not used."""

    def body(rank: Rank) -> None:
        own, kind = dist.get_backend(), rank.device.type
        dist.Backend.register_backend("another_one", lambda *arguments: None, devices=["fpga"])
        names = {"alone": own, "device": f"{kind}:{own}", "devices": f"{kind}:{own},fpga:{own}"}
        group: Any = dist.new_group(backend=names[named])
        alone: Any = dist.new_group(backend=own)
        assert alone.name() in (own, "custom")  # which a registered backend is
        assert group.name() == alone.name(), f"it says {group.name()}"
        assert total(rank, group) == 1

    world.run(body)


@requirement(
    "COLL-CALL-05",
    "get_node_local_rank is the number in LOCAL_RANK, or else the fallback, or else an error.",
    source="torch.distributed.get_node_local_rank",
)
@requirement(
    "COLL-CALL-06",
    "get_default_backend_for_device accepts a device by name or as an object, with or without an index.",
    source="torch.distributed.get_default_backend_for_device",
)
@requirement(
    "COLL-CALL-1500",
    "is_backend_available of a text with devices says whether each backend that it names is available, as of a name.",
    source="torch.distributed.is_backend_available; torch.distributed.init_process_group: backend",
)
@requirement(
    "COLL-CALL-56",
    "is_torchelastic_launched is true if TORCHELASTIC_RUN_ID is set, whatever else the environment has.",
    source="torch.distributed.is_torchelastic_launched: 'the existence of TORCHELASTIC_RUN_ID environment variable'",
)
@pytest.mark.world(1)
def test_of_this_process(world: World) -> None:
    """Set, replace and unset the variable; ask for the rank's device in every way, and for one without a backend."""

    def body(rank: Rank) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_RANK", "3")
            assert dist.get_node_local_rank() == dist.get_node_local_rank(5) == 3
            patch.setenv("LOCAL_RANK", "0")
            assert dist.get_node_local_rank(5) == dist.get_node_local_rank(fallback_rank=5) == 0
            patch.delenv("LOCAL_RANK")
            assert (dist.get_node_local_rank(5), dist.get_node_local_rank(fallback_rank=0)) == (5, 0)
            with pytest.raises(RuntimeError, match="LOCAL_RANK"):
                dist.get_node_local_rank()
            for name in OF_LAUNCHERS:
                patch.delenv(name, raising=False)
            for names in ((), *((name,) for name in OF_LAUNCHERS), OF_LAUNCHERS):
                with pytest.MonkeyPatch.context() as launched:
                    for name in names:
                        launched.setenv(name, "1")
                    assert dist.is_torchelastic_launched() is ("TORCHELASTIC_RUN_ID" in names), names
        kind = rank.device.type
        names = {dist.get_default_backend_for_device(of) for of in (kind, torch.device(kind), f"{kind}:0")}
        assert names == {dist.Backend.default_device_backend_map[kind]}
        with pytest.raises(ValueError, match="meta"):
            dist.get_default_backend_for_device("meta")
        assert dist.is_backend_available(dist.get_backend())
        assert not dist.is_backend_available("no such backend")
        own = dist.get_backend()
        for named in (f"{kind}:{own}", f"{kind.upper()}:{own.upper()}", f"{kind}:{own},fpga:{own}"):
            assert dist.is_backend_available(named), named
        for named in (f"{kind}:missing", f"{kind}:{own},fpga:missing", f"fpga:missing,{kind}:{own}"):
            assert not dist.is_backend_available(named), named
        assert dist.Backend(dist.get_backend().upper()) == dist.get_backend()

    world.run(body)


OF_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
)
"""What launchers of processes set, of which only the last is promised to say which launcher it was."""


@requirement(
    "COLL-LIFE-10",
    "A destroyed group is known to no query and is not alive, while other groups of its ranks stay.",
    source="torch.distributed.destroy_process_group",
)
@requirement(
    "COLL-LIFE-11",
    "Functional collectives of a list of ranks use a group that is alive.",
    source="torch.distributed._functional_collectives: all_reduce: group; torch.distributed.destroy_process_group",
)
@pytest.mark.needs(features=["functional"])
@spmd(3)
def test_destroyed_groups(rank: Rank) -> None:
    """Destroy the first, the last and the middle one of three groups of the same ranks, in turn."""
    for turn in range(3):
        groups: list[Any] = [dist.new_group([1, 2]) for _ in range(3)]
        if rank.index == 0:
            continue
        order = [turn, *(i for i in range(3) if i != turn)]
        for number, i in enumerate(order):
            group, groups[i] = groups[i], None
            reference, name = weakref.ref(group), group.group_name
            assert total(rank, group) == 110
            dist.destroy_process_group(group)
            queries: list[Callable[[], Any]] = [
                lambda group=group: dist.get_backend(group),
                lambda group=group: dist.get_group_rank(group, 1),
                lambda group=group: dist.get_global_rank(group, 0),
                lambda group=group: dist.destroy_process_group(group),
                lambda name=name: functional.all_reduce(torch.ones(1, device=rank.device), "sum", name),
            ]
            for query in queries:
                with pytest.raises((ValueError, RuntimeError, KeyError)):
                    query()
            queries.clear()
            del group, query
            gc.collect()
            assert reference() is None, "something keeps the group"
            for other in order[number + 1 :]:
                assert dist.get_process_group_ranks(groups[other]) == [1, 2]
                assert total(rank, groups[other]) == 110
            own = torch.tensor([10**rank.index], device=rank.device)
            if number < 2:
                assert functional.wait_tensor(functional.all_reduce(own, "sum", [1, 2])).item() == 110
            else:
                with pytest.raises((ValueError, RuntimeError)):
                    functional.all_reduce(own, "sum", [1, 2])


@requirement(
    "COLL-LIFE-12",
    "init_process_group refuses arguments that contradict each other or are missing, and leaves no group.",
    source="torch.distributed.init_process_group: backend, init_method, timeout, world_size, rank, store",
)
@pytest.mark.world(2)
def test_refused_beginnings(world: World) -> None:
    """Both ranks are refused in every way, and then begin again."""

    def body(rank: Rank) -> None:
        dist.barrier()
        dist.destroy_process_group()
        store = dist.PrefixStore("refused", rank.store)
        place: dict[str, Any] = {"rank": rank.index, "world_size": 2}
        wrong: dict[str, dict[str, Any]] = {
            "store and method": {"store": store, "init_method": "env://", **place},
            "no rank": {"store": store, "world_size": 2},
            "no size": {"store": store, "rank": rank.index},
            "negative rank": {"store": store, "rank": -1, "world_size": 2},
            "no size but 0": {"store": store, "rank": 0, "world_size": 0},
            "unknown method": {"init_method": "nowhere://", **place},
            "seconds": {"store": store, "timeout": 10, **place},
            "no backend": {"backend": "no such backend", "store": store, **place},
        }
        for name, arguments in wrong.items():
            with pytest.raises((ValueError, TypeError, RuntimeError, AssertionError, AttributeError)):
                dist.init_process_group(**{"backend": rank.backend, **arguments})
            assert not dist.is_initialized(), name
            assert dist.group.WORLD is None, name
        with pytest.raises((ValueError, RuntimeError)):
            dist.barrier()
        dist.init_process_group(rank.backend, store=store, timeout=timedelta(seconds=20), **place)
        assert total(rank, None) == 11
        assert dist.get_process_group_ranks(dist.new_group([1, 0])) == [0, 1]

    world.run(body)


@requirement(
    "COLL-LIFE-13",
    "With env://, rank and world size come from the environment unless they are given.",
    source="torch.distributed.init_process_group: init_method; torch.distributed.rendezvous",
)
@requirement(
    "COLL-LIFE-14",
    "With tcp://, rank and world size may be part of the address.",
    source="torch.distributed.init_process_group: init_method; torch.distributed.rendezvous",
)
@pytest.mark.world(2)
def test_places_of_the_rank(world: World) -> None:
    """Take both from the environment, or swap the ranks by an argument or in the address."""

    def body(rank: Rank) -> None:
        dist.barrier()
        dist.destroy_process_group()
        swapped = 1 - rank.index
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
            for name, value in (("RANK", rank.index), ("WORLD_SIZE", 2), ("MASTER_ADDR", "127.0.0.1")):
                patch.setenv(name, str(value))
            ways: list[tuple[str, dict[str, Any], int]] = [
                ("env://", {}, rank.index),
                ("env://", {"rank": swapped}, swapped),
                ("", {"rank": swapped, "world_size": 2}, swapped),
                (f"tcp://127.0.0.1:{{port}}?rank={swapped}&world_size=2", {}, swapped),
            ]
            for number, (method, place, expected) in enumerate(ways):
                if expected == 0:
                    with socket.create_server(("127.0.0.1", 0)) as listener:
                        port = str(listener.getsockname()[1])
                    rank.store.set(f"port {number}", port)
                port = rank.store.get(f"port {number}").decode()
                patch.setenv("MASTER_PORT", port)
                options = {"init_method": method.format(port=port)} if method else {}
                dist.init_process_group(rank.backend, timeout=timedelta(seconds=20), **options, **place)
                assert (dist.get_rank(), dist.get_world_size()) == (expected, 2), f"{method}, {place}"
                own = torch.tensor([float(expected)], device=rank.device)
                dist.broadcast(own, 1)
                assert own.item() == 1, f"{method}, {place}"
                dist.barrier()
                dist.destroy_process_group()
        started(rank, "back", rank.index, 2)

    world.run(body)


@requirement(
    "COLL-LIFE-15",
    "An address keeps its options, whether rank and world size are given beside it or as options.",
    source="torch.distributed.init_process_group: init_method; torch.distributed.rendezvous: use_libuv",
)
@requirement(
    "COLL-LIFE-16",
    "The handler that is registered for a scheme gets the address, with rank and world size among its options.",
    source="torch.distributed.register_rendezvous_handler",
)
@pytest.mark.world(1)
def test_options_of_an_address(world: World) -> None:
    """Give none, one or two options, and rank and size beside them, before them or after them."""

    def body(rank: Rank) -> None:
        seen: list[str] = []

        def handler(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
            seen.append(url)
            given = dict(parse_qsl(urlsplit(url).query))
            yield dist.PrefixStore(str(len(seen)), rank.store), int(given["rank"]), int(given["world_size"])

        def together(*parts: str) -> str:
            return "&".join(filter(None, parts))

        dist.register_rendezvous_handler("seen", handler)
        with pytest.raises(RuntimeError, match="seen"):
            dist.register_rendezvous_handler("seen", handler)
        for options in ("", "color=red", "color=red&size=3"):
            for place, me, size in (("rank=0&world_size=1", 0, 1), ("rank=2&world_size=5", 2, 5)):
                ways: list[tuple[str, tuple[int, ...]]] = [
                    (options, (me, size)),
                    (together(place, options), ()),
                    (together(options, place), ()),
                ]
                for query, beside in ways:
                    url = f"seen://somewhere:1/there?{query}"
                    assert next(dist.rendezvous(url, *beside))[1:] == (me, size), url
                    parts = urlsplit(seen[-1])
                    assert (parts.scheme, parts.netloc, parts.path) == ("seen", "somewhere:1", "/there")
                    assert dict(parse_qsl(parts.query)) == dict(parse_qsl(together(options, place))), url
        for query, arguments in (("color=red", {"rank": 0, "world_size": 1}), ("rank=0&color=red&world_size=1", {})):
            dist.destroy_process_group()
            dist.init_process_group(rank.backend, init_method=f"seen://here?{query}", **arguments)
            assert dict(parse_qsl(urlsplit(seen[-1]).query)) == {"color": "red", "rank": "0", "world_size": "1"}
            assert total(rank, None) == 1
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
            for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
                patch.setenv(name, value)
            for default in ("0", "1"):
                patch.setenv("USE_LIBUV", default)
                for option in ("use_libuv=0", "use_libuv=1", ""):
                    for place in ("tcp://127.0.0.1:0", "env://"):
                        ways = [(option, (0, 1)), (together(option, "rank=0&world_size=1"), ())]
                        for query, beside in ways:
                            store, *found = next(dist.rendezvous(f"{place}?{query}", *beside))
                            assert found == [0, 1]
                            assert store.libuvBackend == ((option or default)[-1] == "1"), (default, place, query)

    world.run(body)
