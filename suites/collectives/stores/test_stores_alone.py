"""Stores that one process has by itself, whose threads set keys and wait for them: of every kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, requirement

SECONDS = 0.2
LONG = timedelta(seconds=20)
KINDS: dict[str, Callable[[Path], dist.Store]] = {
    "network": lambda folder: dist.TCPStore("127.0.0.1", 0, None, True, timeout=LONG, wait_for_workers=False),
    "legacy": lambda folder: dist.TCPStore(
        "127.0.0.1", 0, None, True, timeout=LONG, wait_for_workers=False, use_libuv=False
    ),
    "memory": lambda folder: dist.HashStore(),
    "file": lambda folder: dist.FileStore(str(folder / "store"), 1),
    "prefix": lambda folder: dist.PrefixStore("prefix", dist.HashStore()),
}
"""Every store that one process can have by itself."""
WAYS_TO_SET: dict[str, Callable[[dist.Store], Any]] = {
    "set": lambda store: store.set("key", "1"),
    "add": lambda store: store.add("key", 1),
    "append": lambda store: store.append("key", "1"),
    "compare_set": lambda store: store.compare_set("key", "", "1"),
    "multi_set": lambda store: store.multi_set(["key"], ["1"]),
}


@requirement(
    "COLL-STORE-11",
    "wait and get block until another rank has set the keys.",
    source="torch.distributed.Store: wait, get",
)
@pytest.mark.parametrize("way", WAYS_TO_SET)
@pytest.mark.parametrize("kind", ["network", "legacy", "memory", "prefix"])
@pytest.mark.world(1)
def test_noticed(world: World, tmp_path: Path, kind: str, way: str) -> None:
    """One thread waits for a key by get; another then sets it by one of the methods that do."""

    def body(_: Rank) -> None:
        store = KINDS[kind](tmp_path)
        store.set_timeout(timedelta(seconds=5 * SECONDS))
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(store.clone().get, "key")
            time.sleep(SECONDS / 10)  # so that it waits
            WAYS_TO_SET[way](store)
            began = time.monotonic()
            assert found.exception() is None, f"get did not see {way}: {found.exception()!r}"
        took = time.monotonic() - began
        assert took < 3 * SECONDS, f"get returned {took:.1f} s after {way}, when its limit was over"

    world.run(body)


@requirement(
    "COLL-STORE-12",
    "wait raises an error after its own timeout, and get after that of the store.",
    source="torch.distributed.Store: wait, get, set_timeout",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(1)
def test_timeout_of_a_clone(world: World, tmp_path: Path, kind: str) -> None:
    """Clone a store whose timeout was set, and a clone."""

    def body(_: Rank) -> list[float]:
        store = KINDS[kind](tmp_path)
        store.set_timeout(timedelta(seconds=7))
        clone = store.clone()
        return [each.timeout.total_seconds() for each in (store, clone, clone.clone())]

    assert_on_ranks([[7.0] * 3], world.run(body))


@requirement(
    "COLL-STORE-12",
    "wait raises an error after its own timeout, and get after that of the store.",
    source="torch.distributed.Store: wait, get, set_timeout",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(1)
def test_short_timeouts(world: World, tmp_path: Path, kind: str) -> None:
    """Wait for no time at all, and for less than a millisecond."""

    def body(_: Rank) -> list[str]:
        found = []
        for timeout in timedelta(0), timedelta(microseconds=10):
            store = KINDS[kind](tmp_path)
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit(store.clone().wait, ["key"], timeout)
                done = wait([waits], 2 * SECONDS).done
                store.set("key", "")  # let it end
            found.append("an error" if done and waits.exception() else f"waited: {waits.exception()}")
            store.delete_key("key")
        return found

    assert_on_ranks([["an error"] * 2], world.run(body))


@requirement(
    "COLL-STORE-3606",
    "list_keys returns the keys that were set through the store, or through another one of its kind and prefix.",
    source="torch.distributed.Store: list_keys: 'a list of all keys in the store'; torch.distributed.PrefixStore",
)
@pytest.mark.needs(torch="torch.distributed.Store.list_keys")
@pytest.mark.parametrize("kind", [*KINDS, "longer prefix"])
@pytest.mark.world(1)
def test_keys(world: World, tmp_path: Path, kind: str) -> None:
    """Set keys, set one again and delete one; beside a prefix, others have one that is different, or longer."""

    def body(_: Rank) -> list[str]:
        under = dist.HashStore()
        store = KINDS[kind](tmp_path) if kind in KINDS else dist.PrefixStore("prefix", under)
        if kind not in KINDS:
            for other in "other", "prefixes":
                dist.PrefixStore(other, under).set("of others", "")
        for key in "a", "b/c", "d", "a":
            store.set(key, "")
        store.add("number", 1)
        store.delete_key("d")
        return sorted(store.list_keys())

    assert_on_ranks([["a", "b/c", "number"]], world.run(body))


@requirement(
    "COLL-STORE-3607",
    "multi_set of another number of values than keys raises an error, after which the store works as before.",
    source="torch.distributed.Store: multi_set: keys, values",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(1)
def test_unequal_lists(world: World, tmp_path: Path, kind: str) -> None:
    """Give more values than keys, and keys without any value."""

    def body(_: Rank) -> None:
        store = KINDS[kind](tmp_path)
        for keys, values in ((["a"], ["1", "2"]), (["a", "b"], [])):
            try:
                store.multi_set(keys, values)
            except dist.DistError:
                continue
            raise AssertionError(f"{len(keys)} keys and {len(values)} values: no error")
        store.set("after", "3")
        assert store.get("after") == b"3"

    world.run(body)


@requirement(
    "COLL-STORE-3608",
    "After the error for an add to what is no number, the store has its values, and works as before.",
    source="torch.distributed.Store: add: 'will result in an exception'",
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(1)
def test_added_to_text(world: World, tmp_path: Path, kind: str) -> None:
    """Add to a text; then get it, set another key and count with a third one."""

    def body(_: Rank) -> None:
        store = KINDS[kind](tmp_path)
        store.set("text", "no number")
        with pytest.raises((RuntimeError, ValueError)):
            store.add("text", 1)
        assert store.get("text") == b"no number"
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert [store.add("number", 2), store.add("number", 3)] == [2, 5]

    world.run(body)
