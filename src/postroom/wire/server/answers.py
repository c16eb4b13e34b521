"""Room for answers: what a broker holds in memory for clients that have not read it yet.

One budget for all connections, over the wire and over HTTP. Counted are answers that are being made (by what
they may bring) and bytes that wait in the sockets' buffers. Of the budget one connection may have a part, and
all connections of one principal half, so that there is room for the next one. Whoever finds no room waits for
it, principals in turn, and no longer than a while: then it is told to ask again. Must never refuse what is
alone: one answer always fits, however large it is (I17). No socket; belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from ...errors import BrokerUnavailable

__all__ = ["Answers", "Share", "no_room"]


def no_room() -> BrokerUnavailable:
    return BrokerUnavailable(
        "too many answers of this broker wait to be read: ask again in a moment, or another broker; "
        "a client that reads more slowly than it asks should ask for less at a time"
    )


class _QueuedAnswer(NamedTuple):
    share: Share
    size: int
    granted: asyncio.Future[None]


class Answers:
    """The room for answers that all connections share."""

    def __init__(self, all_bytes: int, connection_bytes: int, wait_ms: int) -> None:
        self.most = all_bytes
        self.most_of_principal = all_bytes // 2
        self.most_of_connection = min(connection_bytes, all_bytes // 2)
        self.held = 0
        self._wait_s = wait_ms / 1000
        self._principals: dict[str, int] = {}  # what each holds
        self._lines: dict[
            str, deque[_QueuedAnswer]
        ] = {}  # who waits, by principal; the next one's turn first

    def share(self, principal: str) -> Share:
        """Returns the share of a new connection."""
        return Share(self, principal)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for room."""
        return sum(map(len, self._lines.values()))

    @property
    def waited_for(self) -> bool:
        return bool(self._lines)

    def wanted_of(self, share: Share) -> bool:
        """Returns whether others wait for what this connection holds."""
        return any(
            one.share is not share
            and (principal == share.principal or not _fits(self.held, one.size, self.most))
            for principal, line in self._lines.items()
            for one in line
        )

    def held_by(self, principal: str) -> int:
        return self._principals.get(principal, 0)

    def add(self, principal: str, size: int) -> None:
        self.held += size
        left = self._principals.get(principal, 0) + size
        if left:
            self._principals[principal] = left
        else:
            self._principals.pop(principal, None)
        if size < 0 and self._lines:
            self._let_in()

    async def wait(self, share: Share, size: int) -> None:
        """Until there is room, which is held then."""
        waiting = _QueuedAnswer(share, size, asyncio.get_running_loop().create_future())
        self._lines.setdefault(share.principal, deque()).append(waiting)
        self._let_in()
        try:
            async with asyncio.timeout(self._wait_s):
                await waiting.granted
        except BaseException as error:
            if waiting.granted.done() and not waiting.granted.cancelled():
                share.hold(-size)
            else:
                self._leave(waiting)
            if isinstance(error, TimeoutError):
                raise no_room() from None
            raise

    def _leave(self, waiting: _QueuedAnswer) -> None:
        line = self._lines.get(waiting.share.principal)
        if line is not None and waiting in line:
            line.remove(waiting)
            if not line:
                del self._lines[waiting.share.principal]
        self._let_in()

    def _let_in(self) -> None:
        """Principals in turn; who waits for room that it holds itself does not hold up the others."""
        going_on = True
        while going_on:
            going_on = False
            for principal, line in list(self._lines.items()):
                waiting = line[0]
                if not (waiting.granted.done() or waiting.share.fits(waiting.size)):
                    if not _fits(self.held, waiting.size, self.most):
                        return  # there is room for nobody
                    continue
                del self._lines[principal], line[0]
                if line:
                    self._lines[principal] = line  # behind the others
                if not waiting.granted.done():
                    waiting.share.hold(waiting.size)
                    waiting.granted.set_result(None)
                going_on = True


class Share:
    """The part of that room which one connection holds."""

    __slots__ = ("_answers", "held", "principal", "unread")

    def __init__(self, answers: Answers, principal: str) -> None:
        self._answers, self.principal = answers, principal
        self.held = 0  # answers that are being made, and
        self.unread = 0  # of these, bytes that are in the socket's buffer

    def fits(self, size: int, mine: int = 0) -> bool:
        """Returns whether there is room for so much more; `mine` of what is held is for the same answer."""
        answers = self._answers
        if answers.held == mine:  # all that is held anywhere
            return True
        return (
            _fits(self.held, size, answers.most_of_connection, mine)
            and _fits(answers.held_by(self.principal), size, answers.most_of_principal, mine)
            and _fits(answers.held, size, answers.most, mine)
        )

    def hold(self, size: int) -> None:
        """Holds so much more, or less."""
        if size:
            self.held += size
            self._answers.add(self.principal, size)

    async def room(self, size: int) -> None:
        """Hold so much; waits until there is room. BrokerUnavailable if there is none for a while."""
        if not self._answers.waited_for and self.fits(size):
            self.hold(size)
        else:
            await self._answers.wait(self, size)

    def saw_unread(self, size: int) -> None:
        """Holds as much as is in the socket's buffer now."""
        more, self.unread = size - self.unread, size
        self.hold(more)

    @property
    def wanted(self) -> bool:
        """True if somebody waits for what it holds."""
        return self._answers.waited_for and self.held > 0 and self._answers.wanted_of(self)


def _fits(held: int, size: int, most: int, mine: int = 0) -> bool:
    return held + size <= most or held == mine
