"""The sessions of all consumers of share groups on this broker, by who they are, their group and their name.

Kept in memory, and gone with the broker: a client whose session is not known opens a new one, and what it had
acquired comes again when its lease ends. Bounded: whoever was silent for longest gives way, if it has been
so for a while; else a new one is refused, as Kafka does.
"""

from __future__ import annotations

from collections.abc import Callable

from ...model.share_session import CLOSES, OPENS, EpochError, ShareSession
from ..apis import Code

__all__ = ["ShareError", "ShareSessions", "Who"]

Who = tuple[str, str, str]
"""The principal, the share group, and the name that the client has given itself."""

_MOST = 2_000  # Kafka's own limit


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
        return session

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
        return ShareSession()

    def __len__(self) -> int:
        return len(self._known)
