"""The listener to ranks on this host: waits until their descriptors, or their server's, can be read."""

from __future__ import annotations

import math
import select
from collections.abc import Callable, Collection, Sequence

from harness.worlds.handle import Heard, News, RankHandle
from harness.worlds.local_rank import LocalRank

_LONGEST_SILENCE = 1.0  # seconds after which the server is asked whether it is still there
_STACK_INTERVAL = 0.005  # seconds between two checks whether a signal was handled, which no descriptor shows


class LocalListener:
    """A listener to ranks on this host; see :class:`~harness.worlds.handle.Listener`.

    ``server``: a descriptor that is readable when ``poll`` has something to do; negative once it is closed; ``poll``
    and ``check``: methods of the :class:`~harness.worlds.local.LocalLauncher`.
    """

    def __init__(
        self,
        server: int,
        poll: Callable[[], None],
        check: Callable[[], bool],
        ranks: Sequence[LocalRank],
        to: Collection[Heard],
    ) -> None:
        self._server = server
        self._poll_server = poll
        self._check_server = check
        # A poll object and a dict instead of a selector, because a selector costs 0.1 ms in every run.
        self._poll = select.poll()
        self._news: dict[int, News] = {}
        self._stacks = list(ranks) if Heard.STACK in to else []
        if server >= 0:
            self._poll.register(server, select.POLLIN)
        for rank in ranks:
            for what in to:
                if what is not Heard.STACK:
                    fd = _descriptor(rank, what)
                    self._poll.register(fd, select.POLLIN)
                    self._news[fd] = News(what, rank)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors for which :meth:`wait` waits; it also waits for stacks, which no descriptor shows."""
        return [*([self._server] if self._server >= 0 else []), *self._news]

    def wait(self, seconds: float) -> list[News]:
        longest = _STACK_INTERVAL if self._stacks else _LONGEST_SILENCE
        readable = self._poll.poll(math.ceil(max(0.0, min(seconds, longest)) * 1000))
        self._check_server()
        news = []
        for fd, _ in readable:
            if fd == self._server:
                self._poll_server()
            elif fd in self._news:
                news.append(self._news[fd])
        if self._stacks:
            news += [News(Heard.STACK, rank) for rank in self._stacks if rank.stack_is_there()]
        return news

    def ignore(self, rank: RankHandle, what: Heard) -> None:
        if what is Heard.STACK:
            self._stacks = [r for r in self._stacks if r is not rank]
            return
        for fd, news in self._news.items():
            if news.what is what and news.rank is rank:
                del self._news[fd]
                self._poll.unregister(fd)
                return


def _descriptor(rank: LocalRank, what: Heard) -> int:
    if what is Heard.MESSAGE:
        return rank.control.fileno()
    return rank.output_fd if what is Heard.OUTPUT else rank.monitor.fileno()
