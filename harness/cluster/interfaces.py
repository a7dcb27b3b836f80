"""Addresses and interfaces of this host, as its kernel routes to others."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Environment variables that name the interface by which ranks reach other hosts."""
_SIOCGIFADDR = 0x8915


def plain(host: str) -> str:
    """Return an address as text that is equal for equal addresses: without a scope, and IPv4 not as IPv6.

    Errors: ValueError if it is not an address.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def looked_up(name: str) -> str:
    """Return the first address of a host.  Errors: OSError if it has none."""
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def towards(host: str) -> str:
    """Return the address of this host from which packets to another host leave.  Errors: OSError if there is no route.

    ``host``: an address.  Nothing is sent.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))
        return plain(sock.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address of this host; empty if none has."""
    wanted = plain(address)
    if ipaddress.ip_address(wanted).is_loopback:  # all of 127.0.0.0/8 is this host's, though no interface has it
        return "lo"
    return next((name for name, has in _addresses() if has == wanted), "")


def addresses_here() -> list[tuple[str, str]]:
    """Return the interfaces of this host with their addresses, without those that are of use on one link alone."""
    found = _addresses()
    return sorted({(name, text) for name, text in found if not ipaddress.ip_address(text).is_link_local})


def chosen(variables: Mapping[str, str]) -> str:
    """Return the interface that an environment gives to ranks, as in ``eth0``.

    If libraries differ, each is named: ``GLOO eth0, NCCL ib0``.
    """
    given = {name.partition("_")[0]: variables[name] for name in VARIABLES if variables.get(name)}
    names = set(given.values())
    return names.pop() if len(names) == 1 else ", ".join(f"{library} {name}" for library, name in given.items())


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield interfaces with their addresses.  The kernel tells one IPv4 address of each, which is its first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                yield name, socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, asked)[20:24])
            except OSError:
                continue  # it has no IPv4 address
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split()
        yield fields[-1], plain(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))


def addresses(text: str) -> Sequence[tuple[str, int]]:
    """Return the addresses in ``HOST:PORT,[HOST]:PORT…``.  Errors: ValueError, which says what is wrong."""
    found = []
    for each in text.split(","):
        host, _, port = each.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{each.strip()!r} is not HOST:PORT")
        found.append((host.removeprefix("[").removesuffix("]"), int(port)))
    if len(set(found)) != len(found):
        raise ValueError(f"{text!r} names an agent twice")
    return found
