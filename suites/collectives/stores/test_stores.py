"""Stores, over which ranks meet before they have collectives: of the default group, of a file, with prefixes."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier, get_all, synchronize

from fixtures.beginnings import started
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks.collectives import default_store
from suites.collectives.groups.test_naming import total

SECONDS = 0.2
LONG = timedelta(seconds=20)
_served: dict[Path, dist.Store] = {}


def served(rank: Rank, folder: Path) -> dist.Store:
    """Return a store over the network without a prefix, which rank 0 serves until the next test's."""
    if folder not in _served:
        _served.clear()
        own = dist.PrefixStore(f"port for {folder}", rank.store)
        port = 0 if rank.index == 0 else int(own.get("port"))
        store = dist.TCPStore("127.0.0.1", port, None, rank.index == 0, timeout=LONG, wait_for_workers=False)
        own.set("port", str(store.port))
        _served[folder] = store
    return _served[folder]


def stores(rank: Rank, folder: Path, *, files: bool = True) -> dict[str, dist.Store]:
    """Return stores that the ranks share: three over the network and, with ``files``, two in a file of the folder.

    The folder is the test's own: what others have stored over the network has other prefixes, or another server.
    """
    default: dist.Store = default_store().clone()  # which has a timeout of its own
    made: dict[str, dist.Store] = {
        "default": dist.PrefixStore(f"kinds of {folder}", default),
        "prefixes": dist.PrefixStore("outer", dist.PrefixStore(f"inner {folder}", rank.store.clone())),
        "network": served(rank, folder),
    }
    if files:
        file = dist.FileStore(str(folder / "store"), rank.size)
        made |= {"file": file, "prefixed-file": dist.PrefixStore("prefix", file)}
    for store in made.values():
        store.set_timeout(LONG)
    return made


@requirement(
    "COLL-STORE-01",
    "Of several ranks that set a key with compare_set, one wins, and every rank is told its value.",
    source="torch.distributed.Store: compare_set",
)
@pytest.mark.parametrize("kind", ["default", "file"])
@pytest.mark.world(2, 4)
def test_compare_set(world: World, tmp_path: Path, kind: str) -> None:
    """Each rank writes its number where nothing is yet, in the default group's store and in one of a file."""
    file = str(tmp_path / "store")

    def body(rank: Rank) -> tuple[list[str], str]:
        store: dist.Store = default_store()
        if kind == "file":
            store = dist.FileStore(file, rank.size)
        store.set_timeout(timedelta(seconds=20))
        told = [store.compare_set(f"compare_set {turn}", "", str(rank.index)).decode() for turn in range(5)]
        dist.barrier()
        kept = [store.get(f"compare_set {turn}").decode() for turn in range(5)]
        assert told == kept
        return told, store.compare_set("compare_set 0", "none of them", "late").decode()

    found = world.run(body)
    assert len({tuple(told) for told, _ in found}) == 1
    assert [late for _, late in found] == [found[0][0][0]] * world.size


@requirement(
    "COLL-STORE-02",
    "multi_get returns the value of each key in the order of the keys it is given.",
    source="torch.distributed.Store: multi_get",
)
@requirement(
    "COLL-STORE-03",
    "multi_set stores each value under the key at the same place of its list.",
    source="torch.distributed.Store: multi_set",
)
@pytest.mark.world(2)
def test_several_keys(world: World, tmp_path: Path) -> None:
    """One rank stores, the other reads: keys in rising, falling and no order, one key, a key twice, none."""
    keys = ["m", "a", "z", "k", "B", "10", "9"]
    orders = [keys, keys[::-1], sorted(keys), ["z"], ["k", "a", "k", "z", "a"], []]

    def body(rank: Rank) -> None:
        for kind, store in stores(rank, tmp_path).items():
            if rank.index == 0:
                store.multi_set([f"set {key}" for key in keys], [f"of {key}" for key in keys])
                for key in keys:
                    store.set(key, f"value of {key}")
                store.multi_set(["twice", "once"], ["first", "only"])
                store.multi_set(["done", "twice"], ["yes", "second"])
            store.wait(["done"])
            for order in orders:
                wanted = [f"value of {key}".encode() for key in order]
                assert store.multi_get(order) == wanted, f"{kind}, multi_get({order})"
            assert [store.get(f"set {key}") for key in keys] == [f"of {key}".encode() for key in keys], kind
            assert store.multi_get(["once", "twice"]) == [b"only", b"second"], kind

    world.run(body)


@requirement(
    "COLL-STORE-04",
    "A store returns the bytes that were stored, whatever they are.",
    source="torch.distributed.Store: set, get",
)
@requirement(
    "COLL-STORE-05",
    "A key may be any text.",
    source="torch.distributed.Store: set, get",
)
@pytest.mark.world(2)
def test_any_bytes(world: World, tmp_path: Path) -> None:
    """Values are empty, text, zeros, not UTF-8, or long; one rank stores and each reads; a value is replaced."""
    values: list[Any] = [
        b"",
        "",
        b"text",
        "text",
        b"\0",
        b"a\0b",
        b"\xff\xfe\0",
        "öß",
        b" \n",
        bytes(range(256)) * 1000,
    ]
    keys = ["key", "with space", "a/b", "a//b", "ö", "x" * 300, "key/", "0"]

    def body(rank: Rank) -> None:
        for kind, store in stores(rank, tmp_path).items():
            for number, value in enumerate(values):
                if rank.index == 0:
                    store.set(f"{number}", value)
                found = store.get(f"{number}")
                wanted = value.encode() if isinstance(value, str) else value
                assert isinstance(found, bytes)
                assert found == wanted, f"{kind}: {wanted[:20]!r} became {found[:20]!r}"
            if rank.index == 1:
                for key in keys:
                    store.set(f"{key}", f"first of {key}")
                    store.set(f"{key}", f"last of {key}")
                store.set("stored", "")
            store.wait(["stored"])
            for key in keys:
                assert store.get(key) == f"last of {key}".encode(), f"{kind}: {key!r}"

    world.run(body)


@requirement(
    "COLL-STORE-06",
    "add returns the sum of everything that was added to a key, including what it adds.",
    source="torch.distributed.Store: add",
)
@requirement(
    "COLL-STORE-07",
    "append puts its value after what the key holds.",
    source="torch.distributed.Store: append",
)
@pytest.mark.world(2, 3)
def test_counting(world: World, tmp_path: Path) -> None:
    """Ranks add to one counter at the same time, also negative numbers and zero, and append to one text."""

    def body(rank: Rank) -> dict[str, list[int]]:
        found = {}
        for kind, store in stores(rank, tmp_path).items():
            found[kind] = [store.add("count", 1) for _ in range(10)]
            own = f"own {rank.index}"
            assert [store.add(own, n) for n in (0, 5, -7, 0, 2**40)] == [0, 5, -2, -2, 2**40 - 2], kind
            assert store.get(own) == str(2**40 - 2).encode(), kind
            store.set(own, "40")
            assert store.add(own, 2) == 42, kind
            for part in ("a", b"\0", "", "b"):
                store.append(f"text {rank.index}", part)
            assert store.get(f"text {rank.index}") == b"a\0b", kind
            if "file" in kind:  # not at the same time: it reads the value and then sets it
                continue
            for _ in range(3):
                store.append("all", f"<{rank.index}>")
            store.add("done", 1)
            while store.add("done", 0) < rank.size:
                time.sleep(0.001)
            text = store.get("all").decode()
            assert sorted(text) == sorted("".join(f"<{i}>" * 3 for i in range(rank.size))), f"{kind}: {text}"
            assert text.count("><") == 3 * rank.size - 1, f"{kind}: {text}"
        return found

    ranks = world.run(body)
    for kind in ranks[0]:
        assert sorted(n for found in ranks for n in found[kind]) == list(range(1, 10 * world.size + 1)), kind


@requirement(
    "COLL-STORE-08",
    "check says at once whether a store has all of the keys.",
    source="torch.distributed.Store: check",
)
@requirement(
    "COLL-STORE-09",
    "delete_key removes the key and tells whether there was one.",
    source="torch.distributed.Store: delete_key",
)
@requirement(
    "COLL-STORE-10",
    "compare_set changes a key only if it holds the expected value, and returns what it holds then.",
    source="torch.distributed.Store: compare_set: 'only be set if expected_value for the key already exists'",
)
@pytest.mark.world(1)
def test_presence(world: World, tmp_path: Path) -> None:
    """Ask before and after keys are set, replaced, deleted and set again."""

    def body(rank: Rank) -> None:
        for kind, store in {**stores(rank, tmp_path), "hash": dist.HashStore()}.items():
            assert not store.check(["a"]), kind
            store.set("a", "1")
            store.set("b", "")
            checks = [["a"], ["b"], ["a", "b"], ["a", "c"], ["c", "a"], ["c"], []]
            assert [store.check(keys) for keys in checks] == [True, True, True, False, False, False, True], kind
            before = store.num_keys()
            store.set("a", "2")
            assert store.num_keys() == before, kind
            store.set("c", "3")
            assert store.num_keys() == before + 1, kind
            assert store.delete_key("c"), kind
            assert not store.delete_key("never") or "file" in kind, kind  # a file does not tell
            assert [store.check([key]) for key in "abc"] == [True, True, False], kind
            store.set("c", "4")
            assert (store.check(["c"]), store.get("c"), store.get("a")) == (True, b"4", b"2"), kind
            # one that holds something else, one that holds it, one that is not there
            assert store.compare_set("c", "3", "5") == store.get("c") == b"4", kind
            assert store.compare_set("c", "4", "5") == store.get("c") == b"5", kind
            assert store.compare_set("c", "", "6") == store.get("c") == b"5", kind
            store.compare_set("none", "expected", "new")
            assert not store.check(["none"]), kind
            assert store.compare_set("none", "", "new") == store.get("none") == b"new", kind

    world.run(body)


@requirement(
    "COLL-STORE-11",
    "wait and get block until another rank has set the keys.",
    source="torch.distributed.Store: wait, get",
)
@requirement(
    "COLL-STORE-12",
    "wait raises an error after its own timeout, and get after that of the store.",
    source="torch.distributed.Store: wait, get, set_timeout",
)
@pytest.mark.world(2)
def test_waiting(world: World, tmp_path: Path) -> None:
    """Rank 1 sets keys only after rank 0 has begun to wait, some before, and one key never; each limit is tried."""
    short, errors = timedelta(seconds=SECONDS), (RuntimeError, dist.DistError)

    def expires(what: str, call: Any) -> None:
        began = time.monotonic()
        with pytest.raises(errors):
            call()
        assert 0.9 * SECONDS <= time.monotonic() - began < SECONDS + 5, what

    def body(rank: Rank) -> None:
        for kind, store in stores(rank, tmp_path, files=False).items():  # a file takes a second to notice anything
            if rank.index == 1:
                store.wait(["ready"])
                time.sleep(0.03)  # enough to see a rank that does not wait
                for number in range(4):
                    store.set(f"{number}", f"value {number}")
                store.wait(["some"])
                for key in ("first", "second"):
                    time.sleep(0.03)
                    store.set(key, "")
                store.wait(["end"])
                continue
            store.set("ready", "")
            assert store.get("0") == b"value 0", kind
            store.wait(["2", "1"], LONG)
            store.wait(["3"])
            assert store.check(["1", "2", "3"]), kind
            store.set("some", "")
            store.wait(["0", "second", "some", "first"], timedelta(seconds=5))  # two are there, two come one by one
            assert store.check(["first", "second"]), kind
            expires(f"{kind}, wait(timeout)", lambda store=store: store.wait(["0", "never"], short))
            assert store.timeout == LONG, f"{kind}: the timeout of one wait stays"
            store.set_timeout(short)
            assert store.timeout == short, kind
            expires(f"{kind}, get", lambda store=store: store.get("never"))
            store.set("never", "now")
            assert store.get("never") == b"now", kind
            store.set_timeout(LONG)
            store.set("end", "")

    world.run(body)


@requirement(
    "COLL-STORE-13",
    "Stores with different prefixes have keys of their own, and those with the same prefixes share them.",
    source="torch.distributed.PrefixStore",
)
@requirement(
    "COLL-STORE-308",
    "A PrefixStore over something that is no store is refused when it is made.",
    source="torch.distributed.PrefixStore: store; pytorch/pytorch#136723",
)
@pytest.mark.world(2)
def test_prefixes(world: World, tmp_path: Path) -> None:
    """The same key is in stores with one prefix or two, in both orders; clones and stores of both ranks share it."""

    def body(rank: Rank) -> None:
        file = dist.FileStore(str(tmp_path / "store"), rank.size)
        for kind, store in {"default": default_store(), "file": file}.items():
            chains = [("a",), ("b",), ("a", "b"), ("b", "a"), ("a", "a"), ("",), ("ab",)]

            def under(chain: tuple[str, ...], store: dist.Store = store) -> dist.Store:
                for prefix in chain:
                    store = dist.PrefixStore(prefix, store)
                return store

            if rank.index == 0:
                for chain in chains:
                    under(chain).set("key", "/".join(chain))
                    under(chain).add("number", len(chain))
                store.set("prefixes", "")
            store.wait(["prefixes"])
            for chain in chains:
                assert under(chain).get("key").decode() == "/".join(chain), f"{kind}: {chain}"
                assert under(chain).clone().multi_get(["key"]) == ["/".join(chain).encode()], f"{kind}: {chain}"
                assert under(chain).check(["number"]), f"{kind}: {chain}"
                assert under(chain).add("number", 0) == len(chain), f"{kind}: {chain}"
            assert not under(("c",)).check(["key"]), kind
            assert not store.check(["key"]), kind
            inner = dist.PrefixStore("a", store)
            outer = dist.PrefixStore("b", inner)
            assert outer.underlying_store.get("key") == inner.get("key"), kind
            dist.barrier()
            if rank.index == 1:
                assert under(("a",)).delete_key("key"), kind
            dist.barrier()
            assert [under(chain).check(["key"]) for chain in chains] == [chain != ("a",) for chain in chains], kind
        for nothing in (None, "store", 1, dist.Store):
            with pytest.raises((TypeError, ValueError)):
                dist.PrefixStore("prefix", nothing)  # type: ignore[arg-type]

    world.run(body)


@requirement(
    "COLL-STORE-14",
    "A queue of a store gives its values to any rank, once each, in the order in which they came.",
    source="torch.distributed.Store: queue_push, queue_pop, queue_len",
)
@pytest.mark.world(2)
def test_queues(world: World, tmp_path: Path) -> None:
    """Rank 0 pushes to two queues, and rank 1 takes from them, before and after there is something."""

    def body(rank: Rank) -> None:
        for kind, store in stores(rank, tmp_path, files=False).items():
            if rank.index == 0:
                for number in range(4):
                    store.queue_push("one", f"{number}")
                store.queue_push("other", b"\0x")
                store.set("pushed", "")
                store.wait(["taking"])
                time.sleep(0.03)  # enough to see a rank that does not wait
                store.queue_push("one", "late")
                continue
            store.wait(["pushed"])
            assert (store.queue_len("one"), store.queue_len("other"), store.queue_len("none")) == (4, 1, 0), kind
            assert [store.queue_pop("one") for _ in range(3)] == [b"0", b"1", b"2"], kind
            assert store.queue_len("one") == 1, kind
            assert store.queue_pop("other", False) == b"\0x", kind
            assert store.queue_pop("one", block=False) == b"3", kind
            for queue in ("one", "other", "none"):
                with pytest.raises(dist.QueueEmptyError):
                    store.queue_pop(queue, block=False)
            store.set("taking", "")
            assert store.queue_pop("one") == b"late", kind
            assert store.queue_len("one") == 0, kind

    world.run(body)


@requirement(
    "COLL-STORE-15",
    "A TCPStore waits for as many workers as it is told, with the port or timeout that it is made with.",
    source="torch.distributed.TCPStore: world_size, wait_for_workers, timeout, port",
)
@pytest.mark.world(2)
def test_network_stores(world: World) -> None:
    """Rank 0 serves on a free port, with and without waiting for rank 1; then nobody serves there."""

    def body(rank: Rank) -> None:
        host = "127.0.0.1"
        for number, waits in enumerate((True, False)):
            options: dict[str, Any] = {"world_size": 2, "wait_for_workers": waits, "timeout": LONG}
            if rank.index == 0:
                store = dist.TCPStore(host, 0, is_master=True, **{**options, "wait_for_workers": False})
                rank.store.set(f"port {number}", str(store.port))
            else:
                port = int(rank.store.get(f"port {number}"))
                store = dist.TCPStore(host, port, is_master=False, **options)
                assert store.port == port
            assert (store.host, store.timeout) == (host, LONG)
            store.set(f"of {rank.index}", f"{number}")
            assert store.get(f"of {1 - rank.index}") == f"{number}".encode()
            dist.barrier()
        if rank.index == 0:
            server = dist.TCPStore(host, 0, None, True, timeout=LONG, wait_for_workers=False)
            clients = [dist.TCPStore(host, server.port, None, False, timeout=LONG) for _ in range(5)]
            for number, client in enumerate(clients):
                client.set(f"client {number}", f"{number}")
            assert [server.get(f"client {number}") for number in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
            began = time.monotonic()
            with pytest.raises(dist.DistError):
                dist.TCPStore(host, 0, 2, True, timeout=timedelta(seconds=SECONDS), wait_for_workers=True)
            assert 0.9 * SECONDS <= time.monotonic() - began < SECONDS + 5

    world.run(body)


@requirement(
    "COLL-STORE-11",
    "wait and get block until another rank has set the keys.",
    source="torch.distributed.Store: wait, get",
)
@requirement(
    "COLL-STORE-12",
    "wait raises an error after its own timeout, and get after that of the store.",
    source="torch.distributed.Store: wait, get, set_timeout",
)
@pytest.mark.world(1)
def test_waiting_in_threads(world: World, tmp_path: Path) -> None:
    """Threads wait in a store in memory and in one of a file, with prefixes and without, for a key and for none."""

    def body(rank: Rank) -> None:
        file, memory = dist.FileStore(str(tmp_path / "store"), 1), dist.HashStore()
        made: dict[str, Any] = {
            "file": file,
            "prefixed file": dist.PrefixStore("in a file", file),
            "memory": memory,
            "prefixed memory": dist.PrefixStore("in memory", memory),
        }

        def expires(what: str, call: Callable[[], Any]) -> None:
            began = time.monotonic()
            with pytest.raises((RuntimeError, dist.DistError)):
                call()
            assert 0.9 * SECONDS <= time.monotonic() - began < SECONDS + 5, what

        with ThreadPoolExecutor(3 * len(made)) as pool:
            waiting = []
            for kind, store in made.items():
                store.set_timeout(LONG)
                waiting += [pool.submit(store.get, "late"), pool.submit(store.wait, ["late", "later"])]
                waiting.append(
                    pool.submit(expires, kind, lambda s=store: s.wait(["never"], timedelta(seconds=SECONDS)))
                )
            time.sleep(0.03)  # enough to see a thread that does not wait
            for kind, store in made.items():
                assert not any(each.done() for each in (*waiting[::3], *waiting[1::3])), kind
                store.set("later", "2")
            for store in made.values():
                store.set("late", "1")
            found = [each.result() for each in waiting]
        assert found == [b"1", None, None] * len(made)
        for kind, store in made.items():
            if "memory" in kind:  # a file takes a second to notice anything
                store.set_timeout(timedelta(seconds=SECONDS))
                expires(kind, lambda store=store: store.get("never"))
                assert store.add("counter", 2) == 2
                assert store.add("counter", 3) == 5
                assert store.get("counter") == b"5"

    world.run(body)


@requirement(
    "COLL-STORE-16",
    "A store that is written in Python serves groups, and a PrefixStore passes calls on to it with the prefix.",
    source="torch.distributed.Store, PrefixStore; test_store.py: PythonStoreTest, TestPythonStore",
)
@pytest.mark.world(2)
def test_stores_in_python(world: World) -> None:
    """One store passes everything on to a store of PyTorch, another has only what it must; groups begin in it."""

    def body(rank: Rank) -> set[str]:
        real = dist.PrefixStore("python", rank.store.clone())
        real.set_timeout(LONG)

        class Plain(dist.Store):
            def __init__(self) -> None:
                super().__init__()
                self.calls: list[tuple[Any, ...]] = []

            def set(self, key: str, value: Any) -> None:
                assert isinstance(value, bytes)
                self.calls.append(("set", key, value))
                real.set(key, value)

            def get(self, key: str) -> bytes:
                self.calls.append(("get", key))
                return real.get(key)

            def add(self, key: str, value: int) -> int:
                self.calls.append(("add", key, value))
                return real.add(key, value)

            def check(self, keys: list[str]) -> bool:
                self.calls.append(("check", *keys))
                return real.check(keys)

            def wait(self, keys: list[str], *timeout: timedelta) -> None:  # type: ignore[override]
                self.calls.append(("wait", *keys, *timeout))
                real.wait(keys, *timeout)

        class Whole(Plain):
            def has_extended_api(self) -> bool:
                return True

            def append(self, key: str, value: Any) -> None:
                self.calls.append(("append", key, value))

            def multi_get(self, keys: list[str]) -> list[bytes]:
                self.calls.append(("multi_get", *keys))
                return [key.encode() for key in keys]

            def multi_set(self, keys: list[str], values: list[Any]) -> None:
                self.calls.append(("multi_set", *keys, *values))

        me, other = rank.index, 1 - rank.index
        for store in (Plain(), Whole()):
            prefixed = dist.PrefixStore("outer", dist.PrefixStore(f"of {me}", store))
            whole: Any = prefixed
            at = f"of {me}/outer"
            assert prefixed.has_extended_api() == isinstance(store, Whole)
            prefixed.set("key", "value")
            assert prefixed.get("key") == b"value"
            assert prefixed.add("count", 5) == 5
            assert prefixed.add("count", -2) == 3
            assert prefixed.check(["key", "count"])
            assert not prefixed.check(["key", "none"])
            prefixed.wait(["key"])
            prefixed.wait(["key", "count"], timedelta(seconds=7))
            assert store.calls == [
                ("set", f"{at}/key", b"value"),
                ("get", f"{at}/key"),
                ("add", f"{at}/count", 5),
                ("add", f"{at}/count", -2),
                ("check", f"{at}/key", f"{at}/count"),
                ("check", f"{at}/key", f"{at}/none"),
                ("wait", f"{at}/key"),
                ("wait", f"{at}/key", f"{at}/count", timedelta(seconds=7)),
            ]
            store.calls.clear()
            if isinstance(store, Whole):
                whole.append("key", "more")
                whole.multi_set(["a", "b"], ["1", b"2"])
                assert whole.multi_get(["b", "a"]) == [f"{at}/b".encode(), f"{at}/a".encode()]
                assert store.calls == [
                    ("append", f"{at}/key", b"more"),
                    ("multi_set", f"{at}/a", f"{at}/b", b"1", b"2"),
                    ("multi_get", f"{at}/b", f"{at}/a"),
                ]
            else:
                whole.multi_set(["a", "b"], ["1", b"2"])
                assert whole.multi_get(["b", "a"]) == [b"2", b"1"]
                assert real.get(f"{at}/a") == b"1"
            assert prefixed.add("count", -3) == 0
        dist.barrier()
        dist.destroy_process_group()
        store = Plain()
        dist.init_process_group(rank.backend, store=store, rank=me, world_size=2)
        assert total(rank, None) == 11
        assert total(rank, dist.new_group([0, 1])) == 11
        used = {call[0] for call in store.calls} & {"set", "get"}
        assert used
        default_store().set(f"of {me}", "mine")
        assert default_store().get(f"of {other}") == b"mine"
        dist.barrier()
        dist.destroy_process_group()
        started(rank, "back", me, 2)
        return used

    # a backend may have one rank tell the others where to connect
    assert set().union(*world.run(body)) == {"set", "get"}


@requirement(
    "COLL-STORE-16",
    "A store that is written in Python serves groups, and a PrefixStore passes calls on to it with the prefix.",
    source="torch.distributed.Store, PrefixStore; test_store.py: PythonStoreTest, TestPythonStore",
)
@pytest.mark.parametrize("written", ["by PyTorch", "in Python, kept", "in Python"])
@pytest.mark.world(2)
def test_released_stores(world: World, written: str) -> None:
    """Use a PrefixStore, and make a group, after the only reference to the store below has gone, or before."""

    def body(rank: Rank) -> list[Any]:
        real = dist.PrefixStore("released", rank.store.clone())
        real.set_timeout(LONG)

        class Plain(dist.Store):
            def set(self, key: str, value: Any) -> None:
                real.set(key, value)

            def get(self, key: str) -> bytes:
                return real.get(key)

            def add(self, key: str, value: int) -> int:
                return real.add(key, value)

            def check(self, keys: list[str]) -> bool:
                return real.check(keys)

            def wait(self, keys: list[str], *timeout: timedelta) -> None:  # type: ignore[override]
                real.wait(keys, *timeout)

        kept: list[dist.Store] = []

        def made() -> dist.Store:
            store = Plain() if "Python" in written else dist.PrefixStore("below", real)
            if "kept" in written:
                kept.append(store)
            return store

        def attempt(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except RuntimeError as e:
                return str(e).splitlines()[0]

        prefixed = dist.PrefixStore(f"prefix of {rank.index}", made())
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(rank.backend, store=made(), rank=rank.index, world_size=2)
        gc.collect()
        assert total(rank, None) == 11
        found = [attempt(lambda: prefixed.add("key", 2)), attempt(lambda: total(rank, dist.new_group([0, 1])))]
        dist.barrier()
        dist.destroy_process_group()
        started(rank, "back", rank.index, 2)
        return found

    assert_on_ranks([[2, 11]] * 2, world.run(body))


@requirement(
    "COLL-STORE-17",
    "A second TCPStore that serves on a port is refused, unless both are multi_tenant, and then they share their keys.",
    source="torch.distributed.TCPStore: multi_tenant; test_store.py: test_address_already_in_use, test_multitenancy",
)
@requirement(
    "COLL-STORE-18",
    "The file of a FileStore is removed when its last store of all workers ends, and not before.",
    source="torch.distributed.FileStore: world_size; test_store.py: test_refcount",
)
@pytest.mark.world(2)
def test_shared_places(world: World, tmp_path: Path) -> None:
    """Serve twice on a port, in each combination; make and release stores in one file, on both ranks."""

    def body(rank: Rank) -> None:
        host = "127.0.0.1"
        for first, second in ((False, False), (True, True), (False, True), (True, False)):
            one = dist.TCPStore(host, 0, 1, True, multi_tenant=first)
            try:
                other = dist.TCPStore(host, one.port, 1, True, multi_tenant=second)
            except dist.DistError:
                assert not first or not second
            else:
                assert first
                assert second
                one.set("key", "of one")
                assert (other.get("key"), other.port) == (b"of one", one.port)
                other.set("key", "of other")
                assert one.get("key") == b"of other"
                del other
                assert one.get("key") == b"of other"
            client = dist.TCPStore(host, one.port, None, False, timeout=LONG)
            client.set("client", "")
            assert one.get("client") == b""
        path = tmp_path / "store"
        stores = [dist.FileStore(str(path), 2) for _ in range(2)]
        prefixed = dist.PrefixStore("prefix", stores[0])
        stores[0].set(f"of {rank.index}", "x")
        dist.barrier()
        assert stores[1].get(f"of {1 - rank.index}") == b"x"
        dist.barrier()
        if rank.index == 1:
            del prefixed
            stores.clear()
        dist.barrier()
        assert path.exists()
        dist.barrier()
        if rank.index == 0:
            stores.clear()
            assert path.exists()
            assert not prefixed.check(["key"])
            del prefixed
            assert not path.exists()
        dist.barrier()

    world.run(body)


@requirement(
    "COLL-STORE-67",
    "barrier of a store lets no rank pass before as many as it names have come, and then each of them.",
    source="torch.distributed.Store: barrier",
)
@requirement(
    "COLL-STORE-68",
    "barrier of a store raises an error if too few come within its timeout, or else within that of the store.",
    source="torch.distributed.Store: barrier",
)
@pytest.mark.needs(torch="torch.distributed.Store.barrier")
@pytest.mark.world(3)
def test_barrier(world: World, tmp_path: Path) -> None:
    """Each rank comes last in turn, to barriers of all ranks, of two of them and of one, with other keys."""

    def expires(store: Any, *timeout: timedelta) -> None:
        began = time.monotonic()
        with pytest.raises((RuntimeError, dist.DistError)):
            store.barrier(f"nobody else for {len(timeout)}", 2, *timeout)
        assert 0.9 * SECONDS <= time.monotonic() - began < SECONDS + 5

    def body(rank: Rank) -> None:
        short = timedelta(seconds=SECONDS)
        for kind, store in stores(rank, tmp_path, files=False).items():
            for last in range(3):
                for count in (3, 2):
                    key, mine = f"{last} of {count}", (rank.index - last - 1) % 3  # the last one has 2
                    if mine < 3 - count:
                        continue
                    if mine == 2:
                        store.wait([f"{key} comes {first}" for first in range(3 - count, 2)])
                        time.sleep(0.03)  # enough to see a rank that does not wait
                        assert not store.check([f"{key} passed"]), f"{kind}: {key}"
                    store.set(f"{key} comes {mine}", "")
                    store.barrier(key, count, *(() if last else (LONG,)))
                    store.set(f"{key} passed", "")
                    assert store.check([f"{key} comes {of}" for of in range(3 - count, 3)]), f"{kind}: {key}"
            store.barrier(f"of {rank.index} alone", 1)
            if rank.index == 0:
                expires(store, short)
        if rank.index == 0:
            server = dist.TCPStore("127.0.0.1", 0, None, True, timeout=LONG, wait_for_workers=False)
            expires(server, short)
            server.set_timeout(short)
            expires(server)

    world.run(body)


@requirement(
    "COLL-STORE-68",
    "barrier of a store raises an error if too few come within its timeout, or else within that of the store.",
    source="torch.distributed.Store: barrier",
)
@pytest.mark.needs(torch="torch.distributed.Store.barrier")
@pytest.mark.world(1)
def test_barrier_of_a_prefix(world: World) -> None:
    """Set the timeout of a store with a prefix, and of the store under another one."""

    def body(_: Rank) -> None:
        for through in True, False:
            server = dist.TCPStore("127.0.0.1", 0, None, True, timeout=LONG, wait_for_workers=False)
            store = dist.PrefixStore("prefix", server)
            (store if through else server).set_timeout(timedelta(seconds=SECONDS))
            errors = []

            def come(store: Any = store, errors: Any = errors) -> None:
                try:
                    store.barrier("nobody else", 2)
                except (RuntimeError, dist.DistError) as error:
                    errors.append(error)

            thread = threading.Thread(target=come)
            thread.start()
            thread.join(5 * SECONDS)
            waits = thread.is_alive()
            if waits:  # let it end
                dist.PrefixStore("prefix", server.clone()).barrier("nobody else", 2)
            thread.join()
            assert not waits, f"{through=}: still there after {5 * SECONDS} s"
            assert errors

    world.run(body)


@requirement(
    "COLL-STORE-3500",
    "Functions of torch.distributed.elastic for stores exchange data within their timeout, and leave the store's own.",
    source="torch/distributed/elastic/utils/store.py: synchronize, barrier, get_all, store_timeout",
)
@pytest.mark.world(2)
def test_exchanges(world: World, tmp_path: Path) -> None:
    """Exchange data of each rank twice over every store, with a timeout that is longer or shorter than the store's."""

    def body(rank: Rank) -> None:
        for (name, store), seconds in itertools.product(stores(rank, tmp_path).items(), (10, 300)):
            what = f"{name}, {seconds}"
            right = [f"{what}: rank {other}".encode() for other in range(rank.size)]
            mine = right[rank.index]
            assert synchronize(store, mine, rank.index, rank.size, f"synchronize {what}", timeout=seconds) == right
            assert store.timeout == LONG, what
            barrier(store, rank.size, f"barrier {what}", barrier_timeout=seconds)
            assert store.timeout == LONG, what
            store.set(f"all {what}{rank.index}", mine)
            assert get_all(store, rank.index, f"all {what}", rank.size) == right
            assert store.timeout == LONG, what

    world.run(body)
