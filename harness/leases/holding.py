"""Leases on devices: all that a test needs or none, one queue, and locks that the kernel drops."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from harness.devices import DeviceError, Inventory
from harness.leases import records
from harness.leases.locks import lock, unlock
from harness.leases.places import Places, survey
from harness.leases.records import Holder, Waiter
from harness.leases.turns import may_take

_POLL, _LONGEST_POLL = 0.01, 0.2  # seconds
_SHARE_OF_TIME = 0.05  # the most of a waiting process's time that attempts may take
_TELL = 0.25  # seconds between two calls of ``waiting``
_RETURN = 0.5  # seconds for which devices are kept for the next test of the process that gave them back
_MUTEX_TRIES, _MUTEX_POLL = 50, 0.001


@dataclass(frozen=True)
class Wait:
    """A wait in progress."""

    seconds: float
    """How long it has lasted."""
    waiter: Waiter
    folder: Path

    def holders(self) -> list[Holder | None]:
        """Return who holds the devices that are waited for, in the order of devices; None for an unknown holder."""
        return records.holders(self.folder, self.waiter.keys)


@dataclass
class _Lock:
    """The locks of a device, or of one of its shares, in every folder."""

    signed: list[int] = field(default_factory=list)
    """Descriptors of the locks that only this process has, in which it says who it is."""
    shared: list[int] = field(default_factory=list)
    """Those of locks on the device itself, which the leases of its other shares have, too."""

    def release(self) -> None:
        for fd in self.signed:
            records.unsign(fd)
        for fd in (*self.signed, *self.shared):
            unlock(fd)


@dataclass
class _Taken:
    """Devices that are locked, by index in the inventory."""

    locks: dict[int, _Lock] = field(default_factory=dict)

    def give_back(self, only: Sequence[int] | None = None) -> None:
        for i in list(self.locks if only is None else only):
            self.locks.pop(i).release()


@dataclass(frozen=True)
class _Order:
    """Which devices a lease takes."""

    prefer: Collection[str]
    """Names of those to take if they are free."""
    choose: Callable[[Sequence[int]], Sequence[int] | None]
    """Chooses among those that are free; None if others must become free."""
    shares: int
    """Into how many shares devices are divided, of which it takes one each."""


class Leases:
    """Leases on the devices of an inventory, shared by all processes of this user on this machine.

    directory: the one folder where they are kept; by default the places of :func:`harness.leases.places.survey`.
    Errors: :class:`DeviceError` if there is no place to keep them.
    """

    def __init__(self, of: Inventory, directory: Path | None = None) -> None:
        self.inventory = of
        self._directory = directory
        self._broken: dict[Path, str] = {}
        self.refused = self._places().refused
        """The places that other sessions may use and this one can't, a sentence each."""

    def _places(self) -> Places:
        """Return where leases are kept now.  Folders that were deleted in the meantime are made again."""
        return Places((self._directory,)) if self._directory else survey(make=True)

    @contextlib.contextmanager
    def hold(
        self,
        count: int,
        timeout: float | None = None,
        *,
        what: str = "",
        prefer: Collection[str] = (),
        choose: Callable[[Sequence[int]], Sequence[int] | None] | None = None,
        shares: int = 1,
        waiting: Callable[[Wait], None] = lambda wait: None,
        returns: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[str, ...]]:
        """Hold ``count`` devices; yields their names in this process's numbering.

        Waits as long as others hold them, for at most ``timeout`` seconds.
        what: the test that they are for, which others that wait for them are told.
        prefer: names of devices to take if they are free; which lease comes first does not depend on it.
        choose: called with the indices of free devices, those to take first in front; returns the ``count`` of them to
        take, or None if others must become free. By default the first ones.
        shares: into how many shares devices are divided: the lease has one of each of its devices. With 1, it has them
        for itself.
        waiting: called when a wait begins, and several times a second while it goes on.
        returns: called at the end; returns whether this process will want as many again at once.
        Errors: :class:`DeviceError` if there are not as many, the time is over, or locks can't be kept.
        """
        if not 1 <= count <= len(self.inventory.devices):
            have = len(self.inventory.devices)
            raise DeviceError(f"{count} devices of kind {self.inventory.kind} asked for; there are {have}")
        me = Waiter(
            holder=records.myself(what),
            kind=self.inventory.kind,
            keys=self.inventory.keys,
            count=count,
            number=time.time_ns(),
        )
        devices = self.inventory.devices
        choosing = choose or (lambda free: free[:count] if len(free) >= count else None)
        until = None if timeout is None else time.monotonic() + timeout
        taken = self._take(me, _Order(prefer, choosing, shares), until, waiting)
        try:
            yield tuple(devices[i] for i in sorted(taken.locks))
        finally:
            try:
                if returns():
                    self._claim(me)
            finally:
                taken.give_back()

    def _take(self, me: Waiter, order: _Order, deadline: float | None, waiting: Callable[[Wait], None]) -> _Taken:
        folders = self._places().folders
        for folder in folders:
            records.withdraw(folder)
        taken = self._attempt(folders, me, order)
        if taken is not None:
            return taken
        began = told = time.monotonic()
        waiting(Wait(0.0, me, folders[0]))
        with contextlib.closing(_InQueue(me)) as queue:
            while True:
                looked = time.monotonic()
                folders = self._places().folders
                taken = self._attempt(folders, me, order, queue.ticket_in(folders[0]))
                now = time.monotonic()
                if taken is not None:
                    return taken
                if deadline is not None and now >= deadline:
                    raise DeviceError(self._too_late(me.count))
                if now - told >= _TELL:
                    told = now
                    waiting(Wait(now - began, me, folders[0]))
                time.sleep(min(max(_POLL, (now - looked) / _SHARE_OF_TIME), _LONGEST_POLL))

    def _too_late(self, count: int) -> str:
        return f"{count} devices of kind {self.inventory.kind} did not become free in time; others hold them"

    def _attempt(self, folders: Sequence[Path], me: Waiter, order: _Order, ticket: Path | None = None) -> _Taken | None:
        """Take the devices if they are free and nobody else comes first; else return None.

        Errors: :class:`DeviceError` if a device can't be locked in any place.
        """
        with self._alone(folders[0]) as alone:
            if not alone:
                return None
            others = [w for w in records.waiters(folders[0], other_than=ticket) if _compete(w, me)]
            held = Counter(self._sessions_that_hold(folders)) if others else Counter()
            taken = _Taken()
            try:
                for i in self._in_turn(folders[0], order):
                    if not others and order.choose(list(taken.locks)) is not None:
                        break
                    locks = self._lock(folders, self.inventory.keys[i], order.shares)
                    if locks is not None:
                        taken.locks[i] = locks
                chosen = order.choose(list(taken.locks))
                if chosen is None or not may_take(me.place, [w.place for w in others], held, len(taken.locks)):
                    taken.give_back()
                    return None
                taken.give_back([i for i in taken.locks if i not in chosen])
                holder = records.starting_now(me.holder)
                for locks in taken.locks.values():
                    for fd in locks.signed:
                        records.sign(fd, holder)
            except BaseException:
                taken.give_back()
                raise
            return taken

    @contextlib.contextmanager
    def _alone(self, folder: Path) -> Iterator[bool]:
        """Keep others from attempting at the same time; yields False if others do so all the time."""
        path = folder / f"{self.inventory.kind}.mutex"
        fd = None
        try:
            for _ in range(_MUTEX_TRIES):
                if (fd := lock(path)) is not None:
                    break
                time.sleep(_MUTEX_POLL)
        except OSError as e:
            self._broken[folder] = f"{path}: {e.strerror}"
            yield True  # devices have locks of their own, in other places as well: only the order may suffer
            return
        try:
            yield fd is not None
        finally:
            if fd is not None:
                unlock(fd)

    def _in_turn(self, folder: Path, order: _Order) -> Sequence[int]:
        """Return the devices in the order in which to try them: of those that are shared, the emptiest first."""
        several = order.shares > 1 and len(self.inventory.devices) > 1

        def rank(i: int) -> tuple[bool, int]:
            sharers = records.sharers(folder, self.inventory.keys[i]) if several else ()
            return self.inventory.devices[i] not in order.prefer, len(sharers)

        return sorted(range(len(self.inventory.devices)), key=rank)

    def _lock(self, folders: Sequence[Path], key: str, shares: int) -> _Lock | None:
        """Lock a device, or one of its shares, in every folder; returns None if somebody has it, or all of them.

        Errors: :class:`DeviceError` if it can't be locked in any folder.
        """
        taken = _Lock()
        try:
            for folder in folders:
                try:
                    there = _locked_in(folder, key, shares)
                except OSError as e:
                    self._broken[folder] = f"{records.lock_file(folder, key)}: {e.strerror}"
                    continue
                if there is None:
                    taken.release()
                    return None
                taken.signed += there.signed
                taken.shared += there.shared
        except BaseException:
            taken.release()
            raise
        if not taken.signed:
            raise DeviceError(f"leases on devices can't be kept: {'; '.join(self._broken.values())}")
        return taken

    @property
    def broken(self) -> tuple[str, ...]:
        """Files that could not be locked, in places that can be used otherwise; a sentence each."""
        return tuple(self._broken.values())

    def _sessions_that_hold(self, folders: Sequence[Path]) -> Iterator[str]:
        """Yield the session of each holder of a device; "" if no folder says who it is."""
        for key in self.inventory.keys:
            for who in zip_longest(*(records.holders(folder, [key]) for folder in folders)):
                yield next((holder.session for holder in who if holder is not None), "")

    def _claim(self, me: Waiter) -> None:
        """Ask others that wait to leave what is given back now to this process's next test."""
        folder = self._places().folders[0]
        if any(_compete(w, me) for w in records.waiters(folder)):
            records.claim(folder, records.back_within(me, _RETURN))


class _InQueue:
    """The ticket of a waiting process."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self._path: Path | None = None
        self._fd: int | None = None

    def ticket_in(self, folder: Path) -> Path | None:
        """Return the ticket in a folder, made again if somebody has removed it; None if none can be made."""
        if self._path is None or self._path.parent != folder or not self._path.exists():
            self.close()
            try:
                self._path, self._fd = records.ticket(folder, self._waiter)
            except OSError:
                return None  # a full disk: without a ticket, this process may just be overtaken
        return self._path

    def close(self) -> None:
        """Leave the queue."""
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        except OSError:
            pass  # a ticket that is not locked does not count
        finally:
            if self._fd is not None:
                unlock(self._fd)
            self._path = self._fd = None


def _locked_in(folder: Path, key: str, shares: int) -> _Lock | None:
    """Lock a device in a folder, or the first of its shares that is free; returns None if there is none.

    Errors: OSError.
    """
    device = lock(records.lock_file(folder, key), shared=shares > 1)
    if device is None:
        return None
    if shares == 1:
        return _Lock(signed=[device])
    try:
        for share in range(shares):
            fd = lock(records.share_file(folder, key, share))
            if fd is not None:
                return _Lock(signed=[fd], shared=[device])
    except BaseException:
        unlock(device)
        raise
    unlock(device)
    return None


def _compete(waiter: Waiter, me: Waiter) -> bool:
    return waiter.kind == me.kind and not set(waiter.keys).isdisjoint(me.keys)
