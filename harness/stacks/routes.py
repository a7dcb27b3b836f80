"""Routes between two hosts: which addresses and interfaces of one reach which of the other.

Ranks find out by connecting.  An address such as 127.0.0.1 is on every host, so whoever is reached must also know a
secret of that host.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore

from harness.cluster import interfaces
from harness.cluster.connections import connected
from harness.worlds.rank import Rank

_CONNECTING = 2.0
"""Seconds that a connection may take to be answered."""
_ANSWERING = timedelta(seconds=60)
_SECRET = 16


@dataclass(frozen=True, order=True)
class End:
    """One end of a route: an interface of a host, and one of its addresses."""

    interface: str
    address: str

    @property
    def family(self) -> str:
        """``IPv4`` or ``IPv6``."""
        return "IPv6" if ":" in self.address else "IPv4"


Route = tuple[End, End]
"""The ends of a connection that both hosts can open, that of rank 0's host first."""


def routes(rank: Rank) -> list[Route]:
    """Return the routes between the hosts of ranks 0 and 1, in order; the same list on both.

    All ranks of a world of two call this.  Errors: those of the world's store if the other rank does not come within a
    minute.
    """
    call = rank.store.add(f"calls of routes by rank {rank.index}", 1)
    store = PrefixStore(f"routes {call}", rank.store)
    store.set_timeout(_ANSWERING)
    ends = [End(*each) for each in interfaces.addresses_here()]
    with _listening(ends) as (secret, ports):
        told = [[end.interface, end.address, ports[end]] for end in ends if end in ports]
        store.set(f"ends {rank.index}", json.dumps([secret, told]))
        other, theirs = json.loads(store.get(f"ends {1 - rank.index}"))
        wanted = [
            (own, End(name, address), port) for own in ends for name, address, port in theirs if _alike(own, address)
        ]
        with ThreadPoolExecutor(16) as pool:
            reached = list(pool.map(lambda each: _reaches(each[0], each[1], each[2], other), wanted))
        found = sorted({(own, end) for (own, end, _), yes in zip(wanted, reached, strict=True) if yes})
        store.set(f"found {rank.index}", json.dumps([[*map(_plain, each)] for each in found]))
        answer = json.loads(store.get(f"found {1 - rank.index}"))
    back = {(End(*mine), End(*its)) for its, mine in answer}
    both = [(own, end) for own, end in found if (own, end) in back]
    return sorted(both if rank.index == 0 else ((end, own) for own, end in both))


def by_interface(found: list[Route]) -> list[Route]:
    """Return a route for each interface of rank 0's host, if possible to one of the same name on the other."""
    names: dict[str, Route] = {}
    for one, other in found:
        if one.interface not in names or (names[one.interface][1].interface != one.interface == other.interface):
            names[one.interface] = (one, other)
    return list(names.values())


def own_ends(before: set[str]) -> set[str]:
    """Return the addresses of this host at which this process has connections that are not among ``before``."""
    return {address for inode, address in connected(os.getpid()).items() if inode not in before}


def sockets() -> set[str]:
    """Return the connections that this process has, for :func:`own_ends`."""
    return set(connected(os.getpid()))


def _plain(end: End) -> tuple[str, str]:
    return end.interface, end.address


def _alike(own: End, address: str) -> bool:
    return (":" in own.address) == (":" in address)


def _reaches(own: End, end: End, port: int, secret: str) -> bool:
    """Whether a connection from one address to another is answered by the host that has the secret."""
    try:
        with socket.create_connection((end.address, port), _CONNECTING, (own.address, 0)) as there:
            return there.recv(_SECRET, socket.MSG_WAITALL) == secret.encode()
    except OSError:
        return False


@contextlib.contextmanager
def _listening(ends: list[End]) -> Iterator[tuple[str, dict[End, int]]]:
    """Listen at every address; yields the secret that each caller is told, and the ports."""
    secret = secrets.token_hex(_SECRET // 2)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        ports = {}
        for end in ends:
            with contextlib.suppress(OSError):  # an address that is being configured
                family = socket.AF_INET6 if end.family == "IPv6" else socket.AF_INET
                listener = stack.enter_context(socket.create_server((end.address, 0), family=family))
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
                ports[end] = listener.getsockname()[1]
        over = threading.Event()
        thread = threading.Thread(target=_answer, args=(selector, secret, over), name="concord-routes", daemon=True)
        thread.start()
        try:
            yield secret, ports
        finally:
            over.set()
            thread.join()


def _answer(selector: selectors.BaseSelector, secret: str, over: threading.Event) -> None:
    while not over.is_set():
        for key, _ in selector.select(0.05):
            listener = key.fileobj
            assert isinstance(listener, socket.socket)
            with contextlib.suppress(OSError), listener.accept()[0] as caller:
                caller.sendall(secret.encode())
