"""The sessions of all consumers of share groups on this broker, by who they are, their group and their name.

Kept in memory, and gone with the broker: a client whose session is not known opens a new one, and what it had
acquired comes again when its lease ends. Bounded, together with what they want and have: a session names
partitions and holds offsets, and one client may open many. Of all that a principal has no more than half of
what the others leave, so that none keeps another out (I22). A new session that finds no room takes that of
one that was silent for a while, of the same principal unless there is none for anybody; else it is refused,
as Kafka does.
"""

from __future__ import annotations

from collections.abc import Callable

from ...model.policy.fair_shares import FairShares
from ...model.share_session import CLOSES, OPENS, EpochError, ShareSession
from ..apis import Code

__all__ = ["ShareError", "ShareSessions", "Who"]

Who = tuple[str, str, str]
"""The principal, the share group, and the name that the client has given itself."""

_MOST = 4_000  # so that a principal that is alone has as many as Kafka allows
_MOST_PARTITIONS = 200_000  # that all sessions name
_MOST_IN_FLIGHT = 1_000_000  # offsets that all consumers have acquired


class ShareError(Exception):
    """The whole request is answered with this code, and a sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class ShareSessions:
    """`now`: milliseconds of a clock that does not step. `idle_ms`: after so long of silence one may go.

    `sweep_ms`: all are searched for leases that ended no more often than that."""

    def __init__(self, now: Callable[[], int], idle_ms: int, most: int = _MOST, *, sweep_ms: int = 0) -> None:
        self.now = now
        self._idle_ms, self._most, self._sweep_ms = idle_ms, most, sweep_ms
        self._known: dict[Who, ShareSession] = {}  # the one that was used last is the last
        self._counted: dict[Who, tuple[int, int]] = {}  # partitions and offsets of each
        self._sessions, self._partitions, self._in_flight = FairShares(), FairShares(), FairShares()
        self._swept_at = 0  # leases that ended were forgotten then

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
            self._forget(who)
        else:
            self.count(who)
        return session

    def count(self, who: Who) -> None:
        """A session has changed: what its principal wants and has is known again."""
        session = self._known.get(who)
        if session is not None:  # it may have gone while somebody waited
            self._change(who, (len(session.partitions), session.in_flight))

    def _change(self, who: Who, now: tuple[int, int]) -> None:
        before = self._counted.get(who, (0, 0))
        self._counted[who] = now
        self._partitions.take(who[0], now[0] - before[0])
        self._in_flight.take(who[0], now[1] - before[1])

    def check_partitions(self, who: Who) -> None:
        """ShareError, and the session names none, if it names more than before and there is no room."""
        session = self._known[who]
        more = len(session.partitions) - self._counted[who][0]
        if more > 0 and more > self._partitions.room(who[0], _MOST_PARTITIONS):
            session.partitions.clear()
            self.count(who)
            raise ShareError(
                Code.SHARE_SESSION_LIMIT_REACHED,
                f"the sessions of this broker name {self._partitions.total:,} partitions, and a client has "
                "no more than half of what others leave: close some, or add a broker",
            )
        self.count(who)

    def has_room(self, who: Who) -> bool:
        """Return whether a consumer may acquire more."""
        if not self._in_flight.room(who[0], _MOST_IN_FLIGHT):
            self._forget_ended()
        return self._in_flight.room(who[0], _MOST_IN_FLIGHT) > 0

    def _forget_ended(self) -> None:
        """Count again without leases that ended: of consumers that went silent nobody else says so."""
        now = self.now()
        if now - self._swept_at < self._sweep_ms:
            return
        self._swept_at = now
        for who, session in self._known.items():
            session.forget_ended(now)
            self.count(who)

    def _opened(self, who: Who, epoch: int, opens: bool) -> ShareSession:
        if epoch != OPENS or not opens:
            raise ShareError(
                Code.SHARE_SESSION_NOT_FOUND, "there is no such session: open one, with epoch 0 of ShareFetch"
            )
        if not self._sessions.room(who[0], self._most):
            self._forget(self._oldest(who[0]))
        self._sessions.take(who[0], 1)
        return ShareSession()

    def _oldest(self, principal: str) -> Who:
        """A session that may go, as it was silent for long enough. ShareError if there is none."""
        full = len(self._known) >= self._most
        for who, session in self._known.items():
            if self.now() - session.used_at < self._idle_ms:
                break  # so are all that follow
            if full or who[0] == principal:
                return who
        raise ShareError(
            Code.SHARE_SESSION_LIMIT_REACHED,
            f"this broker has {len(self._known):,} sessions of share consumers, and a client has no more "
            "than half of what others leave: close some, or add a broker",
        )

    def _forget(self, who: Who) -> None:
        del self._known[who]
        self._change(who, (0, 0))
        del self._counted[who]
        self._sessions.take(who[0], -1)

    def __len__(self) -> int:
        return len(self._known)
