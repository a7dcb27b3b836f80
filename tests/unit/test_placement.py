"""Which devices a world takes, on which hosts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.devices import Inventory, at_host, host_and_name, host_inventory
from harness.placement import Need, blocks, spread, would_fit


def sim(*counts: int) -> Inventory:
    """So many devices on each of some hosts."""
    places = [(host, i) for host, count in enumerate(counts) for i in range(count)]
    return Inventory(
        "sim",
        tuple(at_host(f"sim:{i}", host) for host, i in places),
        tuple(f"{host}-sim-{i}" for host, i in places),
        tuple(host for host, _ in places),
    )


def letters(count: int) -> Inventory:
    """Devices of one host: a, b, c…"""
    names = tuple("abcdefgh"[:count])
    return Inventory("sim", names, names)


class TestOneHost:
    """Where all devices are of one host."""

    @pytest.mark.parametrize(("ranks", "each", "expected"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (5, 2, 3), (1, 8, 1)])
    def test_count(self, ranks: int, each: int, expected: int) -> None:
        """A world takes as many devices as its ranks need."""
        assert expected == Need(ranks, each).count(letters(8))

    @pytest.mark.parametrize("ranks", [1, 2, 100])
    def test_on_host(self, ranks: int) -> None:
        """A world on the host takes one slot, whatever its size, and its ranks have no device."""
        slots = host_inventory()
        assert Need(ranks).count(slots) == 1
        assert Need(ranks).take(slots, []) is None
        assert Need(ranks).take(slots, [0]) == [0]
        assert Need(ranks).deal(slots, ["cpu"]) == ()

    def test_whole(self) -> None:
        """A world that must be alone takes all devices, and waits until all are free."""
        assert Need(2, whole=True).count(letters(3)) == 3
        assert Need(2, whole=True).take(letters(3), [0, 1]) is None
        assert Need(2, whole=True).take(letters(3), [0, 1, 2]) == [0, 1, 2]
        assert Need(9, whole=True).count(host_inventory()) == len(host_inventory().devices)

    @pytest.mark.parametrize(
        ("ranks", "each", "whole", "leased", "expected"),
        [
            (3, 1, False, "abc", "abc"),
            (3, 1, True, "abc", "abc"),
            (5, 2, False, "abc", "aabbc"),
            (5, 2, True, "abc", "abcab"),
            (2, 2, True, "abc", "ab"),
            (1, 2, False, "c", "c"),
        ],
    )
    def test_deal(self, ranks: int, each: int, whole: bool, leased: str, expected: str) -> None:
        """Neighbors share a device, but where ranks have all of the machine's."""
        assert Need(ranks, each, whole=whole).deal(letters(3), tuple(leased)) == tuple(expected)

    def test_too_few(self) -> None:
        """Ranks that do not fit on what was leased are an error, not ranks on devices of others."""
        with pytest.raises(ValueError, match="3 ranks do not fit on a, b"):
            Need(3).deal(letters(3), ("a", "b"))


class TestSeveralHosts:
    """Where devices are of several hosts."""

    def test_one_host_is_enough(self) -> None:
        """A world on one host has its devices on one, the one with the fewest that are enough."""
        assert Need(2).take(sim(3, 2), range(5)) == [3, 4]
        assert Need(3).take(sim(3, 2), range(5)) == [0, 1, 2]
        assert Need(2).take(sim(3, 2), [0, 3]) is None
        assert not Need(4).fits(sim(3, 2))

    def test_spread(self) -> None:
        """The first host has as many ranks as the others, or one more."""
        need = Need(5, hosts=2)
        assert need.take(sim(3, 2), range(5)) == [0, 1, 2, 3, 4]
        assert need.deal(sim(3, 2), sim(3, 2).devices) == ("sim:0@0", "sim:1@0", "sim:2@0", "sim:0@1", "sim:1@1")
        assert Need(5, hosts=2).deal(sim(2, 3), sim(2, 3).devices)[:3] == ("sim:0@1", "sim:1@1", "sim:2@1")
        assert not Need(4, hosts=2).fits(sim(3, 1))
        assert Need(4, ranks_per_device=2, hosts=2).fits(sim(3, 1))

    def test_shared_devices(self) -> None:
        """Ranks of several hosts never share a device."""
        dealt = Need(6, ranks_per_device=2, hosts=2).deal(sim(2, 2), sim(2, 2).devices)
        assert dealt == ("sim:0@0", "sim:0@0", "sim:1@0", "sim:0@1", "sim:0@1", "sim:1@1")

    def test_whole(self) -> None:
        """A world that must be alone takes the devices of all hosts, and uses those of its own."""
        assert Need(2, whole=True).count(sim(2, 2)) == 4
        assert Need(2, whole=True).take(sim(2, 2), [0, 1, 2]) is None
        assert not Need(3, whole=True).fits(sim(2, 2))
        assert Need(2, whole=True).deal(sim(2, 2), sim(2, 2).devices) == ("sim:0@0", "sim:1@0")

    def test_hosts_for_a_world(self) -> None:
        """A world gets the first number of hosts on which it fits."""
        assert spread(Need(2), sim(2, 2), (1, 2)).hosts == 1
        assert spread(Need(2), sim(1, 1), (1, 2)).hosts == 2
        assert spread(Need(2), sim(2, 2), (2, 1)).hosts == 2
        assert spread(Need(8), sim(2, 2), (1, 2)).hosts == 1

    @given(
        counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        ranks=st.integers(1, 12),
        each=st.integers(1, 3),
        hosts=st.integers(1, 4),
        data=st.data(),
    )
    def test_every_choice(self, counts: list[int], ranks: int, each: int, hosts: int, data: st.DataObject) -> None:
        """What is taken is free, on as many hosts as asked for, and no device has more ranks than may share it."""
        there = sim(*counts)
        need = Need(ranks, each, min(hosts, ranks))
        free = data.draw(st.lists(st.sampled_from(range(len(there.devices))), unique=True))
        taken = need.take(there, free)
        assert would_fit(need, list(Counter(map(there.host_of, free)).values())) == (taken is not None)
        if taken is None:
            return
        assert set(taken) <= set(free)
        assert len(set(taken)) == len(taken) == need.count(there)
        dealt = need.deal(there, [there.devices[i] for i in taken])
        assert set(dealt) == {there.devices[i] for i in taken}
        assert max(Counter(dealt).values()) <= each
        on = [host_and_name(device)[0] for device in dealt]
        assert list(Counter(on).values()) == blocks(ranks, need.hosts)


@pytest.mark.parametrize(
    ("need", "counts", "expected"),
    [
        (Need(4), [4], True),
        (Need(4), [3, 3], False),
        (Need(4, hosts=2), [3, 1], False),
        (Need(4, hosts=2), [1, 2, 2], True),
        (Need(4, hosts=3), [2, 2], False),
        (Need(5, 2, hosts=2), [1, 2], True),
    ],
)
def test_would_fit(need: Need, counts: list[int], expected: bool) -> None:
    """Each host of a world has enough devices for its ranks."""
    assert would_fit(need, counts) is expected


def test_names() -> None:
    """A device of a host has the name that torch has for it there."""
    assert host_and_name(at_host("cuda:3", 1)) == (1, "cuda:3")
    assert host_and_name("cuda:3") == (None, "cuda:3")
    assert host_and_name("cpu") == (None, "cpu")


@pytest.mark.parametrize(
    ("ranks", "hosts", "expected"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (2, 2, [1, 1]), (7, 3, [3, 2, 2]), (1, 1, [1])]
)
def test_blocks(ranks: int, hosts: int, expected: list[int]) -> None:
    """Hosts have nearly equally many ranks, the first the most."""
    assert blocks(ranks, hosts) == expected


def test_hosts_of_devices() -> None:
    """An inventory names the host of each device or of none."""
    with pytest.raises(ValueError, match="each device needs a host"):
        Inventory("sim", ("sim:0", "sim:1"), ("a", "b"), (0,))
