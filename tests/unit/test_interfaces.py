"""Interfaces of this host, and those that an environment gives to ranks."""

from __future__ import annotations

import pytest

from harness.cluster import interfaces


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ""),
        ({"GLOO_SOCKET_IFNAME": ""}, ""),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}, "GLOO eth0, NCCL ib0"),
    ],
)
def test_chosen(variables: dict[str, str], said: str) -> None:
    """One name if all libraries use the same, or else each."""
    assert interfaces.chosen(variables) == said


def test_addresses_here() -> None:
    """Loopback is there, and no address is of use on one link alone."""
    found = interfaces.addresses_here()
    assert ("lo", "127.0.0.1") in found
    assert not [address for _, address in found if address.startswith("fe80")]
    assert all(interfaces.interface_of(address) == name for name, address in found)
