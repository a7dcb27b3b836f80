"""Backends that are written in Python: what reaches them, how they are made, and their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fixtures.beginnings import started
from fixtures.recording import Recording
from harness import Rank, World, requirement
from harness.stacks import pretended
from harness.stacks.collectives import coalescing_manager, flattened, functional, unflattened


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of arguments, in order, out of lists of any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, (list, tuple)) else []


def options_of(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the root, the operation and the timeout among arguments, and plain numbers: a peer and a tag."""
    found: dict[str, Any] = {"numbers": [each for each in arguments if isinstance(each, int)]}
    for argument in arguments:
        for name in ("rootRank", "reduceOp", "timeout"):
            if hasattr(argument, name) and not isinstance(argument, torch.Tensor):
                found[name] = getattr(argument, name)
    return found


@contextmanager
def recorded(rank: Rank) -> Iterator[list[tuple[Recording, list[int]]]]:
    """Yield a recording backend of three ranks, which replaces the world meanwhile, and one of those without rank 0.

    Each comes with the ranks of its group; rank 0 has the first alone.
    """
    dist.barrier()
    dist.destroy_process_group()
    made: list[Recording] = []

    def make(store: dist.Store, index: int, size: int, timeout: timedelta) -> Recording:
        made.append(Recording(index, size))
        return made[-1]

    dist.Backend.register_backend("recording", make, devices=[rank.device.type])
    store = dist.PrefixStore("recording", rank.store)
    dist.init_process_group("recording", store=store, rank=rank.index, world_size=3)
    dist.new_group([1, 2])
    yield list(zip(made, ([0, 1, 2], [1, 2]), strict=False))
    assert len(made) == (1 if rank.index == 0 else 2)
    dist.destroy_process_group()
    started(rank, "back", rank.index, 3)


@requirement(
    "COLL-PLUGIN-01",
    "A backend in Python gets each collective or message with its tensors, root, operation or tag, and its Work is "
    "waited for or returned.",
    source="torch.distributed.Backend.register_backend; test_c10d_common.py: PythonProcessGroupExtensionTest",
)
@pytest.mark.world(3, warm=False, keeps="what the backend of the test is given")
def test_calls(world: World) -> None:
    """Call everything in the world and in a group without rank 0, at once or in flight, also in other forms."""

    def body(rank: Rank) -> None:
        with recorded(rank) as made:
            for backend, ranks in made:
                assert (backend.rank(), backend.size(), backend.name()) == (
                    ranks.index(rank.index),
                    len(ranks),
                    "recording",
                )
                _called(rank, backend, ranks)

    def _called(rank: Rank, backend: Recording, ranks: list[int]) -> None:
        size, group = len(ranks), backend
        root, last = ranks[-1], size - 1
        peer = ranks[(ranks.index(rank.index) + 1) % size]
        there = ranks.index(peer)
        t = torch.ones(2, device=rank.device)
        parts, others = ([torch.ones(2, device=rank.device) for _ in range(size)] for _ in range(2))
        whole, other = (torch.ones(2 * size, device=rank.device) for _ in range(2))
        mine = rank.index == root
        best = dist.ReduceOp.MAX
        of: dict[str, Any] = {"group": group}
        everything: list[tuple[str, Callable[..., Any], list[torch.Tensor], dict[str, Any]]] = [
            ("all_reduce", lambda **o: dist.all_reduce(t, best, **o), [t], {"reduceOp": best}),
            ("broadcast", lambda **o: dist.broadcast(t, root, **o), [t], {"rootRank": last}),
            ("reduce", lambda **o: dist.reduce(t, root, best, **o), [t], {"rootRank": last, "reduceOp": best}),
            ("all_gather", lambda **o: dist.all_gather(parts, t, **o), [*parts, t], {}),
            ("all_gather", lambda **o: dist.all_gather_into_tensor(whole, t, **o), [whole, t], {}),
            (
                "gather",
                lambda **o: dist.gather(t, parts if mine else None, root, **o),
                [*(parts if mine else []), t],
                {"rootRank": last},
            ),
            (
                "scatter",
                lambda **o: dist.scatter(t, parts if mine else None, root, **o),
                [t, *(parts if mine else [])],
                {"rootRank": last},
            ),
            ("reduce_scatter", lambda **o: dist.reduce_scatter(t, parts, best, **o), [t, *parts], {"reduceOp": best}),
            (
                "reduce_scatter",
                lambda **o: dist.reduce_scatter_tensor(t, whole, best, **o),
                [t, whole],
                {"reduceOp": best},
            ),
            ("all_to_all", lambda **o: dist.all_to_all(parts, others, **o), [*parts, *others], {}),
            ("all_to_all", lambda **o: dist.all_to_all_single(whole, other, **o), [whole, other], {}),
            ("barrier", lambda **o: dist.barrier(**o), [], {}),
        ]
        messages: list[tuple[str, Callable[..., Any], list[torch.Tensor], dict[str, Any]]] = [
            ("send", lambda: dist.send(t, peer, group, 5), [t], {"numbers": [there, 5]}),
            ("send", lambda: dist.send(t, group_dst=there, group=group), [t], {"numbers": [there, 0]}),
            ("recv", lambda: dist.recv(t, peer, group, 5), [t], {"numbers": [there, 5]}),
            ("recv", lambda: dist.recv(t, group_src=there, group=group), [t], {"numbers": [there, 0]}),
        ]

        def check(what: str, call: Callable[[], Any], given: list[torch.Tensor], options: dict[str, Any]) -> Any:
            backend.calls.clear()
            backend.works.clear()
            result = call()
            assert [kind for kind, _ in backend.calls] == [what]
            arguments = backend.calls[0][1]
            found = tensors_in(arguments)
            assert len(found) == len(given), what
            assert all(one is another for one, another in zip(found, given, strict=True)), what
            seen = options_of(arguments)
            for name, right in options.items():
                assert seen[name] == right, f"{what}: {name}"
            return result

        for what, call, given, options in everything:
            assert check(what, lambda call=call: call(**of), given, options) is None
            assert backend.works[0].waits == 1, what
            work = check(what, lambda call=call: call(async_op=True, **of), given, options)
            assert work is backend.works[0], what
            assert work.waits == 0, what
        seconds = timedelta(seconds=77)
        if "timeout" in dist.barrier.__code__.co_varnames:
            check("barrier", lambda: dist.barrier(group, timeout=seconds), [], {"timeout": seconds})
        for what, call, given, options in messages:
            result = check(what, call, given, options)
            assert result == (peer if what == "recv" else None)
            assert backend.works[0].waits == 1, what
        for what, call, numbers in (
            ("send", lambda: dist.isend(t, peer, group, 6), [there, 6]),
            ("recv", lambda: dist.irecv(t, peer, group, 6), [there, 6]),
            ("recv from any", lambda: dist.irecv(t, None, group, 6), [6]),
        ):
            assert check(what, call, [t], {"numbers": numbers}) is backend.works[0]
            assert backend.works[0].waits == 0, what
        backend.works.clear()
        with coalescing_manager(group, async_ops=True) as manager:
            for tensor in (t, whole):
                dist.all_reduce(tensor, best, group)
        assert {work.waits for work in backend.works} == {0}
        manager.wait()
        assert {work.waits for work in backend.works} == {1}
        for kind, through in {
            "all_reduce": lambda: functional.all_reduce(t, "max", group),
            "broadcast": lambda: functional.broadcast(t, last, group),
            "all_gather": lambda: functional.all_gather_tensor(t, 0, group),
            "reduce_scatter": lambda: functional.reduce_scatter_tensor(whole, "max", 0, group),
            "all_to_all": lambda: functional.all_to_all_single(whole, None, None, group),
        }.items():
            backend.calls.clear()
            backend.works.clear()
            functional.wait_tensor(through())
            assert [each for each, _ in backend.calls] == [kind]
            assert backend.works[0].waits > 0, kind
            seen = options_of(backend.calls[0][1])
            assert seen.get("reduceOp", best) == best, kind
            assert seen.get("rootRank", last) == last, kind

    world.run(body)


@requirement(
    "COLL-PLUGIN-04",
    "batch_isend_irecv calls a Python group's send or recv for each operation with its tensor, peer and tag, "
    "returning their Works in order.",
    source="torch.distributed.Backend.register_backend; torch.distributed.batch_isend_irecv; test_c10d_pypg.py: "
    "TestBatchSendRecv",
)
@pytest.mark.world(3, warm=False, keeps="what the backend of the test is given")
def test_batches(world: World) -> None:
    """Send to and receive from the next member, in the world and in a group without rank 0; take the works."""

    def body(rank: Rank) -> None:
        with recorded(rank) as made:
            for backend, ranks in made:
                there = (ranks.index(rank.index) + 1) % len(ranks)
                peer = ranks[there]
                sent, received = torch.ones(2, device=rank.device), torch.ones(6, device=rank.device)
                ops = [
                    dist.P2POp(dist.isend, sent, peer, backend, 7),
                    dist.P2POp(dist.irecv, received, peer, backend, 8),
                    dist.P2POp(dist.irecv, sent, group=backend, group_peer=there),
                ]
                works = dist.batch_isend_irecv(ops)
                assert len(works) == 3
                assert all(one is another for one, another in zip(works, backend.works, strict=True))
                assert {work.waits for work in backend.works} == {0}
                assert [kind for kind, _ in backend.calls] == ["send", "recv", "recv"]
                for (_, arguments), tensor, tag in zip(backend.calls, (sent, received, sent), (7, 8, 0), strict=True):
                    (found,) = tensors_in(arguments)
                    assert found is tensor
                    assert options_of(arguments)["numbers"] == [there, tag]

    world.run(body)


@requirement(
    "COLL-PLUGIN-02",
    "A backend is made with its group's own rank, size, store, timeout and, by the extended API, ranks or options.",
    source="torch.distributed.Backend.register_backend: extended_api; new_group: pg_options, timeout",
)
@requirement(
    "COLL-PLUGIN-03",
    "destroy_process_group shuts the backend of the destroyed group down once, or those of all groups at the end.",
    source="torch.distributed.destroy_process_group: shutdown; test_c10d_common.py: test_shutdown",
)
@pytest.mark.parametrize("extended", [False, True], ids=["plain", "extended"])
@pytest.mark.world(3, warm=False)
def test_made_and_ended(world: World, extended: bool) -> None:
    """Make the world and groups in every way, with and without options and a timeout; destroy one, then all."""

    def body(rank: Rank) -> None:
        me = rank.index
        dist.barrier()
        dist.destroy_process_group()
        made: list[tuple[Recording, dict[str, Any]]] = []

        def make(*arguments: Any) -> Recording:
            if extended:
                given, options = arguments
                seen = {
                    "place": (given.group_rank, given.group_size),
                    "timeout": given.timeout,
                    "ranks": list(given.global_ranks_in_group),
                    "name": given.group_id,
                    "options": options,
                }
                store = given.store
            else:
                store, index, size, timeout = arguments
                seen = {"place": (index, size), "timeout": timeout}
            store.set("made", str(len(made)))
            made.append((Recording(*seen["place"]), seen))
            return made[-1][0]

        dist.Backend.register_backend("recording", make, extended_api=extended, devices=[rank.device.type])
        start, limit = dist.PrefixStore("made", rank.store), timedelta(seconds=123)
        wanted = [object() for _ in range(4)]
        dist.init_process_group("recording", store=start, rank=me, world_size=3, timeout=limit, pg_options=wanted[0])
        expected: list[tuple[list[int], timedelta | None, Any]] = [([0, 1, 2], limit, wanted[0])]
        ways: list[tuple[list[int], timedelta | None, Any, Callable[..., Any]]] = [
            ([1, 2], limit, wanted[1], lambda **options: dist.new_group([2, 1], **options)),
            ([0, 2], None, None, lambda **options: dist.new_group([0, 2], **options)),
            ([0, 1, 2], timedelta(seconds=7), None, lambda **options: dist.new_group(**options)),
            ([0, 1, 2], limit, wanted[2], lambda **options: dist.new_subgroups(3, **options)[0]),
            ([2], limit, wanted[3], lambda **options: dist.new_subgroups_by_enumeration([[2]], **options)[0]),
            ([1], limit, wanted[1], lambda **options: dist.new_group([1], use_local_synchronization=True, **options)),
        ]
        for ranks, seconds, options, way in ways:
            given: dict[str, Any] = {} if seconds is None else {"timeout": seconds}
            if options is not None:
                given["pg_options"] = options
            count = len(made)
            group = way(**given)
            assert len(made) - count == (me in ranks)
            if me in ranks:
                assert group is made[-1][0]
                expected.append((ranks, seconds, options))
        default = None
        for (backend, seen), (ranks, seconds, options) in zip(made, expected, strict=True):
            assert seen["place"] == (ranks.index(me), len(ranks))
            default = seen["timeout"] if seconds is None else default
            assert seen["timeout"] == seconds or (seconds is None and seen["timeout"] > timedelta(seconds=7))
            if extended:
                assert seen["ranks"] == (ranks if backend is not made[0][0] else [])
                assert seen["options"] is options
                assert seen["name"] == backend.group_name
        if extended:
            assert len({seen["name"] for _, seen in made}) == len(made)
        gone = made[-1][0]
        dist.destroy_process_group(gone)
        assert [backend.ends for backend, _ in made] == [int(backend is gone) for backend, _ in made]
        dist.destroy_process_group()
        assert [backend.ends for backend, _ in made] == [1] * len(made)
        started(rank, "back", me, 3)

    world.run(body)


@requirement(
    "COLL-PLUGIN-1500",
    "A backend may be registered again under its name, as when a module is loaded twice, after which groups are made "
    "by the last one.",
    source="torch.distributed.Backend.register_backend",
)
@pytest.mark.parametrize("extended", [False, True], ids=["plain", "extended"])
@pytest.mark.world(2, warm=False)
def test_registered_again(world: World, extended: bool) -> None:
    """Register three times, with the name in both cases and other devices, and make a group before and after each."""

    def body(rank: Rank) -> None:
        kind = rank.device.type
        tensor = torch.ones(2, device=rank.device)
        made: list[int] = []

        def register(name: str, number: int, devices: list[str]) -> None:
            def make(*arguments: Any) -> Recording:
                made.append(number)
                place = (arguments[0].group_rank, arguments[0].group_size) if extended else arguments[1:3]
                return Recording(*place)

            dist.Backend.register_backend(name, make, extended_api=extended, devices=devices)

        for number, (name, devices) in enumerate((("again", [kind]), ("again", [kind]), ("AGAIN", ["ve", kind]))):
            register(name, number, devices)
            assert dist.is_backend_available("again")
            group: Any = dist.new_group(backend="again")
            dist.all_reduce(tensor, group=group)
            assert made == [number], f"registration {number}"
            made.clear()
            dist.destroy_process_group(group)

    world.run(body)


@requirement(
    "COLL-PLUGIN-1501",
    "A mesh dimension's groups have the timeout that the options for it have, in whichever way the mesh is made.",
    source="torch.distributed.device_mesh.init_device_mesh: backend_override; DeviceMesh._flatten, _unflatten; "
    "torch.distributed.new_group: timeout",
)
@pytest.mark.world(2, warm=False)
def test_timeouts_of_a_mesh(world: World) -> None:
    """Name dimensions by number and by name, of all ranks and of one; flatten and divide; without options as well."""

    def body(rank: Rank) -> None:
        kind = rank.device.type
        made: list[timedelta] = []

        def make(given: Any, options: Any) -> Recording:
            made.append(given.timeout)
            return Recording(given.group_rank, given.group_size)

        dist.Backend.register_backend("recording", make, extended_api=True, devices=[kind])

        def fresh(*names: str) -> Any:
            return init_device_mesh(kind, (2, 1)[: len(names)], mesh_dim_names=names)

        def overridden(shape: tuple[int, ...], dim: int | str) -> Callable[[Any], Any]:
            names = ("a", "b")[: len(shape)]
            return lambda value: init_device_mesh(kind, shape, mesh_dim_names=names, backend_override={dim: value})

        ways: dict[str, Callable[[Any], Any]] = {
            "line by number": overridden((2,), 0),
            "line by name": overridden((2,), "a"),
            "first by name": overridden((2, 1), "a"),
            "last by number": overridden((1, 2), 1),
            "of one rank": overridden((2, 1), "b"),
            "flattened": lambda value: flattened(fresh("a", "b"), "flat", backend_override=value),
            "divided": lambda value: unflattened(fresh("w"), 0, (2, 1), ("x", "y"), backend_override={"x": value}),
        }
        for seconds in (7, 123, None):
            for what, way in ways.items():
                way("recording" if seconds is None else ("recording", pretended.options(seconds=seconds)))
                if seconds is None:
                    assert len(made) == 1, what
                    assert made[0] > timedelta(seconds=123), what
                else:
                    assert made == [timedelta(seconds=seconds)], f"{what}, {seconds}"
                made.clear()

    world.run(body)


@requirement(
    "COLL-PLUGIN-56",
    "A registered backend serves its devices by its name, whether these were given as a text, a list or a tuple.",
    source="torch.distributed.Backend.register_backend: devices, str or list of str; new_group, init_process_group: "
    "backend, get_backend_config",
)
@pytest.mark.world(2, warm=False, keeps="what the backend of the test is given")
def test_devices_of_a_backend(world: World) -> None:
    """Make groups and worlds of each backend, by its name alone or with the device, and reduce in them."""

    def body(rank: Rank) -> None:
        kind = rank.device.type
        tensor = torch.ones(2, device=rank.device)
        made: dict[str, list[Recording]] = {}

        def register(name: str, devices: Any) -> None:
            def make(store: dist.Store, index: int, size: int, timeout: timedelta) -> Recording:
                made[name].append(Recording(index, size))
                return made[name][-1]

            made[name] = []
            dist.Backend.register_backend(name, make, devices=devices)

        register("of_text", kind)
        register("of_list", [kind])
        register("of_tuple", (kind,))
        register("of_two", ["ve", kind])
        for name, backends in made.items():
            devices = ["ve", kind] if name == "of_two" else [kind]
            assert list(dist.Backend.backend_capability[name]) == devices
            assert dist.is_backend_available(name)
            for backend in (name, name.upper(), f"{kind}:{name}"):
                where = f"{name} as {backend}"
                group: Any = dist.new_group(backend=backend)
                assert len(backends) == 1, where
                configured = {part.split(":")[0] for part in dist.get_backend_config(group).split(",")}
                assert configured == (set(devices) if ":" not in backend else {kind}), where
                dist.all_reduce(tensor, group=group)
                assert [call for call, _ in backends[0].calls] == ["all_reduce"], where
                dist.destroy_process_group(group)
                backends.clear()
        dist.barrier()
        dist.destroy_process_group()
        for name, backends in made.items():
            store = dist.PrefixStore(name, rank.store)
            dist.init_process_group(name, store=store, rank=rank.index, world_size=2)
            dist.all_reduce(tensor)
            assert [call for call, _ in backends[0].calls] == ["all_reduce"], name
            dist.destroy_process_group()
        started(rank, "back", rank.index, 2)

    world.run(body)
