"""The sessions of all consumers of share groups on this broker, by who they are, their group and their name.

Kept in memory, and gone with the broker: a client whose session is not known opens a new one, and what it had
acquired comes again when its lease ends. Bounded: whoever was silent for longest gives way, if it has been
so for a while; else a new one is refused, as Kafka does. So is what all of them want and have together: a
session names partitions and holds offsets, and one client may open many.
"""

from __future__ import annotations

from collections.abc import Callable

from ...model.share_session import CLOSES, OPENS, EpochError, ShareSession
from ..apis import Code

__all__ = ["ShareError", "ShareSessions", "Who"]

Who = tuple[str, str, str]
"""The principal, the share group, and the name that the client has given itself."""

_MOST = 2_000  # Kafka's own limit
_MOST_PARTITIONS = 200_000  # that all sessions name
_MOST_IN_FLIGHT = 1_000_000  # offsets that all consumers have acquired


class ShareError(Exception):
    """The whole request is answered with this code, and a sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class ShareSessions:
    """`now`: milliseconds of a clock that does not step. `idle_ms`: after so long of silence one may go."""

    def __init__(self, now: Callable[[], int], idle_ms: int, most: int = _MOST) -> None:
        self.now = now
        self._idle_ms, self._most = idle_ms, most
        self._known: dict[Who, ShareSession] = {}  # the one that was used last is the last
        self._counted: dict[Who, tuple[int, int]] = {}  # partitions and offsets of each
        self._partitions = self._in_flight = 0  # of all

    def begin(self, who: Who, epoch: int, *, opens: bool) -> ShareSession:
        """The session of a request. ShareError if it cannot be continued, or (`opens`) begun."""
        session = self._known.pop(who, None)
        if session is None:
            session = self._opened(who, epoch, opens)
        self._known[who] = session
        try:
            if epoch == OPENS and not opens:
                raise EpochError("an acknowledgement opens no session")
            session.advance(epoch)
        except EpochError as error:
            raise ShareError(Code.INVALID_SHARE_SESSION_EPOCH, f"{error}: open a new session") from None
        session.used_at = self.now()
        session.forget_ended(session.used_at)
        if epoch == CLOSES:
            del self._known[who]
        self.count(who)
        return session

    def count(self, who: Who) -> None:
        """A session has changed, or is gone: what all of them want and have is known again."""
        session = self._known.get(who)
        partitions, in_flight = self._counted.pop(who, (0, 0))
        self._partitions -= partitions
        self._in_flight -= in_flight
        if session is not None:
            self._counted[who] = now = len(session.partitions), session.in_flight
            self._partitions += now[0]
            self._in_flight += now[1]

    def check_partitions(self, who: Who) -> None:
        """ShareError, and the session names none, if all of them name too many."""
        self.count(who)
        if self._partitions > _MOST_PARTITIONS:
            self._known[who].partitions.clear()
            self.count(who)
            raise ShareError(
                Code.SHARE_SESSION_LIMIT_REACHED,
                f"this broker's sessions name {self._partitions:,} partitions: close some, or add a broker",
            )

    @property
    def has_room(self) -> bool:
        """Whether consumers may acquire more."""
        return self._in_flight < _MOST_IN_FLIGHT

    def _opened(self, who: Who, epoch: int, opens: bool) -> ShareSession:
        if epoch != OPENS or not opens:
            raise ShareError(
                Code.SHARE_SESSION_NOT_FOUND, "there is no such session: open one, with epoch 0 of ShareFetch"
            )
        if len(self._known) >= self._most:
            oldest, silent = next(iter(self._known.items()))
            if self.now() - silent.used_at < self._idle_ms:
                raise ShareError(
                    Code.SHARE_SESSION_LIMIT_REACHED,
                    f"this broker has {self._most} sessions of share consumers: close some, or add a broker",
                )
            del self._known[oldest]
            self.count(oldest)
        return ShareSession()

    def __len__(self) -> int:
        return len(self._known)
